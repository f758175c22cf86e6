"""Evict, quarantine, clear: how blocks leave, and what becomes of those that held them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, islice

import numpy as np

from kvstore.core.keys import BLOCK_KEY_BYTES, chain_keys
from kvstore.core.space import Space
from kvstore.policies.accounts import pool_in
from kvstore.policies.actions import Drop
from kvstore.policies.index import Anchor, Removed, Run, Span
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.sessions import Session

TRIM_DROPS = 64


class Remover:
    """Carries removals out: slots un-published, events sent, holders told.

    `on_lost(owner id)` hears of reservations and pins whose blocks are gone; it runs deferred.
    """

    def __init__(self, parts: Parts, on_lost: Callable[[int], None]) -> None:
        self._parts = parts
        self._on_lost = on_lost

    def drop(self, action: Drop) -> None:
        """Evicts the copies in a tier of the tail of a run; last copies go with all below."""
        index, (run, keep, tier, reason) = self._parts.index, action
        space = run.root.space
        there = index.places_grid(run, keep, run.ready)[:, tier, 0] >= 0
        removed = index.drop(run, keep, tier)
        stop = run.ready if run.alive else keep
        if keep < stop:
            keys = compress(index.keys(Span(run, keep, stop)), there)
            self._tell(space, tier, reason, b"".join(keys))
        self.removed(space, removed, reason)

    def make_room(self, space: Space, byte_count: int, tier: int = HOST) -> None:
        """Evicts what the policy gives up: until the tenant is within its cap, which counts what
        it has reserved, and `byte_count` more are free in its pool, or nothing more may go.
        """
        residency, pool = self._parts.residency, pool_in(tier, space.pool)
        for action in residency.make_room(tier, pool, space.tenant, byte_count, 0):
            self.drop(action)

    def trim(self, tier: int, pool: str, tenant: str) -> None:
        """Evicts what a tenant holds above its cap, a slice at a time."""
        actions = self._parts.residency.make_room(tier, pool_in(tier, pool), tenant, 0)
        dropped = 0
        for action in islice(actions, TRIM_DROPS):
            self.drop(action)
            dropped += 1
        if dropped == TRIM_DROPS:
            self._parts.defer(lambda: self.trim(tier, pool, tenant))

    def removed(self, space: Space, removed: Removed, reason: str) -> None:
        """Un-publishes what the index let go of; slots under a lease rest until it ends."""
        parts = self._parts
        places = removed.places[HOST]
        keys = self._published_keys(removed)
        if parts.unverified:
            parts.unverified.difference_update(places)
        if parts.checksums:
            for place in places:
                parts.checksums.pop(place, None)
        readers = self._part_with(removed.anchors)
        for retired, left in zip(parts.retired, removed.places, strict=True):
            retired.retire(left, readers)
        for tier, gone in enumerate(keys):
            self._tell(space, tier, reason, b"".join(gone))

    def _tell(self, space: Space, tier: int, reason: str, keys: bytes) -> None:
        """Blocks left a tier."""
        if keys:
            parts, name = self._parts, self._parts.tier_names[tier]
            count = len(keys) // BLOCK_KEY_BYTES
            byte_count = count * space.slot_bytes * space.shard_count
            parts.recorder.evicted(name, reason, count, byte_count)
            parts.events.removed(space, name, keys)

    def _published_keys(self, removed: Removed) -> list[list[bytes]]:
        """Keys of the removed blocks that were published, by tier; one a block whatever its shards.

        Chained from the parent key in a slot's header: to chain them from the root costs a hash
        for each block before, and is done only where there is no sound header in memory.
        """
        parts = self._parts
        found: list[list[bytes]] = [[] for _ in parts.tiers]
        for span, grid in zip(removed.spans, removed.grids, strict=True):
            shown = [
                tier.generations(grid[:, number, 0]) != 0 for number, tier in enumerate(parts.tiers)
            ]
            if not any(mask.any() for mask in shown):
                continue
            keys = self._keys(span, int(grid[0, HOST, 0]), bool(shown[HOST][0]))
            for number, mask in enumerate(shown):
                found[number] += keys if mask.all() else compress(keys, mask)
        return found

    def _keys(self, span: Span, place: int, published: bool) -> list[bytes]:
        """Keys of a span whose first block lies at `place` in host, if it is `published`."""
        header = self._parts.header(place) if published else None
        if header is None:
            return self._parts.index.keys(span)
        run, start, stop = span
        return chain_keys(header.parent_key, [run.symbol(i) for i in range(start, stop)])

    def cut(self, run: Run, keep: int, reason: str) -> None:
        """Removes the blocks of `run` from `keep` on and all below, leased or not.

        Leases on them are lost; what they cover before the cut stays held until they end, for
        their readers have not heard yet.
        """
        index, leases = self._parts.index, self._parts.leases
        last, depth = block_before(run, keep)
        removed = index.remove(run, keep)
        self.removed(run.root.space, removed, reason)
        for anchor in removed.anchors if depth else ():
            owner = anchor.owner
            lease = leases.get(owner)
            if lease is not None:
                lease.remains = index.anchor(last, depth, owner)
            elif owner in self._parts.readers:
                self._parts.remains[owner] = index.anchor(last, depth, owner)

    def quarantine(self, place: int, tier: int = HOST) -> bytes:
        """Drops a copy whose bytes no longer match, and what depends on it alone.

        Answers with the block's key; empty if it is not there any more.
        """
        parts = self._parts
        raw = place.to_bytes(8, "little", signed=True)
        for run in parts.index.runs():
            if raw in run.places:
                block = self._block_at(run, place, tier)
                if block is not None:
                    key = parts.index.keys(Span(run, block, block + 1))[0]
                    self.lose_copy(run, block, tier, "corrupt")
                    return key
        return b""

    def lose_copy(self, run: Run, i: int, tier: int, reason: str) -> None:
        """Block `i` of `run` loses its copy in `tier`: if it has no other, it goes with all below.

        Who may be reading the copy is not known, so its slots rest until everybody who might has
        ended.
        """
        parts, index = self._parts, self._parts.index
        if reason == "corrupt":
            parts.recorder.corrupt(parts.tier_names[tier], 1)
            if tier == DISK and parts.disk is not None:
                for place in index.places_grid(run, i, i + 1)[0, DISK].tolist():
                    parts.disk.report_bad(place)
        held = (index.places_grid(run, i, i + 1)[0] >= 0).all(axis=1)
        held[tier] = False
        if not held.any():
            self.cut(run, i, reason)
            return
        key = index.keys(Span(run, i, i + 1))[0]
        places = index.clear_places(run, i, i + 1, tier)
        if tier == HOST:
            parts.unverified.difference_update(places)
        else:
            parts.residency.copy_lost(run)
        readers = [lease.id for lease in parts.leases.all()] if tier == HOST else []
        parts.retired[tier].retire(places, [*readers, *parts.readers])
        self._tell(run.root.space, tier, reason, key)

    def _block_at(self, run: Run, place: int, tier: int) -> int | None:
        grid = self._parts.index.places_grid(run, 0, run.ready)
        found = np.flatnonzero((grid[:, tier] == place).any(axis=1))
        return int(found[0]) if len(found) else None

    def _part_with(self, anchors: Iterable[Anchor]) -> list[int]:
        """Tells the owners of dead anchors; answers with those that may still be reading."""
        parts = self._parts
        readers: list[int] = []
        lost: dict[Session, list[int]] = {}
        for anchor in anchors:
            owner = anchor.owner
            lease = parts.leases.get(owner)
            if lease is not None:
                readers.append(owner)
                for session in lease.engine.sessions if anchor is lease.anchor else ():
                    lost.setdefault(session, []).append(owner)
            elif owner in parts.readers:
                readers.append(owner)
            else:
                parts.defer(partial(self._on_lost, owner))
        for session, lease_ids in lost.items():
            if session.notify is not None:
                session.notify("lost_leases", lease_ids)
        return readers


def block_before(run: Run, i: int) -> tuple[Run, int]:
    """The run and depth of the block before block `i` of `run`; depth 0 if that is the first."""
    if i or run.parent is None:
        return run, i
    return run.parent, run.parent.count
