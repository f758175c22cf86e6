"""Places and answers: how a block's slot and state are written down.

    STAGING --publish--> READY --un-publish--> resting --leases over, rest over--> free
       `--abort, expiry, lost parent--------------------------------------------^

A place is one int64 naming a slot within its tier; the tier alone reads it. In pools of memory
(host, hbm) it is pool number << 40 | byte offset >> 12.

A host pool's file may be larger than the memory it has. Behind its generation map clients find a
cell (uint64) for each 4 MiB: even while all of them have memory, and one more with each change.
"""

from __future__ import annotations

from typing import NamedTuple

SLOT_ALIGN = 4096
SLOT_SHIFT = 12
POOL_SHIFT = 40
NO_PLACE = -1
GENERATION_BYTES = 8
BACKING_SHIFT = 22

Place = int


class Slot(NamedTuple):
    """A place in a pool of memory: what a client needs to find a block and to trust it."""

    pool_id: int
    offset: int
    length: int
    generation: int


def make_place(pool_id: int, offset: int) -> Place:
    """Place of the 4 KiB-aligned byte `offset` in pool `pool_id`."""
    return pool_id << POOL_SHIFT | offset >> SLOT_SHIFT


def place_pool(place: Place) -> int:
    return place >> POOL_SHIFT


def place_offset(place: Place) -> int:
    """Byte offset within the pool."""
    return (place & ((1 << POOL_SHIFT) - 1)) << SLOT_SHIFT


def backing_cells(data_bytes: int) -> tuple[int, int]:
    """Where the cells of a pool begin in the file of its generation map, and how many they are."""
    return (data_bytes >> SLOT_SHIFT) * GENERATION_BYTES, -(-data_bytes >> BACKING_SHIFT)


def slot_bytes(payload_bytes: int) -> int:
    """Bytes a payload takes in a tier: rounded up to 4 KiB."""
    return -(-payload_bytes // SLOT_ALIGN) * SLOT_ALIGN
