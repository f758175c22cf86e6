"""Commit, the second half of a put: copy from staging, hash our own copy, publish in order."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.completion import Completion
from kvstore.core.errors import InvalidRequest, NotFound, TierError
from kvstore.core.plan import BlockOutcome, CommitResult, CommitRun
from kvstore.core.space import Space
from kvstore.mover import COPY_LINK, Job, Moved
from kvstore.store.parts import HOST, Parts
from kvstore.store.publish import Publisher
from kvstore.store.reservations import Reservation, ReservationTable
from kvstore.store.sessions import Session

JOB_BYTES = 8 << 20  # of one copy: a hand-over between threads costs as much as 1 MiB of it
JOB_BLOCKS = 128  # of one turn that publishes them


class _Answer:
    """What one Commit answers: a result a piece, in order, once the last is there."""

    __slots__ = ("completion", "left", "results")

    def __init__(self, piece_count: int) -> None:
        self.completion: Completion[list[CommitResult]] = Completion()
        self.left = piece_count
        self.results: list[CommitResult] = []
        if not piece_count:
            self.completion.resolve([])

    def add(self, result: CommitResult) -> None:
        self.results.append(result)
        self.left -= 1
        if not self.left:
            self.completion.resolve(self.results)


class _Copy:
    """A piece under way, and its outcome once its copy is over."""

    __slots__ = ("answer", "moved", "piece")

    def __init__(self, piece: CommitRun, answer: _Answer) -> None:
        self.piece = piece
        self.answer = answer
        self.moved: Moved | None = None


class CommitFlow:
    """Publishes reserved blocks once their bytes are ours and checksummed.

    `stored(space)` hears that blocks of a space became READY.
    """

    def __init__(
        self,
        parts: Parts,
        table: ReservationTable,
        publisher: Publisher,
        stored: Callable[[Space], None] = lambda space: None,
    ) -> None:
        self._parts = parts
        self._stored = stored
        self._table = table
        self._publisher = publisher

    def commit(
        self, session: Session, reservation_id: int, runs: list[CommitRun]
    ) -> Completion[list[CommitResult]]:
        """Copies reserved blocks from `runs`; answers when all of their copies are over.

        The sources must stay untouched until then. Raises NotFound for a reservation that ended,
        InvalidRequest for a block that does not wait in it.
        """
        reservation = self._table.get(reservation_id)
        if reservation is None or reservation.ended or reservation.session is not session:
            raise NotFound(
                f"reservation {reservation_id} is unknown: committed, aborted, or past its "
                f"{self._parts.limits.staging_ttl_seconds} s; reserve again"
            )
        _check_positions(reservation, runs)
        pieces = [piece for run in runs for piece in _pieces(run)]
        for piece in pieces:
            for position in _positions(piece):
                reservation.copying[position] = reservation.waiting.pop(position)
        self._table.extend(reservation)
        answer = _Answer(len(pieces))
        for piece in pieces:
            self._copy(reservation, piece, answer)
        return answer.completion

    def _copy(self, reservation: Reservation, piece: CommitRun, answer: _Answer) -> None:
        parts, space = self._parts, reservation.attachment.space
        targets = [
            (reservation.copying[position], i * piece.stride)
            for i, position in enumerate(_positions(piece))
        ]
        write, source, length = parts.host.write, piece.source, space.block_bytes
        copy = _Copy(piece, answer)
        reservation.copies.append(copy)

        def done(moved: Moved) -> None:
            copy.moved = moved
            reservation.session.copy_ended()
            self._take_over(reservation)

        job = Job(
            COPY_LINK, space.tenant, reservation.session.id, len(targets) * length,
            lambda: [write(place, source[at : at + length]) for place, at in targets], done,
        )  # fmt: skip
        reservation.session.copy_started()
        if not parts.mover.submit(job):
            parts.recorder.queue_rejected(COPY_LINK, len(targets))
            done(Moved(None, TierError("the copy queue is full; put again later"), 0.0))

    def _take_over(self, reservation: Reservation) -> None:
        """Publishes finished copies in the order they were asked for: parents come first."""
        while reservation.copies and reservation.copies[0].moved is not None:
            copy = reservation.copies.popleft()
            copy.answer.add(self._copied(reservation, copy.piece, copy.moved))

    def _copied(self, reservation: Reservation, piece: CommitRun, moved: Moved) -> CommitResult:
        """The copies of a piece are over: its blocks become COMMITTED, and READY where they can."""
        parts, positions = self._parts, _positions(piece)
        places = self._table.copied(reservation, positions)
        length = reservation.attachment.space.block_bytes
        if moved.error is None:
            parts.recorder.copied(COPY_LINK, len(places) * length, moved.seconds)
        reason = _refused(reservation, moved)
        kept = 0 if reason else len(range(piece.first_block, reservation.anchor.block_count))
        kept = min(kept, len(places))
        outcomes = bytes(len(places) - kept)
        if outcomes:
            reason = reason or "a block before these could not be stored; put again from there"
            gone = dict(zip(positions[kept:], places[kept:], strict=True))
            self._table.give_up(reservation, gone)
        if kept:
            checksums = moved.value[:kept]
            outcomes = (
                self._publish(reservation, positions[:kept], places[:kept], checksums) + outcomes
            )
        self._table.settle(reservation)
        for outcome in BlockOutcome:
            if count := outcomes.count(outcome):
                parts.recorder.put_blocks(outcome.name.lower(), count)
        return CommitResult(piece.first_block, outcomes, reason)

    def _publish(
        self, reservation: Reservation, positions: range, places: list[int], checksums: list[bytes]
    ) -> bytes:
        parts, attachment = self._parts, reservation.attachment
        runs, done = [], 0
        for run, start, stop in parts.index.path(reservation.anchor, positions[0]):
            taken = places[done : done + stop - start]
            parts.index.commit_span(run, start, attachment.shard, HOST, taken)
            runs.append(run)
            done += len(taken)
            if done == len(places):
                break
        parts.residency.serve(reservation.use)
        self._publisher.remember(places, checksums)
        self._table.committed(reservation, positions)
        ready = self._publisher.publish(runs)
        self._table.published(attachment.space.number)
        self._stored(attachment.space)
        if reservation.anchor.run is None:
            return bytes(len(places))
        return bytes(BlockOutcome.STORED if p in ready else BlockOutcome.PENDING for p in places)


def _check_positions(reservation: Reservation, runs: list[CommitRun]) -> None:
    seen: set[int] = set()
    for run in runs:
        for position in _positions(run):
            if position not in reservation.waiting or position in seen:
                raise InvalidRequest(
                    f"block {position} does not wait in reservation {reservation.id}; commit each "
                    "wanted block once"
                )
            seen.add(position)


def _refused(reservation: Reservation, moved: Moved) -> str:
    """Why copied blocks may not be published; empty when they may."""
    space = reservation.attachment.space
    if moved.error is not None:
        return f"the copy failed: {moved.error}"
    if space.epoch != reservation.epoch or space.closing:
        return f"epoch {reservation.epoch} of the space is over; put again"
    if reservation.ended:
        return "the reservation ended before its copies did; reserve again"
    if reservation.lost or reservation.anchor.run is None:
        return "the prefix that these blocks extend is gone; put from its start"
    return ""


def _positions(run: CommitRun) -> range:
    return range(run.first_block, run.first_block + run.block_count)


def _pieces(run: CommitRun) -> list[CommitRun]:
    """`run` in parts of about JOB_BYTES, so that several workers share it.

    And of few blocks: publishing a part is one turn of the owner.
    """
    step = max(1, min(JOB_BYTES // run.stride, JOB_BLOCKS))
    return [
        CommitRun(
            run.first_block + i, min(step, run.block_count - i), run.source[i * run.stride :],
            run.stride,
        )
        for i in range(0, run.block_count, step)
    ]  # fmt: skip
