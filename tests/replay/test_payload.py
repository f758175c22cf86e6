"""Payloads: any byte that is not the right one shows."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.keys import chain_keys, pack_tokens, token_chain
from kvstore.core.spec import root_digest
from kvstore.replay.payload import PayloadMaker, PromptMaker, prompt_keys

SPACE = bytes(range(32))
KEY, OTHER = b"k" * 16, b"o" * 16
SIZES = [1, 7, 8, 4096, 300_001]


@pytest.fixture(params=SIZES)
def maker(request: pytest.FixtureRequest) -> PayloadMaker:
    return PayloadMaker(SPACE, 3, request.param)


def test_right_payload_is_right(maker: PayloadMaker) -> None:
    """What was written verifies, at any size, through any buffer."""
    data = maker.make(KEY)
    assert len(data) == maker.block_bytes
    assert maker.wrong_bytes(KEY, data) == 0
    assert maker.wrong_bytes(KEY, memoryview(data)) == 0


def test_every_wrong_byte_is_counted(maker: PayloadMaker) -> None:
    """A flipped bit anywhere is one wrong byte."""
    for at in {0, maker.block_bytes // 2, maker.block_bytes - 1}:
        data = bytearray(maker.make(KEY))
        data[at] ^= 1
        assert maker.wrong_bytes(KEY, data) == 1


def test_truncated_payload_is_wrong(maker: PayloadMaker) -> None:
    """Missing bytes count as wrong."""
    assert maker.wrong_bytes(KEY, maker.make(KEY)[:-1]) == 1


@pytest.mark.parametrize(
    "foreign",
    [
        PayloadMaker(SPACE, 3, 65_536).make(OTHER),
        PayloadMaker(SPACE, 2, 65_536).make(KEY),
        PayloadMaker(SPACE[::-1], 3, 65_536).make(KEY),
        bytes(65_536),
    ],
    ids=["other key", "older epoch", "other space", "zeros"],
)
def test_foreign_bytes_show_in_every_word(foreign: bytes) -> None:
    """Bytes of another key, epoch or space, even one 8-byte word of them, are wrong (I1)."""
    maker = PayloadMaker(SPACE, 3, 65_536)
    right = np.frombuffer(maker.make(KEY), dtype=np.uint64)
    assert not (right == np.frombuffer(foreign, dtype=np.uint64)).any()
    torn = maker.make(KEY)[:40_000] + foreign[40_000:]
    assert maker.wrong_bytes(KEY, torn) > 25_000


def test_misplaced_piece_shows() -> None:
    """A piece of the right payload in the wrong place is wrong."""
    maker = PayloadMaker(SPACE, 3, 65_536)
    data = maker.make(KEY)
    shifted = data[4096:8192] + data[4096:]
    assert maker.wrong_bytes(KEY, shifted) > 4000


def test_prompts_follow_the_ids() -> None:
    """Prompts share exactly the blocks whose ids they share; the seed makes other prompts."""
    prompts = PromptMaker(16)
    one, two = prompts.tokens([5, 6, 7], 40), prompts.tokens([5, 6, 2**40 + 7], 48)
    assert one.dtype == np.uint32
    assert len(one) == 40
    assert (one[:32] == two[:32]).all()
    assert not (one[32:] == two[32:40]).all() or one[-1] != two[-1]
    assert not (PromptMaker(16, seed=1).tokens([5], 16) == one[:16]).all()
    flat = {tuple(prompts.tokens([i], 16)) for i in range(3000)}
    assert len(flat) == 3000


def test_keys_are_the_stores_keys() -> None:
    """Payload keys are the chained block keys of full blocks, as on the wire."""
    tokens = PromptMaker(16).tokens([1, 2, 3], 40)
    chain = token_chain(pack_tokens(tokens), 16)
    symbols = [chain.segments[0].symbols[i : i + 64] for i in (0, 64)]
    assert prompt_keys(SPACE, tokens, 16) == chain_keys(root_digest(SPACE, "", "")[:16], symbols)
