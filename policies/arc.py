"""`arc`: two queues by recency, the target between them moved by what is missed."""

from __future__ import annotations

from kvstore.policies.base import Context, register
from kvstore.policies.index import Run
from kvstore.policies.two_queues import NEW, PROVEN, Seat, TwoQueues


@register("arc")
class Arc(TwoQueues):
    """ARC (Megiddo and Modha, FAST 2003), leaf-first over runs, sizes in blocks.

    A run that is used again, or comes back, sits in the second queue; what comes back to one queue
    makes it larger by as much.
    """

    def __init__(self, tier: int, context: Context):
        super().__init__(tier, context)
        self._target = 0.0

    def order(self, run: Run, seat: Seat) -> int:
        return run.touched

    def choose(self) -> int:
        new, proven = self.sizes
        return NEW if new > self._target or not proven else PROVEN

    def on_access(self, run: Run) -> None:
        super().on_access(run)
        self.seat(self.history(run), PROVEN)

    def on_return(self, queue: int, blocks: int) -> None:
        mine, other = self.memory.sizes[queue], self.memory.sizes[PROVEN - queue]
        step = blocks * max(1.0, other / mine if mine else 1.0)
        self._target += step if queue == NEW else -step
        self._target = min(max(self._target, 0.0), float(sum(self.sizes)))

    def offer(self, run: Run, seat: Seat) -> bool:
        if seat.queue == NEW and seat.count > seat.base:
            # It was used through what lay below it.
            self.seat(seat, PROVEN)
            return False
        return True
