"""Restore: slots of leased blocks, read from disk where need be, and bytes for other hosts."""

from __future__ import annotations

from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import CorruptBlock, InvalidRequest, LeaseLost, LimitReached
from kvstore.core.lease import Lease
from kvstore.mover import COPY_LINK, READ_LINK, Job, Moved
from kvstore.store.evict import Remover
from kvstore.store.lookup import LookupFlow
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.promote import Promoter
from kvstore.store.restoring import Emit, Restoring, cut_at
from kvstore.store.sessions import Session


class RestoreFlow:
    """Serves leased blocks: those in host at once, those on disk as they arrive there."""

    def __init__(
        self, parts: Parts, lookups: LookupFlow, remover: Remover, promoter: Promoter
    ) -> None:
        self._parts = parts
        self._lookups = lookups
        self._remover = remover
        self._promoter = promoter
        self._running: set[Restoring] = set()  # those that have a plan to keep to

    def restore(
        self, session: Session, lease_id: int, first_block: int, block_count: int, emit: Emit,
        keeps_part: bool = False,
    ) -> Completion[None]:  # fmt: skip
        """Emits where blocks [first_block, first_block + block_count) lie; 0 means all the rest.

        With `keeps_part` the client can use the leading blocks if the others don't come.
        """
        lease = self.owned(session, lease_id)
        path = self.path(lease, first_block, block_count)
        shard = shard_of(session, lease)
        if self._parts.disk is None:
            if path:
                emit(self._lookups.slots(path, shard, first_block))
            done: Completion[None] = Completion()
            done.resolve(None)
            return done
        stop = path[-1].run.first + path[-1].stop if path else first_block
        stream = Restoring(
            self._parts, self._lookups, self._promoter, lease, shard, emit, keeps_part
        )
        answer = stream.start(session.id, first_block, stop, path)
        if not answer.done and stream.has_plan:
            self._running.add(stream)
            answer.then(lambda _: self._running.discard(stream))
        return answer

    def tick(self, now: float) -> None:
        """Cuts restores short, or gives them up, that are so late that to recompute is faster."""
        for stream in list(self._running):
            found = stream.look(now)
            if found is not None:
                # Ranks of one engine have to do the same.
                for other in [one for one in self._running if one.lease is stream.lease]:
                    other.cut(*found)

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
        run, start, _ = self.path(lease, position, 1)[0]
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

    def path(self, lease: Lease, first_block: int, block_count: int) -> list[Any]:
        """Spans of leased blocks from `first_block` on, all the rest with a count of 0."""
        last = first_block + block_count if block_count else lease.block_count
        if first_block < 0 or last > lease.block_count or first_block > last:
            raise InvalidRequest(
                f"blocks [{first_block}, {last}) are not all leased: lease {lease.id} covers "
                f"[0, {lease.block_count})"
            )
        return cut_at(self._parts.index.path(lease.anchor, first_block), last)


def shard_of(session: Session, lease: Lease) -> int:
    """The shard that a session reads under a lease: its own, whichever rank looked it up."""
    attachment = lease.attachment
    if attachment.session is not session:
        for own in session.attachments.values():
            if own.engine is lease.engine and own.space is attachment.space:
                return own.shard
    return int(attachment.shard)
