"""Group commit: headers, cells and payloads on the medium, then one transaction of the index.

    header pages, cells      pwrite
    touched segments         fdatasync each; the folder too where a file is new
    index                    blocks in, removals out, counters: one durable transaction
    books                    PUBLISHED; removed slots that the owner has freed: FREE

What fails on the way fails the whole group, and is never tried again: after a failed sync the
kernel no longer knows what was lost. Groups run one after another, so sequence numbers and
generations of the tier grow together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.core.errors import TierError
from kvstore.core.generations import Generations
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk.books import DiskBooks
from kvstore.tiers.disk.health import Health
from kvstore.tiers.disk.index import (
    FULL_RATIO,
    RELIEF_RATIO,
    Changes,
    DiskIndex,
    IndexFull,
    IndexLost,
    Meta,
    entry_bytes,
    pack_key,
)
from kvstore.tiers.disk.io import PAGE, FileIO, aligned
from kvstore.tiers.disk.layout import CELLS, pack_cell, pack_header, parse_header
from kvstore.tiers.disk.segments import Segment, SegmentFiles
from kvstore.tiers.record import SlotRecord

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

FULL = "its index is full; raise tiers.disk.size or store fewer blocks"
WANTED_MAX = 0.5
GENERATION_STEP = 1 << 20
"""Generations reserved at a time; a crash skips at most this many."""


class _Block(NamedTuple):
    place: int
    segment: Segment
    slot: int
    record: SlotRecord


class Committer:
    """Makes groups durable, one at a time; worker threads only."""

    def __init__(
        self, books: DiskBooks, files: SegmentFiles, index: DiskIndex, meta: Meta,
        store_id: bytes, generations: Generations, health: Health, io: FileIO,
        index_works: Callable[[], None], vault: Vault | None = None,
    ) -> None:  # fmt: skip
        self._books, self._files, self._index, self._vault = books, files, index, vault
        self._meta, self._store_id = meta, store_id
        self._sequence = meta.sequence
        self._generations, self._health, self._io = generations, health, io
        self._forgotten: set[bytes] = set()
        self._wanted_ratio = 0.0
        self._index_works: Callable[[], None] | None = index_works
        self.lock = threading.Lock()

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        """`Tier.commit`; files of all these blocks' segments are there."""
        with self.lock:
            self._refuse_if_read_only()
            if not blocks:
                self._remove()
                return []
            if not self._has_room(blocks):
                self._remove()
                if not self._has_room(blocks):
                    raise self._health.failed("enter more blocks", IndexFull(FULL))
            removals = self._books.pending()
            group = self._numbered(blocks)
            try:
                self._write_pages(group)
                self._enter(group, removals)
            except BaseException:
                self._books.suspect(block.place for block in group)
                raise
            self._books.publish([(b.place, b.record.generation, b.record.checksum) for b in group])
            self._books.removed(removals)
            return [block.record.generation for block in group]

    def relieve(self) -> bool:
        """Whether the index has room for blocks, or has it again."""
        with self.lock:
            if not self._index.is_open:
                return False
            return self._index.used_ratio + min(self._wanted_ratio, WANTED_MAX) < RELIEF_RATIO

    def resize_index(self, map_bytes: int) -> float:
        """`DiskIndex.resize`, between groups."""
        with self.lock:
            self._refuse_if_read_only()
            try:
                return self._index.resize(map_bytes)
            except TierError as error:
                self._reopen(self._meta)
                raise self._health.failed("resize its index", error) from error

    def entry(self, key: bytes) -> SlotRecord | None:
        with self.lock:
            return self._index.block(key) if self._index.is_open else None

    def check_integrity(self) -> None:
        """Asserts that index and headers on the medium agree with the books."""
        with self.lock:
            if not self._index.is_open:
                return
            has_keys = self._vault is not None
            read = self._index.sealed_blocks() if has_keys else self._index.blocks()
            assert read is not None, "the index is damaged"
            entries = dict(zip(*read, strict=True))
            for key in self._books.pending().values():
                entries.pop(key, None)
            for segment in list(self._books.segments.values()):
                for index in np.flatnonzero(segment.generations).tolist():
                    key = pack_key(segment.serial, index)
                    self._check_block(segment, index, self._index.parse(key, entries.pop(key)))
            assert not set(entries) - self._forgotten, "the index holds blocks that are not there"

    def _check_block(self, segment: Segment, index: int, entry: SlotRecord | None) -> None:
        assert entry is not None, "an entry of the index is damaged"
        assert entry.generation == segment.generations[index], "generations disagree"
        assert entry.checksum == segment.checksums[index].tobytes(), "checksums disagree"
        page = aligned(segment.geometry.header_bytes)
        self._io.read_all(segment.fd, [page], segment.geometry.header_at(index))
        header = parse_header(page.tobytes(), self._store_id, segment.serial, index, self._vault)
        assert header == entry, "a header is not what the index says"

    def _refuse_if_read_only(self) -> None:
        if self._health.read_only:
            raise TierError(self._health.problem)

    def _has_room(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> bool:
        """Whether the index can take these and stay below its limit."""
        sealed = self._vault is not None
        needed = sum(entry_bytes(len(header.symbol), sealed) for _, header, _ in blocks)
        self._wanted_ratio = needed / self._index.map_bytes
        return self._index.used_ratio + self._wanted_ratio < FULL_RATIO

    def _remove(self) -> None:
        """Makes all removals durable by themselves."""
        while True:
            removals = self._books.pending()
            if not (removals or self._forgotten or self._books.gone_serials):
                return
            self._enter([], removals)
            self._books.removed(removals)

    def _numbered(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[_Block]:
        if not self._books.check_staging([place for place, _, _ in blocks]):
            raise TierError("a sync failed while these blocks were written; write them elsewhere")
        group = []
        for place, header, checksum in blocks:
            segment, index = self._books.locate(place)
            assert header.length <= segment.geometry.payload_bytes, "the payload outgrew its slot"
            seal = b""
            if self._vault is not None:
                seal = self._vault.expand(segment.seals[index]) or self._vault.unwritten()
            record = SlotRecord(header, checksum, self._generations.take(), seal)
            group.append(_Block(place, segment, index, record))
        return group

    def _write_pages(self, group: list[_Block]) -> None:
        self._sequence += 1
        by_segment: dict[int, list[_Block]] = {}
        for block in group:
            by_segment.setdefault(block.segment.serial, []).append(block)
        segments = [members[0].segment for members in by_segment.values()]
        try:
            for members in by_segment.values():
                self._write_headers(members)
                self._write_cell(members[0].segment)
        except OSError as error:
            raise self._health.failed("write headers", error) from error
        try:
            for segment in segments:
                self._io.fdatasync(segment.fd)
            if not all(segment.linked for segment in segments):
                self._files.sync_directory()
        except OSError as error:
            self._books.suspect_staging(segments)
            raise self._health.failed("sync a group", error) from error
        for segment in segments:
            segment.linked = True
            if not self._files.direct:
                os.posix_fadvise(segment.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_headers(self, members: list[_Block]) -> None:
        """Header pages of one segment; neighbours in one call."""
        members = sorted(members, key=lambda block: block.slot)
        segment, size = members[0].segment, members[0].segment.geometry.header_bytes
        pages = aligned(len(members) * size).reshape(len(members), size)
        for row, block in zip(pages, members, strict=True):
            packed = pack_header(
                block.record, self._store_id, segment.serial, block.slot, size, self._vault
            )
            row[:] = np.frombuffer(packed, np.uint8)
        indexes = np.array([block.slot for block in members])
        starts = [0, *(np.flatnonzero(np.diff(indexes) != 1) + 1).tolist(), len(members)]
        for start, stop in pairwise(starts):
            at = segment.geometry.header_at(members[start].slot)
            self._io.write_all(segment.fd, [pages[start:stop].reshape(-1)], at)

    def _write_cell(self, segment: Segment) -> None:
        page = aligned(PAGE)
        packed = pack_cell(self._store_id, segment.serial, self._sequence)
        page[:] = np.frombuffer(packed, np.uint8)
        # The cell that does not hold the last group's number: a torn write leaves that one.
        segment.cell = 1 - segment.cell
        self._io.write_all(segment.fd, [page], CELLS[segment.cell] * PAGE)
        segment.sequence = self._sequence

    def _enter(self, group: list[_Block], removals: dict[int, bytes]) -> None:
        """The transaction: from here on the group survives, or never was."""
        gone = set(self._books.gone_serials)
        changes = Changes(deletes=[*removals.values(), *self._forgotten], gone_segments=gone)
        for block in group:
            self._index.enter(changes, block.segment.serial, block.slot, block.record)
            if not block.segment.entered:
                changes.segments[block.segment.serial] = block.segment.geometry
        meta = self._next_meta(group)
        try:
            self._index.commit(changes, meta)
        except TierError as error:
            self._forgotten.update(key for key, _ in (*changes.puts, *changes.sealed_puts))
            if isinstance(error, IndexLost):
                self._reopen(meta)
            raise self._health.failed("write its index", error) from error
        self._meta = meta
        if self._index_works is not None:
            self._index_works()
            self._index_works = None
        self._forgotten.clear()
        self._books.gone_serials -= gone
        for block in group:
            block.segment.entered = True

    def _next_meta(self, group: list[_Block]) -> Meta:
        highest = group[-1].record.generation if group else self._meta.watermark
        reserved = self._meta.generations
        if self._generations.next + GENERATION_STEP // 2 > reserved:
            reserved = self._generations.next + GENERATION_STEP
        return Meta(self._sequence, reserved, highest, self._books.next_serial)

    def _reopen(self, tried: Meta) -> None:
        """After a failed transaction: goes on from what is on the medium, or only reads."""
        try:
            self._index.reopen()
            found = self._index.meta()
        except TierError as error:
            self._health.give_up(str(error))
            return
        if found in (self._meta, tried):
            self._meta = found
        else:
            self._health.give_up("its index is not what was written last")
