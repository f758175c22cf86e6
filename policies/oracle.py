"""`oracle`: Belady's optimum, for simulations that know what comes."""

from __future__ import annotations

from kvstore.policies.base import HeapPolicy, register
from kvstore.policies.index import Run

NEVER = 1 << 62


@register("oracle", offline=True)
class Oracle(HeapPolicy):
    """The leaf that is used again last goes first, what just came not excepted (bypass).

    Along a chain the next use is never later above than below, so leaf-first ties alone keep the
    optimum prefix-closed. Exact for blocks of one size; it counts blocks, not seconds.
    """

    def next_use(self, run: Run, position: int) -> int:
        """Number of the next request for the block at `position`."""
        use = run.policy
        if use is None or position >= len(use.next_uses):
            return NEVER
        number: int = use.next_uses[position]
        return number

    def key(self, run: Run) -> int:
        return -self.next_use(run, self.last_position(run))

    def on_access(self, run: Run) -> None:
        if run.is_leaf(self.tier):
            self.on_leaf(run)

    def first_to_go(self, run: Run) -> int:
        first, last = run.first, self.last_position(run)
        wanted = self.next_use(run, last)
        low, high = first, last
        while low < high:
            middle = (low + high) // 2
            if self.next_use(run, middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low - first
