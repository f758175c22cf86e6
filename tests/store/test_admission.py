"""Admission in the store: what is not worth a write stays off the disk, and is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from desk import Desk

from kvstore.core.recorder import Recorder
from kvstore.testing import MemoryTier

BLOCK = 4096
BLOCKS = 32  # of a prompt: 128 tokens, for which statistics are kept
Make = Callable[..., Desk]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Blocks that were skipped, by reason, and written."""
    found: Counter[str] = Counter()

    def skipped(_: Recorder, reason: str, blocks: int) -> None:
        found[reason] += blocks

    def demoted(_: Recorder, blocks: int, byte_count: int) -> None:
        found["written"] += blocks

    monkeypatch.setattr(Recorder, "demotion_skipped", skipped)
    monkeypatch.setattr(Recorder, "demoted", demoted)
    return found


@pytest.fixture
def make(make_desk: Make) -> Make:
    """Makes a store of 8 prompts in host over a disk of 128."""

    def desk(policy: str = "saved_time", **section: Any) -> Desk:
        disk = {"demote_watermark": 0.5, "endurance_dwpd": 0.0, **section}
        return make_desk(
            tier=MemoryTier(8 * BLOCKS * BLOCK), disk=MemoryTier(128 * BLOCKS * BLOCK, "disk"),
            sections={"tiers": {"disk": disk}, "policy": {"eviction": policy}},
        )  # fmt: skip

    return desk


def serve(desk: Desk, engine: Any, number: int, name: int) -> int:
    """One request of an engine, a second after the last: looks a prompt up and stores it.

    Answers with the blocks that it found.
    """
    tokens = [name << 16 | i for i in range(4 * BLOCKS)]
    found = engine.lookup(tokens, request_id=f"r{number}")
    blocks = int(found.matched_tokens) // 4
    if blocks:
        engine.restore(found, tokens)
    if blocks < BLOCKS:
        engine.put(tokens, blocks, request_id=f"r{number}")
    desk.kv.finish_request(engine.attachment, f"r{number}")
    desk.advance(1.0)
    desk.store.settle()
    return blocks


@pytest.mark.parametrize("policy", ["lru", "saved_time"])
def test_prompts_that_never_come_back_are_not_written(
    make: Make, counts: Counter[str], policy: str
) -> None:
    """Without any reuse at most a hundredth is written; with "all", all that leaves host is."""
    desk = make(policy)
    engine = desk.engine()
    for number in range(150):
        serve(desk, engine, number, number)
    assert counts["written"] <= 0.01 * 150 * BLOCKS
    assert counts["worth"] >= 0.5 * 142 * BLOCKS
    counts.clear()
    other = make("lru", admission="all")
    engine = other.engine()
    for number in range(40):
        serve(other, engine, number, number)
    assert counts["written"] >= 32 * BLOCKS
    assert counts["worth"] == 0


def test_prompts_that_come_back_are_found_on_disk(make: Make, counts: Counter[str]) -> None:
    """Twelve prompts in turn, more than host holds: those it cannot keep are written, once, and
    all are found ever after."""
    desk = make()
    engine = desk.engine()
    found = [serve(desk, engine, number, number % 12) for number in range(120)]
    assert found[-12:] == [BLOCKS] * 12
    assert sum(found) >= 8 * 12 * BLOCKS
    assert 4 * BLOCKS <= counts["written"] <= 12 * BLOCKS


def test_a_flush_asks_for_no_worth(make: Make, counts: Counter[str]) -> None:
    """What an operator has written down is written down, worth it or not."""
    desk = make()
    engine = desk.engine()
    for number in range(20):
        serve(desk, engine, number, number)
    assert counts["written"] == 0
    flushed = desk.wait(desk.kv.flush())
    assert flushed.durable_blocks >= 7 * BLOCKS
    assert flushed.left_out_blocks == 0


def test_prices_of_the_configuration_count(make_desk: Make, counts: Counter[str]) -> None:
    """Where GPU time is free nothing is worth a write, however often it comes back."""
    desk = make_desk(
        tier=MemoryTier(8 * BLOCKS * BLOCK), disk=MemoryTier(128 * BLOCKS * BLOCK, "disk"),
        sections={"tiers": {"disk": {"demote_watermark": 0.5}}, "prices": {"gpu_hour": 0}},
    )  # fmt: skip
    engine = desk.engine()
    for number in range(60):
        serve(desk, engine, number, number % 12)
    assert counts["written"] == 0
    assert counts["worth"] > 0
