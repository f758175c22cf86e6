"""Slot header: what lies beside a payload in a pool, packed so that a torn one shows.

    offset  bytes
    0       8      magic `KVSH`, version, state (all zero: nothing valid here)
    8       8      xxh3_64 over everything after it, seeded with the pool's identity
    16      160    slot offset, generation, length, position, shard, epoch, symbol length,
                   key, parent key, payload checksum, space, root
    176     ...    symbol

The slot's own offset is part of it, so a header that ends up elsewhere does not count. A header
is made valid by its first 8 bytes, written last, and invalid by zeroing them first.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvstore.tiers.base import BlockHeader

HEADER_ALIGN = 64
VALID = struct.pack("<4sHH", b"KVSH", 1, 1)
VALID_WORD = int.from_bytes(VALID, "little")
INVALID = bytes(8)
GENERATION_AT = 24

_CHECK = struct.Struct("<Q")
_BODY = struct.Struct("<QQQIIQII16s16s16s32s32s")
_BODY_AT = 16
_FIXED_BYTES = _BODY_AT + _BODY.size


class SlotRecord(NamedTuple):
    """A parsed slot header."""

    header: BlockHeader
    checksum: bytes
    generation: int
    seal: bytes = b""
    """How the payload is encrypted; empty where it is not."""


def header_bytes(symbol_bytes: int) -> int:
    """Bytes a slot header takes with a symbol of at most this size."""
    return -(-(_FIXED_BYTES + symbol_bytes) // HEADER_ALIGN) * HEADER_ALIGN


def pack(header: BlockHeader, checksum: bytes, generation: int, offset: int, seed: int) -> bytes:
    """Header of the slot at byte `offset`, valid."""
    body = (
        _BODY.pack(
            offset, generation, header.length, header.position, header.shard, header.epoch,
            len(header.symbol), 0, header.key, header.parent_key, checksum, header.space,
            header.root,
        )
        + header.symbol
    )  # fmt: skip
    return VALID + _CHECK.pack(xxhash.xxh3_64_intdigest(body, seed)) + body


def store(headers: memoryview, at: int, packed: bytes) -> None:
    """Writes a packed header at byte `at` so that it turns valid with its last store."""
    headers[at : at + 8] = INVALID
    headers[at + 8 : at + len(packed)] = packed[8:]
    headers[at : at + 8] = VALID


def erase(headers: memoryview, at: int, size: int) -> None:
    """Makes the header in `size` bytes at byte `at` invalid, then removes what it said."""
    headers[at : at + 8] = INVALID
    headers[at + 8 : at + size] = bytes(size - 8)


def parse(raw: bytes | memoryview, offset: int, seed: int) -> SlotRecord | None:
    """The header of the slot at byte `offset`; None if it is not valid, torn or another slot's."""
    if raw[:8] != VALID or len(raw) < _FIXED_BYTES:
        return None
    (
        at, generation, length, position, shard, epoch, symbol_length, _,
        key, parent_key, checksum, space, root,
    ) = _BODY.unpack_from(raw, _BODY_AT)  # fmt: skip
    end = _FIXED_BYTES + symbol_length
    if at != offset or end > len(raw):
        return None
    if _CHECK.unpack_from(raw, 8)[0] != xxhash.xxh3_64_intdigest(raw[_BODY_AT:end], seed):
        return None
    header = BlockHeader(
        space, root, key, parent_key, position, shard, epoch, length, bytes(raw[_FIXED_BYTES:end])
    )
    return SlotRecord(header, checksum, generation)
