"""Slabs whose size changes while they serve: granules are added, or given up as they come free.

Pure bookkeeping, like the slab. What a smaller slab lacks is a debt: every granule that comes free
pays for it, wherever it lies, and is withheld from use. Offsets are names, so holes do no harm.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from kvstore.tiers.chunks import SlotClass
from kvstore.tiers.slab import Slab

_BY_GRANULE = ("_head", "_class_of", "_order_of", "_slots", "_free", "_published", "_first_free")


class GrowingSlab(Slab):
    """A slab that may get more granules behind those it has."""

    def grow(self, byte_count: int) -> None:
        """Has so many bytes from now on; the ceiling stays where it is."""
        granules = (byte_count - self.capacity_bytes) >> self.shift
        if granules > 0:
            self.capacity_bytes += granules << self.shift
            self.free_bytes += granules << self.shift
            self._extend(granules)
            self._order_anew()

    def _extend(self, granules: int) -> None:
        # New arrays take the place of the old: workers may be looking at those.
        for name in _BY_GRANULE:
            old: array[int] = getattr(self, name)
            fill = -1 if name in _BY_GRANULE[:3] else 0
            setattr(self, name, old + array(old.typecode, [fill]) * granules)
        self._draining += bytes(granules)
        self._buddy.extend(len(self._head))

    def _order_anew(self) -> None:
        """Larger chunks for each class, as a slab that was made with this size gives them."""
        for slots in self._classes:
            slots.order = self._order_of_class(slots.slot_bytes)


class ResizableSlab(GrowingSlab):
    """A slab with `set_size`; `capacity_bytes` falls as memory comes free, its ceiling at once."""

    _debt_granules = 0
    _withheld: tuple[tuple[int, int], ...] = ()
    _leaving: frozenset[int] = frozenset()

    @property
    def span_bytes(self) -> int:
        """Offsets are below this; it never falls."""
        return len(self._head) << self.shift

    @property
    def debt_bytes(self) -> int:
        """What is still to be given up."""
        return self._debt_granules << self.shift

    def set_size(self, byte_count: int, least_order: int) -> None:
        """The size to have from now on, at least a granule; classes new to it get larger chunks."""
        wanted = byte_count >> self.shift
        more = wanted - ((self.capacity_bytes >> self.shift) - self._debt_granules)
        if more < 0:
            for number in list(self._drains):
                self._end_drain(number)
            self._debt_granules -= more
            self.dissolve_empty()
            self._pay()
        else:
            forgiven = min(more, self._debt_granules)
            self._debt_granules -= forgiven
            if not self._debt_granules:
                self._stay(self._leaving)
                self._add(more - forgiven)
                self._least_order = least_order
                self._order_anew()
        self.ceiling_bytes = wanted << self.shift

    def choose_leaving(self, unmovable: Iterable[int] = ()) -> bool:
        """Chooses the chunks to empty for the debt: those with the least in them.

        A chunk in which one of the offsets `unmovable` lies is left for later. Nothing new is
        placed in what was chosen. False if nothing can be.
        """
        self._stay(self._leaving)
        held = {self._head[offset >> self.shift] for offset in unmovable}
        chunks = [at for at in self._states if at not in held]
        chunks.sort(key=lambda at: 1.0 - self._free[at] / self._slots[at])
        chosen, granules = [], 0
        for at in chunks:
            if granules >= self._debt_granules:
                break
            chosen.append(at)
            granules += 1 << self._order_of[at]
            self._draining[at] = 1
        self._leaving = frozenset(chosen)
        for at in chosen:
            if self._free[at] == self._slots[at]:
                self._dissolve(at)
        return bool(chosen)

    def is_leaving(self, offsets: np.ndarray) -> np.ndarray:
        """Which of these offsets (int64) of slots lie in a chunk that is to be emptied."""
        heads = np.frombuffer(self._head, np.intc)[offsets >> self.shift]
        leaving = np.zeros(len(self._head) + 1, bool)
        leaving[[at for at in self._leaving if at in self._states]] = True
        answer: np.ndarray = leaving[heads]
        return answer

    def reserve_for_move(self, slot_bytes: int, header_bytes: int, count: int) -> list[int]:
        """`reserve` above the ceiling, for what leaves its own slot as soon as it has another."""
        ceiling, self.ceiling_bytes = self.ceiling_bytes, self.span_bytes
        try:
            return self.reserve(slot_bytes, header_bytes, count)
        finally:
            self.ceiling_bytes = ceiling

    def drain(self, slot_bytes: int, header_bytes: int) -> list[int]:
        """None while memory is given up: what comes free pays for that first."""
        return [] if self._debt_granules else super().drain(slot_bytes, header_bytes)

    def _emptied(self, chunk: int, slots: SlotClass) -> None:
        if self._debt_granules:
            self._dissolve(chunk)
        else:
            super()._emptied(chunk, slots)

    def _give(self, at: int, order: int) -> None:
        super()._give(at, order)
        self._pay()

    def _pay(self) -> None:
        """Withholds free blocks for the debt, large ones first."""
        while self._debt_granules and self._buddy.free_granules:
            order = min(self._debt_granules.bit_length() - 1, self._buddy.orders()[-1])
            self._withheld = (*self._withheld, (self._buddy.take(order), order))
            self._debt_granules -= 1 << order
            self.capacity_bytes -= 1 << order + self.shift
            self.free_bytes -= 1 << order + self.shift
            if not self._debt_granules:
                self._stay(self._leaving)

    def _stay(self, chunks: Iterable[int]) -> None:
        """These are used again as before."""
        self._leaving = frozenset()
        for at in chunks:
            if at in self._states and self._draining[at]:
                self._draining[at] = 0
                if self._free[at]:
                    self._list(at, self._classes[self._class_of[at]])

    def _add(self, granules: int) -> None:
        """More memory: what was withheld, then what was never there."""
        self.capacity_bytes += granules << self.shift
        self.free_bytes += granules << self.shift
        withheld = list(self._withheld)
        while granules and withheld:
            at, order = withheld.pop()
            if 1 << order > granules:
                half = order - 1
                withheld += [(at + (1 << half), half), (at, half)]
                continue
            self._buddy.give(at, order)
            granules -= 1 << order
        self._withheld = tuple(withheld)
        if granules:
            self._extend(granules)

    def check_integrity(self) -> None:
        super().check_integrity()
        withheld = sum(1 << order for _, order in self._withheld) << self.shift
        assert self.capacity_bytes + withheld == self.span_bytes, "granules were withheld twice"
        size = self.capacity_bytes - self.debt_bytes
        assert self.ceiling_bytes == size, "the ceiling is not the size"
        assert not self._debt_granules or not self._buddy.free_granules, "a debt is not paid"
