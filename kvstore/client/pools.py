"""Shared memory as the client sees it: pools mapped read-only, staging read-write."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.block import BACKING_SHIFT, SLOT_ALIGN, SLOT_SHIFT, backing_cells
from kvstore.core.errors import StoreUnavailable

READ = mmap.PROT_READ
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MADV_POPULATE_READ = 22

# ctypes releases the GIL around each call.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, eq=False)
class MappedPool:
    """A pool's bytes and its generation map, one uint64 for each 4 KiB, 0 where nothing is.

    `backing` has a uint64 for each 4 MiB: odd where some of it may have no memory, another one with
    each change. Nothing there may be touched but what a slot is at.
    """

    pool_id: int
    data: np.ndarray
    generations: memoryview
    view: memoryview = field(repr=False)
    backing: np.ndarray = field(repr=False)

    @classmethod
    def over(cls, pool_id: int, data: memoryview, generations: memoryview) -> MappedPool:
        """The pool in these buffers; what the client gets of them is read-only."""
        view, raw = data.toreadonly().cast("B"), generations.toreadonly().cast("B")
        at, count = backing_cells(len(view))
        # A daemon that does not tell keeps all of its pool.
        told = len(raw) >= at + 8 * count
        backing = np.frombuffer(raw, np.uint64, count, at) if told else np.zeros(count, np.uint64)
        return cls(pool_id, np.frombuffer(view, np.uint8), raw[:at].cast("Q"), view, backing)

    @classmethod
    def map(
        cls, pool_id: int, data_fd: int, data_bytes: int, map_fd: int, map_bytes: int
    ) -> MappedPool:
        """Maps two descriptors, which stay the caller's."""
        if map_bytes < (data_bytes >> SLOT_SHIFT) * 8:
            raise StoreUnavailable(
                f"pool {pool_id} has a generation map of {map_bytes} bytes for {data_bytes} bytes "
                "of data; run the daemon's version of the client"
            )
        data = map_descriptor(data_fd, data_bytes, READ, f"pool {pool_id}")
        generations = map_descriptor(map_fd, map_bytes, READ, f"the map of pool {pool_id}")
        return cls.over(pool_id, data, generations)

    def touch(self, start: int, size: int) -> int:
        """Has each page from `start` on that has memory mapped here; answers where it ended."""
        stop, cell_bytes = min(start + size, len(self.data)), 1 << BACKING_SHIFT
        while start < stop:
            end = min((start // cell_bytes + 1) * cell_bytes, stop)
            if self.backing[start >> BACKING_SHIFT] % 2 == 0:
                self._populate(start, end)
            start = end
        return stop

    def _populate(self, start: int, end: int) -> None:
        # By the kernel: if the memory was given back meanwhile, to read it could be fatal.
        failed = _libc.madvise(self.data.ctypes.data + start, end - start, MADV_POPULATE_READ)
        if failed and ctypes.get_errno() == errno.EINVAL:  # before Linux 5.14
            np.add.reduce(self.data[start:end:SLOT_ALIGN])

    @property
    def whole_cells(self) -> int:
        """How many of them have memory, all of it."""
        return len(self.backing) - int(np.count_nonzero(self.backing & np.uint64(1)))


def map_descriptor(descriptor: int, size: int, protection: int, what: str) -> memoryview:
    """Maps `size` bytes, after making sure that there are as many: access beyond is a SIGBUS."""
    held = os.fstat(descriptor).st_size
    if held < size or not size:
        raise StoreUnavailable(
            f"{what} holds {held} bytes where the daemon said {size}; restart the daemon"
        )
    return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=protection))
