"""The size of a pool while it serves: smaller at once, larger when the memory for it is there."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from kvstore.tiers.host import pages
from kvstore.tiers.host.backing import Backing
from kvstore.tiers.host.files import FileSizes, PoolFiles
from kvstore.tiers.host.growth import Growth
from kvstore.tiers.slab_size import GrowingSlab

PUNCHES_A_CALL, GRANULES_A_CALL = 16, 256
RETRIES, FREED_KEPT = 64, 1024


class Sizing:
    """Keeps a pool's slab, its ceiling and its memory in step; the owner thread's alone.

    The ceiling is the size. A smaller one leaves the slab as it is, with its free slots' memory
    given back bit by bit, so every slot gets memory before it is handed out. `problem` says what
    kept the last growth from its end.
    """

    slab: GrowingSlab

    def __init__(self, made: PoolFiles, sizes: FileSizes, backing: Backing, address: int) -> None:
        self._files, self._sizes, self._backing, self._address = made, sizes, backing, address
        self._growth: Growth | None = None
        self._next_granule = 0
        self._freed: deque[int] = deque(maxlen=FREED_KEPT)
        self.can_give_back = True
        self.problem = ""
        self.prefaulted_bytes = self.locked_bytes = 0

    def reserve(self, slot_bytes: int, header_bytes: int, count: int) -> list[int]:
        """`Slab.reserve` of slots that have memory: fewer where the system has none left."""
        offsets = self.slab.reserve(slot_bytes, header_bytes, count)
        if not self._backing.has_holes:
            return offsets
        filled = next((i for i, at in enumerate(offsets) if not self._fill(at, slot_bytes)), count)
        for offset in offsets[filled:]:
            self.slab.give_up(offset)
        return offsets[:filled]

    def _fill(self, offset: int, slot_bytes: int) -> bool:
        """Whether a slot has memory, which may have been given back before."""
        tries = RETRIES
        while True:
            try:
                self._backing.fill(offset, slot_bytes)
                return True
            except OSError:
                # The file system may just have room for this pool: free slots elsewhere make some.
                if tries > 0 and self._give_back_freed():
                    tries -= 1
                elif tries >= 0 and self._give_back():
                    tries = -1
                else:
                    return False

    def freed(self, offset: int) -> None:
        """A slot came free while others lack memory: it is the first to be asked for some."""
        self._freed.append(offset >> self.slab.shift)

    def _give_back_freed(self) -> bool:
        """Returns what is free around a slot that was freed lately; False if there is none."""
        if not self._freed or not self.can_give_back:
            return False
        ranges, _ = self.slab.free_ranges(self._freed.pop())
        return self._return(ranges)

    def resize(self, byte_count: int, populate: bool, lock: bool) -> None:
        """Has another size: a smaller one at once, a larger one when `tick` finds its memory there.

        At most the length of its files.
        """
        wanted = self._sizes.rounded(byte_count)
        if self._growth is not None and self._growth.size_bytes == wanted:
            return
        self.close()
        self.problem = ""
        if wanted <= self.slab.ceiling_bytes:
            self.slab.ceiling_bytes = wanted
            return
        self._growth = Growth(
            self._files, self._sizes, self._backing, self._address, wanted, populate, lock
        )

    @property
    def is_growing(self) -> bool:
        return self._growth is not None

    def tick(self) -> None:
        """Uses the memory that came, all of it; or returns some that is too much."""
        growth = self._growth
        if growth is None:
            self._lower()
        elif growth.is_over:
            self._growth, self.problem = None, growth.problem
            if self.problem:
                self._undo(growth)
                return
            self._backing.backed(growth.cells)
            self.slab.grow(growth.size_bytes)
            self.slab.ceiling_bytes = growth.size_bytes
            self._backing.use(self.slab.capacity_bytes)
            self.prefaulted_bytes += growth.prefaulted_bytes
            self.locked_bytes += growth.locked_bytes

    def close(self) -> None:
        """Ends a growth where it is."""
        growth, self._growth = self._growth, None
        if growth is not None:
            growth.stop()
            self._undo(growth)

    def _undo(self, growth: Growth) -> None:
        """Returns what a growth got that came to nothing; what lies in the slab goes bit by bit."""
        end, wanted = self._backing.end, self._sizes.backed(growth.size_bytes)
        with suppress(OSError):  # sealed memory stays, for the next growth
            if growth.locked_bytes and end < wanted:
                pages.unlock(self._address + end, wanted - end)
            self._backing.give_back_beyond()

    def _lower(self) -> None:
        """Returns memory of free slots to the system, while more is there than the ceiling."""
        size, may = self.slab.ceiling_bytes, self.can_give_back
        if may and size < self.slab.capacity_bytes and self._backing.memory_bytes > size:
            self._give_back()

    def _give_back(self) -> bool:
        """Returns memory of some free slots; False where that cannot be.

        A few ranges a call: each takes as long as the kernel needs for its pages.
        """
        slab = self.slab
        granules, left = slab.capacity_bytes >> slab.shift, PUNCHES_A_CALL
        for _ in range(GRANULES_A_CALL if self.can_give_back else 0):
            ranges, after = slab.free_ranges(self._next_granule)
            self._next_granule = after if after < granules else 0
            if not self._next_granule and slab.capacity_bytes < self._backing.end:
                ranges.append((slab.capacity_bytes, self._backing.end - slab.capacity_bytes))
            left -= len(ranges)
            if not self._return(ranges) or left <= 0:
                break
        return self.can_give_back

    def _return(self, ranges: list[tuple[int, int]]) -> bool:
        for offset, length in ranges:
            try:
                self._backing.give_back(offset, length)
            except OSError:
                self.can_give_back = False  # sealed memory, or huge pages
        return self.can_give_back
