"""Groups: blocks that are written to disk together, and what becomes of each when that is over."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.core.space import Space
from kvstore.mover import WRITE_LINK, Job, Moved
from kvstore.policies.index import Run, Span
from kvstore.store.evict import Remover, block_before
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.tiers.base import BlockHeader


class Part:
    """Blocks [first, first + count) of one chain on their way to disk, anchored until that is over.

    `sources` and `targets` are places [block][shard] in host and on disk.
    """

    __slots__ = ("anchor", "epoch", "first", "reader", "sources", "space", "targets")

    def __init__(self, parts: Parts, run: Run, start: int, targets: np.ndarray) -> None:
        stop = start + len(targets)
        self.space: Space = run.root.space
        self.epoch = self.space.epoch
        self.first = run.first + start
        self.sources = parts.index.places_grid(run, start, stop)[:, HOST].copy()
        self.targets = targets
        self.reader = parts.start_reading()
        self.anchor = parts.index.anchor(run, stop, self.reader)

    @property
    def count(self) -> int:
        return len(self.targets)

    @property
    def byte_count(self) -> int:
        return self.targets.size * self.space.block_bytes


class Group:
    """Parts that one commit makes durable; `moved` is set when it is over."""

    __slots__ = ("moved", "parts")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.moved: Moved | None = None

    @property
    def block_count(self) -> int:
        return sum(part.count for part in self.parts)

    @property
    def byte_count(self) -> int:
        return sum(part.byte_count for part in self.parts)


class GroupWriter:
    """Has a worker write a group, and enters in the index what has become durable."""

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover

    def job(self, group: Group, done: Any) -> Job:
        """Writes the leading sound blocks of each part; its value is how many, a part each."""
        parts = self._parts
        disk, host = parts.disk, parts.host
        assert disk is not None
        plans = [self._plan(part) for part in group.parts]
        lengths = [part.space.block_bytes for part in group.parts]

        def write() -> list[int]:
            kept, blocks = [], []
            for plan, length, part in zip(plans, lengths, group.parts, strict=True):
                items = [(target, host.view(source, length)) for target, source, _, _ in plan]
                sums = disk.write_many(items)
                wrong = [i for i, (_, _, _, sum_) in enumerate(plan) if sums[i] != sum_]
                shards = part.space.shard_count
                whole = (wrong[0] if wrong else len(plan)) // shards
                kept.append(whole)
                blocks += [
                    (target, header, sum_) for target, _, header, sum_ in plan[: whole * shards]
                ]
            disk.commit(blocks)
            return kept

        first = group.parts[0].space
        return Job(WRITE_LINK, first.tenant, 0, group.byte_count, write, done)

    def _plan(self, part: Part) -> list[tuple[int, int, BlockHeader, bytes]]:
        """(target, source, header, checksum) of each slot, up to the first damaged header."""
        host, plan = self._parts.host, []
        sources, targets = part.sources.ravel().tolist(), part.targets.ravel().tolist()
        for source, target in zip(sources, targets, strict=True):
            header = self._parts.header(source)
            if header is None:
                break
            plan.append((target, source, header, host.checksum(source)))
        return plan

    def finish(self, group: Group) -> int:
        """The group is over: its blocks are durable, or may be written again; how many are."""
        moved = group.moved
        assert moved is not None
        kept = moved.value if moved.error is None else [0] * len(group.parts)
        durable = 0
        for part, count in zip(group.parts, kept, strict=True):
            durable += self._finish(part, count, moved.error is None)
        if durable:
            self._parts.recorder.copied(WRITE_LINK, group.byte_count, moved.seconds)
        lost = group.block_count - durable
        if lost:
            self._parts.recorder.demotion_skipped("failed", lost)
        return durable

    def _finish(self, part: Part, count: int, written: bool) -> int:
        parts = self._parts
        whole = part.anchor.run is not None
        path = parts.moving_path(part.anchor, part.reader, part.first)
        stale = part.space.epoch != part.epoch or part.space.closing
        if not whole or stale or not self._parent_is_there(path):
            count, written = 0, False
        done = 0
        for run, start, stop in path:
            take = max(0, min(stop - start, count - done))
            if take:
                self._enter(run, start, part.targets[done : done + take])
            if take < stop - start:
                parts.index.give_up_move(run, start + take, stop, DISK)
                parts.residency.copy_lost(run)
            done += stop - start
        parts.retired[DISK].retire(part.targets[count:].ravel().tolist())
        parts.index.unanchor(part.anchor)
        parts.stop_reading(part.reader)
        if written and count < part.count:
            self._drop_damaged(part, path, count)
        return count

    def _parent_is_there(self, path: list[Span]) -> bool:
        """Whether the block before a path is on disk: a child alone would be lost with host."""
        if not path:
            return False
        run, depth = block_before(path[0].run, path[0].start)
        return not depth or self._parts.index.place(run, depth - 1, 0, DISK) >= 0

    def _enter(self, run: Run, start: int, targets: np.ndarray) -> None:
        parts, space = self._parts, run.root.space
        parts.index.end_move(run, start, DISK, targets)
        parts.recorder.demoted(len(targets), targets.size * space.block_bytes)
        stop = start + len(targets)
        keys = parts.index.keys(Span(run, start, stop))
        parent_key = parts.index.key_before(run, start)
        symbols = b"".join(run.symbol(i) for i in range(start, stop))
        parts.events.stored(space, parts.tier_names[DISK], b"".join(keys), parent_key, symbols)

    def _drop_damaged(self, part: Part, path: list[Span], count: int) -> None:
        """The block after `count` no longer is in host what was put there."""
        position = part.first + count
        for run, start, stop in path:
            if run.alive and run.first + start <= position < run.first + stop:
                self._remover.lose_copy(run, position - run.first, HOST, "corrupt")
                return
