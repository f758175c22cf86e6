"""Prompts longer than a message holds find and store their beginning."""

from __future__ import annotations

import numpy as np

from kvstore.client import KVSpec
from kvstore.testing import InProcessStore

SPEC = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=16, dtype="bfloat16",
    block_size=64,
)  # fmt: skip
MESSAGE_BYTES = 64 << 10


def test_what_no_message_holds_is_left_out_and_said() -> None:
    """A put of too long a prompt stores its beginning and counts the rest as rejected, why."""
    sections = {"limits": {"message_bytes": MESSAGE_BYTES}}
    with InProcessStore("8MiB", sections=sections) as store, store.client() as client:
        space = client.attach(SPEC)
        tokens = np.arange(400 * 64, dtype=np.uint32)
        blocks = np.ones((400, SPEC.block_bytes), np.uint8)
        result = space.put(tokens, blocks)
        assert result.stored + result.rejected == 400
        assert 200 <= result.stored < 256
        assert "limits.message_bytes" in result.reason
        match = space.lookup(tokens)
        assert match.matched_tokens == result.stored * 64
        views = space.restore(match)
        assert all(bytes(view) == blocks[0].tobytes() for view in views)
        match.release()
        beyond = space.put(tokens, blocks[300:], first_block=300)
        assert (beyond.stored, beyond.rejected) == (0, 100)
