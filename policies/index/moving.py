"""Blocks on their way to another tier: marked there from the decision on until they arrive."""

from __future__ import annotations

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.policies.index.places import PlacedTree
from kvstore.policies.index.run import COUNTER_BITS, RESERVED_PLACE, Run


class MovingTree(PlacedTree):
    """A tree whose READY blocks can be on their way to a tier: a slot there counts as used.

    The mark stands in the block's own cells, so that it goes where the block goes when runs are
    split, merged or removed. Whoever moves a block keeps an anchor on it.
    """

    def begin_move(self, run: Run, start: int, stop: int, tier: int) -> None:
        """READY blocks [start, stop), with no copy in `tier`, are on their way there."""
        before = self._swap_places(run, start, stop, tier, RESERVED_PLACE)
        assert (before == NO_PLACE).all(), "a block is there, or on its way, already"
        self.listener.on_slots(run.root.space, tier, before.size)

    def end_move(self, run: Run, start: int, tier: int, places: np.ndarray) -> None:
        """They arrived: int64 places [block][shard] from `start` on."""
        assert (places >= 0).all()
        before = self._swap_places(run, start, start + len(places), tier, places)
        assert (before == RESERVED_PLACE).all(), "a block arrived that was not on its way"
        held = self._held(run)
        run.resident += places.size << COUNTER_BITS * tier
        self._lift(run, held)
        if run.is_leaf(tier):
            self.listener.on_leaf(run, tier)

    def give_up_move(self, run: Run, start: int, stop: int, tier: int) -> None:
        """They will not arrive."""
        before = self._swap_places(run, start, stop, tier, NO_PLACE)
        assert (before == RESERVED_PLACE).all(), "a block was given up that was not on its way"
        self.listener.on_slots(run.root.space, tier, -before.size)
