"""Fits segments of an earlier life into the space of places: newest first, where there is room."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from kvstore.core.block import SLOT_SHIFT
from kvstore.tiers.buddy import Buddy
from kvstore.tiers.disk.books import DiskBooks
from kvstore.tiers.disk.found import Found
from kvstore.tiers.disk.scanning import FoundSegment
from kvstore.tiers.disk.segments import Segment


def fitting(
    segments: Sequence[FoundSegment], capacity_bytes: int, shift: int, dead: Container[int] = ()
) -> list[FoundSegment]:
    """The most recently written segments that fit together, newest first, the `dead` last."""
    newest = sorted(
        segments, key=lambda s: (s.serial not in dead, s.sequence, s.serial), reverse=True
    )
    kept: list[FoundSegment] = []
    left = capacity_bytes
    for segment in newest:
        left -= segment.chunk_bytes
        if left < 0:
            break
        kept.append(segment)
    while kept and not _pack(kept, capacity_bytes, shift):
        kept.pop()
    return kept


def _pack(segments: Sequence[FoundSegment], capacity_bytes: int, shift: int) -> bool:
    buddy = Buddy(capacity_bytes >> shift)
    orders = sorted((_order(s, shift) for s in segments), reverse=True)
    return all(order <= buddy.max_order and buddy.take(order) >= 0 for order in orders)


def _order(segment: FoundSegment, shift: int) -> int:
    return (segment.chunk_bytes >> shift).bit_length() - 1


def restore(
    books: DiskBooks, segments: Sequence[FoundSegment], blocks: Found, with_seals: bool = False
) -> None:
    """Enters the segments in the books, all slots RESTING, and gives the blocks their places."""
    largest_first = sorted(segments, key=lambda s: s.chunk_bytes, reverse=True)
    for segment in largest_first:
        geometry, order = segment.geometry, _order(segment, books.slab.shift)
        assert geometry is not None, "the segment is understood"
        chunk = books.slab.restore_anywhere(order, geometry.slot_bytes, geometry.header_bytes)
        assert chunk is not None, "the segments were found to fit"
        made = Segment(segment.serial, chunk, segment.fd, with_seals)
        books.segments[chunk.offset] = made
        made.cell, made.sequence = segment.cell, segment.sequence
        made.entered = segment.entered
    _place(books, blocks)


def _place(books: DiskBooks, blocks: Found) -> None:
    by_serial = {s.serial: s for s in books.segments.values()}
    serials, positions = np.unique(blocks.serials, return_inverse=True)
    chunks = [by_serial[serial].chunk for serial in serials.tolist()]
    offsets = np.array([chunk.offset for chunk in chunks], np.int64)
    sizes = np.array([chunk.slot_bytes for chunk in chunks], np.int64)
    if len(chunks):
        at: np.ndarray = offsets[positions] + blocks.indexes * sizes[positions]
        blocks.rows["place"] = at >> SLOT_SHIFT
