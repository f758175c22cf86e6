"""Carries bytes: a bounded fair queue and worker threads for each link.

The owner thread submits jobs; a worker runs each job's `work` (copies that release the GIL) and
the outcome comes back to the owner with the measured seconds. Nothing here decides anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.core.clock import perf_seconds
from kvstore.core.fair import FairQueue

COPY_LINK = "staging>host"
CHECK_LINK = "host>check"
WRITE_LINK = "host>disk"
READ_LINK = "disk>host"
DISK_CHECK_LINK = "disk>check"
RECORD_LINK = "record"  # small files that say which blocks are void; one thread keeps their order
ARENA_IN_LINK = "host>arena"  # into the daemon's memory on a GPU
ARENA_OUT_LINK = "arena>staging"  # to what an engine sees of it
PEER_LINK = "peer>staging"  # to what an engine on another GPU sees of it
LINKS = (COPY_LINK, CHECK_LINK)
DISK_LINKS = (WRITE_LINK, READ_LINK, DISK_CHECK_LINK)
ARENA_LINKS = (ARENA_IN_LINK, ARENA_OUT_LINK, PEER_LINK)
CLOSE_SECONDS = 10.0

Post = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """Outcome of a job: what `work` returned or raised, and how long it took."""

    value: Any
    error: BaseException | None
    seconds: float


@dataclass(slots=True)
class Job:
    """Bytes to move for a session: `work` runs on a worker, `done` on the owner.

    `device` is the GPU that the bytes go to or come from, where there may be several.
    """

    link: str
    tenant: Hashable
    session: Hashable
    byte_count: int
    work: Callable[[], Any]
    done: Callable[[Moved], None]
    is_measured: bool = True  # False: a part of what its owner measures as a whole
    device: str = ""


class Mover(Protocol):
    """Where the store hands its copies to."""

    def submit(self, job: Job) -> bool:
        """Queues a job; False when the link's queue is full, and then `done` is never called."""
        ...

    def queued_bytes(self, link: str) -> int: ...

    def bytes_ahead(self, link: str, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        """Bytes that would move before the last of so many that a session submits now."""
        ...

    def close(self) -> None:
        """Runs what is queued, then stops; later jobs are refused."""
        ...


def run(job: Job) -> Moved:
    """Runs a job on the calling thread."""
    start = perf_seconds()
    try:
        return Moved(job.work(), None, perf_seconds() - start)
    except Exception as caught:
        # Whatever a copy raises belongs to the job, never to the worker.
        return Moved(None, caught, perf_seconds() - start)


class InlineMover:
    """Moves on the calling thread and answers through `post`: for tests and in-process stores."""

    def __init__(self, post: Post) -> None:
        self._post = post

    def submit(self, job: Job) -> bool:
        moved = run(job)
        self._post(lambda: job.done(moved))
        return True

    def queued_bytes(self, link: str) -> int:
        return 0

    def bytes_ahead(self, link: str, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        return 0

    def close(self) -> None:
        pass


class ThreadMover:
    """Worker threads for each link; `post` hands a call to the owner thread."""

    def __init__(self, post: Post, threads: dict[str, int], queue_bytes: int) -> None:
        self._links = {
            name: _Link(name, count, queue_bytes, post) for name, count in threads.items()
        }

    def submit(self, job: Job) -> bool:
        return self._links[job.link].submit(job)

    def queued_bytes(self, link: str) -> int:
        return self._links[link].queued_bytes()

    def bytes_ahead(self, link: str, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        return self._links[link].bytes_ahead(tenant, session, byte_count)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Waits at most `seconds` for what is queued: a hanging disk keeps nobody from leaving."""
        for link in self._links.values():
            link.close()
        end = perf_seconds() + seconds
        for link in self._links.values():
            link.join(end)


class _Link:
    """One link's queue and its threads."""

    def __init__(self, name: str, threads: int, queue_bytes: int, post: Post) -> None:
        self._post = post
        self._queue: FairQueue[Job] = FairQueue(queue_bytes)
        self._running_bytes = 0
        self._closing = False
        self._wake = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore {name} {i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        with self._wake:
            if self._closing:
                return False
            if not self._queue.push(job.tenant, job.session, job.byte_count, job):
                return False
            self._wake.notify()
        return True

    def queued_bytes(self) -> int:
        with self._wake:
            return self._queue.queued_bytes + self._running_bytes

    def bytes_ahead(self, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        with self._wake:
            # What runs is half through, on average.
            return self._running_bytes // 2 + self._queue.bytes_ahead(tenant, session, byte_count)

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()

    def join(self, until: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, until - perf_seconds()))

    def _next(self) -> Job | None:
        with self._wake:
            while not len(self._queue):
                if self._closing:
                    return None
                self._wake.wait()
            job = self._queue.pop()
            self._running_bytes += job.byte_count
            return job

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        """One job, in a frame of its own: while the next is waited for nothing is kept of it, such
        as staging of a session that is over. False at the end."""
        job = self._next()
        if job is None:
            return False
        moved = run(job)
        with self._wake:
            self._running_bytes -= job.byte_count
        self._answer(job, moved)
        # An error leads to the frames it passed and to this one: were it named here it would keep
        # itself, and the job's memory, until a collection.
        del moved
        return True

    def _answer(self, job: Job, moved: Moved) -> None:
        # The owner's loop may be closed already while the last jobs end; nobody waits then.
        try:
            self._post(lambda: job.done(moved))
        except RuntimeError:
            if not self._closing:
                raise
