"""`Ring`: registered memory by halves, for bytes that lie where the GPU cannot fetch them fast."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

from kvstore.cuda.device import Device, Event
from kvstore.cuda.driver import CudaError

RING_BYTES = 32 << 20


class Ring:
    """Halves that are taken by turns; one that copies still read or write is waited for."""

    def __init__(self, device: Device, size: int = RING_BYTES) -> None:
        self._device = device
        self.half_bytes = size // 2
        self._memory = np.frombuffer(mmap.mmap(-1, 2 * self.half_bytes), np.uint8)
        self._halves = (self._memory[: self.half_bytes], self._memory[self.half_bytes :])
        self._ends: list[Event | None] = [None, None]
        self._turn = 0
        device.register(self._memory.ctypes.data, self._memory.nbytes)

    def take(self) -> np.ndarray:
        """The next half, once nobody uses it; `until` says how long it is used."""
        self._turn = 1 - self._turn
        end = self._ends[self._turn]
        if end is not None:
            end.synchronize()
            self._ends[self._turn] = None
        return self._halves[self._turn]

    def until(self, end: Event) -> None:
        """The half that was taken last is in use until then."""
        self._ends[self._turn] = end

    def close(self) -> None:
        """No copy may run."""
        with suppress(CudaError):  # a GPU that failed has let go already
            self._device.unregister(self._memory.ctypes.data)


class StageTurns:
    """Two halves of a stage's slots [first, stop) by turns, with the end of their last use."""

    def __init__(self, first: int, stop: int) -> None:
        assert stop > first, "a stage has slots"
        middle = (first + stop + 1) // 2
        self._halves = [(first, middle), (middle, stop)] if stop - first > 1 else [(first, stop)]
        self._ends: list[Event | None] = [None] * len(self._halves)
        self._turn = 0

    def take(self, count: int) -> tuple[np.ndarray, Event | None]:
        """Slots (int32) of the next half, `count` at most; and what has to be over before."""
        self._turn = (self._turn + 1) % len(self._halves)
        first, stop = self._halves[self._turn]
        slots = np.arange(first, min(first + count, stop), dtype=np.int32)
        return slots, self._ends[self._turn]

    def until(self, end: Event) -> None:
        self._ends[self._turn] = end
