"""Slots between un-published and free: they rest while somebody may still be reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvstore.core.lease import Deadlines
from kvstore.tiers.base import Tier


class _Batch:
    """Slots un-published together, and how many readers they still wait for."""

    __slots__ = ("places", "waiting")

    def __init__(self, places: list[int], waiting: int) -> None:
        self.places = places
        self.waiting = waiting


class RetiredSlots:
    """Keeps un-published slots from reuse until their leases are over, or their rest is.

    A slot whose bytes nobody can be reading is freed at once. `early_places` counts adopted slots
    that were retired already but rest still: they come free by themselves. `freed_places` counts
    all that were ever freed.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._by_reader: dict[Any, list[_Batch]] = {}
        self._resting: Deadlines[int] = Deadlines()
        self._resting_places: dict[int, list[int]] = {}
        self._next = 0
        self._adopted: set[int] = set()
        self._adopted_until = 0.0
        self.waiting_places = 0
        self.early_places = 0
        self.freed_places = 0
        self.on_retire: Callable[[list[int]], None] | None = None
        """Hears of places that hold their blocks no more, before they are reused."""

    def retire(self, places: list[int], readers: Iterable[Any] = ()) -> None:
        """Un-publishes `places`; they become free when every reader has ended."""
        if not places:
            return
        self._tier.discard(places)
        if self.on_retire is not None:
            self.on_retire(places)
        batch = _Batch(places, 0)
        for reader in set(readers):
            self._by_reader.setdefault(reader, []).append(batch)
            batch.waiting += 1
        if not batch.waiting:
            self._free(places)
        else:
            self.waiting_places += len(places)

    def reader_ended(self, reader: Any) -> None:
        """A lease or a running read is over."""
        for batch in self._by_reader.pop(reader, ()):
            batch.waiting -= 1
            if not batch.waiting:
                self.waiting_places -= len(batch.places)
                self._free(batch.places)

    def rest(self, places: list[int], until: float) -> None:
        """Keeps `places`, resting already, from reuse until the time `until`."""
        if places:
            self._next += 1
            self._resting_places[self._next] = places
            self._resting.set(self._next, until)
            self.waiting_places += len(places)

    def adopted(self, places: Iterable[int], until: float) -> None:
        """Readers of before the start may be in these slots: retired sooner, they rest `until`."""
        self._adopted.update(places)
        self._adopted_until = until

    def _free(self, places: list[int]) -> None:
        if self._adopted:
            early = [place for place in places if place in self._adopted]
            self._adopted.difference_update(early)
            self.early_places += len(early)
            self.rest(early, self._adopted_until)
            kept = set(early)
            places = [place for place in places if place not in kept]
        self.freed_places += len(places)
        self._tier.free(places)

    def tick(self, now: float) -> None:
        if self._adopted_until and now >= self._adopted_until:
            self._adopted.clear()
            self._adopted_until = 0.0
            self.early_places = 0
        for key in self._resting.pop_due(now):
            places = self._resting_places.pop(key)
            self.waiting_places -= len(places)
            self.freed_places += len(places)
            self._tier.free(places)
