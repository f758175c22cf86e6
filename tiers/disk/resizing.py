"""Resize: a disk tier gets another size while it serves; segments, index and limits follow.

larger     limits and slots at once, the index's share with the next `finish`
smaller    no slots above it are handed out, segments are emptied and unlinked, then the index is
           written anew where its file is too large, then the limits are the new ones

Nothing on the medium says which size there was: a start takes the one it is told, and what an
interrupted resize has left is fitted in as after any change of `tiers.disk.size`.
"""

from __future__ import annotations

from pathlib import Path

from kvstore.core.errors import TierError
from kvstore.core.sizes import format_bytes
from kvstore.tiers.disk import directory
from kvstore.tiers.disk.books import DiskBooks
from kvstore.tiers.disk.group import Committer
from kvstore.tiers.disk.opening import UNITS_MAX, capacity_bytes, map_bytes
from kvstore.tiers.disk.segments import SegmentFiles


class Resizing:
    """The size of one tier, and how it becomes another."""

    def __init__(
        self, path: Path, unit_shift: int, size_bytes: int, books: DiskBooks,
        files: SegmentFiles, committer: Committer,
    ) -> None:  # fmt: skip
        self._path, self._unit_shift, self.size_bytes = path, unit_shift, size_bytes
        self._books, self._files, self._committer = books, files, committer

    def begin(self, size_bytes: int, reserve_bytes: int) -> int:
        """The owner thread; answers with the bytes of slots there are to be.

        Raises TierError in one sentence; then nothing has changed.
        """
        capacity = self._capacity(size_bytes)
        if size_bytes > self.size_bytes:
            self._check_room(size_bytes, reserve_bytes)
            self._files.set_size(size_bytes, map_bytes(size_bytes))
        least_order = max(0, directory.unit_shift(capacity) - self._unit_shift)
        self.size_bytes = size_bytes
        return self._books.set_size(capacity, least_order)

    def finish(self) -> int:
        """A worker, when no memory of segments is owed any more: the rest of what there is to do.

        Answers with the bytes of blocks that are still too many for the index; 0: it is over.
        """
        size = self.size_bytes
        self._committer.commit([])
        with self._files.lock:
            self._books.unlink_doomed(self._files)
        excess = self._committer.resize_index(map_bytes(size))
        if excess:
            return int(excess * self._books.usage().used_bytes) + 1
        with self._files.lock:
            if size == self.size_bytes:
                self._files.set_size(size, map_bytes(size))
        return 0

    def _capacity(self, size_bytes: int) -> int:
        unit = 1 << self._unit_shift
        capacity = capacity_bytes(self._path, size_bytes)
        if capacity < unit:
            raise TierError(
                f"{format_bytes(size_bytes)} have no room for one segment of {format_bytes(unit)} "
                f"of {self._path}; pass {format_bytes(2 * unit)} or more, or empty the directory"
            )
        if capacity > UNITS_MAX * unit:
            raise TierError(
                f"{self._path} was made for less and takes up to {format_bytes(UNITS_MAX * unit)}; "
                "pass no more, or begin with an empty directory"
            )
        return capacity

    def _check_room(self, size_bytes: int, reserve_bytes: int) -> None:
        free, held = self._files.system_free_bytes(), sum(directory.directory_bytes(self._path))
        if free - max(0, size_bytes - held) < reserve_bytes:
            most = max(0, held + free - reserve_bytes)
            raise TierError(
                f"the file system of {self._path} has {format_bytes(free)} free, of which "
                f"tiers.disk.reserve keeps {format_bytes(reserve_bytes)}; free some space or pass "
                f"at most {format_bytes(most)}"
            )
