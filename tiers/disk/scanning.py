"""Looks at segment files at a start: what each says it is, and the headers of its slots."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.errors import TierError
from kvstore.tiers.disk.directory import SEGMENTS, Format, check_version
from kvstore.tiers.disk.io import OPEN_FLAGS, PAGE, FileIO, aligned
from kvstore.tiers.disk.layout import (
    CELLS,
    HEADER_BASE,
    Geometry,
    SealedHeader,
    Superblock,
    open_header,
    pack_superblock,
    parse_cell,
    parse_header,
    parse_sealed,
    parse_superblock,
    superblock_version,
)
from kvstore.tiers.disk.segments import SegmentFiles
from kvstore.tiers.record import SlotRecord

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

SCAN_BYTES = 4 << 20
SERIALS = 1 << 32
_FILE_NAME = re.compile(r"(0|[1-9]\d{0,9})\.(seg|moved)")


class FoundSegment:
    """A file of an earlier life. Without `geometry` nobody can tell what it holds."""

    def __init__(self, name: str, serial: int, fd: int, length: int) -> None:
        self.name, self.serial, self.fd, self.length = name, serial, fd, length
        self.geometry: Geometry | None = None
        self.is_mended = False
        """Whether its superblock is to be written anew."""
        self.cell = self.sequence = 0
        self.entered = False
        self.torn_header_count = 0
        self.unreadable: set[int] = set()
        """Slots whose headers the medium did not give."""
        self.missing: Counter[int] = Counter()
        """Keys of headers that did not open, as `Loaded.missing`."""
        self.locked_generation = 0
        """The highest generation of those."""

    def lock(self, key_id: int, generation: int) -> None:
        """Counts a header that does not open."""
        self.missing[key_id] += 1
        self.locked_generation = max(self.locked_generation, generation)

    @property
    def chunk_bytes(self) -> int:
        return self.geometry.chunk_bytes if self.geometry is not None else 0

    @property
    def payload_bytes(self) -> int:
        return self.geometry.payload_bytes if self.geometry is not None else 0

    @property
    def slots_held(self) -> int:
        """Slots whose payload the file reaches to the end of."""
        if self.geometry is None:
            return 0
        left = self.length - self.geometry.payload_base
        return min(self.geometry.slot_count, max(0, left // self.geometry.payload_bytes))


class Scanner:
    """Reads pages of segments; where the medium fails, it is as if nothing was there."""

    def __init__(
        self, files: SegmentFiles, known: Format, io: FileIO, vault: Vault | None = None
    ) -> None:
        self._files, self._format, self._io, self._vault = files, known, io, vault
        self._page = aligned(PAGE)
        self.next_serial = 1
        """Above the number of every file that `survey` saw."""

    def survey(self) -> list[FoundSegment]:
        """Every file that is named like a segment; the serial is what its superblock says."""
        names = sorted(os.listdir(self._files.directory_fd))
        matches = [match for match in map(_FILE_NAME.fullmatch, names) if match is not None]
        matches = [match for match in matches if int(match[1]) < SERIALS]
        self.next_serial = max((int(match[1]) + 1 for match in matches), default=1)
        looks = [self._look(match[0], int(match[1])) for match in matches]
        return [segment for segment in looks if segment is not None]

    def _look(self, name: str, serial: int) -> FoundSegment | None:
        try:
            fd = self._files.open(name)
        except OSError:
            return None  # nobody can read it: as if it was not there
        segment = FoundSegment(name, serial, fd, os.fstat(fd).st_size)
        raw = self._read_page(fd, 0)
        try:
            refuse_unknown(self._files.path, raw)
        except TierError:
            os.close(fd)
            raise
        superblock = parse_superblock(raw)
        if superblock is not None and self._is_ours(superblock):
            segment.serial, segment.geometry = superblock.serial, superblock.geometry
        self._read_cells(segment)
        return segment

    def _is_ours(self, superblock: Superblock) -> bool:
        return superblock.store_id == self._format.store_id and superblock.geometry.is_sound(
            self._format.unit_shift
        )

    def _read_cells(self, segment: FoundSegment) -> None:
        for number, page in enumerate(CELLS):
            raw = self._read_page(segment.fd, page)
            sequence = parse_cell(raw, self._format.store_id, segment.serial)
            if sequence > segment.sequence:
                segment.cell, segment.sequence = number, sequence

    def headers(self, segment: FoundSegment) -> Iterator[tuple[int, SlotRecord]]:
        """(slot, record) of each sound header whose payload the file reaches to."""
        geometry, store_id = segment.geometry, self._format.store_id
        assert geometry is not None, "the segment is not understood"
        size = geometry.header_bytes
        for first, raw in self._header_pieces(segment, geometry):
            marks = np.frombuffer(raw, np.uint8).reshape(-1, size)[:, :4].any(axis=1)
            for row in np.flatnonzero(marks).tolist():
                page = raw[row * size : (row + 1) * size]
                sealed = parse_sealed(page, store_id, segment.serial, first + row)
                if sealed is not None:
                    record = self._open(segment, sealed, first + row)
                    if record is None:
                        continue
                else:
                    record = parse_header(page, store_id, segment.serial, first + row)
                    if record is not None and self._vault is not None:
                        segment.lock(0, record.generation)  # in clear: anybody may have written it
                        continue
                if record is None or first + row >= segment.slots_held:
                    segment.torn_header_count += 1
                elif record.header.length <= geometry.payload_bytes:
                    yield first + row, record

    def _open(self, segment: FoundSegment, sealed: SealedHeader, slot: int) -> SlotRecord | None:
        store_id = self._format.store_id
        record = open_header(sealed, store_id, segment.serial, slot, self._vault)
        if record is None:
            is_there = self._vault is not None and self._vault.has(sealed.key_id)
            segment.lock(0 if is_there else sealed.key_id, sealed.generation)
        return record

    def _header_pieces(
        self, segment: FoundSegment, geometry: Geometry
    ) -> Iterator[tuple[int, bytes]]:
        size = geometry.header_bytes
        step = max(1, SCAN_BYTES // size)
        buffer = aligned(step * size)
        for first in range(0, geometry.slot_count, step):
            count = min(step, geometry.slot_count - first)
            piece = buffer[: count * size]
            piece[:] = 0
            at = HEADER_BASE + first * size
            try:
                self._io.read_all(segment.fd, [piece], at)
            except OSError:
                segment.unreadable |= {
                    first + row for row in self._read_singly(segment.fd, piece, at, size)
                }
            yield first, piece.tobytes()

    def _read_singly(self, fd: int, piece: np.ndarray, at: int, size: int) -> list[int]:
        """What can be read of a piece; the rest is zeros. Answers with the rows that could not."""
        failed = []
        for start in range(0, len(piece), size):
            row = piece[start : start + size]
            try:
                self._io.read_all(fd, [row], at + start)
            except OSError:
                row[:] = 0
                failed.append(start // size)
        return failed

    def write_superblock(self, segment: FoundSegment) -> None:
        assert segment.geometry is not None, "the segment is not understood"
        unit = 1 << self._format.unit_shift
        packed = pack_superblock(
            Superblock(self._format.store_id, segment.serial, unit, segment.geometry)
        )
        self._page[:] = np.frombuffer(packed, np.uint8)
        self._io.write_all(segment.fd, [self._page], 0)
        self._io.fdatasync(segment.fd)

    def _read_page(self, fd: int, page: int) -> bytes:
        try:
            self._io.read_all(fd, [self._page], page * PAGE)
        except OSError:
            return b""
        return self._page.tobytes()


def refuse_unknown(path: Path, raw: bytes) -> None:
    """Raises TierError for the superblock of another version: it holds blocks of somebody's."""
    version = superblock_version(raw)
    if version is not None:
        check_version(path, version)


def find_format(path: Path) -> Format | None:
    """What the first sound superblock says; None if there is none."""
    for name in sorted(os.listdir(path / SEGMENTS)):
        if _FILE_NAME.fullmatch(name) is not None:
            with open(path / SEGMENTS / name, "rb", opener=_no_follow) as file:
                raw = file.read(PAGE)
            refuse_unknown(path, raw)
            superblock = parse_superblock(raw)
            if superblock is not None:
                return Format(superblock.store_id, superblock.unit_bytes.bit_length() - 1)
    return None


def _no_follow(name: str, flags: int) -> int:
    return os.open(name, flags | OPEN_FLAGS)
