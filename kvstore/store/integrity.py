"""Integrity: a recount of everything that the store keeps books of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.policies.index import Span
from kvstore.store.parts import DISK, HOST, Parts

if TYPE_CHECKING:
    from kvstore.store.kvstore import KVStore


def check_integrity(store: KVStore) -> None:
    """Recounts everything everywhere; raises AssertionError."""
    parts = store.parts
    parts.leases.flush()
    parts.index.check_integrity()
    parts.residency.check_integrity()
    for tier in parts.tiers:
        tier.check_integrity()
    parts.leases.check_integrity()
    store.reservations.check_integrity()
    if parts.hbm is not None:
        parts.hbm.check_integrity()
    _check_slots(store)
    _check_disk_slots(parts)


def _check_slots(store: KVStore) -> None:
    """Every slot in use belongs to a block, or to a put under way."""
    parts = store.parts
    if parts.readers or any(s.symbol_bytes_max > s.slot_bytes for s in parts.spaces.values()):
        return  # slots that blocks are moved to, or that are larger than their payload
    used = store.reservations.slot_bytes() + sum(
        run.root.space.slot_bytes * int((parts.index.places([span], HOST, shard) >= 0).sum())
        for run in parts.index.runs()
        for span in [Span(run, 0, run.count)]
        for shard in range(run.root.space.shard_count)
    )
    assert used == parts.host.usage().used_bytes, "slots are in use that nobody knows"


def _check_disk_slots(parts: Parts) -> None:
    """On disk every slot in use belongs to a block."""
    if parts.readers or parts.disk is None:
        return
    slots = sum(run.resident_in(DISK) for run in parts.index.runs())
    assert slots == parts.disk.usage().block_count, "disk slots that nobody knows"
