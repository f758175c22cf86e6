"""What a section is given, and how its work is timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Context:
    """A section's deadline, the results of earlier sections, and its share of the cases.

    `driver` is a library that stands in for the CUDA driver on a dry run.
    """

    deadline: float
    results: dict[str, Any] = field(default_factory=dict)
    part: int = 0
    parts: int = 1
    driver: str = ""

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def share(self, cases: list[Any]) -> list[Any]:
        return cases[self.part :: self.parts]

    def ceiling(self, name: str) -> float:
        """A figure of the section `ceilings`; NaN where it is not there."""
        return float(self.results.get("ceilings", {}).get(name, float("nan")))


def seconds(work: Callable[[], Any], most: float = 0.25, repeats: int = 15) -> float:
    """Median seconds of `work` on the current stream, by events; warmed up twice."""
    work()
    work()
    torch.cuda.synchronize()
    times: list[float] = []
    begin = time.monotonic()
    while len(times) < 3 or (len(times) < repeats and time.monotonic() - begin < most):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graph_seconds(works: list[Callable[[], Any]], most: float = 0.25) -> float:
    """Median seconds of one of `works`, captured together as a graph and replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for work in works:
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for work in works:
            work()
    return seconds(graph.replay, most) / len(works)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|, in float64; infinite where anything is not finite."""
    found, wanted = found.double(), wanted.double()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / (norm if norm else 1.0)
