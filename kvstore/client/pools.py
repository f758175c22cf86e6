"""Shared memory as the client sees it: pools mapped read-only, staging read-write."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.block import SLOT_ALIGN, SLOT_SHIFT
from kvstore.core.errors import StoreUnavailable

READ = mmap.PROT_READ
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True, eq=False)
class MappedPool:
    """A pool's bytes and its generation map, one uint64 for each 4 KiB, 0 where nothing is."""

    pool_id: int
    data: np.ndarray
    generations: memoryview
    view: memoryview = field(repr=False)

    @classmethod
    def over(cls, pool_id: int, data: memoryview, generations: memoryview) -> MappedPool:
        """The pool in these buffers; what the client gets of them is read-only."""
        view = data.toreadonly().cast("B")
        return cls(
            pool_id,
            np.frombuffer(view, np.uint8),
            generations.toreadonly().cast("B").cast("Q"),
            view,
        )

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
        """Reads a byte of each page from `start` on, without the GIL; answers where it ended."""
        stop = min(start + size, len(self.data))
        np.add.reduce(self.data[start:stop:SLOT_ALIGN])
        return stop


def map_descriptor(descriptor: int, size: int, protection: int, what: str) -> memoryview:
    """Maps `size` bytes, after making sure that there are as many: access beyond is a SIGBUS."""
    held = os.fstat(descriptor).st_size
    if held < size or not size:
        raise StoreUnavailable(
            f"{what} holds {held} bytes where the daemon said {size}; restart the daemon"
        )
    return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=protection))
