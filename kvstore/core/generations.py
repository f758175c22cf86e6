"""Counter of generations: one for all tiers of a store, so that one clear mark covers them all."""

from __future__ import annotations

import threading


class Generations:
    """Hands out numbers that only grow, to any thread; 0 means "not published" and is not one."""

    def __init__(self, first: int = 1) -> None:
        self._next = max(1, first)
        self._lock = threading.Lock()

    @property
    def next(self) -> int:
        """Above every generation handed out so far."""
        return self._next

    def take(self) -> int:
        with self._lock:
            taken = self._next
            self._next += 1
            return taken

    def raise_to(self, least: int) -> None:
        """Nothing below `least` is handed out from now on."""
        with self._lock:
            self._next = max(self._next, least)
