"""`s3fifo`: a small queue that most runs only pass through, and a main one for the others."""

from __future__ import annotations

from kvstore.policies.base import register
from kvstore.policies.index import Run
from kvstore.policies.two_queues import NEW, PROVEN, Seat, TwoQueues

SMALL_SHARE = 0.1
COUNT_MAX = 3


@register("s3fifo")
class S3Fifo(TwoQueues):
    """S3-FIFO (Yang et al., SOSP 2023), leaf-first over runs, sizes in blocks.

    From the small queue a run goes to the main one if it was used more than once, or if it comes
    back; in the main one each use, up to three, is one more round.
    """

    def choose(self) -> int:
        small, main = self.sizes
        return NEW if small > SMALL_SHARE * (small + main) or not main else PROVEN

    def offer(self, run: Run, seat: Seat) -> bool:
        # Only the uses since the run last had a seat count, and not more than three of them.
        uses = min(seat.count - seat.base, COUNT_MAX)
        if seat.queue == NEW and uses <= 1:
            return True
        if seat.queue == PROVEN and uses == 0:
            return True
        left = 0 if seat.queue == NEW else uses - 1
        seat.count = seat.base + left
        self.seat(seat, PROVEN)
        return False
