"""Promotion: which blocks of the host tier get a copy in a GPU's memory, and which copy goes.

A copy costs one transfer from host, the very one that each later load from it spares. It pays if
it is expected to be read more often than that while it stays:

    stay / gap x (host seconds - hbm seconds) > host seconds

`gap` is the time between the block's last two loads, `stay` how long copies stay unread before
they go: the age of the coldest one, for ever while there is room. Costs are measured. A block that
was loaded once has no gap, so nothing is promoted before its second load.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

# Loads remembered of blocks without a copy, for each that has one: a gap longer than a few times
# the stay decides nothing.
REMEMBERED_FOR_EACH = 4
REMEMBERED_MIN = 1024
PROMOTED_A_LOAD = 128  # 20 us each; of a longer prompt the rest comes with its next loads
VICTIMS_FOR_EACH = 4  # a copy of another size leaves a hole that may be of no use


class Promotion:
    """Copies by recency and depth, and when blocks without one were last loaded.

    A place is whatever names a block's bytes to the caller. The least recently loaded copy is the
    coldest; of blocks loaded together, the deepest: what is before them is loaded without them,
    never the other way round.
    """

    def __init__(self) -> None:
        self._copies: OrderedDict[int, float] = OrderedDict()
        self._loads: OrderedDict[int, float] = OrderedDict()
        self._is_full = False

    def __len__(self) -> int:
        return len(self._copies)

    def has(self, place: int) -> bool:
        """Whether the block has a copy."""
        return place in self._copies

    def loaded(self, places: Sequence[int], now: float, spared: float) -> list[int]:
        """Blocks were loaded, in the order of the prompt; answers with those worth a copy.

        `spared` is the share of a block's seconds from host that a load from a copy spares.
        """
        wanted = []
        longest = self.stay(now) * spared
        for place in reversed(places):
            if place in self._copies:
                self._copies[place] = now
                self._copies.move_to_end(place)
                continue
            before = self._loads.get(place)
            if before is not None and now - before < longest:
                wanted.append(place)
            self._loads[place] = now
            self._loads.move_to_end(place)
        self._forget()
        wanted.reverse()
        return wanted

    def stay(self, now: float) -> float:
        """Seconds that a copy stays without being read, as far as is known."""
        if not self._is_full or not self._copies:
            return math.inf
        return now - next(iter(self._copies.values()))

    def arrived(self, places: Iterable[int], now: float) -> None:
        """Copies of these blocks are there, in the order of the prompt."""
        for place in reversed(list(places)):
            self._copies[place] = self._loads.pop(place, now)

    def full(self, is_full: bool) -> None:
        """Whether room for the last copies could be had only at the expense of others."""
        self._is_full = is_full

    def victims(self, kept: Collection[int], now: float) -> Iterator[int]:
        """Copies from the coldest on, but for those in `kept`, which are read at present.

        One that was loaded only just now is none: whoever comes next would find it gone.
        """
        for place, loaded in list(self._copies.items()):
            if loaded >= now:
                return
            if place not in kept:
                yield place

    def make_room(
        self, count: int, reserve: Callable[[int], list[int]], drop: Callable[[int], None],
        kept: Collection[int], now: float,
    ) -> list[int]:  # fmt: skip
        """Up to `count` slots that `reserve` gives: free ones, then those of the coldest copies.

        `drop` gives such a copy up, and calls `gone`.
        """
        slots = reserve(count)
        self.full(len(slots) < count)
        victims, left = self.victims(kept, now), VICTIMS_FOR_EACH * count
        while len(slots) < count and left:
            victim = next(victims, None)
            if victim is None:
                break
            left -= 1
            drop(victim)
            slots += reserve(count - len(slots))
        return slots

    def gone(self, place: int) -> None:
        """The block has no copy any more."""
        if self._copies.pop(place, None) is not None:
            return
        self._loads.pop(place, None)

    def _forget(self) -> None:
        most = max(REMEMBERED_MIN, REMEMBERED_FOR_EACH * len(self._copies))
        while len(self._loads) > most:
            self._loads.popitem(last=False)
