"""Many blocks at a time: what every tier can do one by one, and recovered blocks as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvstore.core.errors import TierError
from kvstore.tiers.base import ROW, Source, StoredBlock, StoredColumns, Target, Tier
from kvstore.tiers.payload import as_bytes, digest


def columns_of(blocks: Iterable[StoredBlock]) -> StoredColumns:
    """The same blocks as columns."""
    rows, symbols = [], []
    for place, header, checksum, generation in blocks:
        rows.append(
            (
                place, generation, header.epoch, header.length, header.position, header.shard,
                header.space, header.root, header.key, header.parent_key, checksum,
            )
        )  # fmt: skip
        symbols.append(header.symbol)
    return StoredColumns(np.array(rows, ROW), symbols)


def write_each(tier: Tier, items: Sequence[tuple[int, Source]]) -> list[bytes]:
    """`Tier.write_many` for tiers that gain nothing from neighbours."""
    return [tier.write(place, source) for place, source in items]


def read_each(tier: Tier, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
    """`Tier.read_many` for tiers that gain nothing from neighbours."""
    return [_read(tier, place, target, length) for place, target in items]


def _read(tier: Tier, place: int, target: Target, length: int) -> bytes | None:
    try:
        tier.read(place, target, length)
    except TierError:
        return None
    return digest(as_bytes(target)[:length])
