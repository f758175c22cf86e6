"""The daemon's watch over its wall clock."""

from __future__ import annotations

import logging

import pytest

from kvstore.core.clock import ManualClock
from kvstore.daemon.clock_watch import ClockWatch
from kvstore.metrics import Metrics


class TwoClocks(ManualClock):
    """A wall clock that can be moved apart from the other."""

    shift = 1e9

    def wall(self) -> float:
        return self.now() + self.shift


def test_jumps_of_the_clock_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A jump, forward or back, counts once and is logged; a clock that is slewed never does."""
    caplog.set_level(logging.WARNING)
    clock, metrics = TwoClocks(), Metrics()
    watch = ClockWatch(clock, metrics)
    jumps = metrics.number("kvstore_clock_jumps_total")
    for _ in range(10_000):
        clock.advance(0.5)
        clock.shift += 0.5 * 500e-6
        watch.look()
    assert jumps.value == 0
    for shift, count in ((3600.0, 1), (0.0, 1), (-3600.0, 2), (0.0, 2)):
        clock.shift += shift
        watch.look()
        assert jumps.value == count
    assert [record.getMessage()[:36] for record in caplog.records] == [
        "the wall clock jumped by +3600.0 s; ", "the wall clock jumped by -3600.0 s; ",
    ]  # fmt: skip
