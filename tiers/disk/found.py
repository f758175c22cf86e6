"""Blocks found at a start, as columns: the slot of each, and all that is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kvstore.tiers.base import ROW, BlockHeader
from kvstore.tiers.disk.entries import PLAIN, SEAL, VALUE
from kvstore.tiers.disk.index import CHECK_BYTES, pack_key
from kvstore.tiers.record import SlotRecord

_PLACE_BYTES = 8
SEAL_COLUMN = np.dtype(f"V{SEAL.size}")
# An entry of the index has the fields of a row but for the place, in the same order and packing.
assert ROW.itemsize == _PLACE_BYTES + VALUE.size, "entries and rows no longer match"


class Found(NamedTuple):
    """Equally long columns; places are set when segments have theirs.

    `seals` say how payloads are encrypted, zeros for those in clear.
    """

    serials: np.ndarray
    indexes: np.ndarray
    rows: np.ndarray
    symbols: list[bytes]
    seals: np.ndarray

    def only(self, mask: np.ndarray) -> Found:
        """The rows where `mask` is True."""
        if mask.all():
            return self
        symbols = [self.symbols[i] for i in np.flatnonzero(mask).tolist()]
        return Found(
            self.serials[mask], self.indexes[mask], self.rows[mask], symbols, self.seals[mask]
        )

    def plus(self, other: Found) -> Found:
        if not len(other.rows):
            return self
        return Found(
            np.concatenate([self.serials, other.serials]),
            np.concatenate([self.indexes, other.indexes]),
            np.concatenate([self.rows, other.rows]),
            self.symbols + other.symbols,
            np.concatenate([self.seals, other.seals]),
        )

    def keys(self) -> list[bytes]:
        """Keys in the index."""
        return [
            pack_key(*pair)
            for pair in zip(self.serials.tolist(), self.indexes.tolist(), strict=True)
        ]

    @property
    def are_sealed(self) -> np.ndarray:
        """Which payloads are encrypted."""
        key_ids = self.seals.view(np.uint8).reshape(-1, SEAL.size)[:, :4]
        return np.asarray(key_ids.any(axis=1))

    def record(self, at: int) -> SlotRecord:
        """One of them."""
        return record_of(self.rows[at], self.symbols[at], self.seals[at].item())


def record_of(row: np.void, symbol: bytes, seal: bytes = PLAIN) -> SlotRecord:
    """One row as a record."""
    (
        _, generation, epoch, length, position, shard, space, root, key, parent_key, checksum,
    ) = cast(tuple[Any, ...], row.tolist())  # fmt: skip
    header = BlockHeader(space, root, key, parent_key, position, shard, epoch, length, symbol)
    return SlotRecord(header, checksum, generation, b"" if seal == PLAIN else seal)


def nothing() -> Found:
    return of_records([])


def of_records(records: Iterable[tuple[int, int, SlotRecord]]) -> Found:
    """(serial, slot, record) of each block."""
    serials, indexes, rows, symbols, seals = [], [], [], [], []
    for serial, index, (header, checksum, generation, seal) in records:
        serials.append(serial)
        indexes.append(index)
        rows.append(
            (
                -1, generation, header.epoch, header.length, header.position, header.shard,
                header.space, header.root, header.key, header.parent_key, checksum,
            )
        )  # fmt: skip
        symbols.append(header.symbol)
        seals.append(seal or PLAIN)
    return Found(
        np.array(serials, np.int64), np.array(indexes, np.int64), np.array(rows, ROW), symbols,
        np.array(seals, SEAL_COLUMN),
    )  # fmt: skip


def of_sealed(keys: Sequence[bytes], bodies: Sequence[bytes]) -> Found:
    """Entries of encrypted blocks, opened: their seals, then as `of_entries`, without a check."""
    if not keys:
        return nothing()
    seals = b"".join([body[: SEAL.size] for body in bodies])
    fields = of_entries(keys, [body[SEAL.size :] for body in bodies], 0)
    return fields._replace(seals=np.frombuffer(seals, SEAL_COLUMN).copy())


def of_entries(
    keys: Sequence[bytes], values: Sequence[bytes], check_bytes: int = CHECK_BYTES
) -> Found:
    """Entries of the index, checked before."""
    pairs = np.frombuffer(b"".join(keys), ">u4").reshape(-1, 2).astype(np.int64)
    rows = np.empty(len(values), ROW)
    rows["place"] = -1
    table = rows.view(np.uint8).reshape(len(values), ROW.itemsize)[:, _PLACE_BYTES:]
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    for size in np.unique(sizes).tolist():
        where = np.flatnonzero(sizes == size).tolist()
        raw = np.frombuffer(b"".join([values[i] for i in where]), np.uint8)
        fields = raw.reshape(len(where), size)[:, : VALUE.size]
        if len(where) == len(values):
            table[:] = fields  # the usual case, and several times as fast
        else:
            table[where] = fields
    symbols = [value[VALUE.size : len(value) - check_bytes] for value in values]
    seals = np.zeros(len(values), SEAL_COLUMN)
    return Found(pairs[:, 0].copy(), pairs[:, 1].copy(), rows, symbols, seals)
