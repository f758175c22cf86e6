"""Puts of odd prompts: the right answer or a clear error, and nothing lost."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.errors import InvalidRequest

TOKENS = list(range(32))  # 8 blocks


def test_prompts_without_a_full_block(engine: Any) -> None:
    """Empty and short prompts match nothing and want nothing; one block is one block."""
    for tokens in ([], [1], [1, 2, 3]):
        assert engine.put(tokens) == ""
        found = engine.lookup(tokens)
        assert (found.matched_tokens, found.lease_id) == (0, 0)
        assert found.reason == "the prompt has no full block"
    assert engine.put([1, 2, 3, 4]) == "S"
    assert engine.matched([1, 2, 3, 4]) == 1
    assert engine.matched([1, 2, 3, 4, 5, 6, 7]) == 1


def test_first_block_out_of_range(engine: Any) -> None:
    """A first block beyond the prompt or below 0 is InvalidRequest, one with a gap is rejected."""
    engine.put(TOKENS[:8])
    for first in (9, -1):
        with pytest.raises(InvalidRequest, match="first_block"):
            engine.reserve(TOKENS, first)
    assert engine.put(TOKENS, 8) == ""
    answer = engine.reserve(TOKENS, 4)
    assert answer.outcomes == bytes(4)
    assert "put from block 2 on" in answer.reason
    assert engine.put(TOKENS, 2) == "SSSSSS"


def test_first_block_on_pending_parents(desk: Any) -> None:
    """Blocks before first_block may still be written by others; they are not the caller's."""
    first, second = desk.engine(), desk.engine()
    answer = first.reserve(TOKENS[:8])
    assert second.put(TOKENS, 2) == "OOOOOO"
    assert first.commit(answer.reservation_id, TOKENS, 0, 2) == "SS"
    assert first.matched(TOKENS) == 8


def test_token_ids_out_of_range(engine: Any) -> None:
    """Token ids that are no uint32 are refused by name, never wrapped around."""
    for tokens in ([-1, 0, 0, 0], [1 << 32, 0, 0, 0]):
        with pytest.raises(InvalidRequest, match="token_ids"):
            engine.put(tokens)


def test_no_store_is_obeyed(engine: Any) -> None:
    """A request that asks not to be stored leaves nothing behind."""
    answer = engine.reserve(TOKENS, no_store=True)
    assert answer.outcomes == bytes(8)
    assert answer.reason == "the request asked not to be stored"
    assert engine.desk.usage().used_bytes == 0
