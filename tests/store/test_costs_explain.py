"""Explain: a decision is told with its numbers, its alternatives and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from desk import Desk
from planned import (
    BLOCK,
    BLOCKS,
    CALL,
    FAST,
    SLOW,
    TOKENS,
    ask,
    begin_restore,
    disk_desk,
    measure,
    to_disk,
)  # fmt: skip

from kvstore.core.errors import NotFound
from kvstore.store import decisions
from kvstore.store.explain_text import explained


@pytest.fixture
def two_tiers(make_desk: Callable[..., Desk]) -> Callable[..., Desk]:
    return partial(disk_desk, make_desk)


def test_outcomes_are_kept(two_tiers: Callable[..., Desk]) -> None:
    """A decision knows what its restore took, and what another plan would have spared."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, FAST, CALL.times(10_000.0), steps=60)
    found = ask(engine)
    _, done = begin_restore(desk, engine, found)
    desk.advance(0.5)
    desk.wait(done)
    desk.kv.costs.report_transfer(
        engine.attachment, "host>hbm", BLOCKS * BLOCK, 0.25, found.lease_id
    )
    (entry,) = [e for e in desk.kv.parts.decisions if e.decision is not None]
    outcome = entry.outcome()
    assert outcome.load_seconds == pytest.approx(0.75)
    assert outcome.regret_seconds == 0.0
    assert outcome.seconds > found.plan.predicted_p50_seconds


def test_a_decision_is_explained(two_tiers: Callable[..., Desk]) -> None:
    """By request and by block: the plan, the numbers it was chosen by, the others, the outcome."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, FAST)
    found = ask(engine, request_id="chat-1", deadline_seconds=5.0)
    desk.wait(begin_restore(desk, engine, found)[1])
    told = desk.kv.explainer.request("chat-1")
    assert told["plan"]["kind"] == "load_all"
    assert told["reason"] == found.reason
    assert told["recompute"]["state"] == "fitted"
    assert told["recompute"]["token_seconds"] == pytest.approx(100e-6, rel=0.1)
    assert told["links"]["disk>host"]["bytes_per_second"] == pytest.approx(FAST, rel=0.2)
    assert told["segments"] == [
        {"tokens": 160, "bytes": BLOCKS * BLOCK, "source": "disk", "links": ["disk>host"]}
    ]
    assert [other["kind"] for other in told["alternatives"]][:2] == ["load_all", "recompute_all"]
    assert told["outcome"]["regret_seconds"] == 0.0
    keys = engine.keys(TOKENS)
    assert desk.wait(desk.kv.explainer.block(keys[7])) == told
    text = explained(told)
    for words in ("load all", "regret", "disk>host", "fitted", "recompute all", "deadline", "met"):
        assert words in text
    # Of later plans for a shorter prompt, only blocks that those have are told.
    for i in range(20):
        desk.kv.costs.report_transfer(engine.attachment, "host>hbm", BLOCK << i % 6, 1e-3)
    assert ask(engine, tokens=TOKENS[:16]).matched_tokens == 16
    assert desk.wait(desk.kv.explainer.block(keys[7])) == told
    assert desk.wait(desk.kv.explainer.block(keys[2]))["matched_tokens"] == 16


def test_recomputing_is_judged_by_the_steps(two_tiers: Callable[..., Desk]) -> None:
    """A decision to recompute all has an outcome once the engine has told all of its steps."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    found = ask(engine, request_id="r")
    assert found.plan.kind == "recompute_all"
    entry = desk.kv.parts.decisions.of_request("r")

    def step(seconds: float, new: int, cached: int, request: str = "r") -> None:
        desk.kv.costs.report_step(
            engine.attachment, seconds, [(7, 9), (new, cached)], 0, 0, ["", request]
        )

    step(0.5, 64, 0, "another")
    step(0.25, 64, 0)
    assert entry.outcome() is None
    step(0.125, 32, 0)  # begun again
    step(0.125, 131, 32)
    outcome = entry.outcome()
    assert outcome.seconds == pytest.approx(0.5)
    others = [plan.p50_seconds for plan in entry.decision.alternatives[1:]]
    assert outcome.regret_seconds == pytest.approx(max(0.0, 0.5 - min(others)))
    step(1.0, 163, 0)
    assert entry.outcome().seconds == pytest.approx(0.5)
    assert "the first token took 500.00 ms" in explained(desk.kv.explainer.request("r"))


def test_steps_that_are_not_all_tell_nothing(two_tiers: Callable[..., Desk]) -> None:
    """Where the engine had a part from elsewhere, or another rank tells it too, nothing counts."""
    desk = two_tiers()
    engine, twin = desk.engine(engine_id="e"), desk.engine(engine_id="e")
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    for request in ("ranks", "elsewhere"):
        assert ask(engine, request_id=request).plan.kind == "recompute_all"
    report, entries = desk.kv.costs.report_step, desk.kv.parts.decisions
    report(engine.attachment, 0.25, [(64, 0)], 0, 0, ["ranks"])
    report(twin.attachment, 0.25, [(99, 64)], 0, 0, ["ranks"])
    assert entries.of_request("ranks").outcome() is None
    report(engine.attachment, 0.25, [(99, 64)], 0, 0, ["ranks"])
    assert entries.of_request("ranks").outcome().seconds == pytest.approx(0.5)
    report(engine.attachment, 0.25, [(63, 100)], 0, 0, ["elsewhere"])
    assert entries.of_request("elsewhere").outcome() is None


def test_a_link_that_others_wait_for_costs_more(two_tiers: Callable[..., Desk]) -> None:
    """While others restore, a load pays for what it delays, and the price is told."""
    desk = two_tiers()
    engine = desk.engine()
    other = [10_000 + i for i in range(4 * 8)]
    to_disk(desk, engine, other)
    to_disk(desk, engine)
    measure(desk, engine, FAST)
    alone = ask(engine, request_id="alone")
    price = desk.kv.explainer.request("alone")["links"]["disk>host"]["second_price"]
    assert price == 0.0
    engine.release(alone)
    found = ask(engine, tokens=other)
    begin_restore(desk, engine, found)
    ask(engine, request_id="beside")
    told = desk.kv.explainer.request("beside")
    link = told["links"]["disk>host"]
    assert link["queued_bytes"] == 8 * BLOCK
    assert link["second_price"] == pytest.approx(8 / BLOCKS)
    assert told["alternatives"][0]["price_seconds"] > 0
    assert "a second of it costs others 0.2 s" in explained(told)


def test_a_lookup_without_numbers_is_explained(desk: Desk) -> None:
    """Misses and what was loaded for want of measurements are told as such."""
    engine = desk.engine()
    assert ask(engine, request_id="miss").matched_tokens == 0
    assert desk.kv.explainer.request("miss")["plan"]["steps"] == []
    engine.put(TOKENS)
    ask(engine, request_id="hit")
    told = desk.kv.explainer.request("hit")
    assert told["plan"]["kind"] == "load_all"
    assert "recompute" not in told
    for name in ("miss", "hit"):
        assert "not measured" in explained(desk.kv.explainer.request(name))


def test_what_is_not_known_is_not_found(make_desk: Callable[..., Desk]) -> None:
    """An unknown request or block, or a decision of too long ago, is one sentence."""
    desk = make_desk(sections={"limits": {"decisions_kept": 3}})
    engine = desk.engine()
    engine.put(TOKENS)
    keys = engine.keys(TOKENS)
    measure(desk, engine)
    for i in range(20):
        desk.kv.costs.report_transfer(engine.attachment, "host>hbm", BLOCK << i % 6, 1e-3)
    for name in "abcd":
        ask(engine, tokens=TOKENS[:8], request_id=name)
    assert len(desk.kv.parts.decisions) == 3
    assert desk.kv.explainer.request("d")["request_id"] == "d"
    with pytest.raises(NotFound, match=r"'a' is none of the last 3 lookups .*decisions_kept"):
        desk.kv.explainer.request("a")
    with pytest.raises(NotFound, match=keys[20].hex()):
        desk.wait(desk.kv.explainer.block(keys[20]))
    with pytest.raises(NotFound, match="is stored"):
        desk.wait(desk.kv.explainer.block(bytes(16)))


def test_prompts_of_old_decisions_are_let_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts kept to find decisions by block take a bounded amount of memory."""
    monkeypatch.setattr(decisions, "SYMBOL_BYTES_MAX", 4 * len(TOKENS) * 3)
    engine = desk.engine()
    engine.put(TOKENS)
    measure(desk, engine)
    for i in range(20):
        desk.kv.costs.report_transfer(engine.attachment, "host>hbm", BLOCK << i % 6, 1e-3)
    for i in range(10):
        ask(engine, request_id=str(i))
    entries = list(desk.kv.parts.decisions)
    assert [bool(entry.chain.segments) for entry in entries] == [True] * 3 + [False] * 7
    assert desk.kv.explainer.request("0")["request_id"] == "0"
