"""Calls that answer in a stream: Restore, FetchInline; others are in files of their own.

A source calls `emit(message)`; if that answers with a Completion, the source waits for it before
it sends more, so that a slow reader holds back its own stream and nobody's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import InvalidRequest, LeaseLost
from kvstore.core.lease import Lease
from kvstore.core.plan import FailedBlocks, Slots
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import translate
from kvstore.server.steps import Driver, Steps, error_of
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Session

CHUNK_BYTES = 1 << 20

Emit = Callable[[Any], Completion[None] | None]
Done = Callable[[BaseException | None], None]
Cancel = Callable[[], None]


class Restores:
    """Restore streams under way, by lease, so that CancelRestore finds them."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._running: dict[tuple[int, int], list[_Restore]] = {}

    def start(self, session: Session, request: pb.RestoreRequest, emit: Emit, done: Done) -> Cancel:
        lease = find_lease(session, request.lease_id)
        first, count = block_range(lease, request.first_block, request.block_count)
        key = (session.id, lease.id)
        stream = _Restore(lease, emit, done, lambda ended: self._forget(key, ended))
        self._running.setdefault(key, []).append(stream)
        try:
            stream.follow(
                self._store.restore(session, lease.id, first, count, stream.emit, request.partial)
            )
        except BaseException:
            stream.stop()
            raise
        return stream.stop

    def cancel(self, session: Session, lease_id: int) -> None:
        """Ends the session's restores of a lease; runs already sent stay readable."""
        for stream in list(self._running.get((session.id, lease_id), ())):
            stream.finish(None)

    def _forget(self, key: tuple[int, int], stream: _Restore) -> None:
        streams = self._running[key]
        streams.remove(stream)
        if not streams:
            del self._running[key]


class _Restore:
    """One Restore stream; nothing is sent once it is over."""

    def __init__(
        self, lease: Lease, emit: Emit, done: Done, forget: Callable[[_Restore], None]
    ) -> None:
        self._space = lease.attachment.space
        self._emit = emit
        self._done = done
        self._forget = forget
        self._over = False

    def emit(self, item: Slots | FailedBlocks) -> None:
        if not self._over:
            self._emit(translate.restore_response(item, self._space))

    def follow(self, completion: Completion[None]) -> None:
        completion.then(lambda ended: self.finish(error_of(ended)))

    def finish(self, error: BaseException | None) -> None:
        if not self._over:
            self.stop()
            self._done(error)

    def stop(self) -> None:
        if not self._over:
            self._over = True
            self._forget(self)


def start_fetch(
    store: KVStore, session: Session, request: pb.FetchInlineRequest, emit: Emit, done: Done
) -> Cancel:
    """Sends leased blocks in chunks, one block read at a time."""
    lease = find_lease(session, request.lease_id)
    first, count = block_range(lease, request.first_block, request.block_count)
    driver = Driver(_fetch(store, session, lease.id, range(first, first + count), emit))
    driver.completion.then(lambda ended: done(error_of(ended)))
    return driver.cancel


def _fetch(
    store: KVStore, session: Session, lease_id: int, blocks: range, emit: Emit
) -> Steps[None]:
    for block in blocks:
        payload, checksum = yield store.read_block(session, lease_id, block)
        view = memoryview(payload)
        for offset in range(0, len(view), CHUNK_BYTES):
            chunk = view[offset : offset + CHUNK_BYTES]
            is_last = offset + len(chunk) == len(view)
            yield emit(
                pb.FetchInlineResponse(
                    block=block,
                    offset=offset,
                    data=bytes(chunk),
                    checksum=checksum if is_last else b"",
                )
            )


def find_lease(session: Session, lease_id: int) -> Lease:
    """A live lease of the session or of an engine it is part of; raises LeaseLost."""
    for engine in session.engines.values():
        lease = engine.leases.get(lease_id)
        if lease is not None:
            return lease
    raise LeaseLost(f"lease {lease_id} is not there: it was released or its time ran out")


def block_range(lease: Lease, first_block: int, block_count: int) -> tuple[int, int]:
    """(first, count) of a part of a lease; count 0 means to its end."""
    left = lease.block_count - first_block
    if left < 0 or block_count > left:
        raise InvalidRequest(
            f"first_block {first_block} and block_count {block_count} pass the end of the lease, "
            f"which covers {lease.block_count} blocks"
        )
    return first_block, block_count or left
