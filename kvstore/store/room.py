"""Room: slots of the host tier for blocks that come, and who has to go for them."""

from __future__ import annotations

from kvstore.core.space import Space
from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, Parts
from kvstore.store.relocate import Relocator

SACRIFICE_BYTES = 16 << 20


class HostRoom:
    """Finds slots in the host tier; the blocks they are for are counted as used there already."""

    def __init__(self, parts: Parts, remover: Remover, relocator: Relocator) -> None:
        self._parts = parts
        self._remover = remover
        self._relocator = relocator

    def take(self, space: Space, count: int) -> list[int]:
        """Up to `count` slots: free ones, then those of victims the policy gives up.

        Victims of another size leave holes that these blocks don't fit. After a bounded sacrifice
        no more are taken: whole chunks are emptied into the holes instead, in the background.
        """
        host, residency = self._parts.host, self._parts.residency
        count = self._within_cap(space, count)
        symbol = space.symbol_bytes_max
        places: list[int] = []
        sacrifice = count * space.slot_bytes + max(SACRIFICE_BYTES, 16 * space.slot_bytes)
        while count:
            places += host.reserve(space.block_bytes, symbol, count - len(places), space.pool)
            if len(places) == count:
                break
            if self._parts.retired[HOST].early_places >= count - len(places):
                break  # as much comes free by itself, soon after a start
            before = residency.accounts.used(HOST, space.pool)
            self._remover.make_room(space, (count - len(places)) * space.slot_bytes)
            evicted = before - residency.accounts.used(HOST, space.pool)
            sacrifice -= evicted
            if not evicted or sacrifice < 0:
                self._relocator.start(space)
                break
        return places

    def _within_cap(self, space: Space, count: int) -> int:
        """How many of `count` blocks the tenant's cap allows, its own evicted first."""
        residency = self._parts.residency
        # They are counted already: room below zero is what they are too many.
        if residency.room(HOST, space.pool, space.tenant) < 0:
            self._remover.make_room(space, 0)
        over = max(0, -residency.room(HOST, space.pool, space.tenant))
        return max(0, count - -(-over // space.slot_bytes))
