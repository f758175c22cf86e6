"""Prompts that never come again, far more of them than fit, beside some that do."""

from __future__ import annotations

import random
from itertools import count

import pytest

from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import TraceRequest

CAPACITY, HOT, HOT_BLOCKS, SCANNED_BLOCKS = 400, 20, 10, 20


def workload(seed: int) -> list[tuple[str, bool, TraceRequest]]:
    """The hot ones, then ten times the cache that is asked for once, then the hot ones again."""
    rng, fresh = random.Random(seed), count(100_000)
    hot = [[1000 * (n + 1) + i for i in range(HOT_BLOCKS)] for n in range(HOT)]
    requests: list[tuple[str, bool, TraceRequest]] = []

    def ask(part: str, is_hot: bool) -> None:
        ids = rng.choice(hot) if is_hot else [next(fresh) for _ in range(SCANNED_BLOCKS)]
        request = TraceRequest(
            timestamp=2000 * len(requests), input_length=512 * len(ids), output_length=64,
            hash_ids=ids,
        )  # fmt: skip
        requests.append((part, is_hot, request))

    for _ in range(400):
        ask("before", True)
    for _ in range(10 * CAPACITY // SCANNED_BLOCKS):
        ask("scan", False)
        if rng.random() < 0.3:
            ask("scan", True)
    for _ in range(60):
        ask("after", True)
    return requests


def hot_hits(policy: str, seed: int) -> dict[str, float]:
    """Share of the hot prompts' blocks that were found, by part."""
    requests = workload(seed)
    simulation = CacheSimulation(Workload([each[2] for each in requests]), policy, (CAPACITY,))
    found: dict[str, list[float]] = {}
    for number, (part, is_hot, _) in enumerate(requests):
        hit = simulation.request(number)
        if is_hot:
            found.setdefault(part, []).append(hit.blocks / HOT_BLOCKS)
    return {part: sum(values) / len(values) for part, values in found.items()}


@pytest.mark.parametrize("seed", range(4))
def test_a_scan_does_not_flush_what_is_hot(seed: int) -> None:
    """Ten times the cache, asked for once each: what is hot is there afterwards, and was hit more
    meanwhile than under lru, although nothing seen before the scan came only once."""
    hits, plain = hot_hits("saved_time", seed), hot_hits("lru", seed)
    print(hits, plain)
    assert hits["after"] >= 0.85
    assert hits["after"] >= plain["after"]
    assert hits["scan"] > plain["scan"]
