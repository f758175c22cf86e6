"""Many cells of a simulation, in as many processes as are wanted."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple, Protocol

from kvstore.replay.bounds import Optimum
from kvstore.replay.simulate import BASELINE, Bench, Cell, Setup, with_gaps

_BENCH: list[Bench] = []


class Work(Protocol):
    """Something that a worker process can be sent, and does with its bench."""

    def run(self, bench: Bench) -> Any: ...


class Task(NamedTuple):
    """One piece of work: `cell` none is the optimum at `capacities`, or without those no store."""

    capacities: tuple[int, ...] = ()
    policy: str = ""

    def run(self, bench: Bench) -> Any:
        if self.policy:
            return bench.cell(Cell(self.policy, self.capacities))
        return bench.optimum(self.capacities) if self.capacities else bench.without_store()


def _start(setup: Setup) -> None:
    """Makes a worker process ready; Ctrl-C, which the whole group gets, ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _BENCH.append(Bench(setup))


def _work(work: Work) -> Any:
    return work.run(_BENCH[0])


class Workers:
    """Processes with a bench each, or this one alone for one job; a context manager.

    They read the trace anew: a fork would copy the threads of this process half.
    """

    def __init__(self, bench: Bench, jobs: int) -> None:
        self._bench = bench
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                jobs, context, initializer=_start, initargs=(bench.setup,)
            )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, works: Sequence[Work], progress: Callable[[], None] = lambda: None) -> list[Any]:
        """What each work answers, in their order; `progress` is called after each."""
        if self._pool is None:
            return [self._alone(work, progress) for work in works]
        waiting: dict[Future[Any], int] = {
            self._pool.submit(_work, work): number for number, work in enumerate(works)
        }
        answers: list[Any] = [None] * len(works)
        for future in as_completed(waiting):
            answers[waiting[future]] = future.result()
            progress()
        return answers

    def _alone(self, work: Work, progress: Callable[[], None]) -> Any:
        answer = work.run(self._bench)
        progress()
        return answer


def simulate(
    bench: Bench,
    policies: Sequence[str],
    sizes: Sequence[tuple[int, ...]],
    jobs: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Every policy at every set of capacities, with what they are compared with.

    `progress` is called after each of `task_count` pieces of work.
    """
    tasks = _tasks(policies, sizes)
    with Workers(bench, min(jobs, len(tasks))) as workers:
        done = dict(zip(tasks, workers.run(tasks, progress), strict=True))
    results = []
    for capacities in sizes:
        best: Optimum = done[Task(capacities)]
        baseline = done[Task(capacities, BASELINE)]
        results += [
            with_gaps(done[Task(capacities, policy)], baseline, best) for policy in policies
        ]
    return {
        "trace": str(bench.setup.trace),
        "requests": len(bench.requests),
        "unique_blocks": bench.workload.unique_blocks,
        "block_size": bench.trace.block_size,
        "engine_count": bench.costs.engine_count,
        "hints": bench.setup.hints,
        "what_if": bench.setup.hints is not None,
        "without_store": done[Task()],
        "results": results,
    }


def _tasks(policies: Sequence[str], sizes: Sequence[tuple[int, ...]]) -> list[Task]:
    compared = dict.fromkeys([BASELINE, *policies])
    cells = [Task(capacities, policy) for capacities in sizes for policy in compared]
    return [Task(), *(Task(capacities) for capacities in sizes), *cells]


def task_count(policies: Sequence[str], sizes: Sequence[tuple[int, ...]]) -> int:
    """Pieces of work in `simulate`."""
    return len(_tasks(policies, sizes))
