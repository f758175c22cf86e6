"""Flush: writes what host has and disk lacks, and answers when it is durable."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, NotFound
from kvstore.core.plan import FlushResult
from kvstore.policies.demotion import unwritten
from kvstore.policies.index import Run
from kvstore.store.demote import WriteBehind
from kvstore.store.parts import DISK, HOST, SLICE_BLOCKS, Parts
from kvstore.store.recording import SpaceRecorder
from kvstore.store.slices import RunScan

PASSES_MAX = 3  # the others are for groups that failed


class FlushFlow:
    """Answers Flush. What is put meanwhile may or may not be part of it."""

    def __init__(self, parts: Parts, behind: WriteBehind, recording: SpaceRecorder) -> None:
        self._parts = parts
        self._behind = behind
        self._recording = recording

    def flush(self, space_id: bytes | None = None) -> Completion[FlushResult]:
        """Writes all of a space, or of every one; never waits for endurance or a queue's room."""
        if self._parts.disk is None:
            raise FailedPrecondition(
                "there is no disk tier to flush to; set tiers.disk.path and tiers.disk.size"
            )
        if space_id is not None and space_id not in self._parts.spaces:
            raise NotFound(f"space {space_id.hex()} is unknown; `kvstore spaces` lists them")
        return _Flush(self._parts, self._behind, self._recording, space_id).start()


class _Flush:
    """One Flush: passes over the index until one finds nothing more to begin, then a count.

    It writes no more than the disk holds: beyond that it would evict what it has written itself.
    """

    def __init__(
        self, parts: Parts, behind: WriteBehind, recording: SpaceRecorder, space_id: bytes | None
    ) -> None:
        self._parts = parts
        self._behind = behind
        self._recording = recording
        self._space_id = space_id
        self._answer: Completion[FlushResult] = Completion()
        self._passes = self._begun = 0
        assert parts.disk is not None
        self._bytes_left = parts.disk.usage().capacity_bytes
        self._durable = self._left_out = 0

    def start(self) -> Completion[FlushResult]:
        # No block of a space that is not written down goes to disk.
        spaces = self._parts.spaces.values()
        wanted = [s for s in spaces if self._space_id in (None, s.id)]
        self._recording.catch_up(wanted, self._next_pass)
        return self._answer

    def _next_pass(self) -> None:
        self._passes += 1
        self._begun = 0
        self._scan = RunScan(self._parts.index)
        self._behind.submit()
        self._write_on(None)

    def _write_on(self, held: Run | None) -> None:
        """Goes on with `held`, a run that was not done with, then with the scan."""
        left = SLICE_BLOCKS
        while left > 0 and (held is not None or not self._scan.is_over):
            run = held if held is not None and held.alive else self._scan.next()
            held = None
            left -= run.count if run is not None else 1
            if run is not None and not self._write(run):
                self._behind.when_changed(partial(self._write_on, run))
                return
        if self._scan.is_over:
            self._settle()
        else:
            self._parts.defer(lambda: self._write_on(None))

    def _write(self, run: Run) -> bool:
        """Begins to write what `run` has to; False if that has to go on once something ended."""
        if self._space_id is not None and run.root.space.id != self._space_id:
            return True
        size = run.root.space.slot_bytes * run.root.space.shard_count
        for part, start, stop in unwritten(self._parts.index, run):
            stop = min(stop, start + self._bytes_left // size)
            begun = self._behind.take(part, start, stop, forced=True)
            self._begun += begun
            self._bytes_left -= begun * size
            if begun < stop - start:
                self._behind.submit()
            if begun < stop - start and not self._behind.is_idle and not self._has_failed():
                return False
        return True

    def _has_failed(self) -> bool:
        disk = self._parts.disk
        return disk is None or bool(disk.problem)

    def _settle(self) -> None:
        """Waits for everything that is under way, this Flush's or not."""
        self._behind.submit()
        if not self._behind.is_idle:
            self._behind.when_changed(self._settle)
        elif self._begun and self._passes < PASSES_MAX and not self._has_failed():
            self._next_pass()
        else:
            self._scan = RunScan(self._parts.index)
            self._count_on()

    def _count_on(self) -> None:
        left = SLICE_BLOCKS
        while left > 0 and not self._scan.is_over:
            run = self._scan.next()
            left -= run.count if run is not None else 1
            if run is not None and run.ready:
                self._count(run)
        if self._scan.is_over:
            self._answer.resolve(FlushResult(self._durable, self._left_out))
        else:
            self._parts.defer(self._count_on)

    def _count(self, run: Run) -> None:
        if self._space_id is not None and run.root.space.id != self._space_id:
            return
        grid = self._parts.index.places_grid(run, 0, run.ready)
        on_disk = (grid[:, DISK] >= 0).all(axis=1)
        in_host = (grid[:, HOST] >= 0).all(axis=1)
        self._durable += int(on_disk.sum())
        self._left_out += int(np.count_nonzero(in_host & ~on_disk))
