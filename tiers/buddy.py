"""Buddy allocator: power-of-two blocks of granules, split on demand, merged when given back.

Pure bookkeeping over granule numbers. A size that is no power of two is a row of ever smaller
roots, each aligned to its own size, so the usual arithmetic (partner = number ^ size) holds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator


class Buddy:
    """Free blocks of `count` granules; a block of order k is 2^k granules, aligned to that."""

    def __init__(self, count: int) -> None:
        assert count > 0, "a buddy allocator needs at least one granule"
        self.count = count
        self.max_order = count.bit_length() - 1
        self.free_granules = 0
        self._order_at = array("b", [-1]) * count
        self._free: list[list[int]] = [[] for _ in range(self.max_order + 1)]
        at = 0
        for order in range(self.max_order, -1, -1):
            if count >> order & 1:
                self._add(at, order)
                at += 1 << order

    def take(self, order: int) -> int:
        """Lowest block of `order`, split off the smallest that holds it; -1 if there is none."""
        for have in range(order, self.max_order + 1):
            if self._free[have]:
                at = self._free[have][0]
                self._split(at, have, at, order)
                return at
        return -1

    def take_at(self, at: int, order: int) -> bool:
        """Takes exactly this block; False if it is not wholly free, aligned and inside."""
        if not 0 <= order <= self.max_order or at < 0 or at + (1 << order) > self.count:
            return False
        if at & ((1 << order) - 1):
            return False
        for have in range(order, self.max_order + 1):
            base = at >> have << have
            if self._order_at[base] == have:
                self._split(base, have, at, order)
                return True
        return False

    def give(self, at: int, order: int) -> None:
        """Returns a taken block and merges it with its free partners."""
        while order < self.max_order:
            partner = at ^ (1 << order)
            if partner >= self.count or self._order_at[partner] != order:
                break
            self._remove(partner, order)
            at &= ~(1 << order)
            order += 1
        self._add(at, order)

    def extend(self, count: int) -> None:
        """There are `count` granules from now on; the new ones are free."""
        at, self.count = self.count, count
        self._order_at += array("b", [-1]) * (count - at)
        self.max_order = count.bit_length() - 1
        self._free += [[] for _ in range(self.max_order + 1 - len(self._free))]
        while at < count:
            order = min((at & -at).bit_length() - 1 if at else self.max_order, self.max_order)
            while at + (1 << order) > count:
                order -= 1
            self.give(at, order)
            at += 1 << order

    def orders(self) -> list[int]:
        """Orders that have a free block, ascending."""
        return [order for order, blocks in enumerate(self._free) if blocks]

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Free blocks (granule, order) that begin in [start, stop), by order."""
        stop = self.count if stop is None else stop
        for order, blocks in enumerate(self._free):
            for at in blocks[bisect_left(blocks, start) : bisect_left(blocks, stop)]:
                yield at, order

    def _split(self, base: int, have: int, at: int, order: int) -> None:
        """Removes the free block (base, have) and gives back all of it but (at, order)."""
        self._remove(base, have)
        while have > order:
            have -= 1
            half = base + (1 << have)
            if at >= half:
                self._add(base, have)
                base = half
            else:
                self._add(half, have)

    def _add(self, at: int, order: int) -> None:
        self._order_at[at] = order
        insort(self._free[order], at)
        self.free_granules += 1 << order

    def _remove(self, at: int, order: int) -> None:
        self._order_at[at] = -1
        blocks = self._free[order]
        del blocks[bisect_left(blocks, at)]
        self.free_granules -= 1 << order
