"""`Registrar`: makes mapped pools and staging known to the GPU, a chunk at a time, behind loads.

A GPU copies at full speed only from memory that is registered, which takes a tenth of a second a
GiB and more. Until a chunk is, what lies in it goes through the bounce ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from kvstore.cuda.device import Device
from kvstore.cuda.driver import CudaError

CHUNK_BYTES = 256 << 20
WAIT_SECONDS = 5.0


class Registered:
    """A range of host memory and how much of it, from its beginning, is registered.

    `problem` says why it goes no further. `is_over` tells that its owner has ended.
    """

    def __init__(
        self, memory: np.ndarray, read_only: bool, is_over: Callable[[], bool], chunk_bytes: int
    ) -> None:
        self.memory, self.read_only, self.is_over = memory, read_only, is_over
        self.chunk_bytes = chunk_bytes
        self.address, self.size = memory.ctypes.data, memory.nbytes
        self.covered = 0
        self.users = 0
        self.problem = ""

    @property
    def end(self) -> int:
        """Address up to which it is registered."""
        return self.address + self.covered

    @property
    def bounds(self) -> np.ndarray:
        """Addresses between chunks: a copy across one would be of two registrations."""
        return np.arange(
            self.address + self.chunk_bytes, self.end, self.chunk_bytes, dtype=np.uint64
        )


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

    def use(self, memory: np.ndarray, read_only: bool, is_over: Callable[[], bool]) -> Registered:
        """What is known of `memory`, which from now on is being registered; until `let_go`."""
        address = memory.ctypes.data
        with self._changed:
            entry = self._known.get(address)
            if entry is None or entry.size != memory.nbytes:
                entry = Registered(memory, read_only, is_over, self._chunk_bytes)
                self._known[address] = entry
                self._waiting.append(entry)
                self._changed.notify_all()
            entry.users += 1
            return entry

    def let_go(self, entry: Registered) -> None:
        """The copies that `use` was for are over."""
        with self._changed:
            entry.users -= 1

    def wait(self, entry: Registered, seconds: float = WAIT_SECONDS) -> bool:
        """Whether all of it is registered, after waiting that long."""
        with self._changed:
            self._changed.wait_for(
                lambda: entry.covered == entry.size or entry.problem or self._closed, seconds
            )
            return entry.covered == entry.size

    def close(self) -> None:
        """Unregisters everything; no copy may run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for entry in self._known.values():
            self._unregister(entry)
        self._known.clear()

    # ---- The thread ----

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            self._register_chunk(entry)
            self._drop_ended()

    def _next(self) -> Registered | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting[0]

    def _register_chunk(self, entry: Registered) -> None:
        size = min(self._chunk_bytes, entry.size - entry.covered)
        problem = ""
        if entry.is_over():
            problem = "its session has ended"
        elif entry.read_only and not self._device.registers_read_only:
            problem = "this GPU cannot read memory that is mapped read-only"
        else:
            try:
                self._device.register(entry.end, size, entry.read_only)
            except CudaError as error:
                problem = str(error)
        with self._changed:
            entry.problem = problem
            if not problem:
                entry.covered += size
            if problem or entry.covered == entry.size:
                self._waiting.popleft()
            self._changed.notify_all()

    def _drop_ended(self) -> None:
        """What a restarted daemon left: its pools are mapped anew, and these are of no use."""
        with self._changed:
            over = [e for e in self._known.values() if not e.users and e.is_over()]
            over = [e for e in over if e not in self._waiting]
            for entry in over:
                del self._known[entry.address]
        for entry in over:
            self._unregister(entry)

    def _unregister(self, entry: Registered) -> None:
        for start in range(entry.address, entry.end, self._chunk_bytes):
            try:
                self._device.unregister(start)
            except CudaError as error:
                entry.problem = str(error)
        entry.covered = 0
