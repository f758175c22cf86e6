"""Verify: hashes stored bytes again: adopted ones before anybody gets them, all on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvstore.core.completion import Completion
from kvstore.core.plan import VerifyResult
from kvstore.mover import CHECK_LINK, Job, Moved
from kvstore.policies.index import Run, Span, Walk
from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, SLICE_BLOCKS, TIER_NAMES, Parts
from kvstore.store.slices import RunScan

LOOKUP_BYTES = 64 << 20
JOB_BYTES = 16 << 20
JOB_BLOCKS = 128  # of one turn of the owner

Stamp = tuple[int, int]  # place, generation


class Verifier:
    """Checks bytes on a worker, and drops what no longer matches with all that depends on it.

    A check is of a (place, generation): a slot that was reused meanwhile says nothing.
    """

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover
        self._backlog: deque[int] = deque()
        self._running = False

    def adopted(self, places: Iterable[int]) -> None:
        """Queues blocks found at start; no lookup answers with them before they are checked."""
        self._backlog.extend(places)
        self._parts.unverified.update(self._backlog)
        self._go_on()

    def checked_blocks(self, walk: Walk) -> int:
        """How many leading READY blocks of a walk need no check any more."""
        position = 0
        for run, start, stop in walk.path:
            stop = min(stop, run.ready)
            for shard in range(run.root.space.shard_count):
                places = self._parts.index.places([Span(run, start, stop)], HOST, shard).tolist()
                bad = [i for i, place in enumerate(places) if place in self._parts.unverified]
                stop = min(stop, start + bad[0]) if bad else stop
            position = run.first + stop
            if stop < run.count:
                break
        return min(position, walk.ready_blocks)

    def verify_first(self, walk: Walk, then: Callable[[], None]) -> bool:
        """Checks the first unchecked blocks of a walk, a bounded part, then calls `then`.

        False when the checking queue is full; `then` is not called.
        """
        found: list[int] = []
        space = walk.root.space
        limit = max(1, LOOKUP_BYTES // space.slot_bytes)
        for run, start, stop in walk.path:
            for shard in range(space.shard_count):
                places = self._parts.index.places([Span(run, start, stop)], HOST, shard).tolist()
                found += [place for place in places if place in self._parts.unverified]
            if len(found) >= limit:
                break
        return self._check(found[:limit], then)

    def verify_all(self) -> Completion[VerifyResult]:
        """Checks every block of the host tier again, in the background."""
        result, answer = VerifyResult(), Completion[VerifyResult]()
        scan = RunScan(self._parts.index)

        def next_run() -> None:
            for _ in range(SLICE_BLOCKS):
                if scan.is_over:
                    answer.resolve(result)
                    return
                run = scan.next()
                places = self._run_places(run) if run is not None else []
                if places:
                    self._check_or_retry(places, next_run, result)
                    return
            self._parts.defer(next_run)

        self._parts.defer(next_run)
        return answer

    def _run_places(self, run: Run) -> list[int]:
        space, span = run.root.space, Span(run, 0, run.ready)
        return [
            place
            for shard in range(space.shard_count)
            for place in self._parts.index.places([span], HOST, shard).tolist()
            if place >= 0
        ]

    def _check_or_retry(
        self, places: list[int], then: Callable[[], None], result: VerifyResult
    ) -> None:
        if not self._check(places, then, result):
            self._parts.defer(lambda: self._check_or_retry(places, then, result))

    def _go_on(self) -> None:
        """Checks the backlog a job at a time: lookups' own checks come in between."""
        if self._running:
            return
        batch: list[int] = []
        byte_count = 0
        while self._backlog and byte_count < JOB_BYTES and len(batch) < JOB_BLOCKS:
            place = self._backlog.popleft()
            if place in self._parts.unverified:
                header = self._parts.header(place)
                batch.append(place)
                byte_count += header.length if header is not None else 0
        if not batch:
            return
        self._running = True

        def then() -> None:
            self._running = False
            self._go_on()

        if not self._check(batch, then):
            self._running = False
            self._backlog.extend(batch)

    def _check(
        self, places: list[int], then: Callable[[], None], result: VerifyResult | None = None
    ) -> bool:
        """Checks places a part a turn, then calls `then`; False if not even one could be begun."""
        first, rest = places[:JOB_BLOCKS], places[JOB_BLOCKS:]
        if not rest:
            return self._check_part(first, then, result)
        return self._check_part(first, lambda: self._check_rest(rest, then, result), result)

    def _check_rest(
        self, places: list[int], then: Callable[[], None], result: VerifyResult | None
    ) -> None:
        if result is not None:
            self._check_or_retry(places, then, result)
        elif not self._check(places, then):
            # The queue is full: what is left stays unchecked, and its turn comes by itself.
            self._backlog.extend(places)
            then()

    def _check_part(
        self, places: list[int], then: Callable[[], None], result: VerifyResult | None
    ) -> bool:
        parts, host = self._parts, self._parts.host
        stamps: list[Stamp] = [(place, host.generation(place)) for place in places]
        todo, bad = [], set[int]()
        for place, generation in stamps:
            header = parts.header(place) if generation else None
            if header is not None:
                todo.append((place, header.length, host.checksum(place)))
            elif generation:
                bad.add(place)
        byte_count = sum(length for _, length, _ in todo)

        def done(moved: Moved) -> None:
            if moved.error is None:
                bad.update(p for (p, _, _), ok in zip(todo, moved.value, strict=True) if not ok)
                self._checked(stamps, bad, result)
                parts.recorder.copied(CHECK_LINK, byte_count, moved.seconds)
                if result is not None:
                    result.verified_blocks += len(todo)
                    result.verified_bytes += byte_count
            then()
            self._go_on()

        job = Job(
            CHECK_LINK, "", 0, byte_count, lambda: [host.verify(*item) for item in todo], done
        )
        if not parts.mover.submit(job):
            parts.recorder.queue_rejected(CHECK_LINK)
            return False
        return True

    def _checked(self, stamps: list[Stamp], bad: set[int], result: VerifyResult | None) -> None:
        for place, generation in stamps:
            if not generation or self._parts.host.generation(place) != generation:
                continue
            self._parts.unverified.discard(place)
            if place in bad:
                header = self._parts.header(place)
                if result is not None:
                    result.corrupt_blocks += 1
                    result.findings.append(
                        f"block {header.key.hex() if header is not None else '(header damaged)'} "
                        f"in {TIER_NAMES[HOST]} does not match its checksum: dropped"
                    )
                self._remover.quarantine(place)
