"""Measuring in turns: every contestant once a round, in any order, medians of the rounds."""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import kvstore
from kvstore.core.clock import perf_seconds
from kvstore.core.machine import meminfo

Action = Callable[[], float]


def timed(action: Callable[[], Any]) -> Action:
    """`action` as one that answers with the seconds it took."""

    def run() -> float:
        start = perf_seconds()
        action()
        return perf_seconds() - start

    return run


def cpu_seconds_of(pid: int) -> float:
    """Processor time that another process's threads have taken, those that live."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ended just now
            total += int(path.read_text(encoding="ascii").split()[0])
    return total / 1e9


def alternate(
    actions: Mapping[str, Action],
    rounds: int,
    warmup: int = 2,
    on_round: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of each action in each round.

    Neighbours in time share what the machine is like just then, and the order is drawn anew for
    each round, so a ratio of medians does not depend on who came first or after whom.
    """
    names, rng = list(actions), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        rng.shuffle(names)
        for name in names:
            seconds = actions[name]()
            if number >= 0:
                samples[name].append(seconds)
        if on_round is not None:
            on_round()
    return samples


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def document(
    figures: Mapping[str, float], samples: Mapping[str, list[float]], **facts: Any
) -> dict[str, Any]:
    """What a benchmark answers with: figures on top, then what they were made of, and where."""
    return {
        **figures,
        **facts,
        "medians_seconds": medians(samples),
        "samples": {name: [round(v, 9) for v in values] for name, values in samples.items()},
        "machine": machine(),
        "commit": commit(),
    }


def machine() -> dict[str, Any]:
    """The machine that a figure belongs to."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_bytes": meminfo().get("MemTotal", 0),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit of the tree this runs from, with a + if it was changed; else the version."""
    root = str(Path(kvstore.__file__).parent.parent)
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return kvstore.__version__


def _git(root: str, *arguments: str) -> str:
    command = ["git", "-C", root, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
