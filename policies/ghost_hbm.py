"""The tier above host of a ghost cache: copies of host blocks, made and given up as served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvstore.policies.promotion import PROMOTED_A_LOAD, Promotion


class HbmTier:
    """Counts copies of blocks of one size, without bytes; all GPUs as one.

    `spared` is, for a load of so many blocks, the share of its seconds from host that copies spare.
    What is promoted is there at once.
    """

    def __init__(self, capacity_blocks: int, spared: Callable[[int], float]) -> None:
        self.promotion = Promotion()
        self.promoted_blocks = 0
        self._free, self._spared = capacity_blocks, spared

    def load(self, places: Sequence[int], seconds: float) -> int:
        """Blocks are loaded, in the order of the prompt; answers how many had copies."""
        promotion = self.promotion
        found = sum(map(promotion.has, places))
        wanted = promotion.loaded(places, seconds, self._spared(len(places)))[:PROMOTED_A_LOAD]
        if wanted:
            slots = promotion.make_room(len(wanted), self._reserve, self._drop, (), seconds)
            promotion.arrived(wanted[: len(slots)], seconds)
            self.promoted_blocks += len(slots)
        return found

    def gone(self, places: Iterable[int]) -> None:
        """Host holds these blocks no more, and so the copies do not either."""
        for place in places:
            self._drop(place)

    def _reserve(self, count: int) -> list[int]:
        taken = min(count, self._free)
        self._free -= taken
        return [0] * taken

    def _drop(self, place: int) -> None:
        self._free += self.promotion.has(place)
        self.promotion.gone(place)
