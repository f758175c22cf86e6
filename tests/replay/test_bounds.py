"""Offline bounds, against an exhaustive search and the policies that they bound."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest

from kvstore.replay.bounds import (
    DEFAULT_COST,
    block_seconds,
    find_reuses,
    optimum,
    price_bound,
)
from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.columns import TraceColumns, trace_columns
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace

# At 1 % of the shipped cut.
SMALL_TOKENS, SMALL_SECONDS = 0.110318, 0.088837


def small_trace(seed: int) -> TraceColumns:
    """A few requests over a small tree of blocks, with partly filled ends."""
    rng = random.Random(seed)
    children: dict[int, list[int]] = {-1: [0, 1]}
    fresh = iter(range(2, 100))
    requests = []
    for number in range(9):
        chain, block = [], -1
        for _ in range(rng.randrange(1, 4)):
            options = children.setdefault(block, [])
            if not options or (len(options) < 2 and rng.random() < 0.3):
                options.append(next(fresh))
            block = rng.choice(options)
            chain.append(block)
        tail = rng.choice([0, 100])
        length = 512 * len(chain) + tail
        ids = chain + ([1000 + number] if tail else [])
        requests.append(
            TraceRequest(timestamp=number, input_length=length, output_length=1, hash_ids=ids)
        )
    return trace_columns(requests)


def exhaustive(trace: TraceColumns, capacity: int, worth: np.ndarray) -> float:
    """The most that any choice of what to keep after each request can hit."""
    best: dict[frozenset[int], float] = {frozenset(): 0.0}
    for request in range(trace.request_count):
        span = range(trace.starts[request], trace.starts[request + 1])
        full = [i for i in span if trace.full[i]]
        after: dict[frozenset[int], float] = {}
        for kept, value in best.items():
            gained = 0.0
            for i in full:
                if int(trace.blocks[i]) not in kept:
                    break
                gained += float(worth[i])
            have = sorted(kept | {int(trace.blocks[i]) for i in full})
            for count in range(min(capacity, len(have)) + 1):
                for some in combinations(have, count):
                    state = frozenset(some)
                    after[state] = max(after.get(state, 0.0), value + gained)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_bounds_hold_the_true_optimum(seed: int, capacity: int) -> None:
    """Tokens are exactly the best possible; for seconds the best possible is within the bounds."""
    trace = small_trace(seed)
    bounds = optimum(trace, capacity)
    tokens = exhaustive(trace, capacity, trace.tokens)
    assert bounds.token_hit_ratio == pytest.approx(tokens / trace.inputs.sum())
    seconds = block_seconds(trace)
    best = exhaustive(trace, capacity, seconds) / seconds.sum()
    assert bounds.saved_seconds_ratio <= bounds.seconds_lower + 1e-12
    assert bounds.seconds_lower <= best + 1e-9
    assert bounds.seconds_upper >= best - 1e-9


def test_block_seconds_sum_to_the_prefill() -> None:
    """Values of a prompt's blocks sum to its prefill without the constant: 64 blocks, 1.7465 s."""
    request = TraceRequest(
        timestamp=0, input_length=32_768, output_length=1, hash_ids=list(range(64))
    )
    values = block_seconds(trace_columns([request]))
    assert values.sum() == pytest.approx(1.7465081856)
    assert values.sum() == pytest.approx(DEFAULT_COST.seconds(32_768, 0) - 0.010)


def test_bounds_of_the_bundled_trace() -> None:
    """Golden values on the shipped cut, and bounds that are close to each other."""
    trace = trace_columns(load_trace(BUNDLED))
    small = optimum(trace, int(0.01 * trace.unique_blocks))
    assert small.token_hit_ratio == pytest.approx(SMALL_TOKENS, abs=1e-4)
    assert small.saved_seconds_ratio == pytest.approx(SMALL_SECONDS, abs=1e-4)
    assert small.seconds_upper - small.seconds_lower < 0.03
    large = optimum(trace, trace.unique_blocks)
    assert large.token_hit_ratio == pytest.approx(0.288676, abs=1e-6)
    assert large.seconds_lower == pytest.approx(large.seconds_upper)


def test_one_price_is_a_looser_bound() -> None:
    """A single price for all times bounds too, and a price for each time bounds tighter."""
    trace = trace_columns(load_trace(BUNDLED))
    reuses = find_reuses(trace, block_seconds(trace))
    single = price_bound(reuses, 300, trace.request_count, 0)[0]
    many = price_bound(reuses, 300, trace.request_count, 500)[0]
    assert many < single


def test_oracle_policy_reaches_the_optimum() -> None:
    """The offline policy, through the daemon's own index, hits what Belady's rule hits."""
    requests = load_trace(BUNDLED, 600)
    workload = Workload(requests)
    trace = trace_columns(requests, by_tenant=True)
    for fraction in (0.02, 0.1):
        capacity = workload.capacity(fraction)
        result = CacheSimulation(workload, "oracle", (capacity,)).run()
        assert result.token_hit_ratio == pytest.approx(
            optimum(trace, capacity, steps=0).token_hit_ratio, abs=0.003
        )


def test_nothing_comes_again() -> None:
    """A trace without reuse has an optimum of nothing."""
    requests = [
        TraceRequest(timestamp=i, input_length=600, output_length=1, hash_ids=[2 * i, 2 * i + 1])
        for i in range(5)
    ]
    bounds = optimum(trace_columns(requests), 3)
    assert bounds[1:] == (0, 0, 0, 0)
