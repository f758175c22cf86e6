"""Resize: a host pool that is made smaller while it serves loses what is over, the least first."""

from __future__ import annotations

from itertools import islice

from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, Parts

# Victims of one turn; each may be many blocks.
DROPS_A_TURN = 32


class Resizer:
    """Brings the shared host pool down to its ceiling, a turn at a time.

    The tier itself hands out nothing above the ceiling. What leases hold stays until they end, so
    a pool may be over for a while.
    """

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts, self._remover = parts, remover
        self._ceiling_bytes: int | None = None

    def resized(self, ceiling_bytes: int) -> None:
        """From now on the shared pool may hold so much; its cold end begins where that says."""
        self._ceiling_bytes = ceiling_bytes
        if self._parts.disk is not None:
            mark = int(ceiling_bytes * self._parts.config.tiers.disk.demote_watermark)
            self._parts.residency.demote_above("", mark)

    def tick(self) -> None:
        """Evicts what is over; until all that may go is gone, this is asked again each turn."""
        if self._ceiling_bytes is None:
            return
        parts = self._parts
        over = parts.host.usage("").used_bytes - self._ceiling_bytes
        if over <= 0:
            return
        for drop in islice(parts.residency.make_room(HOST, "", "default", over), DROPS_A_TURN):
            self._remover.drop(drop)
