"""Counters of what lies below a run: they say what is a leaf, in each tier, without a search."""

from __future__ import annotations

from kvstore.policies.index.listener import IndexListener, SilentListener
from kvstore.policies.index.run import COUNTER_BITS, COUNTER_MASK, Run


class Counters:
    """Keeps `Run.below` right; whoever changes a run asks for `_held` before and lifts after."""

    def __init__(self, tier_count: int, listener: IndexListener | None):
        assert tier_count > 0
        self.tier_count = tier_count
        self.listener: IndexListener = listener or SilentListener()
        self._tiers = range(tier_count)
        # With one tier a leaf has no children: nobody asks what is anchored below it.
        self._kinds = range(tier_count + 1 if tier_count > 1 else 1)
        self._busy_shift = COUNTER_BITS * tier_count
        self._counters = [
            sum(1 << COUNTER_BITS * kind for kind in self._kinds if held >> kind & 1)
            for held in range(1 << len(self._kinds))
        ]

    def _held(self, run: Run) -> int:
        """Bit mask of the tiers in which `run` keeps its parent from being a leaf.

        With several tiers the bit above them says that the run, or one below, is busy: anchored or
        STAGING. It is counted like a tier, in the field of `Run.below` above the tiers'.
        """
        counters = run.resident | run.below
        if self.tier_count == 1:
            return 1 if counters or run.staging is not None else 0
        held = 1 << self.tier_count if run.marks else 0
        if run.staging is not None:
            held = 1 << self.tier_count | 1 << run.staging.tier
        for kind in self._kinds:
            if counters >> COUNTER_BITS * kind & COUNTER_MASK:
                held |= 1 << kind
        return held

    def _held_counters(self, run: Run) -> int:
        """What `run` adds to its parent's `below`: one for each bit of `_held`."""
        return self._counters[self._held(run)]

    def _lift(self, run: Run, held: int) -> None:
        """Carries a change of `_held(run)`, which was `held`, up to the ancestors' counters."""
        now = self._held(run)
        while now != held and run.parent is not None:
            parent = run.parent
            parent_held = self._held(parent)
            for kind in self._kinds:
                delta = (now >> kind & 1) - (held >> kind & 1)
                if delta:
                    parent.below += delta << COUNTER_BITS * kind
                    if delta < 0 and parent.is_leaf(kind):
                        self.listener.on_leaf(parent, kind)
            run, held, now = parent, parent_held, self._held(parent)

    def _lift_anchored(self, run: Run, delta: int) -> None:
        """`_lift` after `run` got its first mark (1) or lost its last one (-1)."""
        if self.tier_count == 1:
            return
        shift, step = self._busy_shift, delta << self._busy_shift
        above = run.parent
        busy = run.staging is not None or run.below >> shift > 0
        while not busy and above is not None:
            below = above.below
            above.below = below + step
            others = min(below, below + step) >> shift
            busy = bool(above.marks or above.staging is not None or others)
            above = above.parent

    def _tell_leaf(self, run: Run) -> None:
        for tier in self._tiers:
            if run.is_leaf(tier):
                self.listener.on_leaf(run, tier)
