"""The disk tier of a ghost cache: what is written there, and read back into host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvstore.core.space import Space
from kvstore.policies.admission import spare_rate
from kvstore.policies.index import Span
from kvstore.policies.index.cells import stretches
from kvstore.policies.residency import Residency

HOST, DISK = 0, 1
# From this share of host on, the coldest blocks are written to disk, as the daemon does it.
WATERMARK = 0.75
DAY_SECONDS = 86_400.0


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
    """Carries demotions and promotions out at once.

    With `daily_bytes` above 0 a bucket of so many bytes, full at first and filled again over a day,
    bounds what is written, as in the daemon.
    """

    def __init__(
        self, residency: Residency, host_bytes: dict[str, int], daily_bytes: float = 0.0
    ) -> None:
        self._residency = residency
        self._daily = self._budget = daily_bytes
        self._spent_at = 0.0
        self.written_blocks = 0
        for pool, capacity in host_bytes.items():
            residency.demote_above(pool, int(WATERMARK * capacity))

    def write(self, space: Space, places: Places, seconds: float) -> Iterator[None]:
        """Writes what is due at `seconds`, as far as the budget lasts; a step is one stretch."""
        index, left = self._residency.index, self._left(seconds)
        if left <= 0:
            return
        spare = spare_rate(self._budget, self._daily)
        for action in self._residency.demotions(space.pool, left, 0.0, spare):
            run, start, stop = action.run, action.start, action.stop
            index.begin_move(run, start, stop, DISK)
            index.end_move(run, start, DISK, places.column(stop - start))
            self.written_blocks += stop - start
            self._budget -= (stop - start) * run.root.space.slot_bytes
            yield

    def _left(self, seconds: float) -> int:
        """Bytes that may be written now."""
        if not self._daily:
            return 1 << 60
        gained = (seconds - self._spent_at) * self._daily / DAY_SECONDS
        self._budget = min(self._daily, self._budget + gained)
        self._spent_at = seconds
        return int(self._budget)

    def promote(self, path: Sequence[Span], places: Places) -> int:
        """Copies what of `path` is on disk only to host; answers how many blocks."""
        index, promoted = self._residency.index, 0
        for run, start, stop in path:
            if run.resident_in(HOST) == run.ready:
                continue
            missing = index.places_grid(run, start, stop)[:, HOST, 0] < 0
            for first, past in stretches(missing):
                index.set_places(run, start + first, HOST, places.column(past - first))
                promoted += past - first
        return promoted
