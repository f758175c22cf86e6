"""`Located`: where the blocks of one match lie in the mapped pools, and whether they still do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter

import numpy as np

from kvstore.client.buffers import BlockBuffers, rows_at
from kvstore.client.pools import MappedPool
from kvstore.client.session import Attachment
from kvstore.core.block import POOL_SHIFT, SLOT_SHIFT
from kvstore.core.errors import LeaseLost, StoreUnavailable
from kvstore.proto.v1 import kvstore_pb2 as pb

IN_POOL = (1 << POOL_SHIFT) - 1

# Blocks in neighbouring slots: how many blocks of the match come before them, how many they are,
# their pool, the page (4 KiB) of the first one's slot in it, and its generation.
SlotRun = tuple[int, int, MappedPool, int, int]


class Located:
    """Slots of the blocks in `ranges`, as runs; filled as answers come.

    Plain tuples of integers, no arrays: after a copy has emptied the caches, every call into
    numpy costs more than a run of Python does.
    """

    def __init__(self, attachment: Attachment, ranges: Sequence[range]) -> None:
        self.attachment = attachment
        self.ranges = ranges
        self.runs: list[SlotRun] = []
        self.complete = False  # every block's slot is known, and the runs are in order
        self.inline: list[range] = []  # blocks that are in no pool, and have to be sent

    def add(self, first_block: int, slots: pb.SlotRuns) -> None:
        """Takes over the slots of consecutive blocks, where the match restores them.

        A run with a negative place is of blocks that lie in no pool yet.
        """
        places, generations, counts = unpack(slots)
        ranges = self.ranges
        try:
            if (
                len(ranges) == 1
                and ranges[0].start == first_block
                and len(ranges[0]) == sum(counts)
                and not self.runs
                and min(places) >= 0
            ):
                # The usual answer: all blocks of the only range, and no others.
                pools, starts = self.attachment.pools, [0, *accumulate(counts[:-1])]
                self.runs = [
                    (at, count, pools[place >> POOL_SHIFT], place & IN_POOL, generation)
                    for at, place, generation, count in zip(
                        starts, places, generations, counts, strict=True
                    )
                ]
                self.complete = True
            else:
                self._add_parts(first_block, zip(places, generations, counts, strict=True))
        except KeyError as error:
            raise StoreUnavailable(
                f"a block lies in pool {error}, which was not handed over; attach again"
            ) from None

    def _add_parts(self, first_block: int, entries: Iterable[tuple[int, int, int]]) -> None:
        step, pools = self.attachment.place_step, self.attachment.pools
        for place, generation, count in entries:
            index = 0
            for blocks in self.ranges if place >= 0 else ():
                low = max(blocks.start, first_block)
                high = min(blocks.stop, first_block + count)
                if low < high:
                    skip = low - first_block
                    pool = pools[place >> POOL_SHIFT]
                    page = (place & IN_POOL) + skip * step
                    start = index + low - blocks.start
                    self.runs.append((start, high - low, pool, page, generation + skip))
                index += len(blocks)
            first_block += count

    def send_inline(self, first_block: int, count: int) -> None:
        """These blocks found no room in the pools; those of the match have to be sent."""
        for blocks in self.ranges:
            low, high = max(blocks.start, first_block), min(blocks.stop, first_block + count)
            if low < high:
                self.inline.append(range(low, high))

    def shorten(self, kept: range) -> None:
        """Only these blocks of the only range are wanted any more."""
        count, self.ranges = len(kept), (kept,)
        self.runs = [
            (at, min(n, count - at), pool, page, generation)
            for at, n, pool, page, generation in self.runs
            if at < count
        ]
        self.inline = [
            range(blocks.start, min(blocks.stop, kept.stop))
            for blocks in self.inline
            if blocks.start < kept.stop
        ]

    def missing(self) -> list[range]:
        """Blocks whose slot is not known yet."""
        if self.complete:
            return []
        known = sorted((first, first + count) for first, count, *_ in self.runs)
        found, index = [], 0
        for blocks in self.ranges:
            at = index
            sent = [
                (index + r.start - blocks.start, index + r.stop - blocks.start)
                for r in self.inline
                if r.start in blocks
            ]
            known = sorted([*known, *sent])
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
            if count == 1:
                if page < len(pool.generations) and pool.generations[page] == generation:
                    continue
            elif pool.generations[page : page + count * step : step].tolist() == list(
                range(generation, generation + count)
            ):
                continue
            raise LeaseLost("blocks were cleared or dropped while they were leased; recompute them")

    def copy(self, target: BlockBuffers) -> None:
        width, stride = self.attachment.block_bytes, self.attachment.slot_bytes
        rows, copyto = target.rows, np.copyto
        for index, count, pool, page, _ in self.runs:
            start = page << SLOT_SHIFT
            if count == 1:
                row = target.block(index) if rows is None else rows[index]
                copyto(row, pool.data[start : start + width])
            else:
                target.write(index, rows_at(pool.data, start, count, stride, width))

    def views(self) -> list[memoryview]:
        """A read-only view of each block."""
        width, stride = self.attachment.block_bytes, self.attachment.slot_bytes
        runs = self.runs if self.complete else sorted(self.runs, key=itemgetter(0))
        found = []
        for _, count, pool, page, _ in runs:
            start, view = page << SLOT_SHIFT, pool.view
            if count == 1:
                found.append(view[start : start + width])
            else:
                stop = start + count * stride
                found += [view[at : at + width] for at in range(start, stop, stride)]
        return found


def unpack(slots: pb.SlotRuns) -> tuple[list[int], list[int], list[int]]:
    """Places, generations and block counts of the runs."""
    try:
        places = memoryview(slots.places).cast("q").tolist()
        generations = memoryview(slots.generations).cast("Q").tolist()
        counts = memoryview(slots.counts).cast("I").tolist()
    except TypeError as error:  # no whole entries
        raise StoreUnavailable(f"the daemon sent slots that do not unpack: {error}") from error
    if not len(places) == len(generations) == len(counts):
        raise StoreUnavailable(
            f"the daemon sent slots that disagree: {len(places)} places, {len(generations)} "
            f"generations, {len(counts)} counts"
        )
    return places, generations, counts
