"""The whole store in one thread, out of one seed at a time: `make simulate-faults SEED=...`."""

from __future__ import annotations

from collections import Counter

import pytest
from simulation import Simulation

SEEDS_A_TEST = 25


def simulate(seeds: range, steps: int) -> Counter[str]:
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += Simulation(seed, steps).run()
        except BaseException as error:
            error.add_note(f"make simulate-faults SEED={seed} STEPS={steps}")
            raise
    return happened


@pytest.mark.parametrize("first", range(0, 200, SEEDS_A_TEST))
def test_faults_never_show(first: int) -> None:
    """I1, I3, I4, I5, I6, I10, I11, I15, I22: whatever fails in whatever order, hits are right,
    books agree, and in the end nothing is held by nobody."""
    happened = simulate(range(first, first + SEEDS_A_TEST), 400)
    assert happened["hit"] > 50
    assert happened["outcome S"] > 50


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(1000, 5000, 1000))
def test_faults_never_show_for_long(first: int) -> None:
    """I1, I3, I4, I5, I6, I10, I11, I15, I22: the same for thousands of seeds, and longer."""
    happened = simulate(range(first, first + 200), 800)
    assert all(happened[f"fault {fault}"] for fault in ("write_error", "no_space", "latency"))
    assert happened["died in a commit"]


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 20_000, 500))
def test_faults_never_show_in_ten_thousand_seeds(first: int) -> None:
    """I1, I3, I4, I5, I6, I10, I11, I15, I22: the same for ten thousand seeds."""
    happened = simulate(range(first, first + 500), 800)
    assert happened["hit"] > 10_000


def test_a_seed_is_a_run() -> None:
    """One seed gives one run, step for step; another seed another."""
    first, again = Simulation(11), Simulation(11)
    assert first.run() == again.run()
    assert Simulation(12).run() != first.happened
