"""Views: the store as status, spaces and tenants show it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import kvstore
from kvstore.core.views import SpaceView, StatusView, TenantView, TierView
from kvstore.store.parts import DISK, Parts
from kvstore.tiers.base import NO_USAGE, DeviceTier, Tier

if TYPE_CHECKING:
    from kvstore.store.kvstore import KVStore


def status_view(store: KVStore) -> StatusView:
    """What `kvstore status` tells."""
    parts = store.parts
    tiers = {} if parts.hbm is None else {"hbm": hbm_view(parts.hbm.tiers)}
    tiers |= {name: tier_view(tier) for name, tier in named_tiers(parts)}
    silence = store.promoter.silence or store.behind.silence
    if silence and not parts.tiers[DISK].problem:
        name = parts.tier_names[DISK]
        problem = f"{silence}; check the disk"
        tiers[name] = replace(tiers[name], state="degraded", problem=problem)
    problems = [f"{name}: {view.problem}" for name, view in tiers.items() if view.problem]
    state = "draining" if parts.draining else "degraded" if problems else "serving"
    return StatusView(
        state=state,
        reason="; ".join(problems),
        tiers=tiers,
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
        costs=tuple(parts.costs.views()),
        configured_policy=store.shadowing.guard.configured,
        policy_reason=store.shadowing.guard.reason,
        shadows=store.shadowing.views(),
        shadow_share=store.shadowing.share,
        shadow_request_count=store.shadowing.window_requests,
        what_if=store.shadowing.what_if(),
    )


def named_tiers(parts: Parts) -> Iterator[tuple[str, Tier]]:
    """Tiers of the index with their names, the fastest first."""
    yield from zip(parts.tier_names, parts.tiers, strict=True)


def tier_view(tier: Tier) -> TierView:
    usage, problem = tier.usage(), tier.problem
    return TierView(
        capacity_bytes=usage.capacity_bytes,
        used_bytes=usage.used_bytes,
        free_bytes=usage.free_bytes,
        resting_bytes=usage.resting_bytes,
        block_count=usage.block_count,
        state="degraded" if problem else "serving",
        problem=problem,
        # Only tiers over the machine's memory have pages to make present and to lock.
        prefaulted_bytes=getattr(tier, "prefaulted_bytes", 0),
        locked_bytes=getattr(tier, "locked_bytes", 0),
    )


def hbm_view(tiers: Sequence[DeviceTier]) -> TierView:
    """All GPUs' memory as one tier, and each by itself."""
    views = {tier.device_uuid: tier_view(tier) for tier in tiers}
    usage = sum((tier.usage() for tier in tiers), NO_USAGE)
    problem = "; ".join(view.problem for view in views.values() if view.problem)
    return TierView(
        **usage._asdict(), state="degraded" if problem else "serving", problem=problem,
        devices=views,
    )  # fmt: skip


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
        used = {
            name: accounts.space_used(number, space) for number, name in enumerate(parts.tier_names)
        }
        views.append(
            SpaceView(
                id=space.id,
                spec=space.spec,
                tenant=space.tenant,
                epoch=space.epoch,
                block_count=parts.index.blocks_of(space),
                attachment_count=attached.get(space.number, 0),
                used_bytes=used,
            )
        )
    return views


def tenant_views(parts: Parts) -> list[TenantView]:
    return [tenant_view(parts, tenant) for tenant in sorted(parts.known_tenants())]


def tenant_view(parts: Parts, tenant: str) -> TenantView:
    residency, names = parts.residency, parts.tier_names
    quotas = {name: residency.quota(tenant, number) for number, name in enumerate(names)}
    caps = {name: quota.cap_bytes for name, quota in quotas.items()}
    floors = {name: quota.floor_bytes for name, quota in quotas.items()}
    return TenantView(
        tenant=tenant,
        isolated=parts.pool_of(tenant) == tenant,
        used_bytes={
            name: residency.accounts.tenant_used(number, tenant)
            for number, name in enumerate(names)
        },
        cap_bytes={name: cap for name, cap in caps.items() if cap is not None},
        floor_bytes={name: floor for name, floor in floors.items() if floor is not None},
    )
