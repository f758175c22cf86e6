"""The optimum by a solver, against the bounds by prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.replay.bounds import optimum
from kvstore.replay.columns import trace_columns
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace
from kvstore.replay.simulate import Bench, Setup

pytest.importorskip("scipy", reason="the extra `bounds` is not installed")


def test_solver_lies_within_the_bounds() -> None:
    """The solved optimum is between the bounds by prices, close to the upper one."""
    from kvstore.replay.bounds_flow import exact_upper

    trace = trace_columns(load_trace(BUNDLED))
    for fraction in (0.01, 0.03):
        bounds = optimum(trace, int(fraction * trace.unique_blocks))
        exact = exact_upper(trace, bounds.capacity_blocks)
        assert bounds.seconds_lower <= exact + 1e-9
        assert exact <= bounds.seconds_upper + 1e-9
        assert bounds.seconds_upper - exact < 0.005


def test_solver_and_simulation() -> None:
    """A simulation that is told to solve has the solved bound, and never one below the lower."""
    from kvstore.replay.bounds_flow import exact_upper

    plain = Bench(Setup(Path(BUNDLED), limit=300))
    solved = Bench(Setup(Path(BUNDLED), limit=300, exact=exact_upper), plain.requests)
    before, after = plain.optimum((50,)), solved.optimum((50,))
    assert after.seconds_lower == before.seconds_lower <= after.seconds_upper
    assert after.seconds_upper <= before.seconds_upper


def test_nothing_to_save() -> None:
    """Without reuse nothing can be saved."""
    from kvstore.replay.bounds_flow import exact_upper

    request = TraceRequest(timestamp=0, input_length=600, output_length=1, hash_ids=[1, 2])
    assert exact_upper(trace_columns([request]), 3) == 0
