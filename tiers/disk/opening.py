"""Opens the directory of a disk tier: what an earlier life left is found, fitted in, and told.

The index says what is stored. Segments that heard of a later group than the index did are
believed over it, header by header, and all are if there is no sound index. What needs more room
than is configured leaves first, oldest segments before others, before anything is written.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.errors import TierError
from kvstore.tiers.disk import directory
from kvstore.tiers.disk.belief import Belief, believe
from kvstore.tiers.disk.books import DiskBooks
from kvstore.tiers.disk.directory import Format, directory_bytes
from kvstore.tiers.disk.fitting import fitting, restore
from kvstore.tiers.disk.found import Found
from kvstore.tiers.disk.index import FULL_RATIO, Changes, DiskIndex, Meta, entry_bytes
from kvstore.tiers.disk.io import FileIO
from kvstore.tiers.disk.loading import Loaded, load
from kvstore.tiers.disk.scanning import FoundSegment, Scanner, find_format
from kvstore.tiers.disk.segments import Room, SegmentFiles, file_name

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

SIZE_MIN = 2 << 20
MAP_SHARE, MAP_BYTES_MIN, MAP_BYTES_MAX = 32, 512 << 10, 64 << 30
SIDE_SHARE, SIDE_BYTES_MIN, SIDE_BYTES_MAX = 256, 128 << 10, 16 << 20
EXTENT_SHARE = 128
"""A file system may keep up to this part of a file beside it, to know where its parts lie."""
UNITS_MAX = 1 << 20
BATCH = 20_000


class UnknownKeys(TierError):
    """There are encrypted blocks, and no key that opens one."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An open directory."""

    format: Format
    books: DiskBooks
    files: SegmentFiles
    index: DiskIndex
    meta: Meta
    belief: Belief
    notes: list[str]
    problem: str


def map_bytes(size_bytes: int) -> int:
    """What of the size the index may take."""
    return min(max(size_bytes // MAP_SHARE, MAP_BYTES_MIN), MAP_BYTES_MAX) >> 12 << 12


def capacity_bytes(path: Path, size_bytes: int) -> int:
    """What segments may take: not the index, its neighbours and a file system's own share."""
    side = min(max(size_bytes // SIDE_SHARE, SIDE_BYTES_MIN), SIDE_BYTES_MAX)
    names = directory.NEIGHBOURS | {directory.FORMAT}
    sizes = [(path / name).lstat().st_size for name in names if (path / name).is_file()]
    left = size_bytes - map_bytes(size_bytes) - max(side, 3 * sum(sizes))
    return left - left // EXTENT_SHARE


class Opening:
    """One start. Raises TierError where the directory cannot be used at all."""

    def __init__(
        self, path: Path, size_bytes: int, reserve_bytes: int, direct: bool, io: FileIO,
        vault: Vault | None = None,
    ) -> None:  # fmt: skip
        if size_bytes < SIZE_MIN:
            raise TierError(f"tiers.disk.size is {size_bytes} bytes; give it at least {SIZE_MIN}")
        self._path, self._io, self._vault = path, io, vault
        self._size_bytes, self._reserve_bytes = size_bytes, reserve_bytes
        self._notes: list[str] = []
        self._problem = ""
        directory.check_private(path)
        known = directory.read_format(path)
        if known is None:
            directory.check_empty(path)
        directory.make_folders(path)
        self._notes += directory.close_modes(path)
        self._format = known or self._new_format()
        self._capacity = max(
            min(capacity_bytes(path, size_bytes), UNITS_MAX << self._format.unit_shift),
            1 << self._format.unit_shift,
        )
        self._files = SegmentFiles(
            path, size_bytes, map_bytes(size_bytes), self._format.store_id,
            1 << self._format.unit_shift, direct, io,
        )  # fmt: skip
        self._scanner = Scanner(self._files, self._format, io, vault)

    def run(self) -> Opened:
        index = DiskIndex(
            self._path / directory.INDEX, map_bytes(self._size_bytes), self._format.store_id,
            self._io, self._vault,
        )  # fmt: skip
        segments = self._scanner.survey()
        try:
            return self._open(index, segments)
        except UnknownKeys:
            index.close()
            for segment in segments:
                os.close(segment.fd)
            self._files.close()
            raise

    def _open(self, index: DiskIndex, segments: list[FoundSegment]) -> Opened:
        loaded = load(self._path, index, self._notes)
        if loaded is not None:
            self._check_keys(loaded.missing, loaded.blocks)
        if loaded is None and segments and not self._notes:
            self._notes.append(f"{self._path} has no index; it was made anew from the segments")
        kept = self._understood(segments, loaded)
        kept = self._fitting(kept, _dead(kept, loaded))
        self._put_right(kept)
        belief = believe(self._scanner, loaded, {s.serial: s for s in kept}, self._notes)
        self._check_keys(belief.missing, belief.blocks)
        self._tell_of_keys(belief.missing)
        is_new = loaded is None or self._index_bytes() > map_bytes(self._size_bytes)
        if is_new:
            belief = self._within_index(belief)
        kept = self._without_empty(kept, belief)
        meta = self._counters(loaded, belief, segments)
        books = self._books(kept, belief, meta)
        self._write(index, None if is_new else loaded, belief, kept, meta)
        return Opened(
            self._format, books, self._files, index, meta, belief, self._notes, self._problem
        )

    def _check_keys(self, missing: Counter[int], blocks: Found) -> None:
        """Refuses to go on where no key fits: the blocks would be lost by a slip of the hand."""
        ids = ", ".join(f"{key:08x}" for key in missing if key)
        if not ids or blocks.are_sealed.any():
            return
        if self._vault is None:
            raise UnknownKeys(
                f"{self._path} holds encrypted blocks (keys {ids}), and tiers.disk.key_file is "
                "empty; name the file with their keys or empty the directory"
            )
        raise UnknownKeys(
            f"{self._path} holds encrypted blocks (keys {ids}), and no key of tiers.disk.key_file "
            "opens one; add their key to the file or empty the directory"
        )

    def _tell_of_keys(self, missing: Counter[int]) -> None:
        for key_id, count in sorted(missing.items()):
            if key_id:
                reason = f"need key {key_id:08x}, which is not there"
            else:
                reason = "are in clear, or do not open with the key that they name"
            self._notes.append(f"{count} blocks {reason}; they were dropped")

    def _new_format(self) -> Format:
        """For a new directory, or one whose format file is lost: its segments tell then."""
        made = find_format(self._path)
        if made is not None:
            self._notes.append(f"{self._path / directory.FORMAT} was lost or damaged; made anew")
        made = made or directory.new_format(self._size_bytes)
        directory.write_format(self._path, made)
        return made

    def _understood(
        self, segments: list[FoundSegment], loaded: Loaded | None
    ) -> list[FoundSegment]:
        """Segments whose layout is known, once each; the others go."""
        kept: dict[int, FoundSegment] = {}
        known = loaded.segments if loaded is not None else {}
        # Of a file and its copy under another name, the one with the right name stays.
        for segment in sorted(segments, key=lambda s: s.name != file_name(s.serial)):
            segment.entered = segment.serial in known
            if segment.geometry is None and segment.entered:
                segment.geometry, segment.is_mended = known[segment.serial], True
                self._notes.append(f"the superblock of {segment.name} was damaged; made anew")
            if segment.geometry is None:
                self._remove(segment, "is no segment of this store")
            elif segment.serial in kept:
                self._remove(segment, "is there under another name, too")
            else:
                kept[segment.serial] = segment
        return list(kept.values())

    def _fitting(self, segments: list[FoundSegment], dead: set[int]) -> list[FoundSegment]:
        """Those that fit the configured size; the dead go first, then the oldest of the others."""
        kept = fitting(segments, self._capacity, self._format.unit_shift, dead)
        for segment in sorted(set(segments) - set(kept), key=lambda s: s.sequence):
            self._remove(segment, "does not fit tiers.disk.size any more")
        if kept and self._is_over(kept):
            directory.remove_aside(self._path)
        while kept and self._is_over(kept):
            self._remove(kept.pop(), "does not fit tiers.disk.size any more")
        return kept

    def _is_over(self, kept: list[FoundSegment]) -> bool:
        _, rest = directory_bytes(self._path)
        missing = [s.geometry.file_bytes - s.length for s in kept if s.geometry is not None]
        rest += sum(max(0, count) for count in missing)
        return rest + map_bytes(self._size_bytes) > self._size_bytes

    def _index_bytes(self) -> int:
        return directory_bytes(self._path)[0]

    def _within_index(self, belief: Belief) -> Belief:
        """Without the oldest blocks where an index of this size cannot take them all."""
        blocks, most = belief.blocks, int(FULL_RATIO * map_bytes(self._size_bytes))
        each = zip(blocks.symbols, blocks.are_sealed.tolist(), strict=True)
        sizes = np.array([entry_bytes(len(symbol), sealed) for symbol, sealed in each], np.int64)
        newest_first = np.argsort(blocks.rows["generation"])[::-1]
        fits = np.empty(len(sizes), bool)
        fits[newest_first] = np.cumsum(sizes[newest_first]) <= most
        if not fits.all():
            self._notes.append(f"{np.count_nonzero(~fits)} blocks are too many for the index")
        left = blocks.only(fits)
        return belief._replace(blocks=left, newer=left)

    def _put_right(self, segments: list[FoundSegment]) -> None:
        """Names, sizes and superblocks as they should be."""
        misnamed = [s for s in segments if s.name != file_name(s.serial)]
        for suffix in ("moved", "seg"):
            for segment in misnamed:
                name = f"{segment.serial}.{suffix}"
                self._io.rename(segment.name, name, self._files.directory_fd)
                if suffix == "seg":
                    self._notes.append(f"{name} had another name; renamed")
                segment.name = name
        for segment in list(segments):
            assert segment.geometry is not None, "understood before"
            try:
                if segment.length != segment.geometry.file_bytes:
                    self._notes.append(f"{segment.name} had another length; corrected")
                    os.ftruncate(segment.fd, segment.geometry.file_bytes)
                    self._io.allocate(segment.fd, segment.geometry.file_bytes)
                if segment.is_mended:
                    self._scanner.write_superblock(segment)
            except OSError as error:
                segments.remove(segment)
                self._remove(segment, f"could not be put right ({error.strerror})")

    def _without_empty(self, segments: list[FoundSegment], belief: Belief) -> list[FoundSegment]:
        filled = set(belief.blocks.serials.tolist())
        for segment in segments:
            if segment.serial not in filled:
                self._remove(segment)
        return [segment for segment in segments if segment.serial in filled]

    def _remove(self, segment: FoundSegment, reason: str = "") -> None:
        os.close(segment.fd)
        self._io.unlink(segment.name, self._files.directory_fd)
        if reason:
            self._notes.append(f"{segment.name} in {self._path} {reason}; it was removed")

    def _counters(
        self, loaded: Loaded | None, belief: Belief, segments: list[FoundSegment]
    ) -> Meta:
        """Where counting goes on: above all that anything says."""
        old = loaded.meta if loaded is not None else Meta(0, 1, 0, 1)
        rows = belief.blocks.rows
        highest = int(rows["generation"].max()) if len(rows) else 0
        serials = [s.serial + 1 for s in segments]
        return Meta(
            max([old.sequence, *(s.sequence for s in segments)]),
            max([old.generations, highest + 1, *(s.locked_generation + 1 for s in segments)]),
            max(old.watermark, highest),
            max([old.serial, self._scanner.next_serial, *serials]),
        )

    def _books(self, kept: list[FoundSegment], belief: Belief, meta: Meta) -> DiskBooks:
        room = Room(self._reserve_bytes, self._files.free_bytes())
        shift = self._format.unit_shift
        # A directory that was made for a smaller size must not end in thousands of files.
        least_order = max(0, directory.unit_shift(self._capacity) - shift)
        has_keys = self._vault is not None
        books = DiskBooks(self._capacity, shift, least_order, room, meta.serial, has_keys)
        restore(books, kept, belief.blocks, has_keys)
        return books

    def _write(
        self, index: DiskIndex, loaded: Loaded | None, belief: Belief,
        kept: list[FoundSegment], meta: Meta,
    ) -> None:  # fmt: skip
        """Makes the index say what is believed; if that fails, the tier only reads."""
        try:
            if loaded is None:
                index.close()
                directory.empty_index(self._path)
                index.open()
                directory.sync_folder(self._path / directory.INDEX)
                directory.sync_folder(self._path)
                puts, deletes = belief.blocks, []
                known = set[int]()
            else:
                puts, deletes = belief.newer, belief.stale + loaded.locked
                known = set(loaded.segments)
            here = {s.serial: s.geometry for s in kept if s.geometry is not None}
            fresh = {serial: here[serial] for serial in here.keys() - known}
            gone = known - here.keys()
            _in_batches(index, puts, deletes, Changes(segments=fresh, gone_segments=gone), meta)
            for segment in kept:
                segment.entered = True
        except (TierError, OSError) as error:
            self._problem = f"its index could not be written ({error})"


def _dead(segments: list[FoundSegment], loaded: Loaded | None) -> set[int]:
    """Serials of segments that held nothing any more: a power cut brings unlinked files back."""
    if loaded is None:
        return set()
    stored = set(np.unique(loaded.blocks.serials).tolist())
    last = loaded.meta.sequence
    return {s.serial for s in segments if s.serial not in stored and s.sequence <= last}


def _in_batches(
    index: DiskIndex, puts: Found, deletes: list[bytes], last: Changes, meta: Meta
) -> None:
    """Deletes first; the counters come with the last batch, so that half of it is no index."""
    count = len(puts.rows)
    if not (count or deletes or last.segments or last.gone_segments) and index.meta() == meta:
        return
    for start in range(0, len(deletes), BATCH):
        index.commit(Changes(deletes=deletes[start : start + BATCH]), None)
    for start in range(0, count, BATCH):
        batch = Changes()
        for at in range(start, min(start + BATCH, count)):
            index.enter(batch, int(puts.serials[at]), int(puts.indexes[at]), puts.record(at))
        index.commit(batch, None)
    index.commit(last, meta)
