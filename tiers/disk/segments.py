"""Segment files: made before their first write, unlinked when their class gives them up.

The cap on the directory and the reserve on its file system are kept here, since nothing else
makes the directory grow by much. Serial numbers name files and are never given twice.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvstore.core.errors import TierError
from kvstore.tiers.chunks import Chunk
from kvstore.tiers.disk.directory import directory_bytes, index_bytes, remove_aside
from kvstore.tiers.disk.entries import SLOT_SEAL
from kvstore.tiers.disk.io import PAGE, FileIO, aligned
from kvstore.tiers.disk.layout import Superblock, geometry_of, pack_superblock

TRIAL = "trial"


def file_name(serial: int) -> str:
    return f"{serial}.seg"


class Segment:
    """One file, and what memory holds of each of its slots: 24 bytes, encrypted 52."""

    __slots__ = (
        "cell", "checksums", "chunk", "entered", "fd", "generations", "geometry", "linked",
        "seals", "sequence", "serial",
    )  # fmt: skip

    def __init__(self, serial: int, chunk: Chunk, fd: int = -1, with_seals: bool = False) -> None:
        self.serial, self.chunk, self.geometry = serial, chunk, geometry_of(chunk)
        self.fd = fd
        self.linked = fd >= 0
        """Whether the folder's entry of the file is on the medium."""
        self.entered = False
        """Whether the index knows the segment."""
        self.cell, self.sequence = 0, 0
        """Which cell was written last, and what it says."""
        self.generations = np.zeros(chunk.slot_count, np.uint64)
        self.checksums = np.zeros((chunk.slot_count, 16), np.uint8)
        self.seals = np.zeros(chunk.slot_count if with_seals else 0, SLOT_SEAL)
        """How payloads are encrypted, also of slots being written; none in a tier without keys."""


class Room:
    """Free space of the file system as last measured, and what will be taken of it or given back.

    The caller holds the lock of the books.
    """

    def __init__(self, reserve_bytes: int, free_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self.free_bytes = free_bytes
        self.planned_bytes = 0
        self.doomed_bytes = 0

    def may_grow(self, count: int) -> bool:
        left = self.free_bytes + self.doomed_bytes - self.planned_bytes - count
        return left >= self.reserve_bytes

    @property
    def is_short(self) -> bool:
        return not self.may_grow(0)


class SegmentFiles:
    """Makes and unlinks files; worker threads only. Raises TierError where room is short."""

    def __init__(
        self, path: Path, size_bytes: int, map_bytes: int, store_id: bytes, unit_bytes: int,
        direct: bool, io: FileIO,
    ) -> None:  # fmt: skip
        self.path, self._io = path, io
        self._size_bytes, self._map_bytes = size_bytes, map_bytes
        self._store_id, self._unit_bytes = store_id, unit_bytes
        self.direct = direct
        self.lock = threading.Lock()
        self.directory_fd = os.open(path / "segments", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.directory_fd)

    def set_size(self, size_bytes: int, map_bytes: int) -> None:
        """What the directory may take from now on, the index of it included."""
        self._size_bytes, self._map_bytes = size_bytes, map_bytes

    def system_free_bytes(self) -> int:
        """What the file system has free, for whatever comes."""
        return self._io.free_bytes(self.directory_fd)

    def free_bytes(self) -> int:
        """What of the file system is free for segments: not what the index may still grow by."""
        ahead = max(0, self._map_bytes - index_bytes(self.path))
        return max(0, self.system_free_bytes() - ahead)

    def open(self, name: str) -> int:
        """Descriptor of a file that is there."""
        fd = self._io.open(name, os.O_RDWR, self.directory_fd)
        self._set_direct(fd)
        return fd

    def make(self, segment: Segment, reserve_bytes: int) -> None:
        """Makes the file, whole and zeroed; `lock` is held."""
        length = segment.geometry.file_bytes
        self._check_room(length, reserve_bytes)
        name = file_name(segment.serial)
        fd = self._io.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.directory_fd)
        try:
            self._io.allocate(fd, length)
            self._set_direct(fd)
            page = aligned(PAGE)
            superblock = Superblock(
                self._store_id, segment.serial, self._unit_bytes, segment.geometry
            )
            page[:] = np.frombuffer(pack_superblock(superblock), np.uint8)
            self._io.write_all(fd, [page], 0)
        except BaseException:
            os.close(fd)
            self._io.unlink(name, self.directory_fd)
            raise
        segment.fd = fd

    def unlink(self, segment: Segment) -> None:
        with suppress(FileNotFoundError):
            self._io.unlink(file_name(segment.serial), self.directory_fd)
        os.close(segment.fd)
        segment.fd = -1

    def try_out(self) -> None:
        """Writes and syncs a page of a scratch file; raises OSError where that still fails."""
        fd = self._io.open(TRIAL, os.O_RDWR | os.O_CREAT, self.directory_fd)
        try:
            self._io.allocate(fd, PAGE)
            self._io.write_all(fd, [aligned(PAGE)], 0)
            self._io.fdatasync(fd)
        finally:
            os.close(fd)
            self._io.unlink(TRIAL, self.directory_fd)

    def sync_directory(self) -> None:
        self._io.fsync(self.directory_fd)

    def _set_direct(self, fd: int) -> None:
        if self.direct:
            try:
                self._io.make_direct(fd)
            except OSError:
                self.direct = False

    def _check_room(self, length: int, reserve_bytes: int) -> None:
        free = self.free_bytes()
        if free - length < reserve_bytes:
            raise TierError(
                f"{self.path} is on a file system with {free} bytes free for segments, and "
                f"{reserve_bytes} are to stay so; free some space or lower tiers.disk.reserve"
            )
        if self._over_cap(length):
            remove_aside(self.path)
            if self._over_cap(length):
                raise TierError(
                    f"{self.path} would outgrow its {self._size_bytes} bytes; remove what is not "
                    "the daemon's own from it or raise tiers.disk.size"
                )

    def _over_cap(self, length: int) -> bool:
        index, rest = directory_bytes(self.path)
        return rest + max(index, self._map_bytes) + length > self._size_bytes
