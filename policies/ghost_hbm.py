"""The tier above host of a ghost cache: copies of host blocks, made and given up as served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvstore.core.space import Space
from kvstore.policies.promotion import PROMOTED_A_LOAD, Promotion
from kvstore.policies.sampling import live_blocks

# What restoring from copies costs is filed under this tier; no index and no residency knows it.
HBM = 2


def all_fit(space: Space) -> int:
    """Where all blocks of a load can come from copies."""
    return 1 << 62


class Copies(NamedTuple):
    """Room for copies of host blocks, in the memory of all GPUs together, and what loads are like.

    `spared` is, of a load of so many blocks of a space, the share of its seconds from host that
    copies spare; `fit` is how many of a load's blocks can come from copies.
    """

    capacity_bytes: float
    spared: Callable[[Space, int], float]
    fit: Callable[[Space], int] = all_fit

    def times(self, factor: float) -> Copies:
        """So many times the room."""
        return self._replace(capacity_bytes=self.capacity_bytes * factor)


class HbmTier:
    """Counts copies, without bytes; all GPUs as one. What is promoted is there at once."""

    def __init__(self, copies: Copies) -> None:
        self.promotion = Promotion()
        self.promoted_blocks = 0
        self._copies = copies
        self._capacity = self._free = int(copies.capacity_bytes)
        self._sizes: dict[int, int] = {}  # of copies, by place

    def allow(self, capacity_bytes: float) -> None:
        """Has so much room from now on; what is too much goes at the next load."""
        self._free += int(capacity_bytes) - self._capacity
        self._capacity = int(capacity_bytes)

    def load(self, space: Space, places: Sequence[int], seconds: float) -> int:
        """Blocks of a space are loaded, in the order of the prompt; answers how many had copies."""
        promotion, size = self.promotion, space.slot_bytes
        found = min(sum(map(promotion.has, places)), self._copies.fit(space))
        spared = self._copies.spared(space, len(places))
        wanted = promotion.loaded(places, seconds, spared)
        del wanted[max(1, PROMOTED_A_LOAD // live_blocks(space)) :]
        if self._free < 0:
            self._shrink(seconds)
        if wanted:
            slots = promotion.make_room(
                len(wanted), lambda count: self._reserve(count, size), self._drop, (), seconds
            )
            del wanted[len(slots) :]
            promotion.arrived(wanted, seconds)
            self._sizes.update(dict.fromkeys(wanted, size))
            self.promoted_blocks += len(wanted)
        return found

    def gone(self, places: Iterable[int]) -> None:
        """Host holds these blocks no more, and so the copies do not either."""
        for place in places:
            self._drop(place)

    @property
    def room_bytes(self) -> int:
        """What they may take."""
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """What the copies take."""
        return sum(self._sizes.values())

    def _reserve(self, count: int, size: int) -> list[int]:
        taken = max(0, min(count, self._free // size))
        self._free -= taken * size
        return [0] * taken

    def _drop(self, place: int) -> None:
        self._free += self._sizes.pop(place, 0)
        self.promotion.gone(place)

    def _shrink(self, seconds: float) -> None:
        for victim in self.promotion.victims((), seconds):
            if self._free >= 0:
                break
            self._drop(victim)
