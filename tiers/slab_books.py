"""What the slab allocator knows: chunks, the class of each, and the state of every slot. No moves.

State lives in arrays by granule (the smallest chunk) and one byte a slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from kvstore.core.block import SLOT_ALIGN
from kvstore.tiers.buddy import Buddy
from kvstore.tiers.chunks import Chunk, SlotClass, SlotState, chunk_order, granule_shift
from kvstore.tiers.drain import Drain

FREE, STAGING, PUBLISHED, RESTING = (int(s) for s in SlotState)


class SlabBooks:
    """Books of one pool: questions about slots, and their audit; `Slab` moves them."""

    def __init__(
        self,
        capacity_bytes: int,
        assign: Callable[[Chunk], bool] = lambda chunk: True,
        release: Callable[[Chunk], None] = lambda chunk: None,
        shift: int | None = None,
        overhead_bytes: int = 0,
        least_order: int = 0,
    ) -> None:
        self.shift = granule_shift(capacity_bytes) if shift is None else shift
        self.overhead_bytes, self._least_order = overhead_bytes, least_order
        count = capacity_bytes >> self.shift
        self.capacity_bytes = count << self.shift
        self.ceiling_bytes = self.capacity_bytes
        """No slot is handed out above so many bytes used and resting."""
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

    def chunk_heads(self, offsets: np.ndarray) -> np.ndarray:
        """Offset of the chunk each offset (int64) lies in; negative where there is none."""
        heads = np.frombuffer(self._head, np.intc)[offsets >> self.shift]
        offsets_of_heads: np.ndarray = heads.astype(np.int64) << self.shift
        return offsets_of_heads

    def free_ranges(self, at: int) -> tuple[list[tuple[int, int]], int]:
        """(offset, length) of what is free of the chunk or unassigned granule at granule `at`.

        A chunk's tail, which no slot is in, counts. Answers with the granule after it as well; `at`
        may lie within a chunk.
        """
        head = self._head[at]
        if head < 0:
            return [(at << self.shift, 1 << self.shift)], at + 1
        size = self._classes[self._class_of[head]].slot_bytes
        free = np.frombuffer(bytes(self._states[head]), np.uint8) == FREE
        edges = np.flatnonzero(np.diff(free, prepend=False, append=False)).tolist()
        base = head << self.shift
        ranges = [
            (base + start * size, (stop - start) * size)
            for start, stop in zip(edges[::2], edges[1::2], strict=True)
        ]
        after, tail = head + (1 << self._order_of[head]), base + len(free) * size
        if tail < after << self.shift:
            ranges.append((tail, (after << self.shift) - tail))
        return ranges, after

    def check_integrity(self) -> None:
        """Asserts that every counter agrees with the slots' states, counted anew."""
        counts, tails, granules = [0, 0, 0, 0], 0, self._buddy.free_granules
        for at, states in self._states.items():
            slots = self._classes[self._class_of[at]]
            tally = [states.count(state) for state in range(4)]
            self._check_chunk(at, states, tally, slots)
            counts = [c + n * slots.slot_bytes for c, n in zip(counts, tally, strict=True)]
            size = 1 << self._order_of[at]
            tails += (size << self.shift) - len(states) * slots.slot_bytes
            granules += size
        granules += sum(d.withheld_granules for d in self._drains.values())
        assert granules << self.shift == self.capacity_bytes, "granules got lost"
        unassigned = self.capacity_bytes - sum(counts) - tails
        assert self.used_bytes == counts[STAGING] + counts[PUBLISHED], "used bytes drifted"
        assert self.resting_bytes == counts[RESTING], "resting bytes drifted"
        assert self.free_bytes == counts[FREE] + tails + unassigned, "free bytes drifted"
        assert self.used_bytes + self.free_bytes + self.resting_bytes == self.capacity_bytes
        assert self.published_count == sum(self._published), "published count drifted"

    def _check_chunk(self, at: int, states: bytearray, tally: list[int], slots: SlotClass) -> None:
        assert len(states) == self._slots[at] == sum(tally), f"chunk {at} lost slots"
        assert tally[FREE] == self._free[at], f"chunk {at} miscounts its free slots"
        assert tally[PUBLISHED] == self._published[at], f"chunk {at} miscounts published"
        assert (at in self._empty) <= (tally[FREE] == len(states)), f"chunk {at} not empty"
        lowest = states.find(FREE)
        assert lowest < 0 or lowest >= self._first_free[at], f"chunk {at} hides a free slot"
        assert not tally[FREE] or self._draining[at] or at in slots.listed, f"{at} unlisted"

    def _class(self, slot_bytes: int, header_bytes: int) -> SlotClass:
        slots = self._class_by_size.get((slot_bytes, header_bytes))
        if slots is None:
            assert slot_bytes % SLOT_ALIGN == 0, f"slots of {slot_bytes} bytes are not aligned"
            assert 0 < header_bytes <= slot_bytes, f"no room for {header_bytes} byte headers"
            order = self._order_of_class(slot_bytes)
            number = len(self._classes)
            slots = SlotClass(number, slot_bytes, header_bytes, order, self.overhead_bytes)
            self._classes.append(slots)
            self._class_by_size[slot_bytes, header_bytes] = slots
        return slots

    def _order_of_class(self, slot_bytes: int) -> int:
        """Order of the chunks a class takes; -1 if the pool is too small for one slot."""
        most = self._buddy.max_order
        order = chunk_order(slot_bytes, self.shift, most, self.overhead_bytes)
        return max(order, min(self._least_order, most)) if order >= 0 else -1

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

    def _move_many(self, at: int, indexes: np.ndarray, old: int, new: int) -> None:
        states = np.frombuffer(self._states[at], np.uint8)
        assert (states[indexes] == old).all(), f"slots of chunk {at} are in other states"
        states[indexes] = new

    def _chunk(self, at: int) -> Chunk:
        slots = self._classes[self._class_of[at]]
        size = 1 << self._order_of[at] + self.shift
        return Chunk(at << self.shift, size, slots.slot_bytes, slots.header_bytes, self._slots[at])
