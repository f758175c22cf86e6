"""`LeafScores`: leaf runs whose scores change with time, the lowest of them queued."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.policies.index import Run
from kvstore.policies.reuse_model import ReuseModel

QUEUED_SHARE = 0.05  # of the leaves are queued, and of the blocks go before all are scored anew
QUEUED_MIN = 8
# Leaves that a pass values anew after prices have changed; a turn of the owner is short.
REVALUED = 1024
SLACK = 1.0001
# Where nobody tells of requests, what they touch stands for the time between them.
TICK_SECONDS = 0.3


class LeafScores:
    """Leaf runs of one tenant in one tier by index x seconds lost, lowest first.

    All leaves are scored in one pass of arrays, the lowest of them queued, and their scores made
    good as they come up. A queue that is only filled when it is empty starves: fresh leaves of
    little worth keep it going, and what was worth much once is never looked at again. So the pass
    is also made after a share of the tenant's blocks went.
    """

    def __init__(
        self,
        tier: int,
        model: ReuseModel,
        loss: Callable[[Run], float],
        tick: Callable[[], int],
        version: Callable[[], int] = int,
    ) -> None:
        self._tier = tier
        self._model = model
        self._loss = loss
        self._tick = tick
        self._version = version
        self._valued_version = version()
        self._valued = 1 << 62  # leaves before this one have their new value
        self._slots: dict[Run, int] = {}
        self._runs: list[Run] = []
        self._rows = np.zeros(64, np.intp)
        self._times = np.zeros(64)
        self._losses = np.zeros(64)
        self._queue: list[tuple[float, Run]] = []
        self._threshold = -1.0
        self._gone_blocks = 0
        self.passes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def file(self, run: Run) -> None:
        """`run` is a leaf, or one that was used or cut."""
        slot = self._slots.get(run)
        if slot is None:
            slot = self._slots[run] = len(self._runs)
            self._runs.append(run)
            if slot == len(self._rows):
                self._grow()
        score = self._write(run, slot)
        if score < self._threshold:
            heapq.heappush(self._queue, (score, run))

    def _write(self, run: Run, slot: int) -> float:
        """Notes what the run's last block is scored by; answers the score."""
        row, seconds, loss = self._terms(run)
        self._rows[slot], self._times[slot], self._losses[slot] = row, seconds, loss
        return self._model.index(row, self._now() - seconds) * loss

    def _now(self) -> float:
        model = self._model
        return model.now if model.is_told else TICK_SECONDS * self._tick()

    def _grow(self) -> None:
        self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._times = np.concatenate([self._times, np.zeros_like(self._times)])
        self._losses = np.concatenate([self._losses, np.zeros_like(self._losses)])

    def take_out(self, run: Run) -> bool:
        """`run` is no leaf any more; answers whether it was one here."""
        slot = self._slots.pop(run, None)
        if slot is None:
            return False
        last = self._runs.pop()
        if last is not run:
            end = len(self._runs)
            self._runs[slot] = last
            self._slots[last] = slot
            for column in (self._rows, self._times, self._losses):
                column[slot] = column[end]
        return True

    def gone(self, blocks: int) -> None:
        """So many blocks were evicted."""
        self._gone_blocks += blocks

    def _terms(self, run: Run) -> tuple[int, float, float]:
        """Row, time of the last use and seconds lost of the run's last block."""
        use = run.policy
        if use is None:
            seconds = self._now() if self._model.is_told else TICK_SECONDS * run.touched
            return 0, seconds, self._loss(run)
        return use.row(run.first + run.ready - 1), use.seconds, self._loss(run) * use.weight

    def first(self, limit_blocks: Callable[[], int]) -> tuple[float, Run] | None:
        """The leaf with the lowest score; it stays queued. `limit_blocks` counts the tenant's."""
        queue = self._queue
        if self._gone_blocks > max(QUEUED_MIN, QUEUED_SHARE * limit_blocks()):
            self._pass()
        while True:
            if not queue and not self._pass():
                return None
            before, run = queue[0]
            slot = self._slots.get(run)
            if slot is None:
                heapq.heappop(queue)
                continue
            if not run.is_leaf(self._tier):
                heapq.heappop(queue)
                self.take_out(run)
                continue
            # Noted again: what the next pass reads has to agree with it, or they never meet.
            score = self._write(run, slot)
            if score > self._threshold * SLACK:
                heapq.heappop(queue)
            elif score > before:
                heapq.heapreplace(queue, (score, run))
            else:
                return before, run

    def _pass(self) -> int:
        """Scores all leaves and queues the lowest; answers how many."""
        self.passes += 1
        self._gone_blocks = 0
        self._revalue()
        count = len(self._runs)
        queue = self._queue
        queue.clear()
        if not count:
            return 0
        ages = self._now() - self._times[:count]
        scores = self._model.indices(self._rows[:count], ages) * self._losses[:count]
        wanted = min(max(int(QUEUED_SHARE * count), QUEUED_MIN), count)
        lowest = np.argpartition(scores, wanted - 1)[:wanted]
        queue.extend(zip(scores[lowest].tolist(), [self._runs[i] for i in lowest], strict=True))
        heapq.heapify(queue)
        self._threshold = float(scores[lowest].max())
        return wanted

    def _revalue(self) -> None:
        """After what things cost has changed: gives some more leaves their new value."""
        if self._valued_version != self._version():
            self._valued_version, self._valued = self._version(), 0
        for slot in range(self._valued, min(self._valued + REVALUED, len(self._runs))):
            self._write(self._runs[slot], slot)
        self._valued += REVALUED

    def runs(self) -> Iterator[Run]:
        """All that are filed."""
        return iter(self._runs)
