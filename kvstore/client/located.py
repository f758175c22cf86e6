"""`Located`: where the blocks of one match lie in the mapped pools, and whether they still do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.client.buffers import BlockBuffers, rows_at
from kvstore.client.pools import MappedPool
from kvstore.client.session import Attachment
from kvstore.core.block import POOL_SHIFT, SLOT_SHIFT
from kvstore.core.errors import LeaseLost, StoreUnavailable
from kvstore.proto.v1 import kvstore_pb2 as pb

IN_POOL = (1 << POOL_SHIFT) - 1


class SlotRun(NamedTuple):
    """Blocks in neighbouring slots: `first` counts the match's blocks, `page` the pool's 4 KiB."""

    first: int
    block_count: int
    pool: MappedPool
    page: int
    generation: int


class Located:
    """Slots of the blocks in `ranges`, as runs; filled as answers come.

    Plain integers, no arrays: after a copy has emptied the caches, every call into numpy costs
    more than a run of Python does.
    """

    def __init__(self, attachment: Attachment, ranges: Sequence[range]) -> None:
        self.attachment = attachment
        self.ranges = ranges
        self.runs: list[SlotRun] = []

    def add(self, first_block: int, slots: pb.SlotRuns) -> None:
        """Takes over the slots of consecutive blocks, where the match restores them."""
        step, pools = self.attachment.place_step, self.attachment.pools
        for place, generation, count in unpack(slots):
            index = 0
            for blocks in self.ranges:
                low = max(blocks.start, first_block)
                high = min(blocks.stop, first_block + count)
                if low < high:
                    skip = low - first_block
                    pool = pools.get(place >> POOL_SHIFT)
                    if pool is None:
                        raise StoreUnavailable(
                            f"block {low} lies in pool {place >> POOL_SHIFT}, which was not "
                            "handed over; attach again"
                        )
                    page = (place & IN_POOL) + skip * step
                    start = index + low - blocks.start
                    self.runs.append(SlotRun(start, high - low, pool, page, generation + skip))
                index += len(blocks)
            first_block += count

    def missing(self) -> list[range]:
        """Blocks whose slot is not known yet."""
        if len(self.runs) == 1 == len(self.ranges) and self.runs[0].block_count == len(
            self.ranges[0]
        ):
            return []
        known = sorted((run.first, run.first + run.block_count) for run in self.runs)
        found, index = [], 0
        for blocks in self.ranges:
            at = index
            for start, stop in [*known, (index + len(blocks), 0)]:
                start = min(max(start, index), index + len(blocks))
                if at < start:
                    shift = blocks.start - index
                    found.append(range(at + shift, start + shift))
                at = max(at, stop)
            index += len(blocks)
        return found

    def check(self) -> None:
        """Raises LeaseLost if any of the slots holds something else by now."""
        step = self.attachment.place_step
        for _, count, pool, page, generation in self.runs:
            held = pool.generations[page : page + count * step : step].tolist()
            if held != list(range(generation, generation + count)):
                raise LeaseLost(
                    "blocks were cleared or dropped while they were leased; recompute them"
                )

    def copy(self, target: BlockBuffers) -> None:
        width, stride = self.attachment.block_bytes, self.attachment.slot_bytes
        for index, count, pool, page, _ in self.runs:
            target.write(index, rows_at(pool.data, page << SLOT_SHIFT, count, stride, width))

    def views(self) -> list[memoryview]:
        """A read-only view of each block."""
        width, stride = self.attachment.block_bytes, self.attachment.slot_bytes
        return [
            run.pool.view[start : start + width]
            for run in sorted(self.runs)
            for start in range(
                run.page << SLOT_SHIFT, (run.page << SLOT_SHIFT) + run.block_count * stride, stride
            )
        ]


def unpack(slots: pb.SlotRuns) -> list[tuple[int, int, int]]:
    """(place, generation, blocks) of each run."""
    try:
        places = memoryview(slots.places).cast("q").tolist()
        generations = memoryview(slots.generations).cast("Q").tolist()
        counts = memoryview(slots.counts).cast("I").tolist()
        return list(zip(places, generations, counts, strict=True))
    except (TypeError, ValueError) as error:  # no whole entries, or not as many of each
        raise StoreUnavailable(f"the daemon sent slots that do not unpack: {error}") from error
