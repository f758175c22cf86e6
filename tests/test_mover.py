"""Movers: jobs run off the owner's thread, fairly, bounded, and every outcome comes back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.mover import InlineMover, Job, Moved, ThreadMover

WAIT = 10.0


class Owner:
    """An owner thread's queue of calls."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()
        self.came = threading.Semaphore(0)

    def post(self, call: Callable[[], None]) -> None:
        self.calls.append(call)
        self.came.release()

    def run(self, count: int) -> None:
        for _ in range(count):
            assert self.came.acquire(timeout=WAIT), "no outcome came"
            self.calls.popleft()()


class Jobs:
    """Makes jobs and keeps what came of them, in order."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[Any, Moved]] = []

    def make(
        self, name: Any, size: int = 1, tenant: str = "t", session: int = 0,
        work: Callable[[], Any] = lambda: None,
    ) -> Job:  # fmt: skip
        return Job(
            "l", tenant, session, size, work, lambda moved: self.outcomes.append((name, moved))
        )

    def names(self) -> list[Any]:
        return [name for name, _ in self.outcomes]


def test_outcomes_come_back_to_the_owner() -> None:
    """`done` runs where `post` brings it, with what the work returned or raised, and seconds."""
    owner, jobs = Owner(), Jobs()
    mover = ThreadMover(owner.post, {"l": 2}, 100)
    here = threading.get_ident()
    assert mover.submit(jobs.make("good", work=threading.get_ident))
    assert mover.submit(jobs.make("bad", work=lambda: 1 // 0))
    owner.run(2)
    found = dict(jobs.outcomes)
    assert found["good"].value != here
    assert found["good"].error is None
    assert isinstance(found["bad"].error, ZeroDivisionError)
    assert found["bad"].value is None
    assert all(moved.seconds >= 0 for moved in found.values())
    mover.close()


def blocked(owner: Owner, jobs: Jobs, queue_bytes: int) -> tuple[ThreadMover, threading.Event]:
    """A mover whose only worker is busy until the event is set."""
    mover = ThreadMover(owner.post, {"l": 1}, queue_bytes)
    started, go = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        assert go.wait(WAIT)

    assert mover.submit(jobs.make("first", work=hold))
    assert started.wait(WAIT)
    return mover, go


def test_queues_are_bounded() -> None:
    """A full queue refuses at once; a job larger than the queue still fits into an empty one."""
    owner, jobs = Owner(), Jobs()
    mover, go = blocked(owner, jobs, 100)
    assert mover.submit(jobs.make("a", 500))
    assert not mover.submit(jobs.make("b", 1))
    assert mover.queued_bytes("l") == 501
    go.set()
    owner.run(2)
    assert mover.submit(jobs.make("c", 60))
    mover.close()
    owner.run(1)
    assert jobs.names() == ["first", "a", "c"]
    assert mover.queued_bytes("l") == 0


def test_tenants_and_sessions_share_fairly() -> None:
    """I17: one tenant's or session's long queue does not hold up another's next job."""
    owner, jobs = Owner(), Jobs()
    mover, go = blocked(owner, jobs, 1 << 40)
    size = 4 << 20
    for n in range(20):
        mover.submit(jobs.make(("flood", n), size, "a", 1))
    mover.submit(jobs.make("same tenant", size, "a", 2))
    mover.submit(jobs.make("other tenant", size, "b", 3))
    go.set()
    owner.run(23)
    names = jobs.names()
    assert names.index("other tenant") <= 3
    assert names.index("same tenant") <= 5
    flood = [name for name in names if isinstance(name, tuple)]
    assert flood == sorted(flood)
    mover.close()


def test_it_is_known_what_goes_first() -> None:
    """Of others' queues only what fair turns let go first is ahead, of one's own all, and half of
    what runs.
    """
    owner, jobs = Owner(), Jobs()
    mover, go = blocked(owner, jobs, 1 << 40)
    turn = 4 << 20
    for n in range(20):
        mover.submit(jobs.make(("flood", n), turn, "a", 1))
    mover.submit(jobs.make("own", turn, "a", 2))
    mover.submit(jobs.make("small", 1000, "b", 3))
    # Tenant b's 1,000 bytes; a turn of the flood for each begun turn of its own, after its own.
    assert mover.bytes_ahead("l", "a", 2, 1000) == turn + 2 * turn + 1000
    assert mover.bytes_ahead("l", "a", 4, 3 * turn) == 3 * turn + turn + 1000
    assert mover.bytes_ahead("l", "a", 1, 1000) == 20 * turn + turn + 1000
    assert mover.bytes_ahead("l", "b", 3, turn) == 1000 + 2 * turn
    go.set()
    mover.close()
    assert mover.bytes_ahead("l", "a", 2, 1000) == 0


def test_closing_runs_what_is_queued() -> None:
    """Close ends after the last queued job; later ones are refused."""
    owner, jobs = Owner(), Jobs()
    mover, go = blocked(owner, jobs, 1 << 20)
    for n in range(5):
        mover.submit(jobs.make(n))
    go.set()
    mover.close()
    assert not mover.submit(jobs.make("late"))
    owner.run(6)
    assert jobs.names() == ["first", 0, 1, 2, 3, 4]


def test_an_owner_that_left_is_no_error() -> None:
    """Jobs that end after the owner's loop closed end quietly."""
    ended = threading.Event()

    def post(call: Callable[[], None]) -> None:
        ended.set()
        raise RuntimeError("the loop is closed")

    jobs = Jobs()
    mover = ThreadMover(post, {"l": 1}, 10)
    hold = threading.Event()
    mover.submit(jobs.make("late", work=lambda: hold.wait(WAIT)))
    closing = threading.Thread(target=mover.close)
    closing.start()
    while mover.submit(jobs.make("until it closes")):
        hold.wait(0.01)
    hold.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert ended.is_set()


def test_inline_moves_at_once_and_answers_later() -> None:
    """The mover of in-process stores works on the caller's thread and answers through `post`."""
    owner, jobs = Owner(), Jobs()
    mover = InlineMover(owner.post)
    done: list[int] = []
    assert mover.submit(jobs.make("a", work=lambda: done.append(1)))
    assert (done, jobs.outcomes, mover.queued_bytes("l")) == ([1], [], 0)
    owner.run(1)
    assert jobs.names() == ["a"]
    mover.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_every_job_has_one_outcome(threads: int) -> None:
    """Whatever the number of workers, each accepted job is done exactly once."""
    owner, jobs = Owner(), Jobs()
    mover = ThreadMover(owner.post, {"l": threads}, 1 << 30)
    for n in range(500):
        assert mover.submit(jobs.make(n, n % 7, f"t{n % 3}", n % 5))
    mover.close()
    owner.run(500)
    assert sorted(jobs.names()) == list(range(500))


class Memory:
    """What a job reads, such as a session's staging."""

    def read(self) -> None:
        pass

    def fail(self) -> None:
        raise OSError("no")


@pytest.mark.parametrize("how", ["read", "fail"])
def test_nothing_is_kept_of_a_job_that_is_over(how: str) -> None:
    """I15: memory that a job read can go as soon as the owner has heard of its end, also if it
    failed: an idle worker does not keep it, and no collection has to find it."""
    owner, memory, failed = Owner(), Memory(), []
    mover = ThreadMover(owner.post, {"l": 1}, 100)
    gone = weakref.ref(memory)
    gc.disable()
    try:
        job = Job("l", "t", 0, 1, getattr(memory, how), lambda m: failed.append(m.error is None))
        assert mover.submit(job)
        owner.run(1)
        del job, memory
        end = time.monotonic() + WAIT
        while gone() is not None and time.monotonic() < end:
            time.sleep(0.001)  # the worker is on its way back
        assert gone() is None
    finally:
        gc.enable()
        mover.close()
    assert failed == [how == "read"]
