"""Layout of a segment file, and what each of its pages says; every page carries its own check.

    page 0           superblock: store, serial number, class, never written again
    pages 1 and 2    cells, written in turn: number of the last group that touched this segment
    page 3 ...       headers: whole pages for each slot, at a place that follows from its number
    then             payloads, back to back, each in whole pages

A header names segment and slot, so one that ends up elsewhere does not count. Of an encrypted
block it tells only these, the generation, and what opens the rest (codec 1).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from kvstore.tiers.base import BlockHeader
from kvstore.tiers.chunks import Chunk, slot_count
from kvstore.tiers.disk.entries import (
    SEALED_EXTRA_BYTES,
    VALUE,
    identity,
    key_id_of,
    parse_record,
    seal_record,
)
from kvstore.tiers.disk.io import PAGE, whole_pages
from kvstore.tiers.record import SlotRecord

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

VERSION = 1
VERSIONS_READ = (VERSION,)
"""What this program can take over: its own format, and the one before once there is one."""
STORE_ID_BYTES = 16
CELLS = (1, 2)
HEADER_BASE = 3 * PAGE
CHUNK_OVERHEAD = HEADER_BASE + 2 * PAGE
"""Of a chunk: superblock and cells, and two pages for what a file system keeps of the file."""

_CHECK_BYTES = 16
_SUPERBLOCK = struct.Struct("<8sI16sIQQQQQ")
_CELL = struct.Struct("<8sI16sIQ")
_HEADER = struct.Struct("<4sHHI12s16sIIQQQIII16s16s16s32s32s")
_SEALED = struct.Struct("<4sHHIIQI")
PLAIN_CODEC, SEALED_CODEC = 0, 1
_SUPERBLOCK_MAGIC = b"KVSEGMNT"
_CELL_MAGIC = b"KVGROUP\x00"
_HEADER_MAGIC = b"KVDH"


class Geometry(NamedTuple):
    """Where things lie in a segment; follows from its class and the size of its chunk."""

    payload_bytes: int
    header_bytes: int
    slot_count: int
    chunk_bytes: int

    @property
    def slot_bytes(self) -> int:
        return self.payload_bytes + self.header_bytes

    @property
    def payload_base(self) -> int:
        return HEADER_BASE + self.slot_count * self.header_bytes

    @property
    def file_bytes(self) -> int:
        return self.payload_base + self.slot_count * self.payload_bytes

    def header_at(self, index: int) -> int:
        return HEADER_BASE + index * self.header_bytes

    def payload_at(self, index: int) -> int:
        return self.payload_base + index * self.payload_bytes

    def is_sound(self, unit_shift: int) -> bool:
        """Whether a segment of this program can look so."""
        units = self.chunk_bytes >> unit_shift
        return (
            self.payload_bytes > 0
            and self.payload_bytes % PAGE == 0
            and 0 < self.header_bytes <= self.slot_bytes
            and self.header_bytes % PAGE == 0
            and units << unit_shift == self.chunk_bytes
            and units & (units - 1) == 0 < units
            and self.slot_count == slot_count(self.slot_bytes, self.chunk_bytes, CHUNK_OVERHEAD) > 0
        )


class Superblock(NamedTuple):
    store_id: bytes
    serial: int
    unit_bytes: int
    geometry: Geometry


def geometry_of(chunk: Chunk) -> Geometry:
    payload = chunk.slot_bytes - chunk.header_bytes
    return Geometry(payload, chunk.header_bytes, chunk.slot_count, chunk.size_bytes)


class SealedHeader(NamedTuple):
    """What an encrypted header tells without a key."""

    generation: int
    raw: bytes

    @property
    def key_id(self) -> int:
        return key_id_of(self.raw)


def header_bytes(symbol_bytes: int, is_sealed: bool = False) -> int:
    """Bytes of a slot's header with a symbol of at most this size: whole pages."""
    sealed = _SEALED.size + SEALED_EXTRA_BYTES + VALUE.size
    return whole_pages((sealed if is_sealed else _HEADER.size) + symbol_bytes + _CHECK_BYTES)


def pack_superblock(superblock: Superblock) -> bytes:
    store_id, serial, unit_bytes, geometry = superblock
    body = _SUPERBLOCK.pack(_SUPERBLOCK_MAGIC, VERSION, store_id, serial, unit_bytes, *geometry)
    return _sealed(body, PAGE, 0)


def parse_superblock(raw: bytes) -> Superblock | None:
    """None if it is damaged or of another version."""
    version = superblock_version(raw)
    if version not in VERSIONS_READ:
        return None
    _, _, store_id, serial, unit_bytes, *numbers = _SUPERBLOCK.unpack_from(raw)
    return Superblock(store_id, serial, unit_bytes, Geometry(*numbers))


def superblock_version(raw: bytes) -> int | None:
    """The version of a sound superblock, known or not; None if it is damaged or none."""
    if len(raw) != PAGE or raw[:8] != _SUPERBLOCK_MAGIC or not _is_sealed(raw, 0):
        return None
    return int(_SUPERBLOCK.unpack_from(raw)[1])


def pack_cell(store_id: bytes, serial: int, sequence: int) -> bytes:
    body = _CELL.pack(_CELL_MAGIC, VERSION, store_id, serial, sequence)
    return _sealed(body, PAGE, 0)


def parse_cell(raw: bytes, store_id: bytes, serial: int) -> int:
    """The group a cell names; 0 if the cell is empty, torn or another segment's."""
    if len(raw) != PAGE or raw[:8] != _CELL_MAGIC or not _is_sealed(raw, 0):
        return 0
    _, version, store, number, sequence = _CELL.unpack_from(raw)
    known = version in VERSIONS_READ and (store, number) == (store_id, serial)
    return sequence if known else 0


def pack_header(
    record: SlotRecord, store_id: bytes, serial: int, index: int, size: int,
    vault: Vault | None = None,
) -> bytes:  # fmt: skip
    """All pages of the header of slot `index`; encrypted if the payload is."""
    if record.seal:
        assert vault is not None, "sealed records are written with keys"
        return _pack_sealed(record, store_id, serial, index, size, vault)
    header = record.header
    body = (
        _HEADER.pack(
            _HEADER_MAGIC, VERSION, 0, 0, b"", b"", serial, index, record.generation,
            header.epoch, header.length, header.position, header.shard, len(header.symbol),
            header.key, header.parent_key, record.checksum, header.space, header.root,
        )
        + header.symbol
    )  # fmt: skip
    assert len(body) + _CHECK_BYTES <= size, "the symbol is larger than was reserved for"
    return _sealed(body, size, _seed(store_id))


def _pack_sealed(
    record: SlotRecord, store_id: bytes, serial: int, index: int, size: int, vault: Vault
) -> bytes:
    sealed = seal_record(record, vault, identity(b"header", store_id, serial, index))
    head = _SEALED.pack(
        _HEADER_MAGIC, VERSION, SEALED_CODEC, serial, index, record.generation, len(sealed)
    )
    assert len(head) + len(sealed) + _CHECK_BYTES <= size, "the symbol is larger than reserved for"
    return _sealed(head + sealed, size, _seed(store_id))


def parse_sealed(raw: bytes, store_id: bytes, serial: int, index: int) -> SealedHeader | None:
    """The encrypted header of slot `index`, unopened; None if it is anything else."""
    if len(raw) < PAGE or raw[:4] != _HEADER_MAGIC or not _is_sealed(raw, _seed(store_id)):
        return None
    _, version, codec, in_segment, in_slot, generation, length = _SEALED.unpack_from(raw)
    if version not in VERSIONS_READ or (codec, in_segment, in_slot) != (
        SEALED_CODEC, serial, index,
    ):  # fmt: skip
        return None
    if not generation or not SEALED_EXTRA_BYTES <= length <= len(raw) - _SEALED.size - _CHECK_BYTES:
        return None
    return SealedHeader(generation, raw[_SEALED.size : _SEALED.size + length])


def parse_header(
    raw: bytes, store_id: bytes, serial: int, index: int, vault: Vault | None = None
) -> SlotRecord | None:
    """The header of slot `index`; None if there is none, it is torn, or another slot's.

    Of an encrypted one also where its key, or that of the payload, is not there. With a vault one
    in clear does not count.
    """
    if raw[:4] != _HEADER_MAGIC or not _is_sealed(raw, _seed(store_id)):
        return None
    if int.from_bytes(raw[6:8], "little") == SEALED_CODEC:
        sealed = parse_sealed(raw, store_id, serial, index)
        return sealed and open_header(sealed, store_id, serial, index, vault)
    if vault is not None:
        return None
    (
        _, version, codec, key_id, _, _, in_segment, in_slot, generation, epoch, length, position,
        shard, symbol_bytes, key, parent_key, checksum, space, root,
    ) = _HEADER.unpack_from(raw)  # fmt: skip
    if version not in VERSIONS_READ or (codec, key_id, in_segment, in_slot) != (
        PLAIN_CODEC, 0, serial, index,
    ):  # fmt: skip
        return None
    if _HEADER.size + symbol_bytes + _CHECK_BYTES > len(raw) or not generation:
        return None
    symbol = raw[_HEADER.size : _HEADER.size + symbol_bytes]
    header = BlockHeader(space, root, key, parent_key, position, shard, epoch, length, symbol)
    return SlotRecord(header, checksum, generation)


def open_header(
    sealed: SealedHeader, store_id: bytes, serial: int, index: int, vault: Vault | None
) -> SlotRecord | None:
    """What an encrypted header says; None where a key is missing, or it is not genuine."""
    if vault is None:
        return None
    record = parse_record(sealed.raw, vault, identity(b"header", store_id, serial, index))
    return record if record is not None and record.generation == sealed.generation else None


def _seed(store_id: bytes) -> int:
    return int.from_bytes(store_id[:8], "little")


def _sealed(body: bytes, size: int, seed: int) -> bytes:
    padded = body.ljust(size - _CHECK_BYTES, b"\0")
    return padded + xxhash.xxh3_128_digest(padded, seed)


def _is_sealed(raw: bytes, seed: int) -> bool:
    return xxhash.xxh3_128_digest(raw[:-_CHECK_BYTES], seed) == raw[-_CHECK_BYTES:]
