"""`bench policies`: whether `saved_time` is ever worse than the better of two plain policies.

Every cell is a workload and a capacity. Workloads: traces as they are, with other ids, slower and
faster, and laid over each other; and generated ones. Constants are the same everywhere.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from heapq import merge
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvstore.bench.measure import document
from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace
from kvstore.replay.generate import generate, scaled
from kvstore.replay.generate_preset import load_preset, preset_names

CAPACITIES = (0.05, 0.10, 0.25, 0.50)
BASELINES = ("lru", "gdsf")
JUDGED = "saved_time"
SPEEDS = {"time x 0.3": 0.3, "time x 3": 3.0}
QUICK_REQUESTS, QUICK_CAPACITIES = 600, (0.10, 0.50)
QUICK_SECONDS = 120.0
# Two traces laid over each other must not share ids.
ID_OFFSET = 1 << 40


class CellResult(NamedTuple):
    """Shares of prefill seconds saved in one workload at one capacity, by policy."""

    workload: str
    capacity_fraction: float
    saved_ratio: dict[str, float]

    @property
    def points_below(self) -> float:
        """Points that the judged policy is below the better plain one; less than 0 is above."""
        best = max(self.saved_ratio[name] for name in BASELINES)
        return 100 * (best - self.saved_ratio[JUDGED])


Make = Callable[[], list[TraceRequest]]


def run(
    quick: bool = False, seed: int = 0, traces: Sequence[str | Path] = (), jobs: int = 2
) -> dict[str, Any]:
    """All cells; the worst is the figure."""
    capacities = QUICK_CAPACITIES if quick else CAPACITIES
    made = dict(workloads([Path(path) for path in traces] or [BUNDLED], seed, quick))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, jobs), context) as pool:
        futures = [pool.submit(judge, name, make, capacities) for name, make in made.items()]
        cells = [cell for future in futures for cell in future.result()]
    worst = max(cells, key=lambda cell: cell.points_below)
    return document(
        {"worst_cell_points": worst.points_below},
        {"points_below": [cell.points_below for cell in cells]},
        worst_cell=f"{worst.workload} at {worst.capacity_fraction:.0%}",
        seed=seed,
        cells=[{**cell._asdict(), "points_below": cell.points_below} for cell in cells],
    )


def judge(name: str, make: Make, capacities: Sequence[float]) -> list[CellResult]:
    """One workload, whole, at each capacity under each policy."""
    workload = Workload(make())
    return [
        CellResult(name, fraction, {
            policy: CacheSimulation(workload, policy, (workload.capacity(fraction),))
            .run().saved_ratio
            for policy in (JUDGED, *BASELINES)
        })
        for fraction in capacities
    ]  # fmt: skip


def workloads(paths: Sequence[Path], seed: int, quick: bool) -> Iterator[tuple[str, Make]]:
    """Names of workloads and what makes their requests, in the process that needs them."""
    limit = QUICK_REQUESTS if quick else 0
    for path in paths:
        name = path.name.partition(".")[0]
        yield name, partial(_load, path, limit)
        yield f"{name}, other ids", partial(_shuffled, path, limit, seed)
        for how, factor in SPEEDS.items():
            yield f"{name}, {how}", partial(_faster, path, limit, factor)
    for first, second in pairwise(paths):
        yield "both traces", partial(_interleaved, first, second, limit)
    for preset in preset_names():
        yield f"generated {preset}", partial(_generated, preset, seed, quick)


def _load(path: Path, limit: int) -> list[TraceRequest]:
    return load_trace(path, limit)


def _shuffled(path: Path, limit: int, seed: int) -> list[TraceRequest]:
    """The same requests, their ids drawn anew."""
    requests = load_trace(path, limit)
    ids = list(dict.fromkeys(i for request in requests for i in request.hash_ids))
    others = list(range(len(ids)))
    random.Random(seed).shuffle(others)
    new = dict(zip(ids, others, strict=True))
    return [_replace(r, hash_ids=[new[i] for i in r.hash_ids]) for r in requests]


def _faster(path: Path, limit: int, factor: float) -> list[TraceRequest]:
    """The same requests, all times multiplied."""
    return [_replace(r, timestamp=r.timestamp * factor) for r in load_trace(path, limit)]


def _interleaved(first: Path, second: Path, limit: int) -> list[TraceRequest]:
    """Both traces from the same time on."""
    moved = [
        _replace(r, hash_ids=[i + ID_OFFSET for i in r.hash_ids]) for r in load_trace(second, limit)
    ]
    return list(merge(load_trace(first, limit), moved, key=lambda request: request.timestamp))


def _generated(preset: str, seed: int, quick: bool) -> list[TraceRequest]:
    found = load_preset(preset)
    return list(generate(scaled(found, seconds=QUICK_SECONDS if quick else None), seed))


def _replace(request: TraceRequest, **changes: Any) -> TraceRequest:
    return msgspec.structs.replace(request, **changes)
