"""How large chunks and granules are, and what a class of slots is. Pure arithmetic."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from kvstore.core.block import SLOT_ALIGN, SLOT_SHIFT

GRANULE_SHIFT = 20
TINY_POOL_GRANULES = 64
GRANULE_COUNT_MAX = 1 << 20
WASTE_MAX = 0.04
PADDING_COUNTS_FROM = 128 << 10


class SlotState(IntEnum):
    FREE = 0
    STAGING = 1
    PUBLISHED = 2
    RESTING = 3


class Chunk(NamedTuple):
    """A chunk cut into slots; `offset` is in bytes from the start of the pool."""

    offset: int
    size_bytes: int
    slot_bytes: int
    header_bytes: int
    slot_count: int


class SlotClass:
    """Slots of one size, and the chunks of this class that have room (a heap, lowest first).

    `listed` mirrors the heap, so that a chunk is in it once. Entries go stale when a chunk is
    released or drained; they are dropped when they come up. `least_bytes` is the smallest chunk
    that holds one slot.
    """

    __slots__ = (
        "chunk_count", "header_bytes", "heap", "least_bytes", "listed", "number", "order",
        "slot_bytes",
    )  # fmt: skip

    def __init__(
        self, number: int, slot_bytes: int, header_bytes: int, order: int, overhead_bytes: int = 0
    ) -> None:
        self.number = number
        self.least_bytes = slot_bytes + overhead_bytes
        self.slot_bytes = slot_bytes
        self.header_bytes = header_bytes
        self.order = order
        self.chunk_count = 0
        self.heap: list[int] = []
        self.listed: set[int] = set()


def granule_shift(capacity_bytes: int) -> int:
    """log2 of the smallest chunk: 1 MiB, less in tiny pools, more in huge ones."""
    shift = GRANULE_SHIFT
    while shift > SLOT_SHIFT and capacity_bytes >> shift < TINY_POOL_GRANULES:
        shift -= 1
    while capacity_bytes >> shift > GRANULE_COUNT_MAX:
        shift += 1
    return shift


def slot_count(slot_bytes: int, chunk_bytes: int, overhead_bytes: int = 0) -> int:
    """Slots of a chunk that keeps `overhead_bytes` for itself."""
    return max(0, chunk_bytes - overhead_bytes) // slot_bytes


def chunk_waste(slot_bytes: int, chunk_bytes: int, overhead_bytes: int = 0) -> float:
    """Worst-case share of a chunk that holds no payload; 1.0 if no slot fits."""
    payload = slot_bytes
    if slot_bytes >= PADDING_COUNTS_FROM:
        payload -= SLOT_ALIGN - 1
    return 1.0 - slot_count(slot_bytes, chunk_bytes, overhead_bytes) * payload / chunk_bytes


def chunk_order(slot_bytes: int, shift: int, max_order: int, overhead_bytes: int = 0) -> int:
    """Order of the chunk a class takes; -1 if not even one slot fits the pool."""
    best, least = -1, 1.0
    for order in range(max_order + 1):
        waste = chunk_waste(slot_bytes, 1 << order + shift, overhead_bytes)
        if waste <= WASTE_MAX:
            return order
        if waste < least:
            best, least = order, waste
    return best
