"""Where blocks lie: the places of READY blocks in each tier, and their moves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.policies.index.cells import place_bytes, stride_of
from kvstore.policies.index.run import ABSENT, COUNTER_BITS, PLACE_BYTES, Removed, Run, Span
from kvstore.policies.index.tree import Tree


class PlacedTree(Tree):
    """A tree that answers where a block's shards are, tier by tier."""

    def places(self, path: Sequence[Span], tier: int, shard: int) -> np.ndarray:
        """Places (int64, NO_PLACE where there is none) of a path's blocks in `tier`.

        A path is a sequence of `Span`s or plain (run, start, stop).
        """
        if not path:
            return np.empty(0, np.int64)
        stride = stride_of(path[0][0], self.tier_count)
        if len(path) == 1:
            run, start, stop = path[0]
            blob = place_bytes(run, start, stop, stride)
            if stop <= run.ready and stride == PLACE_BYTES:
                return np.frombuffer(blob, np.int64)
        else:
            blob = b"".join([place_bytes(*span, stride) for span in path])
        shards = stride // (PLACE_BYTES * self.tier_count)
        cells = np.frombuffer(blob, np.int64)
        return np.maximum(cells[tier * shards + shard :: self.tier_count * shards], NO_PLACE)

    def place(self, run: Run, i: int, shard: int, tier: int) -> int:
        """Place of one block's shard in `tier`, or NO_PLACE."""
        return int(self.places([Span(run, i, i + 1)], tier, shard)[0])

    def places_grid(self, run: Run, start: int, stop: int) -> np.ndarray:
        """Places (int64, NO_PLACE where there is none) of READY blocks: [block][tier][shard].

        A read-only view of the cells as they are now; it does not follow later changes.
        """
        assert 0 <= start <= stop <= run.ready
        shards = run.root.space.shard_count
        grid = np.frombuffer(run.places, np.int64).reshape(-1, self.tier_count, shards)
        return grid[start:stop]

    def set_place(self, run: Run, i: int, shard: int, tier: int, place: int) -> None:
        """Writes down where a READY block's shard lies in `tier`: moved, demoted or promoted."""
        assert place >= 0
        if self._swap_place(run, i, shard, tier, place) == NO_PLACE:
            self._count_places(run, tier, 1)

    def set_places(self, run: Run, start: int, tier: int, places: np.ndarray) -> None:
        """`set_place` of all shards of READY blocks from `start` on: int64s [block][shard]."""
        if not len(places):
            return
        assert (places >= 0).all()
        before = self._swap_places(run, start, start + len(places), tier, places)
        assert (before >= NO_PLACE).all(), "a block on its way arrives by `end_move`"
        added = int((before == NO_PLACE).sum())
        if added:
            self._count_places(run, tier, added)

    def clear_place(self, run: Run, i: int, shard: int, tier: int) -> int:
        """Forgets a READY block's copy in `tier`; answers where it was. Not for the last copy."""
        place = self._swap_place(run, i, shard, tier, NO_PLACE)
        if place != NO_PLACE:
            assert self._has_copy(run, i), "the last copy of a block goes by `drop` or `remove`"
            self._count_places(run, tier, -1)
        return place

    def clear_places(self, run: Run, start: int, stop: int, tier: int) -> list[int]:
        """`clear_place` of all shards of READY blocks [start, stop); answers where they were.

        Each block must have another copy: the last one goes by `drop` or `remove`.
        """
        if start == stop:
            return []
        assert self._elsewhere(run, start, stop, tier).all(), "a block would lose its last copy"
        before = self._swap_places(run, start, stop, tier, NO_PLACE)
        assert (before >= NO_PLACE).all(), "a block on its way there is no copy to give up"
        freed: list[int] = before[before != NO_PLACE].tolist()
        if freed:
            self._count_places(run, tier, -len(freed))
        return freed

    def drop(self, run: Run, keep: int, tier: int) -> Removed:
        """Frees the copies in `tier` of the READY blocks from `keep` on.

        Blocks that have no other copy go altogether, with everything below them.
        """
        if keep >= run.ready:
            return self._removed_nothing()
        if self.tier_count == 1:
            return self.remove(run, keep)
        lost = np.flatnonzero(~self._elsewhere(run, keep, run.ready, tier))
        stop = keep + int(lost[0]) if len(lost) else run.ready
        freed = self.clear_places(run, keep, stop, tier)
        removed = self.remove(run, stop) if len(lost) else self._removed_nothing()
        removed.places[tier].extend(freed)
        return removed

    def keep_for(self, run: Run, tier: int, blocks: int, held: int) -> int | None:
        """Where to cut a leaf so that its last `blocks` blocks in `tier` go.

        The first `held` blocks stay whatever is asked; None when no block behind them is there.
        """
        if self.tier_count == 1:
            return max(held, run.ready - blocks) if held < run.ready else None
        shards = run.root.space.shard_count
        grid = np.frombuffer(run.places, np.int64).reshape(-1, self.tier_count, shards)
        there = np.flatnonzero(grid[held:, tier, 0] >= 0)
        return held + int(there[max(0, len(there) - blocks)]) if len(there) else None

    def _elsewhere(self, run: Run, start: int, stop: int, tier: int) -> np.ndarray:
        """Which of the blocks have a whole copy in another tier than `tier`."""
        grid = self.places_grid(run, start, stop)
        if self.tier_count == 2 and grid.shape[2] == 1:
            return np.asarray(grid[:, 1 - tier, 0] >= 0)
        whole = np.all(grid >= 0, axis=2)
        whole[:, tier] = False
        return np.asarray(np.any(whole, axis=1))

    def _has_copy(self, run: Run, i: int) -> bool:
        stride = stride_of(run, self.tier_count)
        return run.places[i * stride : (i + 1) * stride] != ABSENT * (stride // PLACE_BYTES)

    def _swap_place(self, run: Run, i: int, shard: int, tier: int, place: int) -> int:
        assert 0 <= i < run.ready
        shards = run.root.space.shard_count
        at = ((i * self.tier_count + tier) * shards + shard) * PLACE_BYTES
        cells = bytearray(run.places)
        old = int.from_bytes(cells[at : at + PLACE_BYTES], "little", signed=True)
        cells[at : at + PLACE_BYTES] = place.to_bytes(PLACE_BYTES, "little", signed=True)
        run.places = bytes(cells)
        return old

    def _swap_places(
        self, run: Run, start: int, stop: int, tier: int, places: np.ndarray | int
    ) -> np.ndarray:
        """Puts `places` in; answers what was there, [block][shard]."""
        assert 0 <= start <= stop <= run.ready
        shards = run.root.space.shard_count
        grid = np.frombuffer(run.places, np.int64).reshape(-1, self.tier_count, shards).copy()
        before = grid[start:stop, tier].copy()
        grid[start:stop, tier] = places
        run.places = grid.tobytes()
        return before

    def _count_places(self, run: Run, tier: int, delta: int) -> None:
        held = self._held(run)
        run.resident += delta << COUNTER_BITS * tier
        self.listener.on_slots(run.root.space, tier, delta)
        self._lift(run, held)
        if run.is_leaf(tier):
            self.listener.on_leaf(run, tier)
