"""Views: the store as status, spaces and tenants show it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import kvstore
from kvstore.core.views import SpaceView, StatusView, TenantView, TierView
from kvstore.store.parts import HOST, TIER_NAMES, Parts

if TYPE_CHECKING:
    from kvstore.store.kvstore import KVStore


def status_view(store: KVStore) -> StatusView:
    """What `kvstore status` tells."""
    parts = store.parts
    return StatusView(
        state="draining" if parts.draining else "serving",
        reason="",
        tiers={TIER_NAMES[HOST]: tier_view(parts)},
        session_count=len(parts.sessions),
        lease_count=len(parts.leases),
        space_count=len(parts.spaces),
        reservation_count=len(store.reservations),
        pin_count=len(store.pins),
        block_count=parts.index.block_count,
        leased_bytes=parts.leases.leased_bytes,
        pinned_bytes=sum(store.pins.by_tenant.values()),
        reserved_bytes=sum(store.reservations.reserved_bytes.values()),
        readopted_blocks=parts.readopted_blocks,
        policy=parts.residency.policy_name,
        version=kvstore.__version__,
        pid=os.getpid(),
        uptime_seconds=parts.clock.now() - store.started,
    )


def tier_view(parts: Parts) -> TierView:
    usage, host = parts.host.usage(), parts.host
    return TierView(
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        free_bytes=usage.free_bytes,
        resting_bytes=usage.resting_bytes,
        block_count=usage.block_count,
        # Only tiers over the machine's memory have pages to make present and to lock.
        prefaulted_bytes=getattr(host, "prefaulted_bytes", 0),
        locked_bytes=getattr(host, "locked_bytes", 0),
    )


def space_views(parts: Parts) -> list[SpaceView]:
    """Every space with its identity and what it holds."""
    attached: dict[int, int] = {}
    for session in parts.sessions.values():
        for attachment in session.attachments.values():
            number = attachment.space.number
            attached[number] = attached.get(number, 0) + 1
    accounts = parts.residency.accounts
    views = []
    for space in parts.spaces.values():
        used = accounts.space_used(HOST, space)
        views.append(
            SpaceView(
                id=space.id,
                spec=space.spec,
                tenant=space.tenant,
                epoch=space.epoch,
                block_count=used // (space.slot_bytes * space.shard_count),
                attachment_count=attached.get(space.number, 0),
                used_bytes={TIER_NAMES[HOST]: used},
            )
        )
    return views


def tenant_views(parts: Parts) -> list[TenantView]:
    return [tenant_view(parts, tenant) for tenant in sorted(parts.known_tenants())]


def tenant_view(parts: Parts, tenant: str) -> TenantView:
    quota = parts.residency.quota(tenant, HOST)
    name = TIER_NAMES[HOST]
    return TenantView(
        tenant=tenant,
        isolated=parts.pool_of(tenant) == tenant,
        used_bytes={name: parts.residency.accounts.tenant_used(HOST, tenant)},
        cap_bytes={} if quota.cap_bytes is None else {name: quota.cap_bytes},
        floor_bytes={} if quota.floor_bytes is None else {name: quota.floor_bytes},
    )
