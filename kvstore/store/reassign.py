"""Reassign: empties segments of the disk so that they can serve another block size."""

from __future__ import annotations

import numpy as np

from kvstore.core.space import Space
from kvstore.policies.index import Run
from kvstore.store.evict import Remover
from kvstore.store.parts import DISK, SLICE_BLOCKS, Parts
from kvstore.store.slices import RunScan


class Reassigner:
    """Drops what lies in segments that the disk wants to hand to another size class.

    Nothing is copied: what is in host too can be written again, and what is not goes as any victim
    of eviction does. A block under a lease or pin stays; the next shortage asks again.
    """

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover
        self._active = False

    def start(self, space: Space) -> None:
        """Called when a space found no slot on disk although others gave theirs up."""
        disk = self._parts.disk
        if self._active or disk is None:
            return
        found = disk.drain_candidates(space.block_bytes, space.symbol_bytes_max)
        if not found:
            return
        self._active = True
        scan, places = RunScan(self._parts.index), np.array(sorted(found), np.int64)
        self._parts.defer(lambda: self._go_on(scan, places))

    def _go_on(self, scan: RunScan, places: np.ndarray) -> None:
        left = SLICE_BLOCKS
        while not scan.is_over and left > 0:
            run = scan.next()
            left -= run.count if run is not None else 1
            if run is not None and run.ready:
                self._empty(run, places)
        if scan.is_over:
            self._active = False
        else:
            self._parts.defer(lambda: self._go_on(scan, places))

    def _empty(self, run: Run, places: np.ndarray) -> None:
        """Drops the disk copies of `run` that lie at `places`, the last ones first."""
        index = self._parts.index
        there = np.isin(index.places_grid(run, 0, run.ready)[:, DISK], places).any(axis=1)
        held = run.count if index.anchored_below(run) else run.anchored_blocks()
        for i in np.flatnonzero(there)[::-1].tolist():
            if i >= held and run.alive and i < run.ready:
                self._remover.lose_copy(run, i, DISK, "capacity")
