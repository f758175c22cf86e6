"""Many cells of a simulation, in as many processes as are wanted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvstore.replay.bounds import Optimum
from kvstore.replay.simulate import BASELINE, Bench, Cell, Setup, with_gaps

_BENCH: list[Bench] = []


class Task(NamedTuple):
    """One piece of work: `cell` none is the optimum at `capacities`, or without those no store."""

    capacities: tuple[int, ...] = ()
    policy: str = ""

    def run(self, bench: Bench) -> Any:
        if self.policy:
            return bench.cell(Cell(self.policy, self.capacities))
        return bench.optimum(self.capacities) if self.capacities else bench.without_store()


def _start(setup: Setup) -> None:
    """Makes a worker process ready."""
    _BENCH.append(Bench(setup))


def _work(task: Task) -> Any:
    return task.run(_BENCH[0])


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
    done = dict(_carry_out(bench, _tasks(policies, sizes), jobs, progress))
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


def _carry_out(
    bench: Bench, tasks: list[Task], jobs: int, progress: Callable[[], None]
) -> Iterator[tuple[Task, Any]]:
    if jobs == 1:
        for task in tasks:
            yield task, task.run(bench)
            progress()
        return
    with _workers(bench.setup, min(jobs, len(tasks))) as pool:
        waiting: dict[Future[Any], Task] = {pool.submit(_work, task): task for task in tasks}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
            progress()


@contextmanager
def _workers(setup: Setup, count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that read the trace anew: a fork would copy threads of this one half."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start, initargs=(setup,))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
