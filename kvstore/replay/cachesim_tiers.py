"""The disk tier of a cache simulation: what is written there, and read back into host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.core.space import Space
from kvstore.policies.index import Span
from kvstore.policies.residency import Residency

HOST, DISK = 0, 1
# From this share of host on, the coldest blocks are written to disk, as the daemon does it.
WATERMARK = 0.75


class Places:
    """Places that nothing lies at, each given out once."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> range:
        """So many places."""
        self._next += count
        return range(self._next - count, self._next)

    def column(self, count: int) -> np.ndarray:
        """The same as the places of blocks of one shard."""
        return np.array(self.take(count), np.int64).reshape(-1, 1)


class DiskTier:
    """Carries demotions and promotions out at once."""

    def __init__(self, residency: Residency, capacities: tuple[int, ...], slot_bytes: int) -> None:
        self._residency = residency
        self._capacity_bytes = capacities[HOST] * slot_bytes
        self.written_blocks = 0
        residency.demote_above("", int(WATERMARK * self._capacity_bytes), self._capacity_bytes)

    def write(self, space: Space, places: Places) -> None:
        """Writes what is due."""
        index = self._residency.index
        for action in self._residency.demotions(space.pool, 1 << 60):
            run, start, stop = action.run, action.start, action.stop
            index.begin_move(run, start, stop, DISK)
            index.end_move(run, start, DISK, places.column(stop - start))
            self.written_blocks += stop - start

    def promote(self, path: Sequence[Span], places: Places) -> int:
        """Copies what of `path` is on disk only to host; answers how many blocks."""
        index, promoted = self._residency.index, 0
        for run, start, stop in path:
            if run.resident_in(HOST) == run.ready:
                continue
            missing = index.places_grid(run, start, stop)[:, HOST, 0] < 0
            edges = np.flatnonzero(np.diff(missing, prepend=False, append=False)).tolist()
            for first, past in zip(edges[::2], edges[1::2], strict=True):
                index.set_places(run, start + first, HOST, places.column(past - first))
                promoted += past - first
        return promoted
