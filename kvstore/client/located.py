"""`Located`: where the blocks of one match lie in the mapped pools, and whether they still do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from kvstore.client.buffers import BlockBuffers, rows_at
from kvstore.client.pools import MappedPool
from kvstore.client.session import Attachment
from kvstore.core.block import NO_PLACE, POOL_SHIFT, place_offset
from kvstore.core.errors import LeaseLost, StoreUnavailable
from kvstore.core.slots import decode_slots
from kvstore.proto.v1 import kvstore_pb2 as pb

IN_POOL = (1 << POOL_SHIFT) - 1


class Located:
    """Places and generations of the blocks in `ranges`, in order; filled as answers come."""

    def __init__(self, attachment: Attachment, ranges: Sequence[range]) -> None:
        self.attachment = attachment
        self.ranges = ranges
        count = sum(map(len, ranges))
        self.places = np.full(count, NO_PLACE, np.int64)
        self.generations = np.zeros(count, np.uint64)

    def add(self, first_block: int, slots: pb.SlotRuns) -> None:
        """Takes over the slots of consecutive blocks, where the match restores them."""
        places, generations = decode_slots(
            slots.places, slots.generations, slots.counts, self.attachment.place_step
        )
        index = 0
        for blocks in self.ranges:
            low = max(blocks.start, first_block)
            high = min(blocks.stop, first_block + len(places))
            if low < high:
                here = slice(index + low - blocks.start, index + high - blocks.start)
                self.places[here] = places[low - first_block : high - first_block]
                self.generations[here] = generations[low - first_block : high - first_block]
            index += len(blocks)

    def missing(self) -> list[range]:
        """Blocks whose place is not known yet."""
        index, found = 0, []
        for blocks in self.ranges:
            absent = self.places[index : index + len(blocks)] == NO_PLACE
            edges = np.flatnonzero(np.diff(absent, prepend=False, append=False))
            for start, stop in edges.reshape(-1, 2).tolist():
                found.append(range(blocks.start + start, blocks.start + stop))
            index += len(blocks)
        return found

    @cached_property
    def runs(self) -> list[tuple[MappedPool, int, int, int]]:
        """(pool, offset, index of the first block, blocks) of neighbouring slots."""
        if not len(self.places):
            return []
        step = self.attachment.place_step
        edges = np.flatnonzero(np.diff(self.places) != step) + 1
        starts = [0, *edges.tolist(), len(self.places)]
        first_places = self.places[starts[:-1]].tolist()
        return [
            (self._pool(place >> POOL_SHIFT), place_offset(place), start, stop - start)
            for place, start, stop in zip(first_places, starts, starts[1:], strict=False)
        ]

    @cached_property
    def _expected(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(generation map, indices, generations) for each pool."""
        pools = self.places >> POOL_SHIFT
        expected = []
        for number in np.unique(pools).tolist():
            here = pools == number
            indices = self.places[here] & IN_POOL
            expected.append((self._pool(number).generations, indices, self.generations[here]))
        return expected

    def _pool(self, number: int) -> MappedPool:
        pool = self.attachment.pools.get(number)
        if pool is None:
            raise StoreUnavailable(
                f"a block lies in pool {number}, which was not handed over; attach again"
            )
        return pool

    def check(self) -> None:
        """Raises LeaseLost if any of the slots holds something else by now."""
        for generations, indices, expected in self._expected:
            if not np.array_equal(generations[indices], expected):
                raise LeaseLost(
                    "blocks were cleared or dropped while they were leased; recompute them"
                )

    def copy(self, target: BlockBuffers) -> None:
        width, stride = self.attachment.block_bytes, self.attachment.slot_bytes
        for pool, offset, index, count in self.runs:
            target.write(index, rows_at(pool.data, offset, count, stride, width))

    def views(self) -> list[memoryview]:
        """A read-only view of each block."""
        width, stride = self.attachment.block_bytes, self.attachment.slot_bytes
        return [
            pool.view[start : start + width]
            for pool, offset, _, count in self.runs
            for start in range(offset, offset + count * stride, stride)
        ]
