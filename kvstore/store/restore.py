"""Restore: slots of leased blocks again, and their bytes for clients without shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import CorruptBlock, InvalidRequest, LeaseLost, LimitReached
from kvstore.core.lease import Lease
from kvstore.core.plan import Slots
from kvstore.mover import COPY_LINK, Job, Moved
from kvstore.policies.index import Span
from kvstore.store.evict import Remover
from kvstore.store.lookup import LookupFlow
from kvstore.store.parts import HOST, Parts
from kvstore.store.sessions import Session


class RestoreFlow:
    """Serves leased blocks. All are in the host tier, so nothing is waited for."""

    def __init__(self, parts: Parts, lookups: LookupFlow, remover: Remover) -> None:
        self._parts = parts
        self._lookups = lookups
        self._remover = remover

    def restore(
        self, session: Session, lease_id: int, first_block: int, block_count: int,
        emit: Callable[[Slots], None],
    ) -> Completion[None]:  # fmt: skip
        """Emits where blocks [first_block, first_block + block_count) lie; 0 means all the rest."""
        lease = self.owned(session, lease_id)
        path = self._path(lease, first_block, block_count)
        if path:
            emit(self._lookups.slots(path, shard_of(session, lease), first_block))
        done: Completion[None] = Completion()
        done.resolve(None)
        return done

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
        checksum = self._checksum(place)
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
            else:
                answer.resolve((bytes(target), checksum))

        def work() -> None:
            parts.host.read(place, memoryview(target), length)

        if not parts.mover.submit(Job(COPY_LINK, space.tenant, session.id, length, work, done)):
            parts.recorder.queue_rejected(COPY_LINK)
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            raise LimitReached("the copy queue is full (limits.queue_bytes_per_link); try later")
        return answer

    def _checksum(self, place: int) -> bytes:
        try:
            return self._parts.host.checksum(place)
        except CorruptBlock as error:
            self._remover.quarantine(place)
            raise LeaseLost("the block is damaged and was dropped; recompute it") from error

    def _path(self, lease: Lease, first_block: int, block_count: int) -> list[Any]:
        last = first_block + block_count if block_count else lease.block_count
        if first_block < 0 or last > lease.block_count or first_block > last:
            raise InvalidRequest(
                f"blocks [{first_block}, {last}) are not all leased: lease {lease.id} covers "
                f"[0, {lease.block_count})"
            )
        path = []
        for run, start, stop in self._parts.index.path(lease.anchor, first_block):
            stop = min(stop, last - run.first)
            if start < stop:
                path.append(Span(run, start, stop))
        return path


def shard_of(session: Session, lease: Lease) -> int:
    """The shard that a session reads under a lease: its own, whichever rank looked it up."""
    attachment = lease.attachment
    if attachment.session is not session:
        for own in session.attachments.values():
            if own.engine is lease.engine and own.space is attachment.space:
                return own.shard
    return int(attachment.shard)
