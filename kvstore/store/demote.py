"""Write-behind: the coldest blocks of the host tier are copied to disk before they have to go.

policy says which -> slots on disk, kept free ahead -> groups of blocks -> durable -> index

What is not worth it, or does not fit the queue, the room or the endurance budget, is skipped and
counted, never waited for. `Flush` alone overrides all of that and takes its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from kvstore.core.space import Space
from kvstore.mover import WRITE_LINK, Job, Moved
from kvstore.policies.admission import spare_rate
from kvstore.policies.index import Run
from kvstore.store.evict import Remover
from kvstore.store.groups import Group, GroupWriter, Part
from kvstore.store.parts import DISK, RESERVE_BLOCKS_MAX, Parts
from kvstore.store.reassign import Reassigner
from kvstore.store.resize_disk import DiskResizer
from kvstore.tiers.base import Tier

# A commit takes about as long for many blocks as for few.
GROUP_BLOCKS = 128
GROUP_BYTES = 64 << 20
GROUPS_RUNNING = 4
PROBE_SECONDS = 2.0
RETRY_SECONDS = 1.0
DAY_SECONDS = 86_400.0
FRUITLESS_MAX = 4  # rounds that made room of other sizes only, before whole segments are emptied


class WriteBehind:
    """Turns what the policy wants on disk into groups, and groups into durable blocks."""

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover
        self._writer = GroupWriter(parts, remover)
        self._reassigner = Reassigner(parts, remover)
        self._resizer = DiskResizer(parts, remover, self._moved)
        self._open = Group()
        self._running: deque[Group] = deque()
        self._heard: list[Callable[[], None]] = []
        self._settling = self._probing = False
        self._fruitless = self._passed_blocks = 0
        self._settled_places = -1  # what recovery did not take back has to be settled, too
        self._probed = self._paused_until = self._spent_at = self._answered = parts.clock.now()
        self._daily = self._budget = 0.0
        if parts.disk is not None:
            self._budget = self._set_daily(parts.disk.usage().capacity_bytes)

    def _set_daily(self, capacity_bytes: int) -> float:
        """What may be written in a day, and be saved up; answers with it."""
        self._daily = self._parts.config.tiers.disk.endurance_dwpd * capacity_bytes
        return self._daily

    def resized(self, byte_count: int) -> int:
        """The disk has another size from now on, and so much room for blocks.

        Raises TierError in one sentence; nothing has changed then.
        """
        capacity = self._resizer.resized(byte_count)
        self._budget = min(self._budget, self._set_daily(capacity))
        _set_prices(self._parts, capacity)
        return capacity

    def _moved(self, byte_count: int) -> None:
        """A smaller disk has moved so much from one segment to another."""
        self._budget -= byte_count
        self._tell()

    @property
    def is_idle(self) -> bool:
        still = not self._running and not self._open.parts and not self._settling
        return still and self._resizer.is_idle

    @property
    def silence(self) -> str:
        """That no write, sync or probe of the disk ends, in one sentence; empty while they do."""
        timeout = self._parts.config.tiers.disk.read_timeout_seconds
        late = self._parts.clock.now() - self._answered > timeout + PROBE_SECONDS
        waits = self._running or self._settling or self._probing
        return f"the disk has not ended a write for {timeout} s" if late and waits else ""

    def poke(self, pool: str) -> None:
        """Host `pool` took blocks in: writes what is due of it now, a bounded part."""
        if self._parts.disk is None or not self._may_write():
            return
        if len(self._running) >= GROUPS_RUNNING:
            return  # what is due stays due, and the next group's end goes on with it
        left, residency = RESERVE_BLOCKS_MAX, self._parts.residency
        # Half of the queue is for when it comes thick and fast.
        busy = max(0.0, 2.0 * len(self._running) / GROUPS_RUNNING - 1.0)
        spare = spare_rate(self._budget, self._daily)
        for action in residency.demotions(pool, GROUP_BYTES, busy, spare):
            wanted = min(left, action.stop - action.start)
            begun = self.take(action.run, action.start, action.start + wanted)
            left -= begun
            if begun < wanted or left <= 0:
                break
        if residency.passed_blocks > self._passed_blocks:
            passed = residency.passed_blocks - self._passed_blocks
            self._parts.recorder.demotion_skipped("worth", passed)
            self._passed_blocks += passed

    def _may_write(self) -> bool:
        disk, now = self._parts.disk, self._parts.clock.now()
        assert disk is not None
        if now < self._paused_until:
            return False
        self._budget = min(
            self._daily, self._budget + (now - self._spent_at) * self._daily / DAY_SECONDS
        )
        self._spent_at = now
        if disk.problem:
            return False
        return not self._daily or self._budget > 0

    def take(self, run: Run, start: int, stop: int, forced: bool = False) -> int:
        """Begins to write blocks [start, stop) of `run`; answers with how many, the first ones."""
        parts, space = self._parts, run.root.space
        if space.closing or not space.recorded or start >= stop:
            return 0
        if parts.disk is None or parts.disk.problem:
            return 0  # what is there must not make way for what cannot be written
        # Making room on disk must not take away what these blocks depend on.
        held = parts.index.anchor(run, stop, 0)
        begun = self._take_parts(run, start, stop, forced)
        parts.index.unanchor(held)
        return begun

    def _take_parts(self, run: Run, start: int, stop: int, forced: bool) -> int:
        begun = 0
        while start < stop:
            past = min(stop, start + self._blocks_left(run))
            count = self._take(run, start, past)
            begun += count
            start += count
            if self._is_full():
                self.submit()
            if start < past:
                if not forced:
                    self._parts.recorder.demotion_skipped("room", stop - start)
                break
            if forced and len(self._running) >= GROUPS_RUNNING:
                break
        return begun

    def _blocks_left(self, run: Run) -> int:
        """How many blocks of `run` the open group has room for, at least one."""
        block_bytes = run.root.space.slot_bytes * run.root.space.shard_count
        by_size = (GROUP_BYTES - self._open.byte_count) // block_bytes
        return max(1, min(GROUP_BLOCKS - self._open.block_count, by_size))

    def _take(self, run: Run, start: int, stop: int) -> int:
        parts, space, index = self._parts, run.root.space, self._parts.index
        shards = space.shard_count
        index.begin_move(run, start, stop, DISK)
        slots = self._slots(space, self._within_cap(space, (stop - start) * shards))
        count, spare = divmod(len(slots), shards)
        if spare:
            parts.retired[DISK].retire(slots[-spare:])
        if start + count < stop:
            index.give_up_move(run, start + count, stop, DISK)
            parts.residency.copy_lost(run)
        if count:
            targets = np.array(slots[: count * shards], np.int64).reshape(count, shards)
            part = Part(parts, run, start, targets)
            self._open.parts.append(part)
            self._budget -= part.byte_count
        return count

    def _within_cap(self, space: Space, count: int) -> int:
        """How many of `count` slots the tenant's cap allows; they are counted already."""
        residency = self._parts.residency
        if residency.room(DISK, "", space.tenant) < 0:
            self._remover.make_room(space, 0, DISK)
        over = max(0, -residency.room(DISK, "", space.tenant))
        return max(0, count - -(-over // space.slot_bytes))

    # ---- Slots ----

    def _slots(self, space: Space, count: int) -> list[int]:
        disk = self._parts.disk
        assert disk is not None
        places = disk.reserve(space.block_bytes, space.symbol_bytes_max, count) if count else []
        if len(places) < count:
            self._make_room(space, count - len(places))
        else:
            self._fruitless = 0
        return places

    def _make_room(self, space: Space, count: int) -> None:
        """Has slots come free for the groups to come; none is to be had now.

        A slot that was given up is free only once that is durable, so room is made for two groups
        at a time.
        """
        disk = self._parts.disk
        assert disk is not None
        if disk.problem:
            return  # it takes nothing now, whatever is given up for it
        usage = disk.usage()
        groups = 2 * min(GROUP_BYTES, GROUP_BLOCKS * space.slot_bytes * space.shard_count)
        wanted = max(count * space.slot_bytes, min(groups, usage.capacity_bytes // 8))
        if usage.resting_bytes < wanted:
            self._remover.make_room(space, wanted - usage.resting_bytes, DISK)
        self._fruitless += 1
        if self._fruitless > FRUITLESS_MAX:
            self._reassigner.start(space)
        self._settle()

    def _settle(self) -> None:
        """Makes removals durable, so that their slots can be used again."""
        disk, freed = self._parts.disk, self._parts.retired[DISK].freed_places
        assert disk is not None
        if self._settling or freed == self._settled_places:
            return

        def done(moved: Moved) -> None:
            self._settling, self._answered = False, self._parts.clock.now()
            if moved.error is None:
                self._settled_places = freed
            else:
                self._paused_until = self._parts.clock.now() + RETRY_SECONDS
            self._tell()

        self._settling = self._parts.mover.submit(
            Job(WRITE_LINK, "", 0, 0, lambda: disk.commit([]), done)
        )

    # ---- Groups ----

    def _is_full(self) -> bool:
        return self._open.block_count >= GROUP_BLOCKS or self._open.byte_count >= GROUP_BYTES

    def submit(self) -> None:
        """Sends the open group on its way."""
        group, self._open = self._open, Group()
        if not group.parts:
            return
        self._running.append(group)

        def done(moved: Moved) -> None:
            group.moved, self._answered = moved, self._parts.clock.now()
            self._take_over()

        if not self._parts.mover.submit(self._writer.job(group, done)):
            self._parts.recorder.queue_rejected(WRITE_LINK, group.block_count)
            done(Moved(None, OSError("the queue of disk writes is full"), 0.0))

    def _take_over(self) -> None:
        """Groups count in the order they were sent: a child never before its parent."""
        pools: dict[str, None] = {}
        while self._running and self._running[0].moved is not None:
            group = self._running.popleft()
            if self._writer.finish(group) < group.block_count:
                self._paused_until = self._parts.clock.now() + RETRY_SECONDS
            pools.update({part.space.pool: None for part in group.parts})
        self._tell()
        for pool in pools:
            self.poke(pool)

    def when_changed(self, call: Callable[[], None]) -> None:
        """Calls once, when a group or a settling has ended."""
        self._heard.append(call)

    def when_idle(self, call: Callable[[], None]) -> None:
        """Calls once nothing is on its way to disk."""
        self.submit()
        if self.is_idle:
            call()
        else:
            self.when_changed(lambda: self.when_idle(call))

    def _tell(self) -> None:
        heard, self._heard = self._heard, []
        for call in heard:
            self._parts.defer(call)

    def tick(self, now: float) -> None:
        """Sends what waits for company, frees what rests, and looks how the disk is."""
        disk = self._parts.disk
        if disk is None:
            return
        for pool in self._parts.config.host_pools:
            self.poke(pool)
        self.submit()
        self._resizer.tick(now)
        if not self._running and now >= self._paused_until and not disk.problem:
            self._settle()
        if now - self._probed >= PROBE_SECONDS and not self._probing:
            self._probe(now)

    def _probe(self, now: float) -> None:
        disk, self._probed = self._parts.disk, now
        assert disk is not None

        def done(moved: Moved) -> None:
            self._probing = False
            if not self._running and not self._settling:
                self._answered = self._parts.clock.now()  # else it says nothing about those

        self._probing = self._parts.mover.submit(Job(WRITE_LINK, "", 0, 0, disk.probe, done))


def begin_conveyors(parts: Parts, disk: Tier) -> None:
    """Has the cold end of every host pool written to disk, or what of it is worth it."""
    for pool in parts.config.host_pools:
        mark = int(parts.host_bytes(pool) * parts.config.tiers.disk.demote_watermark)
        parts.residency.demote_above(pool, mark)
    _set_prices(parts, disk.usage().capacity_bytes)


def _set_prices(parts: Parts, disk_bytes: int) -> None:
    """What is worth a write follows from them, and from how long a disk of this size keeps it."""
    if parts.config.tiers.disk.admission == "measured":
        prices = parts.config.prices
        parts.residency.set_prices(prices.gpu_second, prices.written_byte, disk_bytes)
