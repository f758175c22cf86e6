"""Slot allocator of a pool: chunks from a buddy allocator, each cut into slots of one class.

Pure bookkeeping, no bytes and no files. A class is (slot bytes, header bytes). It takes the
smallest chunk that wastes at most 4 % of it, counting worst-case padding and the tail; where the
pool is too small for that, the chunk that wastes least. When only smaller memory is left it
takes that, since idle memory wastes more. Whole chunks change class: `drain` names what must
move for that.
"""

from __future__ import annotations

import heapq
from array import array

import numpy as np

from kvstore.core.block import SLOT_ALIGN
from kvstore.tiers.chunks import Chunk, SlotClass, SlotState, chunk_waste, slot_count
from kvstore.tiers.drain import DRAIN_PATIENCE, Drain, cheapest_region
from kvstore.tiers.slab_books import FREE, PUBLISHED, RESTING, STAGING, SlabBooks

__all__ = ["EMPTY_CHUNKS_MAX", "Slab", "SlotState"]

EMPTY_CHUNKS_MAX = 64


class Slab(SlabBooks):
    """Slots of one pool. Offsets are bytes, multiples of 4 KiB.

    `assign(chunk)` is asked before a chunk gets its class (False: no memory for its headers, the
    chunk is not given); `release(chunk)` is told before a chunk loses it. A chunk keeps
    `overhead_bytes` for itself, and is of `least_order` or larger where there is room for that;
    `shift` is log2 of the granule, by default as the pool needs it.
    """

    def reserve(self, slot_bytes: int, header_bytes: int, count: int) -> list[int]:
        """Up to `count` slots, now STAGING, ascending within each chunk; fewer when full."""
        slots = self._class(slot_bytes, header_bytes)
        self._forget_old_drains()
        room = self.ceiling_bytes - self.used_bytes - self.resting_bytes
        count = min(count, max(0, room // slot_bytes))
        offsets: list[int] = []
        while len(offsets) < count:
            chunk = self._chunk_with_room(slots)
            if chunk < 0:
                break
            self._take(chunk, slots, count - len(offsets), offsets)
        taken = len(offsets) * slots.slot_bytes
        self.used_bytes += taken
        self.free_bytes -= taken
        return offsets

    def publish(self, offset: int) -> tuple[int, int, SlotClass]:
        """STAGING -> PUBLISHED; answers as `slot_at` does."""
        chunk, index, slots = self._locate(offset)
        self._move(chunk, index, STAGING, PUBLISHED)
        self._published[chunk] += 1
        self.published_count += 1
        return chunk << self.shift, index, slots

    def rest(self, offset: int) -> tuple[int, int, SlotClass]:
        """STAGING or PUBLISHED -> RESTING; answers as `slot_at` does."""
        chunk, index, slots = self._locate(offset)
        states = self._states[chunk]
        if states[index] == PUBLISHED:
            self._published[chunk] -= 1
            self.published_count -= 1
            states[index] = RESTING
        else:
            self._move(chunk, index, STAGING, RESTING)
        self.used_bytes -= slots.slot_bytes
        self.resting_bytes += slots.slot_bytes
        return chunk << self.shift, index, slots

    def free(self, offset: int) -> None:
        """RESTING -> FREE; a chunk that is wholly free may leave its class."""
        chunk, index, slots = self._locate(offset)
        self._move(chunk, index, RESTING, FREE)
        self.resting_bytes -= slots.slot_bytes
        self.free_bytes += slots.slot_bytes
        self._free[chunk] += 1
        if index < self._first_free[chunk]:
            self._first_free[chunk] = index
        self._came_free(chunk, slots)

    def give_up(self, offset: int) -> None:
        """STAGING -> FREE, for a slot that cannot be used after all."""
        self.rest(offset)
        self.free(offset)

    def dissolve_empty(self) -> None:
        """Takes every wholly free chunk out of its class."""
        for chunk in sorted(self._empty):
            self._dissolve(chunk)

    def restore_chunk(self, offset: int, order: int, slot_bytes: int, header_bytes: int) -> bool:
        """Takes back a chunk of an earlier life, all RESTING; False if it cannot have been one."""
        at = offset >> self.shift
        if not 0 <= order <= self._buddy.max_order or slot_bytes % SLOT_ALIGN:
            return False
        if not 0 < header_bytes <= slot_bytes <= 1 << order + self.shift:
            return False
        if not self._buddy.take_at(at, order):
            return False
        self._restore(at, order, slot_bytes, header_bytes)
        return True

    def restore_anywhere(self, order: int, slot_bytes: int, header_bytes: int) -> Chunk | None:
        """`restore_chunk` of one that may lie at any offset; None if there is no room."""
        at = self._buddy.take(order) if 0 <= order <= self._buddy.max_order else -1
        if at < 0:
            return None
        self._restore(at, order, slot_bytes, header_bytes)
        return self._chunk(at)

    def _restore(self, at: int, order: int, slot_bytes: int, header_bytes: int) -> None:
        slots = self._class(slot_bytes, header_bytes)
        self._cut(at, order, slots, RESTING)
        moved = self._slots[at] * slot_bytes
        self.resting_bytes += moved
        self.free_bytes -= moved

    def adopt(self, offset: int) -> None:
        """RESTING -> PUBLISHED, for a slot of a restored chunk."""
        chunk, index, slots = self._locate(offset)
        self._move(chunk, index, RESTING, PUBLISHED)
        self._published[chunk] += 1
        self.published_count += 1
        self.resting_bytes -= slots.slot_bytes
        self.used_bytes += slots.slot_bytes

    def adopt_many(self, chunk: Chunk, indexes: np.ndarray) -> None:
        """`adopt` of many slots of one chunk, each once."""
        at = chunk.offset >> self.shift
        self._move_many(at, indexes, RESTING, PUBLISHED)
        self._published[at] += len(indexes)
        self.published_count += len(indexes)
        self.resting_bytes -= len(indexes) * chunk.slot_bytes
        self.used_bytes += len(indexes) * chunk.slot_bytes

    def free_many(self, chunk: Chunk, indexes: np.ndarray) -> None:
        """`free` of many slots of one chunk, each once."""
        if not len(indexes):
            return
        at = chunk.offset >> self.shift
        self._move_many(at, indexes, RESTING, FREE)
        self.resting_bytes -= len(indexes) * chunk.slot_bytes
        self.free_bytes += len(indexes) * chunk.slot_bytes
        self._free[at] += len(indexes)
        self._first_free[at] = min(self._first_free[at], int(indexes.min()))
        self._came_free(at, self._classes[self._class_of[at]])

    def drain(self, slot_bytes: int, header_bytes: int) -> list[int]:
        """Published offsets to move so that a chunk comes free for this class; see `Tier`."""
        slots = self._class(slot_bytes, header_bytes)
        if slots.order < 0 or self._chunk_with_room(slots) >= 0:
            return []
        drain = self._drains.get(slots.number) or self._begin_drain(slots)
        if drain is None:
            return []
        drain.asked_at = self._reserve_count
        return self._published_in(drain)

    def cancel_drain(self, slot_bytes: int, header_bytes: int) -> None:
        slots = self._class_by_size.get((slot_bytes, header_bytes))
        if slots is not None:
            self._end_drain(slots.number)

    def _take(self, chunk: int, slots: SlotClass, count: int, offsets: list[int]) -> None:
        states, base, size = self._states[chunk], chunk << self.shift, slots.slot_bytes
        count = min(count, self._free[chunk])
        at = self._first_free[chunk] - 1
        for _ in range(count):
            at = states.index(FREE, at + 1)
            states[at] = STAGING
            offsets.append(base + at * size)
        self._first_free[chunk] = at + 1
        self._free[chunk] -= count
        self._empty.discard(chunk)

    def _list(self, chunk: int, slots: SlotClass) -> None:
        if chunk not in slots.listed:
            slots.listed.add(chunk)
            heapq.heappush(slots.heap, chunk)

    def _chunk_with_room(self, slots: SlotClass) -> int:
        """Lowest chunk of the class that has a free slot, a new one if need be; -1 when full."""
        heap = slots.heap
        while heap:
            at = heap[0]
            if self._class_of[at] == slots.number and self._free[at] and not self._draining[at]:
                return at
            heapq.heappop(heap)
            slots.listed.discard(at)
        return self._new_chunk(slots)

    def _new_chunk(self, slots: SlotClass) -> int:
        if slots.order < 0:
            return -1
        at, order = self._buddy.take(slots.order), slots.order
        if at < 0 and self._empty:
            self.dissolve_empty()
            at = self._buddy.take(order)
        if at < 0:
            at, order = self._take_smaller(slots)
        if at < 0:
            return -1
        size = 1 << order + self.shift
        count = slot_count(slots.slot_bytes, size, self.overhead_bytes)
        chunk = Chunk(at << self.shift, size, slots.slot_bytes, slots.header_bytes, count)
        if not self._assign(chunk):
            self._buddy.give(at, order)
            return -1
        self._cut(at, order, slots, FREE)
        self._list(at, slots)
        self._empty.add(at)
        self._end_drain(slots.number)
        return at

    def _take_smaller(self, slots: SlotClass) -> tuple[int, int]:
        """The least wasteful free block smaller than the class wants; (-1, -1) if none fits."""
        size, least, own = slots.slot_bytes, slots.least_bytes, self.overhead_bytes
        fitting = [k for k in self._buddy.orders() if 1 << k + self.shift >= least]
        if not fitting:
            return -1, -1
        order = min(fitting, key=lambda k: (chunk_waste(size, 1 << k + self.shift, own), -k))
        return self._buddy.take(order), order

    def _cut(self, at: int, order: int, slots: SlotClass, state: int) -> None:
        """Makes a block of granules a chunk whose slots are all in `state`."""
        granules = 1 << order
        count = slot_count(slots.slot_bytes, granules << self.shift, self.overhead_bytes)
        self._head[at : at + granules] = array("i", [at]) * granules
        self._class_of[at], self._order_of[at] = slots.number, order
        self._slots[at], self._published[at], self._first_free[at] = count, 0, 0
        self._free[at] = count if state == FREE else 0
        self._states[at] = bytearray([state]) * count
        slots.chunk_count += 1

    def _came_free(self, chunk: int, slots: SlotClass) -> None:
        if self._free[chunk] == self._slots[chunk]:
            self._emptied(chunk, slots)
        elif not self._draining[chunk]:
            self._list(chunk, slots)

    def _emptied(self, chunk: int, slots: SlotClass) -> None:
        # Some empty chunks keep their class, so that steady traffic does not make and dissolve
        # them again and again; another class that needs memory takes them, few enough for one go.
        if self._draining[chunk] or len(self._empty) >= EMPTY_CHUNKS_MAX:
            self._dissolve(chunk)
        else:
            self._empty.add(chunk)
            self._list(chunk, slots)

    def _dissolve(self, chunk: int) -> None:
        """Takes a wholly free chunk out of its class."""
        self._release(self._chunk(chunk))
        order, granules = self._order_of[chunk], 1 << self._order_of[chunk]
        self._classes[self._class_of[chunk]].chunk_count -= 1
        del self._states[chunk]
        self._empty.discard(chunk)
        self._head[chunk : chunk + granules] = array("i", [-1]) * granules
        self._class_of[chunk] = self._order_of[chunk] = -1
        self._slots[chunk] = self._free[chunk] = self._draining[chunk] = 0
        for number, drain in self._drains.items():
            if drain.start <= chunk < drain.stop:
                drain.withhold(chunk, order)
                if drain.complete:
                    self._end_drain(number)
                    self._chunk_with_room(self._classes[number])
                return
        self._give(chunk, order)

    def _give(self, at: int, order: int) -> None:
        """A block of granules has no class any more."""
        self._buddy.give(at, order)

    def _begin_drain(self, slots: SlotClass) -> Drain | None:
        """Marks the region that is cheapest to empty; None if there is none, or it was empty."""
        if slots.chunk_count == len(self._states):
            return None
        region = cheapest_region(
            slots,
            [c.slot_bytes for c in self._classes],
            self._class_of, self._order_of, self._slots, self._free,
            self._drains.values(), self.shift,
        )  # fmt: skip
        if region is None:
            return None
        drain = self._drains[slots.number] = Drain(*region)
        for at, order in list(self._buddy.blocks(drain.start, drain.stop)):
            self._buddy.take_at(at, order)
            drain.withhold(at, order)
        for at in self._chunks_in(drain):
            self._draining[at] = 1
            if self._free[at] == self._slots[at]:
                self._dissolve(at)
        return self._drains.get(slots.number)

    def _end_drain(self, number: int) -> None:
        """Lets allocations into the region again, whether it was emptied or not."""
        drain = self._drains.pop(number, None)
        if drain is None:
            return
        for at, order in drain.withheld:
            self._buddy.give(at, order)
        for at in self._chunks_in(drain):
            self._draining[at] = 0
            if self._free[at]:
                self._list(at, self._classes[self._class_of[at]])

    def _forget_old_drains(self) -> None:
        """Ends drains that nobody has asked about for long: their free slots serve again."""
        self._reserve_count += 1
        oldest = self._reserve_count - DRAIN_PATIENCE
        for number in [n for n, drain in self._drains.items() if drain.asked_at < oldest]:
            self._end_drain(number)

    def _chunks_in(self, drain: Drain) -> list[int]:
        return [at for at in range(drain.start, drain.stop) if self._class_of[at] >= 0]

    def _published_in(self, drain: Drain) -> list[int]:
        found = []
        for at in self._chunks_in(drain):
            size = self._classes[self._class_of[at]].slot_bytes
            states = np.frombuffer(self._states[at], np.uint8)
            found += [(at << self.shift) + i * size for i in np.flatnonzero(states == PUBLISHED)]
        return [int(offset) for offset in found]
