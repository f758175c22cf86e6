"""Demotion: which blocks of the host tier are written to disk, and when.

The cold end of a host pool has been dealt with: as many bytes as the pool holds above its watermark
belong to its coldest leaf runs, and these are on disk, or not worth it. So what is evicted later,
coldest first, lies on disk already, and what never gets cold is never written. A run that is used
again leaves the cold end, and others get their turn. Chains are written whole, parents first, since
they are evicted from their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.policies.actions import Demote
from kvstore.policies.admission import Admission
from kvstore.policies.base import EvictionPolicy
from kvstore.policies.index import PrefixIndex, Run, Span
from kvstore.policies.index.cells import stretches

if TYPE_CHECKING:
    from kvstore.policies.residency import Residency

HOST, DISK = 0, 1
# Runs dealt with in a round: a turn of the owner is short.
RUNS_MAX = 64
# Runs not worth it longest ago that are judged anew in a round: costs and curves move.
SECOND_LOOKS = 2


class ColdEnd:
    """Runs of one pool that were dealt with, longest ago first, with their blocks in host.

    `missed_bytes` were evicted though they were not dealt with.
    """

    def __init__(self) -> None:
        self.runs: dict[Run, int] = {}
        self.byte_count = self.missed_bytes = 0

    def put(self, run: Run, blocks: int) -> None:
        """So many blocks of `run` are here now; with 0 it is not."""
        self.byte_count += (blocks - self.runs.pop(run, 0)) * block_bytes(run)
        if blocks:
            self.runs[run] = blocks


class DemotionQueue:
    """Leaf runs of each host pool that were not dealt with, in the order of the policy.

    `watermarks` are bytes by pool; without a mark a pool is never written. Runs that were dealt
    with are parked until they are used again or may have something to write again.
    `admission` judges what is due, without one all of it is written; `passed_blocks` were not.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.watermarks: dict[str, int] = {}
        self.admission: Admission | None = None
        self.passed_blocks = 0
        self._ranks: dict[str, EvictionPolicy] = {}
        self._ends: dict[str, ColdEnd] = {}
        # Runs with blocks that were not worth a write, and how many.
        self._passed: dict[Run, int] = {}

    def owed_bytes(self, pool: str) -> int:
        """Bytes above the watermark that were not dealt with."""
        used = self._residency.accounts.used(HOST, pool)
        return used - self.watermarks[pool] - self._end(pool).byte_count

    def _end(self, pool: str) -> ColdEnd:
        end = self._ends.get(pool)
        if end is None:
            end = self._ends[pool] = ColdEnd()
        return end

    def is_cold(self, run: Run) -> bool:
        """Whether `run` was dealt with."""
        return bool(self.watermarks) and run in self._end(run.root.space.pool).runs

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
        self._ends.clear()

    def take(
        self, pool: str, byte_count: int, busy: float = 0.0, spare: float = 0.0
    ) -> Iterator[Demote]:
        """Blocks to write for what is owed, parents first; at most about `byte_count`.

        `busy` and `spare` are for `Admission.begin`.
        """
        rank, left, index = self._ranks.get(pool), byte_count, self._residency.index
        if rank is None or self.owed_bytes(pool) <= 0:
            return
        if self.admission is not None:
            self.admission.begin(busy, spare)
            self._look_again()
        runs = rank.victims(self._residency.accounts.tenants(HOST, pool))
        for run in islice(runs, RUNS_MAX):
            due = unwritten_above(index, run)
            worthy = due if self.admission is None else self.admission.worthy(run, due)
            for part, start, stop in worthy:
                size = block_bytes(part)
                stop = min(stop, start + max(1, left // size))
                yield Demote(part, start, stop, HOST, DISK)
                begun = moving(index, part, start, stop)
                left -= begun * size
                if self.admission is not None:
                    self.admission.wrote(begun * size)
                if left <= 0 or begun < stop - start:
                    return
            if run.is_leaf(HOST):
                rank.park(run)
                self._settle(run, _blocks_of(run, due) - _blocks_of(run, worthy))
            if self.owed_bytes(pool) <= 0:
                return

    def _settle(self, run: Run, passed: int) -> None:
        """`run` was dealt with; so many of its own blocks are not worth a write."""
        blocks = run.resident_in(HOST) // run.root.space.shard_count
        self._end(run.root.space.pool).put(run, blocks)
        before = self._passed.pop(run, 0)
        if passed:
            self._passed[run] = passed
            self.passed_blocks += max(0, passed - before)

    def _look_again(self) -> None:
        """Offers the runs that were passed over longest ago."""
        for run in list(islice(self._passed, SECOND_LOOKS)):
            self._passed[run] = self._passed.pop(run)
            self.offer(run)

    # ---- What happens to runs ----

    def offer(self, run: Run) -> None:
        """`run` may have something to write again, or is not cold any more."""
        if not self.watermarks:
            return
        self._end(run.root.space.pool).put(run, 0)
        for rank in self.holders(run.root.space.pool):
            rank.unpark(run)

    def used(self, run: Run) -> None:
        """`run` was asked for."""
        if not self.watermarks:
            return
        if self.is_cold(run):
            self.offer(run)

    def on_leaf(self, run: Run) -> None:
        """`run` may be evicted, whole or what is left of it.

        If what was evicted had not been dealt with, something else is the cold end now: as much of
        what was taken for it is offered again, beside this one.
        """
        if not self.watermarks:
            return
        self._shrunk(run)
        end = self._end(run.root.space.pool)
        while end.runs and end.missed_bytes > 0:
            cold, blocks = next(iter(end.runs.items()))
            end.missed_bytes -= blocks * block_bytes(cold)
            self.offer(cold)
        end.missed_bytes = 0

    def evicted(self, run: Run, byte_count: int, was_cold: bool) -> None:
        """So much of `run`, which may be dead, left host by a drop."""
        if not self.watermarks:
            return
        if not was_cold:
            self._end(run.root.space.pool).missed_bytes += byte_count
        elif run.alive:
            self._shrunk(run)

    def _shrunk(self, run: Run) -> None:
        """Blocks of `run` may have left host."""
        if not self.is_cold(run):
            return
        blocks = run.resident_in(HOST) // run.root.space.shard_count
        if blocks:
            self._end(run.root.space.pool).put(run, blocks)
        else:
            self.offer(run)

    def on_split(self, run: Run, tail: Run) -> None:
        if not self.watermarks:
            return
        self.used(run)
        passed = self._passed.pop(run, 0)
        if passed:
            self._passed[tail] = min(passed, tail.count)
        if passed > tail.count:
            self._passed[run] = passed - tail.count

    def on_merge(self, run: Run, tail: Run) -> None:
        if not self.watermarks:
            return
        self.used(run)
        self._end(tail.root.space.pool).put(tail, 0)
        passed = self._passed.pop(tail, 0)
        if passed:
            self._passed[run] = self._passed.pop(run, 0) + passed

    def on_remove(self, run: Run) -> None:
        if not self.watermarks:
            return
        self._end(run.root.space.pool).put(run, 0)
        self._passed.pop(run, None)

    def check(self) -> None:
        """Raises AssertionError where the cold end is other than counted."""
        for end in self._ends.values():
            sizes = [blocks * block_bytes(run) for run, blocks in end.runs.items()]
            assert sum(sizes) == end.byte_count
            for run, blocks in end.runs.items():
                assert run.alive
                assert 0 < blocks <= run.resident_in(HOST) // run.root.space.shard_count
        assert all(run.alive and blocks > 0 for run, blocks in self._passed.items())


def _blocks_of(run: Run, spans: Sequence[Span]) -> int:
    """How many blocks of `run` are in the spans."""
    return sum(stop - start for part, start, stop in spans if part is run)


def block_bytes(run: Run) -> int:
    """Bytes of one block, all its shards."""
    return run.root.space.slot_bytes * run.root.space.shard_count


def unwritten(index: PrefixIndex, run: Run) -> list[Span]:
    """Stretches (run, start, stop) of `run` that are in host and neither on disk nor on the way."""
    ready, shards = run.ready, run.root.space.shard_count
    if ready <= 0 or run.resident_in(DISK) == ready * shards:
        return []
    grid = index.places_grid(run, 0, ready)
    if shards == 1:
        wanted = (grid[:, HOST, 0] >= 0) & (grid[:, DISK, 0] == NO_PLACE)
    else:
        wanted = (grid[:, HOST] >= 0).all(axis=1) & (grid[:, DISK] == NO_PLACE).all(axis=1)
    return [Span(run, start, stop) for start, stop in stretches(wanted)]


def unwritten_above(index: PrefixIndex, run: Run) -> list[Span]:
    """The same of `run` and all of its ancestors, parents first."""
    found: list[Span] = []
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
