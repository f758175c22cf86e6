"""Blocks found at a start, as columns: the slot of each, and all that is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kvstore.tiers.base import ROW, BlockHeader
from kvstore.tiers.disk.index import CHECK_BYTES, VALUE, pack_key, pack_value
from kvstore.tiers.record import SlotRecord

_PLACE_BYTES = 8
# An entry of the index has the fields of a row but for the place, in the same order and packing.
assert ROW.itemsize == _PLACE_BYTES + VALUE.size, "entries and rows no longer match"


class Found(NamedTuple):
    """Equally long columns; places are set when segments have theirs."""

    serials: np.ndarray
    indexes: np.ndarray
    rows: np.ndarray
    symbols: list[bytes]

    def only(self, mask: np.ndarray) -> Found:
        """The rows where `mask` is True."""
        if mask.all():
            return self
        symbols = [self.symbols[i] for i in np.flatnonzero(mask).tolist()]
        return Found(self.serials[mask], self.indexes[mask], self.rows[mask], symbols)

    def plus(self, other: Found) -> Found:
        if not len(other.rows):
            return self
        return Found(
            np.concatenate([self.serials, other.serials]),
            np.concatenate([self.indexes, other.indexes]),
            np.concatenate([self.rows, other.rows]),
            self.symbols + other.symbols,
        )

    def keys(self) -> list[bytes]:
        """Keys in the index."""
        return [
            pack_key(*pair)
            for pair in zip(self.serials.tolist(), self.indexes.tolist(), strict=True)
        ]

    def entries(self) -> list[tuple[bytes, bytes]]:
        """Keys and values for the index."""
        return [
            (key, pack_value(key, record_of(row, symbol)))
            for key, row, symbol in zip(self.keys(), self.rows, self.symbols, strict=True)
        ]


def record_of(row: np.void, symbol: bytes) -> SlotRecord:
    """One row as a record."""
    (
        _, generation, epoch, length, position, shard, space, root, key, parent_key, checksum,
    ) = cast(tuple[Any, ...], row.tolist())  # fmt: skip
    header = BlockHeader(space, root, key, parent_key, position, shard, epoch, length, symbol)
    return SlotRecord(header, checksum, generation)


def nothing() -> Found:
    return of_records([])


def of_records(records: Iterable[tuple[int, int, SlotRecord]]) -> Found:
    """(serial, slot, record) of each block."""
    serials, indexes, rows, symbols = [], [], [], []
    for serial, index, (header, checksum, generation) in records:
        serials.append(serial)
        indexes.append(index)
        rows.append(
            (
                -1, generation, header.epoch, header.length, header.position, header.shard,
                header.space, header.root, header.key, header.parent_key, checksum,
            )
        )  # fmt: skip
        symbols.append(header.symbol)
    return Found(
        np.array(serials, np.int64), np.array(indexes, np.int64), np.array(rows, ROW), symbols
    )


def of_entries(keys: Sequence[bytes], values: Sequence[bytes]) -> Found:
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
    symbols = [value[VALUE.size : -CHECK_BYTES] for value in values]
    return Found(pairs[:, 0].copy(), pairs[:, 1].copy(), rows, symbols)
