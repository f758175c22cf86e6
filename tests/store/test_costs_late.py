"""Restores that fall behind their plan: cut short or given up, and what is learned from that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from desk import Desk, Engine
from planned import (
    BLOCK,
    BLOCKS,
    CALL,
    FAST,
    TOKENS,
    ask,
    begin_restore,
    disk_desk,
    measure,
    to_disk,
)  # fmt: skip

from kvstore.client import NotFound
from kvstore.core.plan import FailedBlocks, LookupResult
from kvstore.store import promote, restoring
from kvstore.store.explain_text import explained
from kvstore.testing import MemoryTier

PIECE = 8  # blocks that are read together here


@pytest.fixture
def two_tiers(make_desk: Callable[..., Desk]) -> Callable[..., Desk]:
    return partial(disk_desk, make_desk)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promote, "PIECE_BLOCKS", PIECE)


def begun(desk: Desk, call: Any = CALL) -> tuple[Engine, LookupResult]:
    """A prompt on disk that the plan loads."""
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, FAST, call, steps=60)
    found = ask(engine, request_id="r")
    assert found.plan.kind == "load_all"
    return engine, found


def until_some_came(desk: Desk, answers: list[Any]) -> int:
    """Lets pieces arrive until the first one has; the leading blocks that came."""
    while not any(answer.first_block == 0 for answer in answers):
        assert desk.mover is not None
        desk.mover.step()
        desk.store.drain()
    came = {a.first_block + i for a in answers for i in range(len(a.places))}
    return next(i for i in range(BLOCKS + 1) if i not in came)


def test_a_restore_that_falls_behind_is_given_up(two_tiers: Callable[..., Desk]) -> None:
    """Blocks of a restore so late that to recompute is faster are failed, with that reason."""
    desk = two_tiers()
    engine, found = begun(desk)
    answers, done = begin_restore(desk, engine, found)
    desk.advance(0.004)
    assert not done.done
    desk.advance(1.0)
    assert done.done
    (failed,) = answers
    assert (failed.first_block, failed.block_count, failed.inline) == (0, BLOCKS, False)
    assert "behind its plan" in failed.reason
    desk.settle()  # what arrives later does no harm
    assert len(answers) == 1


def test_a_late_restore_goes_on_where_that_is_faster(two_tiers: Callable[..., Desk]) -> None:
    """An engine that would take longer than the wait is not told to recompute."""
    desk = two_tiers()
    engine, found = begun(desk, CALL.times(10_000.0))
    answers, done = begin_restore(desk, engine, found)
    desk.advance(1.0)
    assert not done.done
    desk.wait(done)
    assert sum(len(answer.places) for answer in answers) == BLOCKS


@pytest.mark.usefixtures("in_pieces")
def test_who_can_use_a_part_keeps_it(two_tiers: Callable[..., Desk]) -> None:
    """A late restore of a client that says so ends after what came; the rest is recomputed."""
    desk = two_tiers()
    engine, found = begun(desk)
    answers: list[Any] = []
    done = desk.kv.restore(engine.session, found.lease_id, 0, 0, answers.append, True)
    desk.store.drain()
    kept = until_some_came(desk, answers)
    assert 0 < kept < BLOCKS
    desk.advance(1.0)
    assert done.done
    failed = [answer for answer in answers if isinstance(answer, FailedBlocks)]
    assert failed[0].first_block == kept
    entry = desk.kv.parts.decisions.of_request("r")
    assert entry.kept_blocks == kept
    outcome = entry.outcome()
    assert outcome.seconds == pytest.approx(1.0 + CALL.seconds(163 - 4 * kept, 4 * kept), rel=0.2)
    assert outcome.regret_seconds > 0.9
    told = desk.kv.explainer.request("r")
    assert told["outcome"]["kept_blocks"] == kept
    assert f"cut short after {kept} blocks: the restore is behind its plan" in explained(told)
    count = len(answers)
    desk.settle()
    assert len(answers) == count


@pytest.mark.usefixtures("in_pieces")
def test_who_drops_all_is_told_of_all(two_tiers: Callable[..., Desk]) -> None:
    """Given up by a client that cannot use a part, a restore is judged as computed from nothing."""
    desk = two_tiers()
    engine, found = begun(desk)
    answers, done = begin_restore(desk, engine, found)
    until_some_came(desk, answers)
    desk.advance(1.0)
    assert done.done
    entry = desk.kv.parts.decisions.of_request("r")
    assert entry.kept_blocks == 0
    assert entry.outcome().seconds == pytest.approx(1.0 + CALL.seconds(163, 0), rel=0.2)
    assert "given up: the restore is behind" in explained(desk.kv.explainer.request("r"))


@pytest.mark.usefixtures("in_pieces")
def test_ranks_are_cut_at_the_same_block(two_tiers: Callable[..., Desk]) -> None:
    """When one rank's restore is cut short, so are those of the others that are under way."""
    desk = two_tiers()
    engine, found = begun(desk)
    heard: list[list[Any]] = [[], []]
    done = [
        desk.kv.restore(engine.session, found.lease_id, 0, 0, answers.append, True)
        for answers in heard
    ]
    desk.store.drain()
    until_some_came(desk, heard[0])
    desk.advance(1.0)
    assert all(one.done for one in done)
    first, second = [
        min(a.first_block for a in answers if isinstance(a, FailedBlocks)) for answers in heard
    ]
    assert first == second


def test_a_cut_restore_teaches_that_the_disk_is_slow(two_tiers: Callable[..., Desk]) -> None:
    """What was not waited for counts with the time that it was waited for."""
    desk = two_tiers()
    engine, found = begun(desk)
    book = desk.kv.parts.costs
    read = book.link(book.read_link)
    count = read.sample_count
    begin_restore(desk, engine, found)
    desk.advance(1.0)
    assert read.sample_count > count
    assert read.ratio(0.99) > 2.0
    desk.settle()


@pytest.mark.parametrize("how", ["error", "views", "copies"])
def test_a_client_can_take_what_comes_before_the_gap(
    make_desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """With `partial`, a block that does not come ends the restore there, and the match says so;
    without, it is an error.
    """
    section = {"demote_watermark": 1.0, "endurance_dwpd": 0.0, "admission": "all"}
    disk = MemoryTier(4096 * BLOCK, "disk")
    desk = make_desk("2MiB", disk=disk, sections={"tiers": {"disk": section}})
    engine = desk.engine()
    to_disk(desk, engine, keep=4)
    keys = engine.keys(TOKENS)
    space = desk.store.client().attach(engine.space.spec)
    match = space.lookup([*TOKENS, 1, 2])
    assert match.block_count == BLOCKS
    # The disk brings the first turn's blocks and hangs then.
    turns = itertools.count()
    monkeypatch.setattr(restoring, "TURN_BLOCKS", 20)
    monkeypatch.setattr(promote.Promoter, "stalled", property(lambda self: next(turns) > 0))
    if how == "error":
        with pytest.raises(NotFound, match="blocks 24 to 39 cannot be had: the disk"):
            space.restore(match)
        return
    if how == "views":
        restored = [bytes(view) for view in space.restore(match, partial=True)]
    else:
        rows = [bytearray(BLOCK) for _ in range(BLOCKS)]
        space.restore_into(match, rows, partial=True)
        restored = [bytes(row) for row in rows[: match.block_count]]
        assert not any(any(row) for row in rows[match.block_count :])
    match.check()
    assert restored == [engine.payload(key).tobytes() for key in keys[:24]]
    assert (match.block_count, match.restore_tokens, match.ranges) == (24, 96, (range(24),))
    steps = [(s.source, s.first_token, s.token_count) for s in match.plan.steps]
    assert steps == [("host", 0, 16), ("disk", 16, 80), ("recompute", 96, 64)]
    assert "blocks from 24 on are left out: the disk does not answer" in match.reason
    match.release()
