"""Probe: reads a little of what plans leave on a slow disk, to know when it is fast again.

nothing read of late? -> a plan that left the disk alone? -> a piece of its match -> the cost book
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from kvstore.mover import READ_LINK, Job, Moved
from kvstore.policies.index import Span
from kvstore.store.decisions import Entry
from kvstore.store.evict import Remover
from kvstore.store.lookup import cut_path
from kvstore.store.parts import DISK, SLICE_BLOCKS, TIER_NAMES, Parts
from kvstore.store.promote import Promoter

# A disk that nobody reads is tried that often: one that got fast again is believed after some five.
PROBE_SECONDS = 5.0
RECENT_SECONDS = 60.0  # for lookups of longer ago nobody needs to know
ENTRIES_MAX = 32  # that are looked at in a turn


class DiskProbe:
    """Measures a disk that was found too slow, since what is never read is never measured.

    No request waits for it: bytes are read, compared with their checksums, and forgotten.
    """

    def __init__(self, parts: Parts, remover: Remover, promoter: Promoter) -> None:
        self._parts = parts
        self._remover = remover
        self._promoter = promoter
        self._due = parts.clock.now() + PROBE_SECONDS
        self._is_running = False

    def tick(self, now: float) -> None:
        parts = self._parts
        if parts.disk is None or parts.draining or self._is_running or now < self._due:
            return
        self._due = now + PROBE_SECONDS
        if parts.costs.quiet_seconds(parts.costs.read_link, now) >= PROBE_SECONDS:
            span = self._left_alone()
            if span is not None:
                self._read(span)

    def _left_alone(self) -> Span | None:
        """Blocks that the last plans would have loaded from a faster disk."""
        oldest = self._parts.clock.wall() - RECENT_SECONDS
        for entry in islice(self._parts.decisions, ENTRIES_MAX):
            if entry.wall_seconds < oldest:
                break
            span = self._on_disk(entry) if _leaves_disk_alone(entry) else None
            if span is not None:
                return span
        return None

    def _on_disk(self, entry: Entry) -> Span | None:
        """The first blocks of an entry's match that lie on disk, as many as are read together."""
        index, space = self._parts.index, entry.space
        root = index.find_root(space, entry.root_digest)
        if root is None or space.closing or not entry.chain.block_count:
            return None
        walk = index.walk(root, entry.chain)
        walk.step(SLICE_BLOCKS)
        for run, start, stop in cut_path(walk.path, walk.ready_blocks):
            there: Any = (index.places_grid(run, start, stop)[:, DISK] >= 0).all(axis=1)
            if there.any():
                first = int(there.argmax())
                left = there[first : first + self._promoter.piece_blocks(space)]
                count = len(left) if left.all() else int(left.argmin())
                return Span(run, start + first, start + first + count)
        return None

    def _read(self, span: Span) -> None:
        parts, (run, start, stop) = self._parts, span
        disk, space = parts.disk, run.root.space
        assert disk is not None
        places = parts.index.places_grid(run, start, stop)[:, DISK].ravel().tolist()
        expected, length = [disk.checksum(place) for place in places], space.block_bytes
        reader = parts.start_reading()
        anchor = parts.index.anchor(run, stop, reader)

        def work() -> list[bytes | None]:
            row = memoryview(bytearray(len(places) * length))
            items = [(p, row[i * length : (i + 1) * length]) for i, p in enumerate(places)]
            return disk.read_many(items, length)

        def done(moved: Moved) -> None:
            self._is_running = False
            is_there = anchor.run is not None
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            found = moved.value if moved.error is None and is_there else ()
            for place, checksum, wanted in zip(places, found, expected, strict=False):
                if checksum not in (None, wanted):
                    self._remover.quarantine(place, DISK)
                    break  # what comes after it leaves with it

        job = Job(READ_LINK, space.tenant, 0, len(places) * length, work, done)
        self._is_running = parts.mover.submit(job)
        if not self._is_running:
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)


def _leaves_disk_alone(entry: Entry) -> bool:
    """Whether a plan by measured costs loads nothing of a match that lies on disk in part."""
    decision, disk = entry.decision, TIER_NAMES[DISK]
    return (
        decision is not None
        and any(segment.source == disk for segment in decision.situation.segments)
        and all(step.source != disk for step in entry.plan.steps)
    )
