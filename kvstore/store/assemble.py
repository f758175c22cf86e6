"""Puts a store together from its tiers, clock and mover; daemon and in-process stores both do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from kvstore.core.clock import Clock
from kvstore.core.config import Config
from kvstore.core.lease import Lease
from kvstore.core.recorder import NO_RECORDER, Recorder
from kvstore.mover import Mover
from kvstore.policies.index import PrefixIndex
from kvstore.policies.residency import Residency
from kvstore.store.costs import CostBook
from kvstore.store.decisions import DecisionLog
from kvstore.store.journal import Journal
from kvstore.store.kvstore import KVStore
from kvstore.store.leases import LeaseTable
from kvstore.store.measured import MeasuredMover
from kvstore.store.parts import DISK, HOST, EventSink, Parts, SpaceRecord
from kvstore.store.retire import RetiredSlots
from kvstore.tiers.base import AddressableTier, DeviceTier, Tier

NO_BLOCK_LIMIT = 1 << 62


def assemble(
    config: Config,
    clock: Clock,
    host: AddressableTier,
    record: SpaceRecord,
    mover: Mover,
    events: EventSink,
    defer: Callable[[Callable[[], None]], None],
    boot_id: str,
    recorder: Recorder = NO_RECORDER,
    disk: Tier | None = None,
    journal: Journal | None = None,
    hbm: Sequence[DeviceTier] = (),
) -> KVStore:
    """A store over `host`, `disk` and `hbm`; `defer` runs a callable on the owner thread soon.

    Of `hbm` there is a tier for each GPU. A `journal` gets everything that index and residency are
    told.
    """
    # Ids of an earlier life must answer NOT_FOUND, so each life begins at its own wall clock.
    ids = count(max(1, int(clock.wall() * 1e6)) << 8)
    residency = Residency(config.policy.eviction)
    tiers: tuple[Tier, ...] = (host,) if disk is None else (host, disk)
    index = PrefixIndex(len(tiers), residency, config.index.max_blocks or NO_BLOCK_LIMIT)
    residency.attach(index)
    if journal is not None:
        index, residency = journal.follow(index, residency)
    retired = tuple(RetiredSlots(tier) for tier in tiers)

    decisions = DecisionLog(config.limits.decisions_kept, clock, recorder)

    def lease_ended(lease: Lease, reason: str) -> None:
        index.unanchor(lease.anchor)
        if lease.remains is not None:
            index.unanchor(lease.remains)
        for slots in retired:
            slots.reader_ended(lease.id)
        if parts.hbm is not None:
            parts.hbm.lease_ended(lease.id)
        recorder.lease_ended(reason)
        decisions.lease_ended(lease.decision)

    costs = CostBook(config.tiers.disk.path)
    parts = Parts(
        config=config,
        clock=clock,
        index=index,
        residency=residency,
        tiers=tiers,
        mover=MeasuredMover(mover, clock, costs),
        events=events,
        recorder=recorder,
        record=record,
        defer=defer,
        next_id=lambda: next(ids),
        leases=LeaseTable(clock, config.limits.lease_ttl_seconds, lambda: next(ids), lease_ended),
        retired=retired,
        decisions=decisions,
        costs=costs,
    )
    _set_quotas(residency, config.tenants, disk is not None)
    return KVStore(parts, boot_id, hbm)


def _set_quotas(residency: Residency, tenants: Any, disk: bool) -> None:
    for tenant in tenants:
        cap = None if tenant.host_cap is None else int(tenant.host_cap)
        floor = None if tenant.host_floor is None else int(tenant.host_floor)
        residency.set_quota(tenant.name, HOST, cap, floor)
        if disk:
            cap = None if tenant.disk_cap is None else int(tenant.disk_cap)
            floor = None if tenant.disk_floor is None else int(tenant.disk_floor)
            residency.set_quota(tenant.name, DISK, cap, floor)
