"""Takes blocks of an earlier life back: found by place, adopted many at once, the rest removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.block import SLOT_SHIFT
from kvstore.tiers.base import StoredBlock, StoredColumns
from kvstore.tiers.chunks import SlotState
from kvstore.tiers.disk.books import DiskBooks
from kvstore.tiers.disk.found import Found, nothing, record_of

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault


class Readoption:
    """What a start found, until `finish`."""

    def __init__(self, books: DiskBooks, blocks: Found, vault: Vault | None = None) -> None:
        self._books, self._blocks = books, blocks
        self._order: np.ndarray | None = None
        if vault is not None:
            self._keep_seals(vault)

    def _keep_seals(self, vault: Vault) -> None:
        """Of every block that was found: it may be read before it is adopted."""
        offsets = self._blocks.rows["place"] << SLOT_SHIFT
        heads = self._books.slab.chunk_heads(offsets)
        for head in np.unique(heads).tolist():
            segment, here = self._books.segments[head], heads == head
            indexes = (offsets[here] - head) // segment.chunk.slot_bytes
            seals = self._blocks.seals[here].tolist()
            segment.seals[indexes] = [vault.compact(seal) for seal in seals]

    def columns(self) -> StoredColumns:
        return StoredColumns(self._blocks.rows, self._blocks.symbols)

    def blocks(self) -> Iterator[StoredBlock]:
        for row, symbol in zip(self._blocks.rows, self._blocks.symbols, strict=True):
            header, checksum, generation, _ = record_of(row, symbol)
            yield StoredBlock(int(row["place"]), header, checksum, generation)

    def adopt(self, places: np.ndarray) -> None:
        """PUBLISHED again, under the old generations."""
        places = np.asarray(places, np.int64)
        rows = self._rows_of(places)
        checksum_column = self._blocks.rows["checksum"]
        generation_column = self._blocks.rows["generation"]
        offsets = places << SLOT_SHIFT
        slab = self._books.slab
        heads = slab.chunk_heads(offsets)
        with self._books.lock:
            for head in np.unique(heads).tolist():
                segment, here = self._books.segments[head], heads == head
                indexes = (offsets[here] - head) // segment.chunk.slot_bytes
                slab.adopt_many(segment.chunk, indexes)
                checksums = np.frombuffer(checksum_column[rows[here]].tobytes(), np.uint8)
                segment.checksums[indexes] = checksums.reshape(-1, 16)
                segment.generations[indexes] = generation_column[rows[here]]

    def _rows_of(self, places: np.ndarray) -> np.ndarray:
        """Which rows these places have."""
        known = self._blocks.rows["place"]
        if self._order is None:
            self._order = np.argsort(known, kind="stable")
        at = np.searchsorted(known, places, sorter=self._order)
        rows = self._order[np.minimum(at, len(known) - 1)] if len(known) else at
        assert len(known) or not len(places), "nothing was recovered"
        assert (known[rows] == places).all(), "a place was not recovered"
        return rows

    def finish(self) -> None:
        """Slots without a block are free; those of blocks not adopted with the next commit."""
        slab = self._books.slab
        stored = self._blocks.rows["place"].copy() << SLOT_SHIFT
        heads = slab.chunk_heads(stored)
        with self._books.lock:
            for chunk in list(slab.chunks()):
                resting = np.flatnonzero(slab.states(chunk) == SlotState.RESTING)
                here = (stored[heads == chunk.offset] - chunk.offset) // chunk.slot_bytes
                held = np.isin(resting, here)
                for index in resting[held].tolist():
                    place = (chunk.offset + index * chunk.slot_bytes) >> SLOT_SHIFT
                    self._books.removals[place] = True
                slab.free_many(chunk, resting[~held])
        self._blocks = nothing()
