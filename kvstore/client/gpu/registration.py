"""`Registrar`: makes mapped pools and staging known to the GPU, a chunk at a time, behind loads.

A GPU copies at full speed only from memory that is registered, which takes a tenth of a second a
GiB and more. Until a chunk is, what lies in it goes through the bounce ring.

Registering pins pages. Where a pool has no memory it would be given some; and where it gave memory
back after that, and has other memory now, the GPU would still read the old. So no chunk reaches
into what is not backed, and one whose cells have changed is used no more, and registered anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from kvstore.core.block import BACKING_SHIFT
from kvstore.cuda.device import Device
from kvstore.cuda.driver import CudaError

CHUNK_BYTES = 256 << 20
WAIT_SECONDS = 5.0


class Registered:
    """A range of host memory and how much of it, from its beginning, is registered.

    `problem` says why it goes no further. `is_over` tells that its owner has ended. `backing` are
    the cells of a pool, None where all memory stays; `stale` is what has to be unregistered.
    """

    def __init__(
        self, memory: np.ndarray, read_only: bool, is_over: Callable[[], bool], chunk_bytes: int,
        backing: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.memory, self.read_only, self.is_over = memory, read_only, is_over
        self.chunk_bytes = chunk_bytes
        self.address, self.size = memory.ctypes.data, memory.nbytes
        self.covered = 0
        self.users = 0
        self.problem = ""
        self.starts: list[int] = []
        self.stale: list[int] = []
        self._backing = backing
        self._seen = np.empty(0, np.uint64)

    @property
    def end(self) -> int:
        """Address up to which it is registered."""
        return self.address + self.covered

    @property
    def bounds(self) -> np.ndarray:
        """Addresses between chunks: a copy across one would be of two registrations."""
        return np.array(self.starts[1:], np.uint64) + np.uint64(self.address)

    @property
    def can_go_on(self) -> bool:
        return not self.problem and self.covered < self.size and self.next_bytes() > 0

    @property
    def is_ready(self) -> bool:
        """Whether there is something to do that disturbs no copy."""
        return not (self.stale and self.users)

    def next_bytes(self) -> int:
        """How much may be registered next."""
        most = min(self.chunk_bytes, self.size - self.covered)
        odd = np.flatnonzero(self.cells(self.covered, self.covered + most) % np.uint64(2))
        if not len(odd):
            return most
        end = (self.covered >> BACKING_SHIFT) + int(odd[0]) << BACKING_SHIFT
        return max(0, end - self.covered)

    def cells(self, start: int, stop: int) -> np.ndarray:
        """A copy of the cells of a part."""
        if self._backing is None:
            return np.empty(0, np.uint64)
        return self._backing[start >> BACKING_SHIFT : -(-stop >> BACKING_SHIFT)].copy()

    def add(self, start: int, size: int, seen: np.ndarray) -> None:
        """A part is registered, and its cells were these before; `look` comes next."""
        if start != self.covered:  # what is before it changed meanwhile
            self.stale.append(start)
            return
        first = self.covered >> BACKING_SHIFT
        self._seen = np.concatenate((self._seen[:first], seen))
        self.starts.append(self.covered)
        self.covered += size

    def look(self) -> None:
        """What is not the pool's memory any more counts as registered no longer."""
        changed = np.flatnonzero(self.cells(0, self.covered) != self._seen)
        if self._backing is None or not len(changed):
            return
        at = int(changed[0]) << BACKING_SHIFT
        kept = max(i for i, start in enumerate(self.starts) if start <= at)
        self.stale += self.starts[kept:]
        self.covered = self.starts[kept]
        del self.starts[kept:]
        self._seen = self._seen[: -(-self.covered >> BACKING_SHIFT)]


class Registrar:
    """Registers what it is given on a thread of its own, in the order given.

    Memory whose owner is over is unregistered, and let go, once nobody uses it. Any thread may
    call it.
    """

    def __init__(self, device: Device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device, self._chunk_bytes = device, chunk_bytes
        self._known: dict[int, Registered] = {}
        self._waiting: deque[Registered] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvstore-register", daemon=True)
        self._thread.start()

    def use(
        self, memory: np.ndarray, read_only: bool, is_over: Callable[[], bool],
        backing: np.ndarray | None = None,
    ) -> Registered:  # fmt: skip
        """What is known of `memory`, which from now on is being registered; until `let_go`.

        `backing` says which parts of a pool have memory. Blocks that were leased before this call
        keep theirs as long as they are.
        """
        address = memory.ctypes.data
        with self._changed:
            entry = self._known.get(address)
            if entry is None or entry.size != memory.nbytes:
                entry = Registered(memory, read_only, is_over, self._chunk_bytes, backing)
                self._known[address] = entry
            entry.look()
            if (entry.stale or entry.can_go_on) and entry not in self._waiting:
                self._waiting.append(entry)
                self._changed.notify_all()
            entry.users += 1
            return entry

    def let_go(self, entry: Registered) -> None:
        """The copies that `use` was for are over."""
        with self._changed:
            entry.users -= 1
            if not entry.users:
                self._changed.notify_all()

    def wait(self, entry: Registered, seconds: float = WAIT_SECONDS) -> bool:
        """Whether all of it is registered, after waiting that long for what can be."""
        with self._changed:
            self._changed.wait_for(lambda: entry not in self._waiting or self._closed, seconds)
            return entry.covered == entry.size

    def close(self) -> None:
        """Unregisters everything; no copy may run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for entry in self._known.values():
            self._end(entry)
        self._known.clear()

    # ---- The thread ----

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._register_chunk(*work)
            self._drop_ended()

    def _next(self) -> tuple[Registered, list[int]] | None:
        """What to go on with, and what of it nobody uses any more and is to be unregistered."""
        with self._changed:
            while not self._closed:
                entry = next((entry for entry in self._waiting if entry.is_ready), None)
                if entry is not None:
                    stale, entry.stale = entry.stale, []
                    return entry, stale
                self._changed.wait()
            return None

    def _register_chunk(self, entry: Registered, stale: list[int]) -> None:
        self._unregister(entry, stale)
        with self._changed:
            start, size = entry.covered, 0 if entry.stale else entry.next_bytes()
            cells, problem = entry.cells(start, start + size), ""
        if entry.is_over():
            problem = "its session has ended"
        elif entry.read_only and not self._device.registers_read_only:
            problem = "this GPU cannot read memory that is mapped read-only"
        else:
            try:
                if size:
                    self._device.register(entry.address + start, size, entry.read_only)
            except CudaError as error:
                problem = str(error)
        with self._changed:
            entry.problem = problem
            if size and not problem:
                entry.add(start, size, cells)
                entry.look()
            if not entry.stale and not entry.can_go_on:
                self._waiting.remove(entry)
            self._changed.notify_all()

    def _drop_ended(self) -> None:
        """What a restarted daemon left: its pools are mapped anew, and these are of no use."""
        with self._changed:
            over = [e for e in self._known.values() if not e.users and e.is_over()]
            over = [e for e in over if e not in self._waiting]
            for entry in over:
                del self._known[entry.address]
        for entry in over:
            self._end(entry)

    def _end(self, entry: Registered) -> None:
        self._unregister(entry, entry.stale)
        self._unregister(entry, entry.starts)
        entry.covered = 0

    def _unregister(self, entry: Registered, starts: list[int]) -> None:
        while starts:
            try:
                self._device.unregister(entry.address + starts.pop())
            except CudaError as error:
                entry.problem = str(error)
