"""Resize of the disk: a tier that is made smaller while it serves gives space up, in slices.

more than fits       the policy drops the least valuable, a few runs a turn
in the way           copied to segments that stay, a batch at a time; durable before the old goes
nothing in the way   a worker unlinks files, brings the index to its share, and the limits

What is leased, pinned or on its way stays where it is until that ends. A crash finds each block
where it was or where it went, or in both places with the same bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import islice

import numpy as np

from kvstore.core.errors import CorruptBlock, TierError
from kvstore.core.sizes import format_bytes
from kvstore.mover import WRITE_LINK, Job, Moved
from kvstore.policies.index import Run
from kvstore.store.evict import Remover
from kvstore.store.parts import DISK, SLICE_BLOCKS, Parts
from kvstore.store.resize import DROPS_A_TURN
from kvstore.store.slices import RunScan
from kvstore.tiers.base import BlockHeader, ResizableTier

BATCH_BLOCKS, BATCH_BYTES = 128, 16 << 20
ROUND_SECONDS, SETTLED_SECONDS = 1.0, 0.25
FRUITLESS_MAX = 4  # times the policy made room and none of this size came of it

_log = logging.getLogger("kvstore.store")


class _Move:
    """Blocks of one run on their way to other segments, anchored until that is over."""

    __slots__ = ("anchor", "epoch", "first", "reader", "slots", "space", "sums", "targets")

    def __init__(
        self, parts: Parts, run: Run, slots: list[tuple[int, int, int]], targets: list[int]
    ) -> None:
        """`slots` are (block, shard, place), ascending."""
        assert parts.disk is not None
        self.space = run.root.space
        self.epoch = self.space.epoch
        self.slots = [(run.first + i, shard, place) for i, shard, place in slots]
        self.targets = targets
        self.sums = [parts.disk.checksum(place) for _, _, place in slots]
        self.first = self.slots[0][0]
        self.reader = parts.start_reading()
        self.anchor = parts.index.anchor(run, slots[-1][0] + 1, self.reader)

    @property
    def byte_count(self) -> int:
        return len(self.slots) * self.space.block_bytes


class DiskResizer:
    """Brings the disk tier to another size. `ended(bytes)` hears of each batch that was moved."""

    def __init__(self, parts: Parts, remover: Remover, ended: Callable[[int], None]) -> None:
        self._parts, self._remover, self._ended = parts, remover, ended
        self._active = self._moving = self._finishing = False
        self._size = self._goal_bytes = self._fruitless = 0
        self._scan: RunScan | None = None
        self._again: Run | None = None
        self._held: list[int] = []
        self._wait_until = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way from one segment to another."""
        return not self._moving

    def resized(self, byte_count: int) -> int:
        """Another size from now on; answers with the bytes of slots it has then.

        Raises TierError in one sentence; nothing has changed then.
        """
        disk = self._parts.disk
        if not isinstance(disk, ResizableTier):
            raise TierError("there is no disk tier that could be resized; a restart is needed")
        self._goal_bytes = disk.begin_resize(byte_count)
        self._size, self._active = byte_count, True
        self._scan, self._again, self._held, self._wait_until = None, None, [], 0.0
        return self._goal_bytes

    def tick(self, now: float) -> None:
        """Does a bounded part of what is left."""
        disk = self._parts.disk
        if not self._active or self._moving or self._finishing or now < self._wait_until:
            return
        assert isinstance(disk, ResizableTier)
        if disk.problem or self._drop_some(disk):
            return
        if not disk.owed_bytes:
            self._finish(disk, now)
        elif self._scan is None:
            self._begin_round(disk)
        else:
            self._go_on(disk, self._scan, now)

    def _drop_some(self, disk: ResizableTier) -> bool:
        """Whether anything was dropped of what is over."""
        over, dropped = disk.usage().used_bytes - self._goal_bytes, False
        if over > 0:
            dropped = self._make_room(over)
        return dropped

    def _make_room(self, byte_count: int) -> bool:
        drops = self._parts.residency.make_room(DISK, "", "default", byte_count)
        dropped = False
        for drop in islice(drops, DROPS_A_TURN):
            self._remover.drop(drop)
            dropped = True
        return dropped

    # ---- Rounds: each chooses segments and looks through the index once ----

    def _begin_round(self, disk: ResizableTier) -> None:
        chosen = disk.choose_leaving(np.array(self._held, np.int64))
        self._held = []
        if chosen:
            self._scan = RunScan(self._parts.index)
        else:
            self._wait_until = self._parts.clock.now() + ROUND_SECONDS

    def _go_on(self, disk: ResizableTier, scan: RunScan, now: float) -> None:
        left, batch = SLICE_BLOCKS, list[_Move]()
        while left > 0 and not (self._again is None and scan.is_over):
            run, self._again = self._again or scan.next(), None
            left -= run.count if run is not None else 1
            if run is not None and run.alive and run.ready and not run.root.space.closing:
                self._gather(disk, run, batch)
            if self._again is not None:
                break
        if batch:
            self._submit(disk, batch)
        if self._again is None and scan.is_over:
            self._scan, self._wait_until = None, now + ROUND_SECONDS

    def _gather(self, disk: ResizableTier, run: Run, batch: list[_Move]) -> None:
        """Takes up what of `run` has to move; `_again` is set if that is not all of it."""
        index, space = self._parts.index, run.root.space
        grid = index.places_grid(run, 0, run.ready)[:, DISK].copy()
        leaving = disk.is_leaving(grid.ravel()).reshape(grid.shape)
        if not leaving.any():
            return
        held = run.count if index.anchored_below(run) else run.anchored_blocks()
        self._held += grid[:held][leaving[:held]].tolist()
        found = [(i, s) for i, s in np.argwhere(leaving).tolist() if i >= held]
        wanted = found[: self._slots_left(batch, space.slot_bytes)]
        symbol = space.symbol_bytes_max
        targets = disk.reserve_for_move(space.block_bytes, symbol, len(wanted)) if wanted else []
        if targets:
            slots = [(i, s, int(grid[i, s])) for i, s in wanted[: len(targets)]]
            batch.append(_Move(self._parts, run, slots, targets))
            self._fruitless = 0
        elif wanted:
            self._without_room(run, [i for i, _ in wanted])
        if len(targets) < len(found) and run.alive:
            self._again = run

    def _slots_left(self, batch: list[_Move], slot_bytes: int) -> int:
        """How many slots more the batch takes; at least one if it is empty."""
        most = min(BATCH_BYTES, self._goal_bytes // 8)
        left = (most - sum(move.byte_count for move in batch)) // slot_bytes
        count = sum(len(move.slots) for move in batch)
        return max(0 if batch else 1, min(BATCH_BLOCKS - count, left))

    def _without_room(self, run: Run, blocks: list[int]) -> None:
        """No segment that stays has a slot: the policy makes room, else these are dropped."""
        space = run.root.space
        self._fruitless += 1
        if self._fruitless <= FRUITLESS_MAX and self._make_room(len(blocks) * space.slot_bytes):
            # They come free when their removal is durable.
            self._wait_until = self._parts.clock.now() + SETTLED_SECONDS
            return
        for i in sorted(set(blocks), reverse=True):
            if run.alive and i < run.ready:
                self._remover.lose_copy(run, i, DISK, "capacity")

    # ---- Batches ----

    def _submit(self, disk: ResizableTier, batch: list[_Move]) -> None:
        size = sum(move.byte_count for move in batch)
        self._moving = True

        def done(moved: Moved) -> None:
            self._moving = False
            kept = moved.value if moved.error is None else [None] * len(batch)
            for move, whole in zip(batch, kept, strict=True):
                self._take_over(disk, move, whole)
            if moved.error is not None:
                self._wait_until = self._parts.clock.now() + ROUND_SECONDS
            self._ended(size)

        # What reads and writes at once says nothing about the time that a write takes.
        work = partial(_copy, disk, batch)
        job = Job(WRITE_LINK, "", 0, size, work, done, is_measured=False)
        if not self._parts.mover.submit(job):
            done(Moved(None, TierError("the queue of disk writes is full"), 0.0))

    def _take_over(self, disk: ResizableTier, move: _Move, kept: list[bool] | None) -> None:
        """Has the index name the new places; `kept` says of each slot whether its copy is right."""
        parts, index = self._parts, self._parts.index
        path = parts.moving_path(move.anchor, move.reader, move.first)
        spots = {run.first + i: (run, i) for run, start, stop in path for i in range(start, stop)}
        index.unanchor(move.anchor)
        parts.stop_reading(move.reader)
        # A copy made now would seem to have come after a clear that is under way.
        stale = kept is None or move.space.closing or move.space.epoch != move.epoch
        unused: list[int] = []
        old: list[int] = []
        bad: list[tuple[Run, int]] = []
        for n, (position, shard, place) in enumerate(move.slots):
            spot = spots.get(position)
            if spot is None or index.place(*spot, shard, DISK) != place:
                unused.append(move.targets[n])
            elif kept is not None and kept[n] and not stale and not self._is_held(*spot):
                index.set_place(*spot, shard, DISK, move.targets[n])
                old.append(place)
            else:
                unused.append(move.targets[n])
                if kept is not None and not kept[n]:
                    bad.append(spot)
        parts.retired[DISK].retire(unused)
        parts.retired[DISK].retire(old, list(parts.readers))
        for run, i in reversed(bad):
            if run.alive and i < run.ready:
                self._remover.lose_copy(run, i, DISK, "corrupt")

    def _is_held(self, run: Run, i: int) -> bool:
        return i < run.anchored_blocks() or bool(self._parts.index.anchored_below(run))

    # ---- The end ----

    def _finish(self, disk: ResizableTier, now: float) -> None:
        self._finishing, size = True, self._size

        def done(moved: Moved) -> None:
            self._finishing = False
            if moved.error is not None:
                _log.warning("the disk tier is not yet %s: %s", format_bytes(size), moved.error)
                self._wait_until = self._parts.clock.now() + ROUND_SECONDS
            elif moved.value:
                self._goal_bytes = min(self._goal_bytes, disk.usage().used_bytes - moved.value)
            elif size == self._size and not disk.owed_bytes:
                self._active = False
                _log.info("the disk tier is %s now", format_bytes(size))

        if not self._parts.mover.submit(Job(WRITE_LINK, "", 0, 0, disk.finish_resize, done)):
            self._finishing, self._wait_until = False, now + ROUND_SECONDS


def _copy(disk: ResizableTier, batch: list[_Move]) -> list[list[bool]]:
    """Copies a batch and makes it durable; which copies are right, a move each. For workers."""
    kept: list[list[bool]] = []
    blocks: list[tuple[int, BlockHeader, bytes]] = []
    for move in batch:
        right = []
        for (_, _, place), target, checksum in zip(
            move.slots, move.targets, move.sums, strict=True
        ):
            header = _copied(disk, place, target, move.space.block_bytes, checksum)
            right.append(header is not None)
            if header is not None:
                blocks.append((target, header, checksum))
        kept.append(right)
    disk.commit(blocks)
    return kept


def _copied(
    disk: ResizableTier, place: int, target: int, length: int, checksum: bytes
) -> BlockHeader | None:
    """The header of a block that was copied as it had been stored; None if it cannot be."""
    try:
        right = disk.copy(place, target, length) == checksum
        return disk.header(place) if right else None
    except (TierError, CorruptBlock):
        if disk.problem:
            raise  # it is not the block
        return None
