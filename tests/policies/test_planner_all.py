"""Restore plans against all executable plans there are, block by block."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore.core.plan import LOAD_ALL, RECOMPUTE
from kvstore.policies.cost import CallCost, LinkCost
from kvstore.policies.planner import Costs, Prices, Segment, Situation, decide
from kvstore.policies.timing import Cut

BOTH = frozenset({"prefix", "split"})
GRID = 16
link = st.tuples(st.floats(0, 5e-3), st.floats(5e6, 1e9))
call = st.builds(
    CallCost, st.floats(0, 5e-3), st.floats(1e-7, 2e-4), st.one_of(st.just(0.0), st.floats(0, 2e-6))
)
paths = {"host": ("up",), "disk": ("disk", "up"), "other": ("other",)}


@st.composite
def situations(draw: Any) -> tuple[Situation, Costs]:
    segments = []
    for source in draw(st.lists(st.sampled_from(list(paths)), min_size=1, max_size=4)):
        tokens = GRID * draw(st.integers(1, 8))
        segments.append(Segment(tokens, tokens * 512, source, paths[source]))
    priced = draw(st.booleans())
    nu = st.floats(0, 1e-7)
    prices = (
        Prices(draw(st.floats(0, 3)), {"disk": draw(nu), "up": draw(nu)}) if priced else Prices()
    )
    queued = st.sampled_from([0, 0, 5_000, 100_000])
    situation = Situation(
        tuple(segments),
        draw(st.integers(0, 100)),
        local_tokens=draw(st.sampled_from([0, 48])),
        shapes=draw(st.sampled_from([BOTH, frozenset({"prefix"})])),
        overlap=draw(st.sampled_from(["none", "layerwise"])),
        prices=prices,
        queued_bytes={"disk": draw(queued), "up": draw(queued)},
        queued_prefill_tokens=draw(st.sampled_from([0, 0, 100])),
        prefill_chunk_tokens=draw(st.sampled_from([0, 0, 48, 64])),
        chunk_bytes=4_096,
    )
    links = {name: LinkCost.of(*draw(link)) for name in ("disk", "up", "other")}
    return situation, Costs(draw(call), links)


def all_cuts(situation: Situation) -> list[Cut]:
    """Every plan the engine can execute, block by block."""
    matched, bounds = situation.matched_tokens, [0]
    for part in situation.segments:
        bounds.append(bounds[-1] + part.tokens)
    cuts = [Cut(start, matched) for start in range(0, matched + 1, GRID)]
    if "split" in situation.shapes:
        cuts += [
            Cut(start, resume)
            for start in bounds[:-1]
            for resume in range(start + GRID, matched, GRID)
        ]
    return cuts


def plain_seconds(situation: Situation, costs: Costs, cut: Cut) -> tuple[float, float]:
    """(seconds, price) of a cut, straight from the formulas."""
    matched, chunk = situation.matched_tokens, situation.prefill_chunk_tokens
    start, resume, local = *cut, situation.local_tokens

    def compute(new: int, cached: int) -> float:
        return costs.call.seconds(new, cached, chunk)

    def load(first: int, second: int) -> tuple[float, dict[str, float]]:
        moved: dict[str, float] = {}
        used, low = [], 0
        for part in situation.segments:
            high = low + part.tokens
            tokens = sum(1 for t in range(low, high, GRID) if t < first or t >= second) * GRID
            for name in part.links:
                moved[name] = moved.get(name, 0.0) + tokens * part.byte_count / part.tokens
            used += [part] if tokens else []
            low = high
        times = [0.0]
        for part in used:
            links = [costs.links[name] for name in part.links]
            busy = [
                (situation.queued_bytes.get(n, 0) + moved[n]) * costs.links[n].byte_seconds
                for n in part.links
            ]
            chunk_bytes = min(situation.chunk_bytes, part.byte_count)
            fill = [chunk_bytes * one.byte_seconds for one in links]
            fixed = sum(one.latency_seconds for one in links) + sum(fill) - max(fill)
            times.append(fixed + max(busy))
        return max(times), moved

    loads, moved = load(start, resume)
    wait = compute(situation.queued_prefill_tokens, 0)
    if resume == matched:
        gpu = compute(matched - start + situation.new_tokens, local + start)
        seconds = max(loads, wait) + gpu
    else:
        middle, tail = (
            compute(resume - start, local + start),
            compute(situation.new_tokens, local + matched),
        )
        gpu = middle + tail
        if situation.overlap == "none":
            seconds = max(loads, wait) + gpu
        else:
            seconds = max(max(load(start, matched)[0], wait) + middle, loads) + tail
    prices = situation.prices
    price = prices.gpu_second * gpu
    price += sum(prices.link_byte.get(name, 0.0) * size for name, size in moved.items())
    return seconds, price


@settings(max_examples=300, deadline=None)
@given(situations())
def test_never_worse_than_the_best_of_all_plans(given_: tuple[Situation, Costs]) -> None:
    """No executable plan has a lower objective, and predictions are what the formulas say."""
    situation, costs = given_
    situation = situation._replace(caution=0.0)
    decision = decide(situation, costs)
    best = min(sum(plain_seconds(situation, costs, cut)) for cut in all_cuts(situation))
    assert decision.chosen.objective <= best * (1 + 1e-9) + 1e-12
    for plan in decision.alternatives:
        assert plan.cut in all_cuts(situation)
        seconds, price = plain_seconds(situation, costs, plan.cut)
        assert plan.p50_seconds == pytest.approx(seconds, rel=1e-9, abs=1e-12)
        assert plan.price == pytest.approx(price, rel=1e-9, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(situations(), st.floats(1.0, 10.0), st.floats(0.5, 1.5))
def test_deadlines_are_met_where_any_plan_meets_them(
    given_: tuple[Situation, Costs], slower: float, share: float
) -> None:
    """A miss is predicted only when no plan is in time; then the fastest one is taken."""
    situation, costs = given_
    situation = situation._replace(caution=0.0)
    late = Costs(costs.call, {name: one.times(slower) for name, one in costs.links.items()})
    fastest = min(plain_seconds(situation, late, cut)[0] for cut in all_cuts(situation))
    decision = decide(situation._replace(deadline_seconds=fastest * share + 1e-9), costs, late)
    assert decision.is_predicted_miss == (share < 1.0 and fastest * share + 1e-9 < fastest)
    if decision.is_predicted_miss:
        assert decision.chosen.p99_seconds == pytest.approx(fastest, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(situations(), st.sampled_from(["disk", "up", "other"]), st.floats(1.0, 100.0))
def test_a_faster_link_is_never_worse(
    given_: tuple[Situation, Costs], name: str, faster: float
) -> None:
    """More bandwidth lowers the objective, or leaves it; so does an idle queue."""
    situation, costs = given_
    situation = situation._replace(caution=0.0)
    before = decide(situation, costs).chosen.objective
    one = costs.links[name]._replace(byte_seconds=costs.links[name].byte_seconds / faster)
    after = decide(situation, costs._replace(links={**costs.links, name: one}))
    assert after.chosen.objective <= before * (1 + 1e-9)
    idle = situation._replace(queued_bytes={}, queued_prefill_tokens=0)
    assert decide(idle, costs).chosen.objective <= before * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(situations())
def test_steps_tile_the_match(given_: tuple[Situation, Costs]) -> None:
    """Each matched token comes from one place, in order, and only declared shapes are planned."""
    situation, costs = given_
    situation = situation._replace(caution=0.0)
    decision = decide(situation, costs)
    for plan in decision.alternatives:
        steps, at = decision.steps(plan.cut), situation.local_tokens
        for step in steps:
            assert step.first_token == at
            assert step.token_count > 0
            at += step.token_count
        assert at == situation.local_tokens + situation.matched_tokens
        computed = [step.source == RECOMPUTE for step in steps]
        if "split" not in situation.shapes:
            assert computed == sorted(computed)
        assert sum(computed) == (plan.kind != LOAD_ALL)
    loaded = sum(s.token_count for s in decision.plan.steps if s.source != RECOMPUTE)
    assert loaded == decision.restore_tokens
