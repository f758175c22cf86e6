"""`ClockWatch`: notices when the wall clock jumps against the one that only goes forward."""

from __future__ import annotations

import logging

from kvstore.core.clock import Clock
from kvstore.metrics import Metrics

# A clock that is slewed (500 us a second at most) never moves so far between two looks.
JUMP_SECONDS = 0.5

_log = logging.getLogger("kvstore.daemon")


class ClockWatch:
    """Counts and logs jumps between two looks.

    Leases and measurements use the monotonic clock and are not touched. Times in logs and events
    are, and a daemon that starts before its predecessor did may give a lease's number twice.
    """

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._jumps = metrics.number("kvstore_clock_jumps_total")
        self._apart = clock.wall() - clock.now()

    def look(self) -> None:
        apart = self._clock.wall() - self._clock.now()
        jump, self._apart = apart - self._apart, apart
        if abs(jump) >= JUMP_SECONDS:
            self._jumps.add()
            _log.warning(
                "the wall clock jumped by %+.1f s; times in logs and events jump with it", jump
            )
