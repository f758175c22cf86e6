"""Two queues and a memory of what left them: what `s3fifo` and `arc` have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from kvstore.core.keys import block_key
from kvstore.policies.base import Context, LeafHeap
from kvstore.policies.histories import History, HistoryPolicy
from kvstore.policies.index import Run

NEW, PROVEN = 0, 1
MEMORY_SHARE = 1.0  # blocks that are remembered, of those that are here


class Seat(History):
    """Which queue a run is in, its number there, and how many blocks it is counted with."""

    __slots__ = ("blocks", "number", "queue")

    def __init__(self) -> None:
        super().__init__()
        self.queue = NEW
        self.number = self.blocks = 0

    def divided(self) -> Seat:
        other = Seat()
        other.queue, other.number = self.queue, self.number
        other.count = other.base = self.count
        return other


class Memory:
    """Stretches of blocks that left, by the key of their first one; the oldest go first."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, tuple[int, int]] = {}
        self.sizes = [0, 0]

    def add(self, key: bytes, queue: int, blocks: int) -> None:
        self.take(key)
        self._blocks[key] = (queue, blocks)
        self.sizes[queue] += blocks

    def take(self, key: bytes) -> tuple[int, int] | None:
        """(queue, blocks) of a stretch, which is forgotten; None when it is not known."""
        found = self._blocks.pop(key, None)
        if found is not None:
            self.sizes[found[0]] -= found[1]
        return found

    def shrink(self, blocks: int) -> None:
        """Forgets the oldest beyond so many blocks."""
        while sum(self.sizes) > blocks and self._blocks:
            self.take(next(iter(self._blocks)))


class TwoQueues(HistoryPolicy[Seat]):
    """Base of policies with one queue for runs that are new and one for those that proved useful.

    The chains' ends are cut, so the first block of what left is the one that is missed first: its
    key stands for the stretch.
    """

    kind = Seat

    def __init__(self, tier: int, context: Context):
        super().__init__(tier, context)
        self.queues = [LeafHeap(tier, partial(self._place, queue)) for queue in (NEW, PROVEN)]
        self.sizes = [0, 0]
        self.memory = Memory()
        self._arrivals = 0

    def order(self, run: Run, seat: Seat) -> int:
        """What ranks the runs of one queue."""
        return seat.number

    def _place(self, queue: int, run: Run) -> tuple[bool, int]:
        """Where a run stands in a queue; one that sits in the other comes last."""
        seat = self.history(run)
        return (seat.queue != queue, self.order(run, seat))

    def choose(self) -> int:
        """The queue that the next victim comes from."""
        raise NotImplementedError

    def on_return(self, queue: int, blocks: int) -> None:
        """A stretch that had left `queue` is back, in PROVEN; still in `memory.sizes`."""

    def offer(self, run: Run, seat: Seat) -> bool:
        """Whether the first of its queue goes; False after it was given another seat."""
        return True

    def on_new(self, run: Run, history: Seat) -> None:
        key = _key(run)
        found = self.memory._blocks.get(key)
        if found is not None:
            self.on_return(*found)
            self.memory.take(key)
            history.queue = PROVEN
        self.seat(history, history.queue)
        self._count(run, history)

    def seat(self, seat: Seat, queue: int) -> None:
        """Last in `queue`."""
        self._arrivals += 1
        self.sizes[seat.queue] -= seat.blocks
        self.sizes[queue] += seat.blocks
        seat.queue, seat.number = queue, self._arrivals

    def _count(self, run: Run, seat: Seat) -> None:
        """Counts the run with the blocks that it has now."""
        blocks = run.resident_in(self.tier) if run.alive else 0
        self.sizes[seat.queue] += blocks - seat.blocks
        seat.blocks = blocks

    def on_insert(self, run: Run, start: int, stop: int) -> None:
        self._count(run, self.history(run))

    def on_split(self, run: Run, tail: Run) -> None:
        super().on_split(run, tail)
        for part in (run, tail):
            if part in self._histories:
                self._count(part, self._histories[part])
        for queue in self.queues:
            queue.unpark(run)

    def on_evicted(self, run: Run) -> None:
        super().on_evicted(run)
        if run in self._histories:
            self._count(run, self._histories[run])
        self.memory.shrink(int(MEMORY_SHARE * sum(self.sizes)))

    def _leave(self, run: Run, heir: Run | None) -> None:
        seat = self._histories.get(run)
        if seat is not None:
            if heir is run.parent:
                self.memory.add(_key(run), seat.queue, seat.blocks)
            self.sizes[seat.queue] -= seat.blocks
            seat.blocks = 0
        for queue in self.queues:
            queue.forget(run)
        super()._leave(run, heir)
        if heir is not None and heir.alive and heir in self._histories:
            self._count(heir, self._histories[heir])

    def on_leaf(self, run: Run) -> None:
        self.history(run)
        for queue in self.queues:
            queue.push(run)

    def on_adopt(self, runs: Sequence[Run]) -> None:
        for run in runs:
            self.on_insert(run, 0, run.ready)
            if run.is_leaf(self.tier):
                self.on_leaf(run)

    def park(self, run: Run) -> None:
        for queue in self.queues:
            queue.park(run)

    def unpark(self, run: Run) -> None:
        for queue in self.queues:
            queue.unpark(run)

    def victims(self, tenants: Collection[str]) -> Iterator[Run]:
        # A queue whose runs are held, or no leaves, leaves it to the other.
        while (run := self.queues[self.choose()].first(tenants)) is not None:
            if self.offer(run, self.history(run)):
                yield run


def _key(run: Run) -> bytes:
    """Names a run by its first block and where that lies; good enough to remember it by."""
    return block_key(run.root.key + run.first.to_bytes(8, "little"), run.symbol(0))
