"""Time as a parameter: the only module that reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a part takes its time from."""

    def now(self) -> float:
        """Seconds that only go forward; the zero is arbitrary. Leases and durations use this."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch; may step. For people and logs only."""
        ...


class SystemClock:
    """The machine's clocks."""

    # Not a method that calls it: a lookup reads the clock four times.
    now = staticmethod(time.monotonic)

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that stands still until a test or the simulator moves it."""

    def __init__(self, start: float = 1_000.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds` >= 0."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s; pass seconds >= 0")
        self._now += seconds


def perf_seconds() -> float:
    """Highest-resolution monotonic seconds, for measuring durations."""
    return time.perf_counter()


def cpu_seconds() -> float:
    """Processor time that this process has taken, all threads, for measuring on a busy machine."""
    return time.process_time()


def sleep(seconds: float) -> None:
    """Blocks the calling thread; worker threads and the command line only."""
    time.sleep(seconds)
