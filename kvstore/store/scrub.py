"""Scrub: reads blocks on disk again and compares them with their checksums, on request."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.completion import Completion
from kvstore.core.plan import VerifyResult
from kvstore.mover import DISK_CHECK_LINK, Job, Moved
from kvstore.policies.index import Run
from kvstore.store.evict import Remover
from kvstore.store.parts import DISK, SLICE_BLOCKS, TIER_NAMES, Parts
from kvstore.store.slices import RunScan

JOB_BYTES = 16 << 20


class Scrubber:
    """Checks the disk tier a bounded part at a time; restores are not held up by it."""

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover

    def verify(self, result: VerifyResult) -> Completion[None]:
        """Adds what it finds to `result`; nothing to do without a disk."""
        return _Scrub(self._parts, self._remover, result).start()


class _Scrub:
    """One pass over the index."""

    def __init__(self, parts: Parts, remover: Remover, result: VerifyResult) -> None:
        self._parts = parts
        self._remover = remover
        self._result = result
        self._answer: Completion[None] = Completion()
        self._scan = RunScan(parts.index)

    def start(self) -> Completion[None]:
        if self._parts.disk is None:
            self._answer.resolve(None)
        else:
            self._parts.defer(self._go_on)
        return self._answer

    def _go_on(self) -> None:
        left = SLICE_BLOCKS
        while left > 0 and not self._scan.is_over:
            run = self._scan.next()
            left -= run.count if run is not None else 1
            places = self._places(run) if run is not None else []
            if run is not None and places:
                self._check(places, run.root.space.block_bytes)
                return
        if self._scan.is_over:
            self._answer.resolve(None)
        else:
            self._parts.defer(self._go_on)

    def _places(self, run: Run) -> list[int]:
        if not run.resident_in(DISK):
            return []
        places = self._parts.index.places_grid(run, 0, run.ready)[:, DISK].ravel()
        found: list[int] = places[places >= 0].tolist()
        return found

    def _check(self, places: list[int], length: int) -> None:
        """Checks places a job at a time, then goes on with the scan."""
        count = max(1, JOB_BYTES // length)
        now, later = places[:count], places[count:]
        then: Callable[[], None] = (lambda: self._check(later, length)) if later else self._go_on
        disk = self._parts.disk
        assert disk is not None
        todo = [(place, length, disk.checksum(place)) for place in now if disk.generation(place)]
        stamps = {place: disk.generation(place) for place, _, _ in todo}

        def done(moved: Moved) -> None:
            if moved.error is None:
                bad = [p for (p, _, _), ok in zip(todo, moved.value, strict=True) if not ok]
                self._found([place for place in bad if disk.generation(place) == stamps[place]])
                self._result.verified_blocks += len(todo)
                self._result.verified_bytes += len(todo) * length
                self._parts.recorder.copied(DISK_CHECK_LINK, len(todo) * length, moved.seconds)
            then()

        job = Job(
            DISK_CHECK_LINK, "", 0, len(todo) * length,
            lambda: [disk.verify(*item) for item in todo], done,
        )  # fmt: skip
        if not self._parts.mover.submit(job):
            self._parts.defer(lambda: self._check(places, length))

    def _found(self, bad: list[int]) -> None:
        for place in bad:
            key = self._remover.quarantine(place, DISK)
            if key:
                self._result.corrupt_blocks += 1
                self._result.findings.append(
                    f"block {key.hex()} in {TIER_NAMES[DISK]} does not match its checksum: dropped"
                )
