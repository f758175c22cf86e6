"""Which parts of a pool's data have memory, in cells of 4 MiB that clients read.

A pool's file is as long as the pool may ever be. Clients must not touch what has no memory: a
memory file system would give it some, or a fatal signal. And what a GPU has pinned is not the
pool's any more once that memory was given back. So each change shows, before memory goes and after
it came.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from os import posix_fallocate

import numpy as np

from kvstore.core.block import BACKING_SHIFT
from kvstore.tiers.host import pages
from kvstore.tiers.host.files import FileSizes

CELL_BYTES = 1 << BACKING_SHIFT
ONE = np.uint64(1)


class Backing:
    """The cells of one pool: `end` bytes of it are in use, all cells beyond have no memory.

    The owner thread's alone, but for `missing` and `back`, which a growth calls.
    """

    def __init__(self, data_fd: int, sizes: FileSizes, cells: np.ndarray) -> None:
        self._fd, self._sizes, self._cells = data_fd, sizes, cells
        self.end = sizes.data
        self.has_holes = False

    @property
    def memory_bytes(self) -> int:
        """What the data takes."""
        return os.fstat(self._fd).st_blocks * 512

    def use(self, size_bytes: int) -> None:
        """So much is in use from now on: whole cells, whose own state stays."""
        self.end = self._sizes.backed(size_bytes)
        beyond = self._cells[self._count(self.end) :]
        beyond[beyond & ONE == 0] += ONE
        self._look()

    def give_back_beyond(self) -> None:
        """Returns what memory there is beyond the end; raises OSError where that cannot be."""
        if self.end < self._sizes.data:
            pages.punch(self._fd, self.end, self._sizes.data - self.end)

    def missing(self, size_bytes: int) -> Iterator[int]:
        """Cells to back, lowest first, so that the pool has memory for so many bytes."""
        wanted = self._sizes.backed(size_bytes)
        for cell in range(self._count(max(self.end, wanted))):
            if self.end > wanted and self.memory_bytes >= size_bytes:
                return
            if self._cells[cell] & ONE:
                yield cell

    def missing_bytes(self, size_bytes: int) -> int:
        """Memory that is still to be had for that, about."""
        wanted = self._sizes.backed(size_bytes)
        odd = np.count_nonzero(self._cells[: self._count(max(self.end, wanted))] & ONE)
        return min(int(odd) * CELL_BYTES, max(0, wanted - self.memory_bytes))

    def back(self, cell: int) -> None:
        """Gives a cell memory, all of it; raises OSError where there is none."""
        start, stop = self.range_of(cell)
        posix_fallocate(self._fd, start, stop - start)

    def backed(self, cells: Sequence[int]) -> None:
        """All of these cells have memory now, and it shows; `use` takes it into account."""
        for cell in cells:
            if self._cells[cell] & ONE:
                self._cells[cell] += ONE

    def range_of(self, cell: int) -> tuple[int, int]:
        start = cell << BACKING_SHIFT
        return start, min(start + CELL_BYTES, self._sizes.data)

    def fill(self, start: int, length: int) -> None:
        """Gives a range memory, where its cells may lack some; raises OSError where there is none.

        Cells stay as they are: other parts of them may still have none.
        """
        cells = self._cells[start >> BACKING_SHIFT : self._count(start + length)]
        if (cells & ONE).any():
            posix_fallocate(self._fd, start, length)

    def give_back(self, start: int, length: int) -> None:
        """Returns the memory of a range; raises OSError where that cannot be."""
        cells = self._cells[start >> BACKING_SHIFT : self._count(start + length)]
        cells[cells & ONE == 0] += ONE
        self.has_holes = True
        pages.punch(self._fd, start, length)

    def runs(self) -> list[tuple[int, int]]:
        """(start, stop) of what has memory, all of it, lowest first."""
        whole = self._cells[: self._count(self.end)] & ONE == 0
        edges = np.flatnonzero(np.diff(whole, prepend=False, append=False)).tolist()
        return [
            (start << BACKING_SHIFT, min(stop << BACKING_SHIFT, self.end))
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]

    def close(self) -> None:
        self._cells = np.empty(0, np.uint64)

    def _count(self, end: int) -> int:
        return -(-end >> BACKING_SHIFT)

    def _look(self) -> None:
        self.has_holes = bool((self._cells[: self._count(self.end)] & ONE).any())
