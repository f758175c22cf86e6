"""Slot allocator of a pool: chunks from a buddy allocator, each cut into slots of one class.

Pure bookkeeping, no bytes and no files. A class is (slot bytes, header bytes). It takes the
smallest chunk that wastes at most 4 % of it, counting worst-case padding and the tail; where the
pool is too small for that, the chunk that wastes least. When only smaller memory is left it
takes that, since idle memory wastes more. Whole chunks change class: `drain` names what must
move for that. State lives in arrays by granule (the smallest chunk) and one byte a slot.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum

import numpy as np

from kvstore.core.block import SLOT_ALIGN
from kvstore.tiers.buddy import Buddy
from kvstore.tiers.chunks import Chunk, SlotClass, chunk_order, chunk_waste, granule_shift
from kvstore.tiers.drain import DRAIN_PATIENCE, Drain, cheapest_region

EMPTY_CHUNKS_MAX = 64


class SlotState(IntEnum):
    FREE = 0
    STAGING = 1
    PUBLISHED = 2
    RESTING = 3


_FREE, _STAGING, _PUBLISHED, _RESTING = (int(s) for s in SlotState)


class Slab:
    """Slots of one pool. Offsets are bytes, multiples of 4 KiB.

    `assign(chunk)` is asked before a chunk gets its class (False: no memory for its headers, the
    chunk is not given); `release(chunk)` is told before a chunk loses it.
    """

    def __init__(
        self,
        capacity_bytes: int,
        assign: Callable[[Chunk], bool] = lambda chunk: True,
        release: Callable[[Chunk], None] = lambda chunk: None,
    ) -> None:
        self.shift = granule_shift(capacity_bytes)
        count = capacity_bytes >> self.shift
        self.capacity_bytes = count << self.shift
        self.used_bytes = 0
        self.resting_bytes = 0
        self.free_bytes = self.capacity_bytes
        self.published_count = 0
        self._assign, self._release = assign, release
        self._buddy = Buddy(count)
        self._classes: list[SlotClass] = []
        self._class_by_size: dict[tuple[int, int], SlotClass] = {}
        self._drains: dict[int, Drain] = {}
        self._reserve_count = 0
        self._empty: set[int] = set()
        self._states: dict[int, bytearray] = {}
        self._head = array("i", [-1]) * count
        # The arrays below are set at the first granule of a chunk only.
        self._class_of = array("h", [-1]) * count
        self._order_of = array("b", [-1]) * count
        self._slots = array("i", [0]) * count
        self._free = array("i", [0]) * count
        self._published = array("i", [0]) * count
        self._first_free = array("i", [0]) * count
        self._draining = bytearray(count)

    def reserve(self, slot_bytes: int, header_bytes: int, count: int) -> list[int]:
        """Up to `count` slots, now STAGING, ascending within each chunk; fewer when full."""
        slots = self._class(slot_bytes, header_bytes)
        self._forget_old_drains()
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
        self._move(chunk, index, _STAGING, _PUBLISHED)
        self._published[chunk] += 1
        self.published_count += 1
        return chunk << self.shift, index, slots

    def rest(self, offset: int) -> tuple[int, int, SlotClass]:
        """STAGING or PUBLISHED -> RESTING; answers as `slot_at` does."""
        chunk, index, slots = self._locate(offset)
        states = self._states[chunk]
        if states[index] == _PUBLISHED:
            self._published[chunk] -= 1
            self.published_count -= 1
            states[index] = _RESTING
        else:
            self._move(chunk, index, _STAGING, _RESTING)
        self.used_bytes -= slots.slot_bytes
        self.resting_bytes += slots.slot_bytes
        return chunk << self.shift, index, slots

    def free(self, offset: int) -> None:
        """RESTING -> FREE; a chunk that is wholly free may leave its class."""
        chunk, index, slots = self._locate(offset)
        self._move(chunk, index, _RESTING, _FREE)
        self.resting_bytes -= slots.slot_bytes
        self.free_bytes += slots.slot_bytes
        self._free[chunk] += 1
        if index < self._first_free[chunk]:
            self._first_free[chunk] = index
        if self._free[chunk] == self._slots[chunk]:
            self._emptied(chunk, slots)
        elif not self._draining[chunk]:
            self._list(chunk, slots)

    def restore_chunk(self, offset: int, order: int, slot_bytes: int, header_bytes: int) -> bool:
        """Takes back a chunk of an earlier life, all RESTING; False if it cannot have been one."""
        at = offset >> self.shift
        if not 0 <= order <= self._buddy.max_order or slot_bytes % SLOT_ALIGN:
            return False
        if not 0 < header_bytes <= slot_bytes <= 1 << order + self.shift:
            return False
        if not self._buddy.take_at(at, order):
            return False
        slots = self._class(slot_bytes, header_bytes)
        self._cut(at, order, slots, _RESTING)
        moved = self._slots[at] * slot_bytes
        self.resting_bytes += moved
        self.free_bytes -= moved
        return True

    def adopt(self, offset: int) -> None:
        """RESTING -> PUBLISHED, for a slot of a restored chunk."""
        chunk, index, slots = self._locate(offset)
        self._move(chunk, index, _RESTING, _PUBLISHED)
        self._published[chunk] += 1
        self.published_count += 1
        self.resting_bytes -= slots.slot_bytes
        self.used_bytes += slots.slot_bytes

    def chunks(self) -> Iterator[Chunk]:
        """Chunks that have a class, by offset."""
        return (self._chunk(at) for at in sorted(self._states))

    def states(self, chunk: Chunk) -> np.ndarray:
        """State of each slot of a chunk (a copy)."""
        return np.frombuffer(bytes(self._states[chunk.offset >> self.shift]), np.uint8)

    def state(self, offset: int) -> SlotState:
        chunk, index, _ = self._locate(offset)
        return SlotState(self._states[chunk][index])

    def slot_bytes_at(self, offset: int) -> int:
        """Size of the slot at `offset`; any thread may ask about a slot it was given."""
        return self._locate(offset)[2].slot_bytes

    def slot_at(self, offset: int) -> tuple[int, int, SlotClass]:
        """(offset of the chunk, index in it, class) of the slot at `offset`."""
        chunk, index, slots = self._locate(offset)
        return chunk << self.shift, index, slots

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

    def check_integrity(self) -> None:
        """Asserts that every counter agrees with the slots' states, counted anew."""
        counts, tails, granules = [0, 0, 0, 0], 0, self._buddy.free_granules
        for at, states in self._states.items():
            slots = self._classes[self._class_of[at]]
            tally = [states.count(state) for state in range(4)]
            assert len(states) == self._slots[at] == sum(tally), f"chunk {at} lost slots"
            assert tally[_FREE] == self._free[at], f"chunk {at} miscounts its free slots"
            assert tally[_PUBLISHED] == self._published[at], f"chunk {at} miscounts published"
            assert (at in self._empty) <= (tally[_FREE] == len(states)), f"chunk {at} not empty"
            lowest = states.find(_FREE)
            assert lowest < 0 or lowest >= self._first_free[at], f"chunk {at} hides a free slot"
            assert not tally[_FREE] or self._draining[at] or at in slots.listed, f"{at} unlisted"
            counts = [c + n * slots.slot_bytes for c, n in zip(counts, tally, strict=True)]
            size = 1 << self._order_of[at]
            tails += (size << self.shift) - len(states) * slots.slot_bytes
            granules += size
        granules += sum(d.withheld_granules for d in self._drains.values())
        assert granules << self.shift == self.capacity_bytes, "granules got lost"
        unassigned = self.capacity_bytes - sum(counts) - tails
        assert self.used_bytes == counts[_STAGING] + counts[_PUBLISHED], "used bytes drifted"
        assert self.resting_bytes == counts[_RESTING], "resting bytes drifted"
        assert self.free_bytes == counts[_FREE] + tails + unassigned, "free bytes drifted"
        assert self.used_bytes + self.free_bytes + self.resting_bytes == self.capacity_bytes
        assert self.published_count == sum(self._published), "published count drifted"

    def _class(self, slot_bytes: int, header_bytes: int) -> SlotClass:
        slots = self._class_by_size.get((slot_bytes, header_bytes))
        if slots is None:
            assert slot_bytes % SLOT_ALIGN == 0, f"slots of {slot_bytes} bytes are not aligned"
            assert 0 < header_bytes <= slot_bytes, f"no room for {header_bytes} byte headers"
            order = chunk_order(slot_bytes, self.shift, self._buddy.max_order)
            slots = SlotClass(len(self._classes), slot_bytes, header_bytes, order)
            self._classes.append(slots)
            self._class_by_size[slot_bytes, header_bytes] = slots
        return slots

    def _locate(self, offset: int) -> tuple[int, int, SlotClass]:
        """(first granule of the chunk, slot index, class) of the slot at `offset`."""
        chunk = self._head[offset >> self.shift]
        assert chunk >= 0, f"no slot at byte {offset}"
        slots = self._classes[self._class_of[chunk]]
        index, rest = divmod(offset - (chunk << self.shift), slots.slot_bytes)
        assert rest == 0, f"no slot begins at byte {offset}"
        assert index < self._slots[chunk], f"byte {offset} is in the tail of its chunk"
        return chunk, index, slots

    def _move(self, chunk: int, index: int, old: int, new: int) -> None:
        states = self._states[chunk]
        assert states[index] == old, (
            f"slot {index} of chunk {chunk} is {SlotState(states[index]).name}, "
            f"not {SlotState(old).name}"
        )
        states[index] = new

    def _take(self, chunk: int, slots: SlotClass, count: int, offsets: list[int]) -> None:
        states, base, size = self._states[chunk], chunk << self.shift, slots.slot_bytes
        count = min(count, self._free[chunk])
        at = self._first_free[chunk] - 1
        for _ in range(count):
            at = states.index(_FREE, at + 1)
            states[at] = _STAGING
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
            for idle in sorted(self._empty):
                self._dissolve(idle)
            at = self._buddy.take(order)
        if at < 0:
            at, order = self._take_smaller(slots)
        if at < 0:
            return -1
        size = 1 << order + self.shift
        count = size // slots.slot_bytes
        chunk = Chunk(at << self.shift, size, slots.slot_bytes, slots.header_bytes, count)
        if not self._assign(chunk):
            self._buddy.give(at, order)
            return -1
        self._cut(at, order, slots, _FREE)
        self._list(at, slots)
        self._empty.add(at)
        self._end_drain(slots.number)
        return at

    def _take_smaller(self, slots: SlotClass) -> tuple[int, int]:
        """The least wasteful free block smaller than the class wants; (-1, -1) if none fits."""
        size = slots.slot_bytes
        fitting = [k for k in self._buddy.orders() if 1 << k + self.shift >= size]
        if not fitting:
            return -1, -1
        order = min(fitting, key=lambda k: (chunk_waste(size, 1 << k + self.shift), -k))
        return self._buddy.take(order), order

    def _cut(self, at: int, order: int, slots: SlotClass, state: int) -> None:
        """Makes a block of granules a chunk whose slots are all in `state`."""
        granules = 1 << order
        count = (granules << self.shift) // slots.slot_bytes
        self._head[at : at + granules] = array("i", [at]) * granules
        self._class_of[at], self._order_of[at] = slots.number, order
        self._slots[at], self._published[at], self._first_free[at] = count, 0, 0
        self._free[at] = count if state == _FREE else 0
        self._states[at] = bytearray([state]) * count
        slots.chunk_count += 1

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
        self._buddy.give(chunk, order)

    def _chunk(self, at: int) -> Chunk:
        slots = self._classes[self._class_of[at]]
        size = 1 << self._order_of[at] + self.shift
        return Chunk(at << self.shift, size, slots.slot_bytes, slots.header_bytes, self._slots[at])

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
            found += [(at << self.shift) + i * size for i in np.flatnonzero(states == _PUBLISHED)]
        return [int(offset) for offset in found]
