"""`lfu`: the leaf that was asked for least often goes first."""

from __future__ import annotations

from kvstore.policies.base import Context, HeapPolicy, register
from kvstore.policies.index import Run
from kvstore.policies.reference_counts import ReferenceCounts, count_of, first_counted_alike


@register("lfu")
class Lfu(HeapPolicy):
    """Leaf-first least frequently used, counted also while a block was not here.

    Of equals, the one unused for longest goes first.
    """

    def __init__(self, tier: int, context: Context):
        super().__init__(tier, context)
        context.model(ReferenceCounts)

    def key(self, run: Run) -> tuple[int, int]:
        return (count_of(run, self.last_position(run)), run.touched)

    def first_to_go(self, run: Run) -> int:
        return first_counted_alike(run)
