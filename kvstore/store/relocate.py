"""Relocate: moves unleased blocks aside so that their memory can serve another block size."""

from __future__ import annotations

from typing import Any

from kvstore.core.space import Space
from kvstore.mover import COPY_LINK, Job, Moved
from kvstore.policies.index import Span
from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, SLICE_BLOCKS, Parts
from kvstore.store.slices import RunScan


class Relocator:
    """Empties the chunks that a tier wants to hand to another size class, in the background.

    A block under a lease stays until the lease ends; the next shortage asks again.
    """

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover
        self._active: set[str] = set()

    def start(self, space: Space) -> None:
        """Called when a space found no slot: begins to make some of other sizes' memory."""
        if space.pool in self._active:
            return
        symbol = space.symbol_bytes_max
        places = set(self._parts.host.drain_candidates(space.block_bytes, symbol, space.pool))
        if not places:
            return
        self._active.add(space.pool)
        scan = RunScan(self._parts.index)
        self._parts.defer(lambda: self._scan(space.pool, scan, places))

    def _scan(self, pool: str, scan: RunScan, places: set[int]) -> None:
        """Finds the blocks of `places` in the index, a slice at a time, and moves each."""
        left = SLICE_BLOCKS
        while not scan.is_over and places and left > 0:
            run = scan.next()
            left -= run.count if run is not None else 1
            if run is not None:
                self._scan_run(run, places)
        if scan.is_over or not places:
            self._active.discard(pool)
        else:
            self._parts.defer(lambda: self._scan(pool, scan, places))

    def _scan_run(self, run: Any, places: set[int]) -> None:
        space = run.root.space
        for shard in range(space.shard_count):
            column = self._parts.index.places([Span(run, 0, run.ready)], HOST, shard).tolist()
            for place in places.intersection(column):
                places.discard(place)
                i = column.index(place)
                if not self._is_held(run, i):
                    self._move(run, i, shard, place)

    def _is_held(self, run: Any, i: int) -> bool:
        """Whether an anchor covers block `i`: on the run itself, or on anything below."""
        if i < run.anchored_blocks():
            return True
        return any(below.marks for below in self._parts.index.runs(run) if below is not run)

    def _move(self, run: Any, i: int, shard: int, place: int) -> None:
        parts, space = self._parts, run.root.space
        host = parts.host
        symbol = space.symbol_bytes_max
        target = host.reserve(space.block_bytes, symbol, 1, space.pool)
        if not target:
            return
        generation, length = host.generation(place), space.block_bytes
        reader = parts.start_reading()
        anchor = parts.index.anchor(run, i + 1, reader)

        def done(moved: Moved) -> None:
            block = parts.index.path(anchor, 0)
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            unchanged = bool(block) and host.generation(place) == generation
            # A copy made now would seem to have come after a clear that is under way.
            if moved.error is not None or not unchanged or space.closing:
                parts.retired[HOST].retire(target)
                return
            header, (tree_run, _, stop) = parts.header(place), block[-1]
            if header is None or moved.value != host.checksum(place):
                parts.retired[HOST].retire(target)
                self._remover.quarantine(place)
            elif self._is_held(tree_run, stop - 1):
                parts.retired[HOST].retire(target)
            else:
                host.commit([(target[0], header, moved.value)])
                parts.index.set_place(tree_run, stop - 1, shard, HOST, target[0])
                if place in parts.unverified:
                    parts.unverified.add(target[0])
                    parts.unverified.discard(place)
                parts.retired[HOST].retire([place])

        job = Job(
            COPY_LINK, space.tenant, 0, length,
            lambda: host.copy(place, target[0], length), done,
        )  # fmt: skip
        if not parts.mover.submit(job):
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            parts.retired[HOST].retire(target)
