"""Every policy on the shipped trace: miss counts that only change when a policy does."""

from __future__ import annotations

import pytest

from kvstore.policies.base import policy_names
from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import BUNDLED, load_trace

CAPACITIES = (0.01, 0.05, 0.25)
# Blocks missed of 45,138 that are full, at each capacity.
MISSES = {
    "arc": (45079, 43512, 37596),
    "fifo": (45118, 44740, 37590),
    "gdsf": (45019, 43883, 37705),
    "lfu": (44253, 42828, 37307),
    "lru": (45118, 44724, 37531),
    "oracle": (41647, 35956, 33117),
    "s3fifo": (44985, 43598, 37834),
    "saved_time": (45126, 42686, 37201),
    "sieve": (44928, 44325, 37594),
}


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(load_trace(BUNDLED))


def test_every_policy_has_its_counts() -> None:
    """No policy is left out of what is written down here."""
    assert policy_names(offline=True) == sorted(MISSES)


@pytest.mark.parametrize("policy", sorted(MISSES))
def test_miss_counts(workload: Workload, policy: str) -> None:
    """A policy misses as many blocks as when it was measured, and index and accounts agree."""
    full = sum(request.full_blocks for request in workload.requests)
    missed = []
    for fraction in CAPACITIES:
        simulation = CacheSimulation(workload, policy, (workload.capacity(fraction),))
        missed.append(full - simulation.run().hit_blocks)
        simulation.index.check_integrity()
        simulation.residency.check_integrity()
    assert tuple(missed) == MISSES[policy]


def test_the_oracle_is_below_them_all() -> None:
    """No policy misses less than the optimum."""
    for policy, misses in MISSES.items():
        for count, least in zip(misses, MISSES["oracle"], strict=True):
            assert count >= least, policy
