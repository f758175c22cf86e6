"""Accounts: bytes in use by tier, pool, tenant and space, and what each tenant may use."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.errors import InvalidRequest
from kvstore.core.space import Space
from kvstore.policies.index import PrefixIndex
from kvstore.policies.index.cells import place_bytes, stride_of

NO_LIMIT_BYTES = 1 << 62


def pool_in(tier: int, pool: str) -> str:
    """The pool of `tier` that blocks of a space with this host pool lie in.

    Only the memory that clients map (tier 0) is divided between isolated tenants.
    """
    return "" if tier else pool


class Quota(NamedTuple):
    """A tenant's share of a tier; None is no limit, no protection."""

    cap_bytes: int | None = None
    floor_bytes: int | None = None


class Accounts:
    """Bytes of reserved and filled slots; what rests in a tier after a drop is not counted."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], int] = {}
        self._pool_tenants: dict[tuple[int, str], dict[str, int]] = {}
        self._tenants: dict[tuple[int, str], int] = {}
        self._spaces: dict[tuple[int, bytes], int] = {}
        self._quotas: dict[tuple[int, str], Quota] = {}
        # Keys of a space's entries in these tables: they are written for every run that moves.
        self._entries: dict[tuple[int, bytes], tuple[Any, dict[str, int], Any]] = {}

    def add(self, space: Space, tier: int, slots: int) -> None:
        """`slots` more (or fewer) are in use."""
        size = slots * space.slot_bytes
        entries = self._entries.get((tier, space.id))
        if entries is None:
            pool = (tier, pool_in(tier, space.pool))
            tenants = self._pool_tenants.setdefault(pool, {})
            entries = self._entries[tier, space.id] = (pool, tenants, (tier, space.tenant))
        _add(self._pools, entries[0], size)
        _add(entries[1], space.tenant, size)
        _add(self._tenants, entries[2], size)
        _add(self._spaces, (tier, space.id), size)

    def used(self, tier: int, pool: str | None = None) -> int:
        """Bytes in use in a pool, or in all pools of a tier."""
        if pool is not None:
            return self._pools.get((tier, pool), 0)
        return sum(size for (t, _), size in self._pools.items() if t == tier)

    def tenant_used(self, tier: int, tenant: str) -> int:
        return self._tenants.get((tier, tenant), 0)

    def space_used(self, tier: int, space: Space) -> int:
        return self._spaces.get((tier, space.id), 0)

    def tenants(self, tier: int, pool: str) -> dict[str, None]:
        """Tenants that have bytes in a pool, in an order that a replay has too."""
        return dict.fromkeys(self._pool_tenants.get((tier, pool), ()))

    def set_quota(
        self, tenant: str, tier: int, cap_bytes: int | None, floor_bytes: int | None
    ) -> None:
        """Raises InvalidRequest for negative sizes or a floor above the cap."""
        for name, value in (("cap_bytes", cap_bytes), ("floor_bytes", floor_bytes)):
            if value is not None and value < 0:
                raise InvalidRequest(f"{name} is {value}; pass 0 or more bytes, or none")
        if cap_bytes is not None and (floor_bytes or 0) > cap_bytes:
            raise InvalidRequest(
                f"floor_bytes is {floor_bytes}, above cap_bytes {cap_bytes}; lower the floor"
            )
        if cap_bytes is None and not floor_bytes:
            self._quotas.pop((tier, tenant), None)
        else:
            self._quotas[tier, tenant] = Quota(cap_bytes, floor_bytes)

    @property
    def quotas(self) -> dict[tuple[int, str], Quota]:
        """All there are, by tier and tenant."""
        return dict(self._quotas)

    def quota(self, tenant: str, tier: int) -> Quota:
        return self._quotas.get((tier, tenant), Quota())

    def room(self, tier: int, tenant: str) -> int:
        """Bytes below the tenant's cap, negative above it; NO_LIMIT_BYTES less what it has."""
        cap = self.quota(tenant, tier).cap_bytes
        return (NO_LIMIT_BYTES if cap is None else cap) - self.tenant_used(tier, tenant)

    def spare(self, tier: int, pool: str, tenant: str) -> int:
        """Bytes that the tenant may lose to others: what it uses above its floor."""
        floor = self.quota(tenant, tier).floor_bytes or 0
        return max(0, self.tenant_used(tier, tenant) - floor)

    def check(self, index: PrefixIndex) -> None:
        """Raises AssertionError where the index holds other bytes than counted."""
        recount = Accounts()
        for run in index.runs():
            space = run.root.space
            cells = np.frombuffer(
                place_bytes(run, 0, run.count, stride_of(run, index.tier_count)), np.int64
            ).reshape(-1, index.tier_count, space.shard_count)
            for tier in range(index.tier_count):
                slots = int((cells[:, tier] != NO_PLACE).sum())
                if slots:
                    recount.add(space, tier, slots)
        assert recount._pools == self._pools
        assert recount._tenants == self._tenants
        assert recount._spaces == self._spaces
        assert recount._pool_tenants == {k: v for k, v in self._pool_tenants.items() if v}


def _add(table: dict, key: object, size: int) -> None:  # type: ignore[type-arg]
    left = table.get(key, 0) + size
    if left > 0:
        table[key] = left
        return
    assert left == 0, "more bytes were freed than were in use"
    table.pop(key, None)
