"""Subscribe: KV events to one reader, in order, without keeping more than a bounded queue."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import LimitReached
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.steps import Driver, Steps, Turns, error_of
from kvstore.server.streams import Cancel, Done, Emit
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Session

QUEUE_EVENTS = 1024
QUEUE_BYTES = 4 << 20
TURN_EVENTS = 64  # half a millisecond of the owner


class Subscribers:
    """Subscribe streams under way: so many of a session and of all, as each event goes to each."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._turns = Turns(store.parts.defer)
        self._by_session: Counter[int] = Counter()

    def start(
        self, session: Session, request: pb.SubscribeRequest, emit: Emit, done: Done
    ) -> Cancel:
        """Starts a stream; raises LimitReached."""
        self._check_limits(session)
        tenants = None if session.role == "admin" else session.tenants
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._by_session -= Counter([session.id])

        def ended(error: BaseException | None) -> None:
            leave()
            done(error)

        def cancel() -> None:
            leave()
            stream.cancel()

        self._by_session[session.id] += 1
        stream = EventStream(
            self._store.events, tenants, request.from_sequence, emit, ended, self._turns
        )
        return cancel

    def _check_limits(self, session: Session) -> None:
        limits, recorder = self._store.parts.limits, self._store.parts.recorder
        for name, count, most in (
            ("subscriptions_per_session", self._by_session[session.id],
             limits.subscriptions_per_session),
            ("subscriptions", self._by_session.total(), limits.subscriptions),
        ):  # fmt: skip
            if count >= most:
                recorder.limit_rejected(name)
                raise LimitReached(
                    f"{count} subscriptions are open, the limit limits.{name}; close some or "
                    "raise it"
                )


class EventStream:
    """Events from a sequence number on, as fast as the reader takes them.

    A reader that falls behind its queue is fed again from the log; only what the log has let go
    of meanwhile is lost, and the reader is told with EventsLost. `tenants` is None for admins,
    who see everybody's.
    """

    def __init__(
        self, log: Any, tenants: frozenset[str] | None, from_sequence: int, emit: Emit, done: Done,
        turns: Turns,
    ) -> None:  # fmt: skip
        self._log = log
        self._tenants = tenants
        self._emit = emit
        self._turns = turns
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
            if self._queue or self._resume_at is not None:
                yield self._turns.wait()
            else:
                self._waiting = Completion()
                yield self._waiting
            if self._resume_at is not None and not self._queue:
                lost = self._read_log(self._resume_at)
                if lost is not None:
                    yield self._emit(lost)
            for _ in range(min(len(self._queue), TURN_EVENTS)):
                event = self._queue.popleft()
                self._queued_bytes -= _event_bytes(event)
                yield self._emit(event_message(event))

    def _read_log(self, sequence: int) -> pb.Event | None:
        """Queues a part of the log from `sequence` on; at its end new events come by themselves.

        Goes on with all there is, and answers with what to tell the reader, if that is no longer
        there; a number that the log has not reached is one of an earlier daemon.
        """
        log = self._log
        if not log.oldest <= sequence <= log.sequence + 1:
            self._resume_at = start = log.oldest
            return pb.Event(sequence=start, lost=pb.EventsLost(next_sequence=start))
        events = log.since(sequence, TURN_EVENTS)
        if not events:
            self._resume_at = None
            self._subscription = log.subscribe(None, 0, self._take)
            return None
        self._resume_at = events[-1].sequence + 1
        for event in events:
            if self._wants(event):
                self._queue.append(event)
                self._queued_bytes += _event_bytes(event)
        return None

    def _wants(self, event: Any) -> bool:
        return self._tenants is None or event.tenant in self._tenants

    def _take(self, event: Any) -> None:
        if not self._wants(event):
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
