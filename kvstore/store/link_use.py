"""`LinkUse`: how much of late transfers over a link had to wait for others."""

from __future__ import annotations

import math

from kvstore.policies.planner import waiting_in

RECENT_SECONDS = 10.0  # what was longer ago counts for less than 1/e


class LinkUse:
    """Decayed means over time: of the transfers that wait, and of the share that a link is busy.

    Of a link of the daemon's own it is known how many transfers are under way; all but one of them
    wait. One client that restores again and again keeps a link busy, and nobody waits for it. Of a
    link that engines use by themselves only their copies' seconds are known, so how many wait
    follows from how busy it is.
    """

    def __init__(self, now: float) -> None:
        self._at = self.changed = now
        self._under_way = 0
        self._waiting = self._busy = 0.0

    def change(self, now: float, count: int) -> None:
        """So many more transfers are under way from now on, or fewer."""
        self._advance(now)
        self._under_way += count
        self.changed = now

    def was_busy(self, now: float, seconds: float) -> None:
        """A copy that took so long is over now."""
        self._advance(now)
        if 0.0 < seconds < RECENT_SECONDS:
            self._busy = min(1.0, self._busy + seconds / RECENT_SECONDS)

    def waiting(self, now: float) -> float:
        """How many wait, on average of late."""
        if not self._busy and not self._waiting and self._under_way < 2:
            return 0.0
        self._advance(now)
        return self._waiting + waiting_in(self._busy)

    def _advance(self, now: float) -> None:
        kept = math.exp(min(0.0, self._at - now) / RECENT_SECONDS)
        self._at = max(self._at, now)
        self._waiting = kept * self._waiting + (1.0 - kept) * max(0, self._under_way - 1)
        self._busy *= kept
