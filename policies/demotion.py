"""Demotion: which blocks of the host tier are written to disk, and when.

A conveyor: from a watermark on, every byte that a host pool takes in has one byte of its coldest
blocks without a copy on disk written there. So what is evicted later, coldest first, lies on disk
already, and what never gets cold is never written. Chains are written whole, parents first, since
they are evicted from their end: what that is more than was due counts for what comes next, up to
half of what the pool can take in between its watermark and its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.space import Space
from kvstore.policies.actions import Demote
from kvstore.policies.base import EvictionPolicy
from kvstore.policies.index import PrefixIndex, Run

if TYPE_CHECKING:
    from kvstore.policies.residency import Residency

HOST, DISK = 0, 1


class DemotionQueue:
    """Leaf runs of each host pool that have something to write, in the order of the policy.

    `watermarks` and `credits` are bytes by pool; without a mark a pool is never written. Runs that
    are on disk, or on their way, are parked until they have something to write again.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.watermarks: dict[str, int] = {}
        self.credits: dict[str, int] = {}
        self._ranks: dict[str, EvictionPolicy] = {}
        self._owed: dict[str, int] = {}
        self._unfinished: set[str] = set()

    def owed_bytes(self, pool: str) -> int:
        """Bytes the pool took in above its watermark, less what was written for them."""
        return self._owed.get(pool, 0)

    def rank(self, run: Run) -> EvictionPolicy | None:
        """The order that `run` is in; None where nothing is written."""
        pool = run.root.space.pool
        if pool not in self.watermarks:
            return None
        rank = self._ranks.get(pool)
        if rank is None:
            rank = self._ranks[pool] = self._residency.new_policy(HOST)
        return rank

    def holders(self, pool: str) -> Iterator[EvictionPolicy]:
        rank = self._ranks.get(pool)
        if rank is not None:
            yield rank

    def forget(self) -> None:
        """The policy changes: everything is entered anew."""
        self._ranks.clear()

    def offer(self, run: Run) -> None:
        """`run` may have something to write again."""
        for rank in self.holders(run.root.space.pool):
            rank.unpark(run)

    def taken_in(self, space: Space, slots: int) -> None:
        """So many host slots more are in use."""
        mark = self.watermarks.get(space.pool)
        if mark is None:
            return
        used = self._residency.accounts.used(HOST, space.pool)
        above = min(used - mark, slots * space.slot_bytes)
        if above > 0:
            self._owed[space.pool] = min(self.owed_bytes(space.pool) + above, used)

    def _count(self, pool: str, byte_count: int) -> None:
        """So much is written of what was due."""
        self._owed[pool] = max(self.owed_bytes(pool) - byte_count, -self.credits.get(pool, 0))

    def take(self, pool: str, byte_count: int) -> Iterator[Demote]:
        """Blocks to write for what is owed, parents first; at most about `byte_count`."""
        rank, left = self._ranks.get(pool), byte_count
        if rank is None or (self.owed_bytes(pool) <= 0 and pool not in self._unfinished):
            return
        for run in rank.victims(self._residency.accounts.tenants(HOST, pool)):
            unwritten = unwritten_above(self._residency.index, run)
            if not unwritten:
                rank.park(run)
            for part, start, stop in unwritten:
                size = part.root.space.slot_bytes * part.root.space.shard_count
                stop = min(stop, start + max(1, left // size))
                self._unfinished.add(pool)
                yield Demote(part, start, stop, HOST, DISK)
                begun = moving(self._residency.index, part, start, stop)
                left -= begun * size
                self._count(pool, begun * size)
                if left <= 0 or begun < stop - start:
                    return
            self._unfinished.discard(pool)
            if self.owed_bytes(pool) <= 0:
                return
        self._unfinished.discard(pool)
        self._owed[pool] = 0


def unwritten(index: PrefixIndex, run: Run) -> list[tuple[Run, int, int]]:
    """Stretches (run, start, stop) of `run` that are in host and neither on disk nor on the way."""
    ready, shards = run.ready, run.root.space.shard_count
    if ready <= 0 or run.resident_in(DISK) == ready * shards:
        return []
    grid = index.places_grid(run, 0, ready)
    wanted = (grid[:, HOST] >= 0).all(axis=1) & (grid[:, DISK] == NO_PLACE).all(axis=1)
    edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False)).tolist()
    return [(run, a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def unwritten_above(index: PrefixIndex, run: Run) -> list[tuple[Run, int, int]]:
    """The same of `run` and all of its ancestors, parents first."""
    found: list[tuple[Run, int, int]] = []
    here: Run | None = run
    while here is not None and here.count:
        found = unwritten(index, here) + found
        here = here.parent
    return found


def moving(index: PrefixIndex, run: Run, start: int, stop: int) -> int:
    """How many of the blocks are on their way to disk, or there."""
    if run.ready < stop:
        return 0
    return int(np.count_nonzero(index.places_grid(run, start, stop)[:, DISK, 0] != NO_PLACE))
