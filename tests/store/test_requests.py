"""Requests in the live store: each is told once, and blocks belong to the one that brought them."""

from __future__ import annotations

from typing import Any

import pytest
from desk import Desk, Engine, ReuseHints
from msgspec import structs

from kvstore.core.plan import NO_ASK, Query
from kvstore.policies.actions import Event
from kvstore.policies.uses import UNKNOWN_TOKENS, Hint
from kvstore.store import requests

# A block is one grain of the statistics, and one slot.
GRAIN = {"block_size": 128, "num_kv_heads": 1, "head_dim": 16, "dtype": "uint8"}
BLOCK = 128
TOKENS = list(range(4 * BLOCK))


class Told:
    """What residency of a desk hears."""

    def __init__(self, desk: Desk) -> None:
        self.residency = desk.kv.parts.residency
        self.events: list[Event] = []
        self.residency.on_event = self.events.append

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [event.values for event in self.events if event.name == name]

    @property
    def requests(self) -> list[Any]:
        return [values[0] for values in self.of("request")]


@pytest.fixture
def told(desk: Desk) -> Told:
    return Told(desk)


@pytest.fixture
def reader(desk: Desk, told: Told) -> Engine:
    return desk.engine(**GRAIN)


def hinted(engine: Engine, tokens: Any, request_id: str = "", **hints: Any) -> Query:
    return structs.replace(engine.query(tokens, request_id=request_id), reuse=ReuseHints(**hints))


def owner_of(desk: Desk, block: int = 0) -> Any:
    """The use of the run that holds a block of the only chain there is."""
    for run in desk.kv.parts.index.runs():
        if run.first <= block < run.first + run.ready:
            return run.policy
    raise AssertionError("no such block")


def test_a_request_counts_once(reader: Engine, told: Told) -> None:
    """Who polls, repeats a lookup or stores under the same id speaks of one request."""
    for _ in range(3):
        reader.lookup(TOKENS, request_id="r")
    reader.put(TOKENS, request_id="r")
    found = reader.lookup(TOKENS, request_id="r")
    assert found.matched_tokens == len(TOKENS)
    assert len(told.requests) == 1
    assert told.requests[0].input_tokens == len(TOKENS)
    assert len(told.requests[0].digests) == 8 * 4


def test_ranks_are_one_request(desk: Desk, told: Told) -> None:
    """Two ranks of an engine that look the same prompt up make it asked for once, not twice."""
    ranks = [desk.engine(**GRAIN, shard_count=2, shard=n, engine_id="e") for n in (0, 1)]
    for rank in ranks:
        rank.lookup(TOKENS, request_id="r")
    for rank in ranks:
        rank.put(TOKENS, request_id="r")
    assert len(told.requests) == 1


def test_ranks_without_ids_leave_it_to_the_first(desk: Desk, told: Told) -> None:
    """Without ids the first shard speaks for all of them."""
    ranks = [desk.engine(**GRAIN, shard_count=2, shard=n, engine_id="e") for n in (0, 1)]
    for rank in ranks:
        rank.lookup(TOKENS)
    for rank in ranks:
        rank.put(TOKENS)
    assert len(told.requests) == 1


def test_a_put_belongs_to_its_lookup(desk: Desk, reader: Engine, told: Told) -> None:
    """Without an id the engine's last prompt is taken, if it agrees; else the put is one itself."""
    reader.lookup(TOKENS)
    reader.put(TOKENS)
    assert len(told.requests) == 1
    other = [7, *TOKENS]
    reader.put(other)
    assert len(told.requests) == 2
    assert told.requests[1].digests != told.requests[0].digests


def test_blocks_belong_to_who_brought_them(desk: Desk, reader: Engine, told: Told) -> None:
    """A lookup of another request between Reserve and Commit does not take the blocks over."""
    reader.lookup(TOKENS, request_id="mine")
    reserved = reader.reserve(TOKENS, request_id="mine")
    desk.engine(**GRAIN).lookup([9, *TOKENS], request_id="other")
    reader.commit(reserved.reservation_id, TOKENS, 0, 4)
    assert len(told.requests) == 2
    assert owner_of(desk).number == 0


def test_what_a_request_adds_is_its_own(reader: Engine, told: Told) -> None:
    """Output that is stored later, and a prompt that grew, extend the request."""
    reader.lookup(TOKENS, request_id="r")
    grown = [*TOKENS, *range(1000, 1000 + 2 * BLOCK)]
    reader.put(grown, request_id="r")
    assert len(told.requests) == 1
    [(number, digests)] = told.of("extend")
    assert (number, len(digests)) == (0, 2 * 8)
    reader.lookup(grown, request_id="next")
    assert told.requests[1].digests == told.requests[0].digests + digests
    assert owner_of_known(reader.desk, 1) > 5


def owner_of_known(desk: Desk, number: int) -> int:
    """Blocks that were known when a request came."""
    use = owner_of(desk)
    assert use.number == number
    return int(use.known)


def test_the_end_of_a_request(desk: Desk, reader: Engine, told: Told) -> None:
    """Output length and hints are told once, whoever of the ranks repeats them."""
    reader.lookup(TOKENS, request_id="r")
    reader.put(TOKENS, request_id="r")
    hints = ReuseHints(expect_reuse=3, expect_reuse_seconds=20.0, priority=2)
    for _ in range(2):
        desk.kv.finish_request(reader.attachment, "r", 77, hints)
    assert told.of("finish") == [(0, 77, Hint("certain", 20.0, 2))]
    assert owner_of(desk).weight > 1
    reader.put([*TOKENS, *TOKENS], request_id="r")
    assert len(told.requests) == 1, "what it stores after its end is still its own"
    reader.lookup(TOKENS, request_id="r")
    assert len(told.requests) == 2, "an id that comes back after its end is another request"


def test_an_end_without_a_length(desk: Desk, reader: Engine, told: Told) -> None:
    """An engine that does not tell the length of the output has not said that it is 0."""
    reader.lookup(TOKENS, request_id="r")
    desk.kv.finish_request(reader.attachment, "r")
    assert told.of("finish") == [(0, UNKNOWN_TOKENS, Hint())]
    desk.kv.finish_request(reader.attachment, "never heard of")
    assert len(told.of("finish")) == 1


def test_turns_of_a_session(desk: Desk, reader: Engine, told: Told) -> None:
    """Requests that name a session are its turns, also where the prompts differ."""
    for n in range(3):
        query = hinted(reader, [n, *TOKENS], session="s")
        desk.wait(desk.kv.lookup(reader.attachment, query, 0, NO_ASK))
    query = hinted(reader, TOKENS, session="s", turn=9)
    desk.wait(desk.kv.lookup(reader.attachment, query, 0, NO_ASK))
    assert [request.turn for request in told.requests] == [1, 2, 3, 9]


def test_statistics_of_small_blocks(desk: Desk, told: Told) -> None:
    """Blocks of 16 tokens share a digest by eights; what is left over is not lost."""
    engine = desk.engine(block_size=16, num_kv_heads=1, head_dim=128, dtype="uint8")
    tokens = list(range(300))
    engine.lookup(tokens)
    engine.put(tokens)
    assert (told.requests[0].grain_blocks, len(told.requests[0].digests)) == (8, 2 * 8)
    engine.lookup(tokens)
    assert told.requests[1].digests == told.requests[0].digests
    assert owner_of(desk, 17).known > 18, "the blocks after the last whole grain are known, too"


def test_memory_of_requests_is_bounded(desk: Desk, reader: Engine, told: Told) -> None:
    """An engine that never ends its requests does not fill the daemon's memory."""
    for n in range(requests.REQUESTS_KEPT + 10):
        desk.kv.parts.requests.looked_up(
            reader.attachment, reader.query(TOKENS[: n % 3], request_id=str(n)), NO_ASK
        )
    assert len(desk.kv.parts.requests._known) == requests.REQUESTS_KEPT


def test_costs_reach_the_policies(desk: Desk, reader: Engine, told: Told) -> None:
    """Once an engine is measured its blocks are worth what they cost; noise is not told."""
    steps = [(n, p) for n in (128, 512, 2048, 8192) for p in (0, 1024, 8192, 16384)]
    worth = told.residency.context.worth
    before = worth.seconds(reader.space, 0)
    for n, p in steps * 3:
        desk.kv.costs.report_step(
            reader.attachment, 1e-3 + n * 1e-4 + n * (p + n / 2) * 2e-9, [(n, p)]
        )
    desk.advance(2)
    after = worth.seconds(reader.space, 0)
    assert after == pytest.approx(BLOCK * 1e-4 + BLOCK * BLOCK / 2 * 2e-9, rel=0.05)
    assert before == pytest.approx(BLOCK * 32e-6, rel=0.05)
    for n, p in steps:
        desk.kv.costs.report_step(
            reader.attachment, 1e-3 + n * 1.02e-4 + n * (p + n / 2) * 2e-9, [(n, p)]
        )
    desk.advance(5)
    assert len(told.of("set_rates")) == 1


def test_a_hint_that_lies_loses_its_weight(desk: Desk, reader: Engine, told: Told) -> None:
    """Of two tenants that say "certain", the one whose prompts never come back is believed less."""
    others = desk.engine(tenant="b", **GRAIN)
    for n in range(300):
        desk.advance(1.0)
        for engine, again in ((reader, True), (others, False)):
            prompt = [n // 2 if again else n, *TOKENS]
            query = hinted(engine, prompt, f"{n}", expect_reuse=3)
            desk.wait(desk.kv.lookup(engine.attachment, query, 0, NO_ASK))
    beliefs = {(t, hint): factor for t, hint, factor in desk.kv.parts.requests.hint_beliefs()}
    assert beliefs["b", "certain"] < 0.7 * beliefs["default", "certain"]
