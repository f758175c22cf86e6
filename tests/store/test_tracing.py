"""Recordings in the store: what they hear, how long they wait, and what bounds them."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, Engine, ReuseHints
from msgspec import structs

from kvstore.core.errors import FailedPrecondition
from kvstore.core.plan import NO_ASK
from kvstore.policies.uses import UNKNOWN_TOKENS
from kvstore.store.tracing import HOLD_SECONDS, RECORD_BYTES, Recording, TraceOptions

# A block is one grain of the statistics.
GRAIN = {"block_size": 128, "num_kv_heads": 1, "head_dim": 16, "dtype": "uint8"}
BLOCK = 128
TOKENS = list(range(3 * BLOCK))


class Reader:
    """Who reads a recording: what was taken so far, and how often it was woken."""

    def __init__(self, desk: Desk, *options: Any) -> None:
        self.desk, self.woken = desk, 0
        self.recording: Recording = desk.kv.tracer.start(TraceOptions(*options), self._wake)
        self.records: list[Any] = []

    def _wake(self) -> None:
        self.woken += 1

    def read(self, seconds: float = 0.1) -> list[Any]:
        """What can be taken after some time."""
        self.desk.advance(seconds)
        new: list[Any] = []
        while taken := self.recording.take():
            new += taken
        self.records += new
        return new


@pytest.fixture
def engine(desk: Desk) -> Engine:
    return desk.engine(**GRAIN)


def finish(engine: Engine, request_id: str, output: int) -> None:
    engine.desk.kv.finish_request(engine.attachment, request_id, output)


def test_a_request_waits_for_its_end(desk: Desk, engine: Engine) -> None:
    """Records come in the order of arrival, each once it is known how long its output was."""
    reader = Reader(desk)
    for name in "abc":
        engine.lookup([ord(name), *TOKENS], request_id=name)
        desk.advance(1)
    finish(engine, "b", 20)
    assert reader.read() == []
    assert reader.recording.held_count == 3
    finish(engine, "a", 10)
    assert [record.output_tokens for record in reader.read()] == [10, 20]
    assert [round(record.seconds) for record in reader.records] == [0, 1]
    assert {len(record.words) for record in reader.records} == {3 * 8}
    finish(engine, "c", 0)
    [last] = reader.read()
    assert last.output_tokens == UNKNOWN_TOKENS, "an end without a length says nothing of it"


def test_nobody_waits_for_ever(desk: Desk, engine: Engine) -> None:
    """A request that is never ended is let go after ten minutes, without its output."""
    reader = Reader(desk)
    engine.lookup(TOKENS, request_id="lost")
    desk.advance(HOLD_SECONDS - 10)
    assert reader.read() == []
    [record] = reader.read(20)
    assert record.output_tokens == UNKNOWN_TOKENS
    assert reader.recording.held_count == 0


def test_a_repeated_lookup_is_one_request(desk: Desk, engine: Engine) -> None:
    """Polls, repeats and puts of a request are no requests of their own."""
    reader = Reader(desk)
    for _ in range(3):
        engine.lookup(TOKENS, request_id="r")
    engine.put(TOKENS, request_id="r")
    finish(engine, "r", 5)
    assert len(reader.read()) == 1


def test_it_ends_by_itself(desk: Desk, engine: Engine) -> None:
    """After its seconds, or its requests, it hears no more and gives out what it held."""
    timed = Reader(desk, 0, 5.0)
    engine.lookup(TOKENS, request_id="a")
    assert timed.read(4) == []
    assert len(timed.read(2)) == 1
    assert timed.recording.ended == "seconds"
    engine.lookup(TOKENS, request_id="b")
    assert timed.read(1) == []
    counted = Reader(desk, 0, 0.0, 2)
    for name in "cde":
        engine.lookup(TOKENS, request_id=name)
    assert len(counted.read()) == 2
    assert counted.recording.ended == "requests"
    assert desk.kv.tracer.is_idle
    with pytest.raises(FailedPrecondition, match="no recording"):
        desk.kv.tracer.stop()
    # Nothing is left that listens, but for what listened before.
    assert all("Recording" not in repr(each) for each in desk.kv.parts.requests.listeners)


def test_blocks_of_several_sizes(desk: Desk) -> None:
    """Small blocks count together; a trace of larger ones takes every so manyth; others are out."""
    engines = {
        size: desk.engine(block_size=size, num_kv_heads=1, head_dim=8, dtype="uint8")
        for size in (16, 128, 256, 512, 96)
    }
    reader = Reader(desk, 512)
    tokens = list(range(2 * 512 + 300))
    for size, engine in engines.items():
        engine.lookup(tokens, request_id=str(size))
        finish(engine, str(size), 1)
    records = reader.read()
    assert [len(record.words) // 8 for record in records] == [2, 2, 2, 2]
    assert reader.recording.left_out_count == 1
    assert len({record.words for record in records}) == 4, "spaces have nothing in common"


def test_without_a_size_the_first_decides(desk: Desk, engine: Engine) -> None:
    """The first request's blocks are the trace's; what does not fit them is counted."""
    reader = Reader(desk)
    engine.lookup(TOKENS, request_id="a")
    desk.engine(**{**GRAIN, "block_size": 256}).lookup(TOKENS, request_id="b")
    assert (reader.recording.block_size, reader.recording.left_out_count) == (128, 1)
    assert reader.recording.request_count == 1


def test_sessions_are_numbers(desk: Desk, engine: Engine) -> None:
    """Requests of one session have one number, none have 0, and no name is in a record."""
    reader = Reader(desk)
    for name, session in (("a", "alice"), ("b", ""), ("c", "alice"), ("d", "bob")):
        query = structs.replace(
            engine.query(TOKENS, request_id=name), reuse=ReuseHints(session=session)
        )
        desk.wait(desk.kv.lookup(engine.attachment, query, 0, NO_ASK))
        finish(engine, name, 1)
    a, b, c, d = (record.session for record in reader.read())
    assert a == c
    assert b == 0
    assert len({a, b, d}) == 3


def test_what_is_held_is_bounded(make_desk: Any) -> None:
    """I16: past half of limits.trace_bytes the oldest are let go; unread, the recording ends."""
    size = RECORD_BYTES + 8 * 3
    desk = make_desk(sections={"limits": {"trace_bytes": 2 * 10 * size}})
    engine, reader = desk.engine(**GRAIN), Reader(desk)
    for n in range(15):
        engine.lookup(TOKENS, request_id=str(n))
    assert (reader.recording.held_count, reader.recording.ready_count) == (10, 5)
    assert len(reader.read()) == 5
    for n in range(15, 40):
        engine.lookup(TOKENS, request_id=str(n))
    assert reader.recording.ended.startswith("its reader is too slow")
    assert len(reader.read()) <= 2 * 10 + 1
