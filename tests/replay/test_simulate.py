"""Simulations: figures of cells, what they are compared with, and the same from any process."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.prices import Prices
from kvstore.replay.formats import BUNDLED
from kvstore.replay.simulate import Bench, Cell, Setup
from kvstore.replay.simulate_pool import simulate, task_count

# Two minutes are too short to learn what is worth a write, so that all that is due is written.
SETUP = Setup(BUNDLED, limit=400, prices=None)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(SETUP)


def steady(result: dict[str, Any]) -> dict[str, Any]:
    """All but the speed of the simulation."""
    return {name: value for name, value in result.items() if "per_second" not in name}


def test_gap_closed(bench: Bench) -> None:
    """LRU closes nothing of the gap to the optimum, the oracle all of it."""
    sizes = [(bench.workload.capacity(0.05),)]
    steps = []
    document = simulate(bench, ["lru", "oracle"], sizes, 1, lambda: steps.append(1))
    lru, oracle = document["results"]
    assert lru["gap_closed_tokens_ratio"] == 0
    assert lru["gap_closed_seconds_ratio"] == 0
    assert oracle["gap_closed_tokens_ratio"] == pytest.approx(1, abs=0.05)
    low, high = oracle["optimum"]["prefill_seconds_saved_ratio_bounds"]
    assert lru["prefill_seconds_saved_ratio"] < low <= high
    assert len(steps) == task_count(["lru", "oracle"], sizes) == 4
    assert not document["what_if"]


def test_hits_make_first_tokens_earlier(bench: Bench) -> None:
    """A larger cache hits more, computes less and answers earlier than a small one, or none."""
    sizes = [(bench.workload.capacity(f),) for f in (0.01, 0.5)]
    document = simulate(bench, ["lru"], sizes)
    small, large = document["results"]
    for name in ("ttft_mean_seconds", "residual_prefill_p99_seconds"):
        assert large[name] <= small[name] <= document["without_store"][name]
    assert large["token_hit_ratio"] > small["token_hit_ratio"]
    assert large["tiers"]["host"]["token_hit_ratio"] == large["token_hit_ratio"]
    saved = large["prefill_seconds_saved"]
    assert large["bytes_per_saved_second"] == pytest.approx(large["restored_bytes"] / saved)
    assert large["endurance"] is None


def test_disk_tier(bench: Bench) -> None:
    """With a disk, hits are told by tier, and what is written is set against its endurance."""
    cell = bench.cell(Cell("lru", (bench.workload.capacity(0.05), bench.workload.capacity(0.4))))
    tiers = cell["tiers"]
    both = tiers["host"]["token_hit_ratio"] + tiers["disk"]["token_hit_ratio"]
    assert both == pytest.approx(cell["token_hit_ratio"])
    assert tiers["disk"]["token_hit_ratio"] > 0
    assert cell["bytes_by_link"]["disk>host"] > 0
    endurance = cell["endurance"]
    assert endurance["written_bytes"] == cell["bytes_by_link"]["host>disk"] > 0
    assert endurance["allowance_used_ratio"] is None


def test_endurance_bounds_writes(bench: Bench) -> None:
    """Held to few drive writes a day, a disk is written less, and serves less."""
    cell = Cell("lru", (bench.workload.capacity(0.05), bench.workload.capacity(0.4)))
    held = Bench(SETUP._replace(endurance_dwpd=0.1), bench.requests).cell(cell)
    free = bench.cell(cell)
    assert 0 < held["endurance"]["allowance_used_ratio"] < 1.02
    assert held["endurance"]["written_bytes"] < free["endurance"]["written_bytes"]
    assert held["token_hit_ratio"] < free["token_hit_ratio"]


def test_what_is_not_worth_a_write_is_told(bench: Bench) -> None:
    """At prices of a GPU and of wear, less is written, and the answer says how much was not."""
    cell = Cell("lru", (bench.workload.capacity(0.05), bench.workload.capacity(0.4)))
    free = bench.cell(cell)["endurance"]
    judged = bench.cell(cell._replace(prices=Prices()))["endurance"]
    assert judged["written_bytes"] < free["written_bytes"]
    assert judged["not_worth_bytes"] > free["not_worth_bytes"] == 0


def test_costs_rule_what_is_saved(bench: Bench) -> None:
    """Twice the prefill costs are twice the seconds saved, and the same share."""
    costs = SETUP.costs._replace(cost=SETUP.costs.cost.times(2))
    slow = Bench(SETUP._replace(costs=costs), bench.requests).cell(Cell("gdsf", (500,)))
    plain = bench.cell(Cell("gdsf", (500,)))
    for name, factor in (("prefill_seconds_saved", 2), ("prefill_seconds_saved_ratio", 1)):
        assert slow[name] == pytest.approx(factor * plain[name])


def test_processes_agree(bench: Bench) -> None:
    """Worker processes answer what this one does."""
    sizes = [(bench.workload.capacity(0.1),)]
    alone = simulate(bench, ["lru", "gdsf"], sizes, jobs=1)
    spread = simulate(bench, ["lru", "gdsf"], sizes, jobs=2)
    pairs = zip(alone["results"], spread["results"], strict=True)
    assert all(steady(one) == steady(other) for one, other in pairs)
    assert alone["without_store"] == spread["without_store"]


def test_ticks_are_spread_for_the_engines_only(bench: Bench) -> None:
    """Requests of one coarse tick reach the engines apart; policies see the trace's own times."""
    assert len(set(bench.arrivals)) > 390
    assert len(set(bench.trace.times)) < 100
    assert bench.workload.requests[0].timestamp == bench.requests[0].timestamp


def test_deadline_misses(bench: Bench) -> None:
    """A deadline counts what comes later than it; the plans, at their 99 %, foresee most of it."""
    setup = SETUP._replace(costs=SETUP.costs._replace(deadline_seconds=0.5, noise=0.2))
    misses = Bench(setup, bench.requests).cell(Cell("lru", (500,)))["deadline_misses"]
    assert misses["predicted"] > 10 * misses["unpredicted"]
