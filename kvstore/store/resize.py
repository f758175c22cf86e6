"""Resize: a host pool that holds more than its size loses what is over, the least first."""

from __future__ import annotations

from itertools import islice

from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, Parts

# Victims of one turn; each may be many blocks.
DROPS_A_TURN = 32


class Resizer:
    """Brings host pools down to their size, a turn at a time.

    One is over after it was made smaller, or was taken back by a start with a smaller size. The
    tier itself hands out nothing above the size. What leases hold stays until they end, so a pool
    may be over for a while.
    """

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts, self._remover = parts, remover
        self._sizes = dict(parts.config.host_pools)

    def resized(self, byte_count: int) -> None:
        """From now on the shared pool may hold so much; its cold end begins where that says."""
        self._sizes[""] = byte_count
        if self._parts.disk is not None:
            mark = int(byte_count * self._parts.config.tiers.disk.demote_watermark)
            self._parts.residency.demote_above("", mark)

    def tick(self) -> None:
        """Evicts what is over; until all that may go is gone, this is asked again each turn."""
        parts = self._parts
        for pool, size in self._sizes.items():
            over = parts.host.usage(pool).used_bytes - size
            if over > 0:
                drops = parts.residency.make_room(HOST, pool, pool or "default", over)
                for drop in islice(drops, DROPS_A_TURN):
                    self._remover.drop(drop)
