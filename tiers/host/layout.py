"""Layout of a pool's headers file: superblock, generation reservations, chunk map, headers.

    page 0            superblock at 0, again at 1024, two generation cells at 2048
    page 1 ...        chunk map, one entry a granule, room for as many as there may ever be
    HEADERS_AT ...    headers; those of a chunk at byte c of the pool begin at HEADERS_AT + c

The file is sparse: pages of the map exist for memory that the pool has or had, header pages only
under chunks that have a class. A longer pool has the same layout, so a pool's files may grow.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.tiers.chunks import GRANULE_COUNT_MAX, Chunk

PAGE_BYTES = 4096
POOL_ID_BYTES = 16
MAGIC = b"KVPOOL\x00\x02"
_SUPERBLOCK = struct.Struct("<8sIIQ16s36s32s")
_CHECK = struct.Struct("<Q")
_CELL = struct.Struct("<QQ")
_CELLS_AT = (2048, 2048 + 64)
_COPY_AT = 1024

MAP_AT = PAGE_BYTES
MAP_ENTRY = np.dtype(
    [("state", "<u4"), ("order", "<u4"), ("slot", "<u8"), ("header", "<u8"), ("check", "<u8")]
)
_ENTRY = struct.Struct("<IIQQQ")
_ENTRY_STATE = struct.Struct("<I")
_ENTRY_VALID = 0x4B4E4843
HEADERS_AT = MAP_AT + GRANULE_COUNT_MAX * MAP_ENTRY.itemsize


class Superblock(NamedTuple):
    """What a pool's files are of. Boot and name must be as they were for them to be taken back."""

    granule_shift: int
    size_bytes: int
    boot_id: str
    name_digest: bytes


def name_digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def map_bytes(granule_count: int) -> int:
    """Bytes from the beginning of the file to the end of this many entries of the chunk map."""
    return MAP_AT + granule_count * MAP_ENTRY.itemsize


def pack_superblock(superblock: Superblock, pool_id: bytes) -> bytes:
    raw = _SUPERBLOCK.pack(
        MAGIC, superblock.granule_shift, 0, superblock.size_bytes, pool_id,
        superblock.boot_id.encode(), superblock.name_digest,
    )  # fmt: skip
    return raw + _CHECK.pack(xxhash.xxh3_64_intdigest(raw))


def parse_superblock(raw: bytes | memoryview) -> tuple[Superblock, bytes] | None:
    """(superblock, pool identity); None if it is damaged or of another version."""
    body = bytes(raw[: _SUPERBLOCK.size])
    if len(raw) < _SUPERBLOCK.size + 8 or body[:8] != MAGIC:
        return None
    if _CHECK.unpack_from(raw, _SUPERBLOCK.size)[0] != xxhash.xxh3_64_intdigest(body):
        return None
    _, shift, _, size_bytes, pool_id, boot_id, digest = _SUPERBLOCK.unpack(body)
    return Superblock(shift, size_bytes, boot_id.decode("ascii", "replace"), digest), pool_id


def write_superblock(raw: memoryview, superblock: Superblock, pool_id: bytes) -> None:
    """The copy, then the first one: a crash tears at most one of them."""
    packed = pack_superblock(superblock, pool_id)
    for at in (_COPY_AT, 0):
        raw[at + 8 : at + len(packed)] = packed[8:]
        raw[at : at + 8] = packed[:8]


def read_superblock(raw: bytes | memoryview) -> tuple[Superblock, bytes] | None:
    """The first one, or the copy where that is damaged; None if both are."""
    return parse_superblock(raw[:_COPY_AT]) or parse_superblock(raw[_COPY_AT : 2 * _COPY_AT])


def read_generation_reservation(raw: memoryview) -> int:
    """Highest generation that may have been handed out, plus one; 0 if both cells are damaged."""
    best = 0
    for at in _CELLS_AT:
        value, check = _CELL.unpack_from(raw, at)
        if check == _cell_check(value):
            best = max(best, value)
    return best


def write_generation_reservation(raw: memoryview, value: int) -> None:
    """Two cells, one after the other: a crash tears at most one, and nothing above it is used."""
    for at in _CELLS_AT:
        _CELL.pack_into(raw, at, value, _cell_check(value))


def _cell_check(value: int) -> int:
    return xxhash.xxh3_64_intdigest(_CHECK.pack(value), seed=1)


def write_chunk(raw: memoryview, granule: int, order: int, chunk: Chunk) -> None:
    """Enters a chunk in the map: invalid, then its class, then valid."""
    at = MAP_AT + granule * MAP_ENTRY.itemsize
    check = _entry_check(granule, order, chunk.slot_bytes, chunk.header_bytes)
    _ENTRY_STATE.pack_into(raw, at, 0)
    _ENTRY.pack_into(raw, at, 0, order, chunk.slot_bytes, chunk.header_bytes, check)
    _ENTRY_STATE.pack_into(raw, at, _ENTRY_VALID)


def erase_chunk(raw: memoryview, granule: int) -> None:
    _ENTRY_STATE.pack_into(raw, MAP_AT + granule * MAP_ENTRY.itemsize, 0)


def read_chunks(
    raw: memoryview, granule_count: int
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """(granule, order, slot bytes, header bytes) of each valid entry, and the damaged granules."""
    entries = np.frombuffer(raw[MAP_AT : map_bytes(granule_count)], MAP_ENTRY)
    valid, damaged = [], []
    for granule in np.flatnonzero(entries["state"]).tolist():
        state, order, slot, header, check = entries[granule].item()
        if state == _ENTRY_VALID and check == _entry_check(granule, order, slot, header):
            valid.append((granule, order, slot, header))
        else:
            damaged.append(granule)
    return valid, damaged


def _entry_check(granule: int, order: int, slot_bytes: int, header_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQQ", granule, order, slot_bytes, header_bytes))
