"""Extensions: blocks that are READY at once, because nothing has to be written for them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.policies.index.run import COUNTER_BITS, MAX_RUN_BLOCKS, Run
from kvstore.policies.index.staging import StagedTree
from kvstore.policies.index.walk import Walk


class ExtendedTree(StagedTree):
    """A tree whose chains can be extended in one go: what a put does in many steps."""

    def extend(self, walk: Walk, tier: int, places: Sequence[int]) -> None:
        """Adds what the tree lacks of the walk's chain, READY in `tier`, at `places`.

        One place for each block that is missing; the walk is finished, what it found is READY, and
        its space has one shard.
        """
        run, space = walk.run, walk.root.space
        assert space.shard_count == 1
        assert walk.finished
        assert walk.chain.block_count - walk.known_blocks == len(places)
        if not places:
            return
        if walk.depth < run.count:
            self.split(run, walk.depth)
        self.listener.on_slots(space, tier, len(places))
        skip, taken = walk.known_blocks, 0
        for symbols, width in walk.chain.segments:
            count = len(symbols) // width
            for start in range(min(skip, count), count, MAX_RUN_BLOCKS):
                stop = min(count, start + MAX_RUN_BLOCKS)
                part = places[taken : taken + stop - start]
                taken += stop - start
                run = self._extend(run, symbols[start * width : stop * width], width, tier, part)
            skip = max(0, skip - count)

    def _extend(
        self, parent: Run, symbols: bytes, width: int, tier: int, places: Sequence[int]
    ) -> Run:
        """One run more under `parent`."""
        assert parent.ready == parent.count, "a READY block under one that is not"
        run = Run(parent.root, parent, parent.first + parent.count, symbols, width)
        run.ready = run.count
        run.places = array("q", places).tobytes()
        if self.tier_count > 1:
            cells = np.full((run.count, self.tier_count), NO_PLACE, np.int64)
            cells[:, tier] = places
            run.places = cells.tobytes()
        run.resident = run.count << COUNTER_BITS * tier
        self._link(parent, run)
        self.listener.on_ready(run, 0, run.count)
        self._tell_leaf(run)
        return run
