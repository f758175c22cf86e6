"""Evict, quarantine, clear: how blocks leave, and what becomes of those that held them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from kvstore.core.keys import BLOCK_KEY_BYTES, chain_keys
from kvstore.core.space import Space
from kvstore.policies.actions import Drop
from kvstore.policies.index import Anchor, Removed, Run, Span
from kvstore.store.parts import HOST, TIER_NAMES, Parts
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
        """Evicts the tail of a run from its tier."""
        removed = self._parts.index.drop(action.run, action.keep, action.tier)
        self.removed(action.run.root.space, removed, action.reason)

    def make_room(self, space: Space, byte_count: int) -> None:
        """Evicts what the policy gives up: until the tenant is within its cap, which counts what
        it has reserved, and `byte_count` more are free in its pool, or nothing more may go.
        """
        residency = self._parts.residency
        for action in residency.make_room(HOST, space.pool, space.tenant, byte_count, 0):
            self.drop(action)

    def trim(self, pool: str, tenant: str) -> None:
        """Evicts what a tenant holds above its cap, a slice at a time."""
        actions = self._parts.residency.make_room(HOST, pool, tenant, 0)
        dropped = 0
        for action in islice(actions, TRIM_DROPS):
            self.drop(action)
            dropped += 1
        if dropped == TRIM_DROPS:
            self._parts.defer(lambda: self.trim(pool, tenant))

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
        parts.retired[HOST].retire(places, self._part_with(removed.anchors))
        if keys:
            count = len(keys) // BLOCK_KEY_BYTES
            byte_count = count * space.slot_bytes * space.shard_count
            parts.recorder.evicted(TIER_NAMES[HOST], reason, count, byte_count)
            parts.events.removed(space, TIER_NAMES[HOST], keys)

    def _published_keys(self, removed: Removed) -> bytes:
        """Keys of the READY blocks that were removed, one a block whatever its shards.

        Chained from the parent key in a slot's header: to chain them from the root costs a hash
        for each block before, and is done only where a header is damaged.
        """
        parts, keys = self._parts, list[bytes]()
        published = [place for place in removed.places[HOST] if parts.host.generation(place)]
        slots = [run.root.space.shard_count * (stop - start) for run, start, stop in removed.spans]
        if len(published) != sum(slots):
            return self._keys_in_headers(removed, published)
        at = 0
        for span, count in zip(removed.spans, slots, strict=True):
            run, start, stop = span
            header = parts.header(published[at])
            if header is None:
                keys += parts.index.keys(span)
            else:
                symbols = [run.symbol(i) for i in range(start, stop)]
                keys += chain_keys(header.parent_key, symbols)
            at += count
        return b"".join(keys)

    def _keys_in_headers(self, removed: Removed, published: list[int]) -> bytes:
        """Keys of blocks of which some could not be published: by what their headers say."""
        headers = [self._parts.header(place) for place in published]
        if None in headers:
            spans = removed.spans
            return b"".join(key for span in spans for key in self._parts.index.keys(span))
        return b"".join(h.key for h in headers if h is not None and h.shard == 0)

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
            lease = leases.get(anchor.owner)
            if lease is not None:
                lease.remains = index.anchor(last, depth, lease.id)

    def quarantine(self, place: int) -> None:
        """Drops a block whose bytes no longer match, and all that depends on it."""
        parts = self._parts
        raw = place.to_bytes(8, "little", signed=True)
        for run in parts.index.runs():
            if raw in run.places:
                block = self._block_at(run, place)
                if block is not None:
                    parts.recorder.corrupt(TIER_NAMES[HOST], 1)
                    self.cut(run, block, "corrupt")
                    return

    def _block_at(self, run: Run, place: int) -> int | None:
        for shard in range(run.root.space.shard_count):
            column: list[int] = self._parts.index.places(
                [Span(run, 0, run.ready)], HOST, shard
            ).tolist()
            if place in column:
                return column.index(place)
        return None

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
