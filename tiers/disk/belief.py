"""What to believe at a start: the index, and the headers of segments that it is behind of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvstore.tiers.disk import found
from kvstore.tiers.disk.found import Found
from kvstore.tiers.disk.loading import Loaded
from kvstore.tiers.disk.scanning import FoundSegment, Scanner
from kvstore.tiers.record import SlotRecord


class Belief(NamedTuple):
    """Blocks that are there, and how the index differs from that."""

    blocks: Found
    newer: Found
    """Of them, those that the index lacks."""
    stale: list[bytes]
    """Keys of the index without a block."""
    torn_header_count: int
    missing: Counter[int]
    """Keys that encrypted blocks need, as `Loaded.missing`; these blocks do not count as there."""


def believe(
    scanner: Scanner,
    loaded: Loaded | None,
    segments: Mapping[int, FoundSegment],
    notes: list[str],
) -> Belief:
    """Reads headers where the index is not enough. Notes say what was dropped."""
    if loaded is None:
        records = [(s, i, r) for s in segments for i, r in scanner.headers(segments[s])]
        blocks = found.of_records(records)
        return _told(Belief(blocks, blocks, [], _torn(segments), _missing(segments)), notes)
    kept = _reachable(loaded.blocks, segments)
    records = []
    for segment in segments.values():
        if segment.sequence > loaded.meta.sequence or not segment.entered:
            records += _scan(scanner, segment, loaded, kept)
    newer = found.of_records(records)
    stale = loaded.blocks.only(~kept).keys() if not kept.all() else []
    blocks = loaded.blocks.only(kept).plus(newer)
    return _told(Belief(blocks, newer, stale, _torn(segments), loaded.missing), notes)


def _reachable(blocks: Found, segments: Mapping[int, FoundSegment]) -> np.ndarray:
    """Which entries have a file that reaches to the end of their slot."""
    serials, positions = np.unique(blocks.serials, return_inverse=True)
    slots, sizes = np.zeros(len(serials), np.int64), np.zeros(len(serials), np.uint64)
    for position, serial in enumerate(serials.tolist()):
        segment = segments.get(serial)
        if segment is not None:
            slots[position], sizes[position] = segment.slots_held, segment.payload_bytes
    fits: np.ndarray = blocks.indexes < slots[positions]
    return fits & (blocks.rows["length"] <= sizes[positions])


def _scan(
    scanner: Scanner, segment: FoundSegment, loaded: Loaded, kept: np.ndarray
) -> list[tuple[int, int, SlotRecord]]:
    """Headers that win over the index; entries that lose are struck from `kept`."""
    headers = dict(scanner.headers(segment))
    generations = loaded.blocks.rows["generation"]
    for at in np.flatnonzero(loaded.blocks.serials == segment.serial).tolist():
        index = int(loaded.blocks.indexes[at])
        record = headers.get(index)
        if index in segment.unreadable:
            continue  # each read compares checksums: to believe the index here costs a miss at most
        if record is not None and record.generation == generations[at]:
            del headers[index]
            continue
        kept[at] = False
        if record is not None and record.generation < generations[at]:
            del headers[index]  # something newer was written here, and its header is gone
    # What is older than the index's last group and not in it was removed, or was never committed.
    least = loaded.meta.watermark if segment.entered else 0
    return [
        (segment.serial, index, record)
        for index, record in headers.items()
        if record.generation > least
    ]


def _missing(segments: Mapping[int, FoundSegment]) -> Counter[int]:
    return sum((segment.missing for segment in segments.values()), Counter())


def _torn(segments: Mapping[int, FoundSegment]) -> int:
    return sum(segment.torn_header_count for segment in segments.values())


def _told(belief: Belief, notes: list[str]) -> Belief:
    if belief.stale:
        notes.append(f"{len(belief.stale)} blocks in the index had no file or header; dropped")
    if len(belief.newer.rows):
        notes.append(f"{len(belief.newer.rows)} blocks were taken up from segment headers")
    if belief.torn_header_count:
        notes.append(f"{belief.torn_header_count} headers were torn or damaged; left out")
    return belief
