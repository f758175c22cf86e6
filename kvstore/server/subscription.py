"""Subscribe: KV events to one reader, in order, without keeping more than a bounded queue."""

from __future__ import annotations

from collections import deque
from typing import Any

from kvstore.core.completion import Completion
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.steps import Driver, Steps, error_of
from kvstore.server.streams import Done, Emit

QUEUE_EVENTS = 1024
QUEUE_BYTES = 4 << 20


class EventStream:
    """Events from a sequence number on, as fast as the reader takes them.

    A reader that falls behind its queue is fed again from the log; only what the log has let go
    of meanwhile is lost, and the reader is told with EventsLost. `tenants` is None for admins,
    who see everybody's.
    """

    def __init__(
        self, log: Any, tenants: frozenset[str] | None, from_sequence: int, emit: Emit, done: Done
    ) -> None:
        self._log = log
        self._tenants = tenants
        self._emit = emit
        self._queue: deque[Any] = deque()
        self._queued_bytes = 0
        self._resume_at: int | None = from_sequence or log.sequence + 1
        self._subscription: Any = None
        self._waiting: Completion[None] | None = None
        self._driver = Driver(self._steps())
        self._driver.completion.then(lambda ended: done(error_of(ended)))

    def cancel(self) -> None:
        self._driver.cancel()
        self._unsubscribe()

    def _steps(self) -> Steps[None]:
        while True:
            while self._queue:
                event = self._queue.popleft()
                self._queued_bytes -= _event_bytes(event)
                yield self._emit(event_message(event))
            if self._resume_at is not None:
                yield from self._resume(self._resume_at)
            if not self._queue:
                self._waiting = Completion()
                yield self._waiting

    def _resume(self, sequence: int) -> Steps[None]:
        """Goes on with the log at `sequence`, or with all there is, if that is no longer there.

        A number that the log has not reached is one of an earlier daemon.
        """
        start = sequence
        if not self._log.oldest <= sequence <= self._log.sequence + 1:
            start = self._log.oldest
            yield self._emit(pb.Event(sequence=start, lost=pb.EventsLost(next_sequence=start)))
        self._resume_at = None
        # Nothing is missed: a start before the next number replays, the next number needs none.
        replay = start if start <= self._log.sequence else 0
        self._subscription = self._log.subscribe(None, replay, self._take)
        if self._resume_at is not None:
            self._unsubscribe()

    def _take(self, event: Any) -> None:
        if self._resume_at is not None:
            return
        if self._tenants is not None and event.tenant not in self._tenants:
            return
        size = _event_bytes(event)
        if len(self._queue) >= QUEUE_EVENTS or (
            self._queue and self._queued_bytes + size > QUEUE_BYTES
        ):
            self._resume_at = event.sequence
            self._unsubscribe()
            return
        self._queue.append(event)
        self._queued_bytes += size
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.resolve(None)

    def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()


def event_message(event: Any) -> pb.Event:
    message = pb.Event(
        sequence=event.sequence, wall_seconds=event.wall_seconds, space_id=event.space_id
    )
    if event.kind == "stored":
        target = message.stored
        target.medium = event.medium
        target.block_keys = event.keys
        target.parent_key = event.parent_key
        target.symbols = event.symbols
        target.block_size = event.block_size
    elif event.kind == "removed":
        message.removed.medium = event.medium
        message.removed.block_keys = event.keys
    else:
        message.cleared.SetInParent()
        message.cleared.medium = event.medium
    return message


def _event_bytes(event: Any) -> int:
    return 256 + len(event.keys) + len(event.symbols)
