"""Operators' calls: status, policy, quotas, pins, clears, verification."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import InvalidRequest, NotFound
from kvstore.core.lease import Lease
from kvstore.core.plan import PinResult, VerifyResult
from kvstore.core.space import Space
from kvstore.core.views import SpaceView, TenantView
from kvstore.policies.accounts import pool_in
from kvstore.store.clear import ClearFlow
from kvstore.store.demote import WriteBehind
from kvstore.store.evict import Remover
from kvstore.store.explain import Explainer
from kvstore.store.find import find_key
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.pins import PinTable
from kvstore.store.resize import Resizer
from kvstore.store.scrub import Scrubber
from kvstore.store.sessions import Session
from kvstore.store.slices import settle
from kvstore.store.verify import Verifier
from kvstore.store.views import space_views, tenant_view, tenant_views

# Runs that a turn of the owner ranks anew after the policy has changed.
ENTERED_RUNS = 128


class OperatorCalls:
    """The part of `KVStore` that operators use; the caller has checked the role."""

    def __init__(self, parts: Parts, remover: Remover, verifier: Verifier) -> None:
        self.parts = parts
        self.remover = remover
        self.verifier = verifier
        self.pins = PinTable(parts)
        self.behind = WriteBehind(parts, remover)
        self.resizer = Resizer(parts, remover)
        self.explainer = Explainer(parts)
        self._clears = ClearFlow(parts, remover, self.behind.when_idle)
        self._scrubber = Scrubber(parts, remover)

    def spaces(self) -> list[SpaceView]:
        return space_views(self.parts)

    def tenants(self) -> list[TenantView]:
        return tenant_views(self.parts)

    def set_policy(self, eviction: str) -> None:
        """Changes the eviction policy; what is resident stays."""
        switch_policy(self.parts, eviction)

    def set_quota(
        self, tenant: str, tier: str, cap_bytes: int | None, floor_bytes: int | None
    ) -> TenantView:
        """Changes what is given; 0 takes a quota away. Answers with the tenant's view."""
        number = self._check_tier(tier)
        if tenant not in self.parts.known_tenants():
            raise NotFound(f"tenant {tenant!r} is unknown; name one of the [[access]] rules")
        self._check_floors(tenant, number, floor_bytes or 0)
        residency, old = self.parts.residency, self.parts.residency.quota(tenant, number)
        cap = old.cap_bytes if cap_bytes is None else cap_bytes or None
        floor = old.floor_bytes if floor_bytes is None else floor_bytes or None
        residency.set_quota(tenant, number, cap, floor)
        self.remover.trim(number, self.parts.pool_of(tenant), tenant)
        return tenant_view(self.parts, tenant)

    def pin(
        self, session: Session, request_id: str, block_key: bytes, ttl_seconds: float
    ) -> PinResult | Completion[PinResult]:
        """Keeps a prefix: what a live request's lease covers, or up to a printed key."""
        if request_id:
            lease = self._lease_of_request(request_id)
            return self.pins.pin(
                session, request_id, lease.anchor.run, lease.anchor.depth, ttl_seconds
            )
        answer: Completion[PinResult] = Completion()

        def found(run: Any, i: int) -> None:
            try:
                answer.resolve(self.pins.pin(session, block_key.hex(), run, i + 1, ttl_seconds))
            except Exception as error:
                answer.fail(error)

        find_key(
            self.parts, block_key, found,
            lambda: answer.fail(NotFound(f"no block {block_key.hex()} is stored")),
        )  # fmt: skip
        return answer

    def _lease_of_request(self, request_id: str) -> Lease:
        for lease in self.parts.leases.all():
            if lease.request_id == request_id and lease.anchor.run is not None:
                return lease
        raise NotFound(f"request {request_id!r} holds no lease now; pin a printed block key")

    def unpin(self, pin_id: str, request_id: str = "", block_key: bytes = b"") -> int:
        return self.pins.unpin(pin_id or request_id or block_key.hex())

    def clear(self, space_id: bytes | None = None, tenant: str | None = None) -> Completion[int]:
        """Drops a space, a tenant's spaces, or (with neither) everything."""
        spaces = list(self.parts.spaces.values())
        if space_id is not None:
            spaces = [self._known(space_id)]
        elif tenant is not None:
            spaces = [space for space in spaces if space.tenant == tenant]
            if not spaces:
                raise NotFound(f"tenant {tenant!r} has no spaces; `kvstore spaces` lists them")
        return self._clears.clear([space for space in spaces if not space.closing])

    def bump_epoch(self, space_id: bytes) -> Completion[tuple[int, int]]:
        """A new epoch of a space: (its number, blocks removed)."""
        space = self._known(space_id)
        answer: Completion[tuple[int, int]] = Completion()
        self._clears.bump(space).then(
            lambda done: settle(answer, lambda: (space.epoch, done.result()))
        )
        return answer

    def verify(self, tier: str = "") -> Completion[VerifyResult]:
        """Hashes every stored block again; corrupt ones are dropped and named."""
        numbers = [self._check_tier(tier)] if tier else range(len(self.parts.tiers))
        if DISK not in numbers:
            return self.verifier.verify_all()
        if HOST not in numbers:
            return self._scrub(VerifyResult())
        answer: Completion[VerifyResult] = Completion()
        self.verifier.verify_all().then(
            lambda done: self._scrub(done.result()).then(
                lambda all_done: answer.resolve(all_done.result())
            )
        )
        return answer

    def _scrub(self, result: VerifyResult) -> Completion[VerifyResult]:
        """Checks the disk too; answers with the same result."""
        answer: Completion[VerifyResult] = Completion()
        self._scrubber.verify(result).then(lambda _: answer.resolve(result))
        return answer

    def _check_floors(self, tenant: str, tier: int, floor_bytes: int) -> None:
        """Refuses a floor that the pool cannot keep beside everybody else's."""
        parts, pool = self.parts, pool_in(tier, self.parts.pool_of(tenant))
        capacity = parts.tiers[tier].usage(pool).capacity_bytes
        others = sum(
            parts.residency.quota(other, tier).floor_bytes or 0
            for other in parts.known_tenants()
            if other != tenant and pool_in(tier, parts.pool_of(other)) == pool
        )
        if others + floor_bytes > capacity:
            raise InvalidRequest(
                f"floor_bytes is {floor_bytes}, and other tenants' floors take {others} of the "
                f"pool's {capacity} bytes; lower one"
            )

    def _known(self, space: bytes) -> Space:
        found = self.parts.spaces.get(space)
        if found is None:
            raise NotFound(f"space {space.hex()} is unknown; `kvstore spaces` lists them")
        return found

    def _check_tier(self, tier: str) -> int:
        """The number of a tier that there is."""
        names = self.parts.tier_names
        if tier not in names:
            raise InvalidRequest(f"tier is {tier!r}; pass one of {', '.join(names)}")
        return names.index(tier)


def switch_policy(parts: Parts, name: str) -> None:
    """Has blocks ranked by another policy, the runs there are a few at a time."""
    parts.residency.set_policy(name, False)
    _rank_more(parts)


def _rank_more(parts: Parts) -> None:
    if parts.residency.enter_runs(ENTERED_RUNS):
        parts.defer(partial(_rank_more, parts))
