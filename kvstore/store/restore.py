"""Restore: slots of leased blocks, read from disk where need be, and bytes for other hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.core.completion import Completion
from kvstore.core.errors import CorruptBlock, InvalidRequest, LeaseLost, LimitReached
from kvstore.core.lease import Lease
from kvstore.core.plan import FailedBlocks, Slots
from kvstore.mover import COPY_LINK, READ_LINK, Job, Moved
from kvstore.policies.index import Span
from kvstore.store.evict import Remover
from kvstore.store.lookup import LookupFlow
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.planning import NOTHING_ARRIVED, is_hopeless
from kvstore.store.promote import Promoter
from kvstore.store.sessions import Session

TURN_BLOCKS = 32  # slots for more of them, and who has to go for that, hold lookups up

Emit = Callable[[Slots | FailedBlocks], None]


class RestoreFlow:
    """Serves leased blocks: those in host at once, those on disk as they arrive there."""

    def __init__(
        self, parts: Parts, lookups: LookupFlow, remover: Remover, promoter: Promoter
    ) -> None:
        self._parts = parts
        self._lookups = lookups
        self._remover = remover
        self._promoter = promoter
        self._running: set[_Restoring] = set()  # those that have a plan to keep to

    def restore(
        self, session: Session, lease_id: int, first_block: int, block_count: int, emit: Emit
    ) -> Completion[None]:
        """Emits where blocks [first_block, first_block + block_count) lie; 0 means all the rest."""
        lease = self.owned(session, lease_id)
        path = self._path(lease, first_block, block_count)
        shard = shard_of(session, lease)
        if self._parts.disk is None:
            if path:
                emit(self._lookups.slots(path, shard, first_block))
            done: Completion[None] = Completion()
            done.resolve(None)
            return done
        stop = path[-1].run.first + path[-1].stop if path else first_block
        stream = _Restoring(self._parts, self._lookups, self._promoter, lease, shard, emit)
        answer = stream.start(session.id, first_block, stop)
        if not answer.done and stream.has_plan:
            self._running.add(stream)
            answer.then(lambda _: self._running.discard(stream))
        return answer

    def tick(self, now: float) -> None:
        """Gives restores up that are so late that to recompute is faster than to wait."""
        for stream in list(self._running):
            stream.give_up_if_late(now)

    def owned(self, session: Session, lease_id: int) -> Lease:
        """A live lease of the session's own engines; raises LeaseLost."""
        lease = self._parts.leases.get(lease_id)
        if lease is None or lease.engine not in session.engines.values():
            raise LeaseLost(f"lease {lease_id} is unknown or over; look the prompt up again")
        if lease.anchor.run is None:
            raise LeaseLost(f"the blocks of lease {lease_id} were cleared; recompute them")
        return lease

    def read_block(
        self, session: Session, lease_id: int, position: int
    ) -> Completion[tuple[bytes, bytes]]:
        """Bytes and checksum of one leased block, copied out on a worker."""
        lease = self.owned(session, lease_id)
        run, start, _ = self._path(lease, position, 1)[0]
        parts, space = self._parts, lease.attachment.space
        shard, length = shard_of(session, lease), space.block_bytes
        place = parts.index.place(run, start, shard, HOST)
        tier = HOST if place >= 0 else DISK
        if tier == DISK:
            place = parts.index.place(run, start, shard, DISK)
            if self._promoter.stalled:
                raise LimitReached("the disk does not answer at present; recompute the block")
        checksum = self._checksum(place, tier)
        reader = parts.start_reading()
        anchor = parts.index.anchor(run, start + 1, reader)
        answer: Completion[tuple[bytes, bytes]] = Completion()
        target = bytearray(length)

        def done(moved: Moved) -> None:
            gone = anchor.run is None
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            if moved.error is not None:
                answer.fail(moved.error)
            elif gone:
                answer.fail(LeaseLost(f"the blocks of lease {lease_id} were cleared; recompute"))
            elif moved.value != checksum:
                self._remover.quarantine(place, tier)
                answer.fail(LeaseLost("the block is damaged and was dropped; recompute it"))
            else:
                answer.resolve((bytes(target), checksum))

        source, link = parts.tiers[tier], COPY_LINK if tier == HOST else READ_LINK

        def work() -> bytes | None:
            if tier == DISK:
                return source.read_many([(place, memoryview(target))], length)[0]
            source.read(place, memoryview(target), length)
            return checksum  # the client hashes what it gets; bytes in host were hashed before

        if not parts.mover.submit(Job(link, space.tenant, session.id, length, work, done)):
            parts.recorder.queue_rejected(link)
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            raise LimitReached("the copy queue is full (limits.queue_bytes_per_link); try later")
        return answer

    def _checksum(self, place: int, tier: int) -> bytes:
        try:
            return self._parts.tiers[tier].checksum(place)
        except CorruptBlock as error:
            self._remover.quarantine(place, tier)
            raise LeaseLost("the block is damaged and was dropped; recompute it") from error

    def _path(self, lease: Lease, first_block: int, block_count: int) -> list[Any]:
        last = first_block + block_count if block_count else lease.block_count
        if first_block < 0 or last > lease.block_count or first_block > last:
            raise InvalidRequest(
                f"blocks [{first_block}, {last}) are not all leased: lease {lease.id} covers "
                f"[0, {lease.block_count})"
            )
        return cut_at(self._parts.index.path(lease.anchor, first_block), last)


class _Restoring:
    """One Restore: goes along the chain a bounded part a turn, and ends when all has arrived."""

    def __init__(
        self, parts: Parts, lookups: LookupFlow, promoter: Promoter, lease: Lease, shard: int,
        emit: Emit,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._lookups = lookups
        self._promoter = promoter
        self._lease = lease
        self._shard = shard
        self._emit = emit
        self._answer: Completion[None] = Completion()
        self._waiting = 0
        self._failed_blocks = 0
        self._blocked = False  # until a piece arrives and leaves room in the queue

    def start(self, session: int, first: int, stop: int) -> Completion[None]:
        self._session, self._first, self._next, self._stop = session, first, first, stop
        # Blocks that the client has heard of.
        self._came: np.ndarray = np.zeros(stop - first, np.bool_)
        self._began = self._parts.clock.now()
        entry = self._lease.decision
        if entry is not None and entry.began is None:
            entry.began = self._began
        self._go_on()
        return self._answer

    def _go_on(self) -> None:
        self._blocked = False
        limit = min(self._stop, self._next + TURN_BLOCKS)
        while self._next < limit and not self._blocked:
            path = cut_at(self._parts.index.path(self._lease.anchor, self._next), limit)
            if not path:
                self._fail(self._stop - self._next, "lost", "the lease is over")
                break
            self._serve(path[0])
        if self._next >= self._stop:
            self._settle()
        elif not self._blocked:
            self._parts.defer(self._go_on)

    def _serve(self, span: Span) -> None:
        """Serves the leading blocks of a span that are in the same state."""
        run, start, stop = span
        grid = self._parts.index.places_grid(run, start, stop)
        here: Any = (grid[:, HOST] >= 0).all(axis=1)
        if here[0]:
            count = len(here) if here.all() else int(here.argmin())
            self._serve_ready(run, start, count)
            return
        count = int(here.argmax()) if here.any() else len(here)
        piece = self._promoter.piece_of(int(grid[0, DISK, 0]))
        if piece is not None:
            self._join(piece)
            return
        places = grid[:count, DISK, 0].tolist()
        reading = self._promoter.piece_of
        count = next((i for i, place in enumerate(places) if reading(place)), count)
        self._read(run, start, count)

    @property
    def has_plan(self) -> bool:
        return self._lease.decision is not None and self._lease.decision.decision is not None

    def give_up_if_late(self, now: float) -> None:
        """Tells the client to recompute what has not come if that is faster than to wait for it."""
        entry, count = self._lease.decision, len(self._came)
        piece = min(1.0, self._promoter.piece_blocks(self._lease.attachment.space) / count)
        share = max(NOTHING_ARRIVED * piece, float(self._came.mean()))
        if not is_hopeless(entry.decision, now - self._began, share):
            return
        entry.given_up = True
        edges = np.flatnonzero(np.diff(np.concatenate(([True], self._came, [True]))))
        for start, stop in edges.reshape(-1, 2).tolist():
            reason = "their restore is behind its plan, and to recompute them is faster"
            self._tell_failed(self._first + start, stop - start, "late", reason)
        self._next, self._blocked = self._stop, False
        self._end()

    def _serve_ready(self, run: Any, start: int, count: int) -> None:
        span = Span(run, start, start + count)
        first = run.first + start
        self._tell_ready([span], first, count)
        self._next = first + count

    def _join(self, piece: Any) -> None:
        piece.heard.append(self._heard)
        self._waiting += 1
        self._next = piece.first + piece.count

    def _read(self, run: Any, start: int, count: int) -> None:
        if self._promoter.stalled:
            self._fail(count, "timeout", "the disk does not answer at present")
            return
        end, pieces, kind, reason = self._promoter.begin(
            run, start, start + count, self._session, self._heard
        )
        self._waiting += pieces
        self._next = run.first + end
        if kind == "queue" and self._waiting:
            self._blocked = True
        elif kind:
            self._fail(start + count - end, kind, reason)

    def _heard(self, first: int, readable: int, failed: int, kind: str, reason: str) -> None:
        """A piece is over: its blocks are in host, or not to be had."""
        self._waiting -= 1
        if self._answer.done:
            return  # given up meanwhile
        low, high = max(first, self._first), min(first + readable, self._stop)
        path = cut_at(self._parts.index.path(self._lease.anchor, low), high)
        if low < high and path:
            self._tell_ready(path, low, high - low)
        elif low < high:
            self._tell_failed(low, high - low, "lost", "the lease is over")
        low, high = max(first + readable, self._first), min(first + readable + failed, self._stop)
        if low < high:
            self._tell_failed(low, high - low, kind, reason)
        if self._blocked:
            self._go_on()
        else:
            self._settle()

    def _fail(self, count: int, kind: str, reason: str) -> None:
        self._tell_failed(self._next, count, kind, reason)
        self._next += count

    def _tell_ready(self, path: list[Span], first: int, count: int) -> None:
        self._came[first - self._first : first - self._first + count] = True
        self._emit(self._lookups.slots(path, self._shard, first))

    def _tell_failed(self, first: int, count: int, kind: str, reason: str) -> None:
        self._came[first - self._first : first - self._first + count] = True
        self._failed_blocks += count
        self._parts.recorder.restore_failed(kind, count)
        self._emit(FailedBlocks(first, count, reason, kind == "room"))

    def _settle(self) -> None:
        if not self._waiting and self._next >= self._stop and not self._answer.done:
            self._end()

    def _end(self) -> None:
        if self._lease.decision is not None:
            self._parts.decisions.restore_ended(self._lease.decision, self._failed_blocks)
        self._answer.resolve(None)


def cut_at(path: list[Span], last: int) -> list[Span]:
    """The part of a path that comes before block `last` of its chain."""
    cut = []
    for run, start, stop in path:
        stop = min(stop, last - run.first)
        if start < stop:
            cut.append(Span(run, start, stop))
    return cut


def shard_of(session: Session, lease: Lease) -> int:
    """The shard that a session reads under a lease: its own, whichever rank looked it up."""
    attachment = lease.attachment
    if attachment.session is not session:
        for own in session.attachments.values():
            if own.engine is lease.engine and own.space is attachment.space:
                return own.shard
    return int(attachment.shard)
