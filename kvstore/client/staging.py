"""`Staging`: ranges of a session's staging segment, handed out and taken back.

The daemon reads a range from the moment a Commit names it until it answers. A range whose Commit
got no answer is never handed out again in its session: a daemon that thaws would copy the new
bytes under the old block's key.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from kvstore.client.gate import Gate
from kvstore.core.block import SLOT_ALIGN
from kvstore.core.clock import Clock


class StagingRange(NamedTuple):
    """Bytes [offset, offset + size) of the segment, one holder's until `give_back`."""

    offset: int
    size: int


class Staging:
    """The segment's free ranges, kept sorted; the lowest that fits is taken.

    Taking the lowest keeps a lone writer within a few batches, whose pages are mapped already.
    Lists are replaced whole, so that an interrupt finds them as they were or as they are to be.
    """

    def __init__(self, segment: memoryview) -> None:
        self.data = np.frombuffer(segment, np.uint8)
        self.size = len(self.data) // SLOT_ALIGN * SLOT_ALIGN
        self._free = [StagingRange(0, self.size)] if self.size else []
        self._lock = threading.Lock()
        self._waiting: list[Gate] = []

    @property
    def free_bytes(self) -> int:
        """What can be handed out now; never answered ranges are not in it."""
        return sum(free.size for free in self._free)

    def take(self, size: int) -> StagingRange | None:
        """A range of `size` bytes, a multiple of 4 KiB; None when no gap is that long."""
        assert size > 0, "an empty range was asked for"
        assert size % SLOT_ALIGN == 0, f"{size} bytes are not whole slots"
        with self._lock:
            for i, free in enumerate(self._free):
                if free.size >= size:
                    taken = StagingRange(free.offset, size)
                    left = StagingRange(free.offset + size, free.size - size)
                    kept = [left] if left.size else []
                    self._free = [*self._free[:i], *kept, *self._free[i + 1 :]]
                    return taken
        return None

    def wait(self, size: int, deadline: float, clock: Clock) -> StagingRange | None:
        """As `take`, but waits for others to give ranges back; None at the deadline."""
        gate = Gate()
        with self._lock:
            self._waiting.append(gate)
        try:
            while (found := self.take(size)) is None:
                if not gate.wait(deadline - clock.now()):
                    return self.take(size)
        finally:
            with self._lock:
                self._waiting.remove(gate)
        return found

    def give_back(self, taken: StagingRange) -> None:
        """The range is free again: nothing reads it any more."""
        with self._lock:
            offset, size = taken
            i = j = bisect_left(self._free, taken)
            if j < len(self._free) and offset + size == self._free[j].offset:
                size += self._free[j].size
                j += 1
            if i and sum(self._free[i - 1]) == offset:
                i -= 1
                offset, size = self._free[i].offset, self._free[i].size + size
            self._free = [*self._free[:i], StagingRange(offset, size), *self._free[j:]]
            for gate in self._waiting:
                gate.open()
