"""`lru`: the leaf that was not used for longest goes first."""

from __future__ import annotations

from kvstore.policies.base import HeapPolicy, register
from kvstore.policies.index import Run


@register("lru")
class Lru(HeapPolicy):
    """Leaf-first least recently used, by logical ticks.

    A use of a run is a use of its ancestors. They are not told: they matter only as leaves, and a
    run that becomes one has taken over the newest tick of what went from below it.
    """

    def key(self, run: Run) -> int:
        return run.touched
