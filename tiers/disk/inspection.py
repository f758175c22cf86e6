"""Looks at every file of a disk tier's directory that no daemon uses, and says what is wrong.

Nothing is changed. What a crash may leave, and any start puts right unasked (the header of a
group that never was, a segment without blocks), is no damage.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from kvstore.tiers import epochs
from kvstore.tiers.disk import directory
from kvstore.tiers.disk.belief import Belief, believe
from kvstore.tiers.disk.directory import Format
from kvstore.tiers.disk.entries import identity
from kvstore.tiers.disk.index import DiskIndex
from kvstore.tiers.disk.io import BOUNCE_BYTES, PAGE, FileIO, aligned, whole_pages
from kvstore.tiers.disk.layout import CELLS, parse_cell, parse_header
from kvstore.tiers.disk.loading import Loaded, is_sound, read
from kvstore.tiers.disk.scanning import FoundSegment, Scanner, find_format
from kvstore.tiers.disk.segments import SegmentFiles, file_name
from kvstore.tiers.record import SlotRecord

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

Progress = Callable[[int, int], None]
ANY_SIZE = 1 << 60
MAP_BYTES = 64 << 30


class Finding(NamedTuple):
    """Something that is wrong; `what` explains it in one sentence, `repair` what mends it."""

    kind: str
    where: str
    what: str
    repair: str
    repaired: bool = False


class BadBlock(NamedTuple):
    """A block whose header or payload is not what it should be."""

    segment: FoundSegment
    slot: int
    record: SlotRecord
    payload_is_right: bool


class Inspection:
    """One look at a directory; `findings`, and what a repair needs to know about them.

    `missing` counts encrypted blocks that could not be looked into, by the key that they need.
    """

    def __init__(self, path: Path, progress: Progress, vault: Vault | None = None) -> None:
        self.path, self._progress, self._io, self.vault = path, progress, FileIO(), vault
        self.missing: Counter[int] = Counter()
        self.findings: list[Finding] = []
        self.open_modes: list[Path] = []
        self.bad_blocks: list[BadBlock] = []
        self.bad_cells: list[tuple[FoundSegment, int]] = []
        self.index_is_lost = False
        self._look_at_modes()
        self._look_at_epochs()
        self.format = self._look_at_format()
        if self.format is not None and (path / directory.SEGMENTS).is_dir():
            self._look_at_blocks(self.format)

    def _add(self, kind: str, where: str, what: str, repair: str) -> None:
        self.findings.append(Finding(kind, where, what, repair))

    def _look_at_modes(self) -> None:
        below = [p for p in sorted(self.path.rglob("*")) if p.name != "lost+found"]
        for place in [self.path, *below]:
            status = place.lstat()
            if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
                self._add(
                    "stranger", str(place), f"{place} is a link or another user's",
                    "remove it by hand",
                )  # fmt: skip
            elif status.st_mode & 0o077:
                self.open_modes.append(place)
                mode = f"{stat.S_IMODE(status.st_mode):04o}"
                self._add(
                    "mode", str(place), f"{place} has mode {mode}: others can read it",
                    "others' access taken away",
                )  # fmt: skip

    def _look_at_epochs(self) -> None:
        states = epochs.copy_states(self.path)
        if set(states.values()) == {"missing"} and not self._has_segments():
            return
        lost = "sound" not in states.values()
        for name, state in states.items():
            if state == "sound":
                continue
            repair = "every block is dropped at the next start" if lost else "copied from the other"
            self._add("epochs", name, f"{self.path / name} is {state}", repair)

    def _has_segments(self) -> bool:
        folder = self.path / directory.SEGMENTS
        return folder.is_dir() and any(folder.iterdir())

    def _look_at_format(self) -> Format | None:
        known = directory.read_format(self.path)
        if known is not None or not self._has_segments():
            return known
        made = find_format(self.path)
        where = self.path / directory.FORMAT
        repair = "made anew from a segment" if made else "made anew; the segments are removed"
        self._add("format", directory.FORMAT, f"{where} is missing or damaged", repair)
        return made

    def _look_at_blocks(self, known: Format) -> None:
        files = SegmentFiles(
            self.path, ANY_SIZE, MAP_BYTES, known.store_id, 1 << known.unit_shift, False, self._io
        )
        scanner = Scanner(files, known, self._io, self.vault)
        segments: list[FoundSegment] = []
        try:
            self._look_for_strangers()
            segments = scanner.survey()
            loaded = self._look_at_index(known, bool(segments))
            kept = self._look_at_segments(segments, loaded)
            belief = believe(scanner, loaded, kept, [])
            self.missing = belief.missing
            self._look_at_forgeries(belief.missing[0])
            self._compare(loaded, belief, kept)
            self._look_at_cells(kept, loaded, belief, known)
            self._look_at_payloads(belief, kept, known)
        finally:
            for segment in segments:
                os.close(segment.fd)
            files.close()

    def _look_at_forgeries(self, count: int) -> None:
        if count:
            what = f"{count} blocks are in clear, or do not open with the key that they name"
            self._add("sealed", directory.INDEX, what, "the blocks are dropped")

    def _look_for_strangers(self) -> None:
        for place in sorted((self.path / directory.SEGMENTS).iterdir()):
            if place.suffix not in (".seg", ".moved") or not place.stem.isdigit():
                self._add("stranger", str(place), f"{place} is no segment", "remove it by hand")

    def _look_at_index(self, known: Format, has_segments: bool) -> Loaded | None:
        folder = self.path / directory.INDEX
        if not (folder / "data.mdb").exists():
            if has_segments:
                self._lost_index("missing")
            return None
        index = DiskIndex(folder, MAP_BYTES, known.store_id, self._io, self.vault)
        loaded = read(index) if is_sound(self.path, index) else None
        index.close()
        if loaded is None:
            self._lost_index("damaged")
        return loaded

    def _lost_index(self, how: str) -> None:
        self.index_is_lost = True
        what = f"the index in {self.path / directory.INDEX} is {how}"
        self._add("index", directory.INDEX, what, "made anew from the headers of the segments")

    def _look_at_segments(
        self, segments: list[FoundSegment], loaded: Loaded | None
    ) -> dict[int, FoundSegment]:
        """Those that can be understood, by serial number."""
        kept: dict[int, FoundSegment] = {}
        known = loaded.segments if loaded is not None else {}
        for segment in sorted(segments, key=lambda s: s.name != file_name(s.serial)):
            where = f"{directory.SEGMENTS}/{segment.name}"
            segment.entered = segment.serial in known
            if segment.geometry is None and segment.entered:
                segment.geometry = known[segment.serial]
                self._add("superblock", where, f"the superblock of {where} is damaged", "made anew")
            if segment.geometry is None or segment.serial in kept:
                self._add("orphan", where, f"{where} is no segment of this store", "removed")
                continue
            kept[segment.serial] = segment
            if segment.name != file_name(segment.serial):
                what = f"{where} is segment {segment.serial} under another name"
                self._add("name", where, what, "renamed")
            if segment.length != segment.geometry.file_bytes:
                what = f"{where} has {segment.length} bytes, not {segment.geometry.file_bytes}"
                self._add("length", where, what, "length corrected; blocks behind it are dropped")
        return kept

    def _compare(
        self, loaded: Loaded | None, belief: Belief, kept: dict[int, FoundSegment]
    ) -> None:
        """Index and files against each other."""
        if loaded is None:
            return
        for serial in sorted(set(loaded.blocks.serials.tolist()) - kept.keys()):
            count = np.count_nonzero(loaded.blocks.serials == serial)
            where = f"{directory.SEGMENTS}/{file_name(serial)}"
            what = f"{where} is missing or unreadable, and with it {count} blocks"
            self._add("missing", where, what, "the blocks are dropped")
        behind = max((s.sequence for s in kept.values()), default=0) - loaded.meta.sequence
        if behind > 1:
            what = f"the index is {behind} groups behind the segments"
            self._add("behind", directory.INDEX, what, "caught up from headers")
        here = [key for key in belief.stale if int.from_bytes(key[:4], "big") in kept]
        for key in here:
            serial, slot = int.from_bytes(key[:4], "big"), int.from_bytes(key[4:], "big")
            where = f"{directory.SEGMENTS}/{file_name(serial)} slot {slot}"
            what = f"{where} does not hold the block that the index names"
            self._add("missing", where, what, "the block is dropped")

    def _look_at_cells(
        self, kept: dict[int, FoundSegment], loaded: Loaded | None, belief: Belief, known: Format
    ) -> None:
        filled = set(belief.blocks.serials.tolist())
        latest = max(
            [
                loaded.meta.sequence if loaded is not None else 0,
                *(s.sequence for s in kept.values()),
            ]
        )
        for segment in kept.values():
            pages = [self._page(segment, page * PAGE, PAGE) for page in CELLS]
            torn = [
                number
                for number, raw in enumerate(pages)
                if any(raw) and not parse_cell(raw, known.store_id, segment.serial)
            ]
            if torn or (segment.serial in filled and not segment.sequence):
                where = f"{directory.SEGMENTS}/{segment.name}"
                what = f"a page of {where} that names its last group is damaged"
                self._add("cell", where, what, "written anew")
                self.bad_cells.append((segment, segment.sequence or latest))

    def _look_at_payloads(
        self, belief: Belief, kept: dict[int, FoundSegment], known: Format
    ) -> None:
        blocks = belief.blocks
        order = np.lexsort((blocks.indexes, blocks.serials))
        total, done = int(blocks.rows["length"].sum()), 0
        for at in order.tolist():
            segment, slot = kept[int(blocks.serials[at])], int(blocks.indexes[at])
            record = blocks.record(at)
            self._look_at_block(segment, slot, record, known)
            done += record.header.length
            self._progress(done, total)

    def _look_at_block(
        self, segment: FoundSegment, slot: int, record: SlotRecord, known: Format
    ) -> None:
        geometry = segment.geometry
        assert geometry is not None, "the segment is understood"
        raw = self._page(segment, geometry.header_at(slot), geometry.header_bytes)
        header_is_right = (
            parse_header(raw, known.store_id, segment.serial, slot, self.vault) == record
        )
        pieces = self._pieces(segment, geometry.payload_at(slot), record.header.length)
        if record.seal:
            place = identity(b"payload", known.store_id, segment.serial, slot)
            payload_is_right = self._opens(pieces, record, place)
        else:
            payload_is_right = _checksum(pieces) == record.checksum
        if header_is_right and payload_is_right:
            return
        self.bad_blocks.append(BadBlock(segment, slot, record, payload_is_right))
        where = f"{directory.SEGMENTS}/{segment.name} slot {slot}"
        key = record.header.key.hex()
        if not payload_is_right:
            what = f"the payload of block {key} in {where} does not match its checksum"
            self._add("payload", where, what, "the block is dropped")
        else:
            what = f"the header of block {key} in {where} is damaged"
            self._add("header", where, what, "written anew from the index")

    def _opens(self, pieces: Iterator[bytes], record: SlotRecord, place: bytes) -> bool:
        """Whether an encrypted payload is genuine, and what was stored."""
        assert self.vault is not None, "without keys it would be missing"
        opener = self.vault.opener(record.seal, place)
        if opener is None:
            return False
        checksum = _checksum(map(opener.update_bytes, pieces))
        return opener.is_genuine() and checksum == record.checksum

    def _page(self, segment: FoundSegment, at: int, length: int) -> bytes:
        page = aligned(length)
        try:
            self._io.read_all(segment.fd, [page], at)
        except OSError:
            page[:] = 0
        return page.tobytes()

    def _pieces(self, segment: FoundSegment, at: int, length: int) -> Iterator[bytes]:
        for start in range(0, length, BOUNCE_BYTES):
            count = min(BOUNCE_BYTES, length - start)
            yield self._page(segment, at + start, whole_pages(count))[:count]


def _checksum(pieces: Iterable[bytes]) -> bytes:
    check = xxhash.xxh3_128()
    for piece in pieces:
        check.update(piece)
    return check.digest()
