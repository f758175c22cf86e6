"""The fields of a block as bytes: in the index in clear, or sealed there and in its header.

    sealed      key id, salt, counter  |  encrypted: seal of the payload, fields, symbol  |  tag

What a sealed record says goes together with the place it was written for: at another place, or
in another store, it does not open.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from kvstore.tiers.base import BlockHeader
from kvstore.tiers.record import SlotRecord

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

VALUE = struct.Struct("<QQQII32s32s16s16s16s")
SEAL = struct.Struct("<I16sQ16s")
"""How a payload is encrypted: key id, salt, counter, tag."""
SLOT_SEAL = np.dtype([("stream", "<u4"), ("counter", "<u8"), ("tag", "V16")])
"""A seal in memory: the stream stands for key id and salt; 0 for a payload in clear."""
SEALED_HEAD = struct.Struct("<I16sQ")
TAG_BYTES = 16
SEALED_EXTRA_BYTES = SEALED_HEAD.size + SEAL.size + TAG_BYTES
PLAIN = bytes(SEAL.size)
"""Stands where a seal would, of a payload that is not encrypted."""
_KEY_ID = struct.Struct("<I")
_PLACE = struct.Struct("<16sII")


def pack_fields(record: SlotRecord) -> bytes:
    header = record.header
    return (
        VALUE.pack(
            record.generation, header.epoch, header.length, header.position, header.shard,
            header.space, header.root, header.key, header.parent_key, record.checksum,
        )
        + header.symbol
    )  # fmt: skip


def parse_fields(body: bytes, seal: bytes = b"") -> SlotRecord:
    (
        generation, epoch, length, position, shard, space, root, key, parent_key, checksum,
    ) = VALUE.unpack_from(body)  # fmt: skip
    symbol = body[VALUE.size :]
    header = BlockHeader(space, root, key, parent_key, position, shard, epoch, length, symbol)
    return SlotRecord(header, checksum, generation, seal)


def identity(what: bytes, store_id: bytes, serial: int, slot: int) -> bytes:
    """What is authenticated beside encrypted bytes: the kind of thing they are, and their place."""
    return what + _PLACE.pack(store_id, serial, slot)


def key_id_of(raw: bytes) -> int:
    """Which key a sealed record, or a seal, needs; 0 for none."""
    key_id: int = _KEY_ID.unpack_from(raw)[0]
    return key_id


def seal_record(record: SlotRecord, vault: Vault, place: bytes) -> bytes:
    return vault.seal(record.seal + pack_fields(record), place)


def open_record(raw: bytes, vault: Vault, place: bytes) -> bytes | None:
    """Seal, fields and symbol of a sealed record; None if it is not what was sealed for there."""
    if len(raw) < SEALED_EXTRA_BYTES + VALUE.size:
        return None
    return vault.open(raw, place)


def parse_record(raw: bytes, vault: Vault, place: bytes) -> SlotRecord | None:
    """None too where the payload needs a key that is not there."""
    body = open_record(raw, vault, place)
    if body is None or not vault.has(key_id_of(body)):
        return None
    return parse_fields(body[SEAL.size :], body[: SEAL.size])
