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
    who see everybody's. Numbers are those of the reader's own view: a gap is a loss of its own
    events, and nothing in them tells how many others had.
    """

    def __init__(
        self, log: Any, tenants: frozenset[str] | None, from_sequence: int, emit: Emit, done: Done,
        turns: Turns,
    ) -> None:  # fmt: skip
        self._log = log
        self._view = log.view(tenants)
        self._emit = emit
        self._turns = turns
        self._queue: deque[Any] = deque()
        self._queued_bytes = 0
        self._next = from_sequence or self._view.sequence + 1
        """Number of the next event to be queued; those in the queue come before it."""
        self._behind = True
        """Whether events are read from the log: after `_place` in it, event `_seen` of the view."""
        self._place, self._seen = self._view.place_before(self._next)
        self._subscription: Any = None
        self._waiting: Completion[None] | None = None
        self._driver = Driver(self._steps())
        self._driver.completion.then(lambda ended: done(error_of(ended)))

    def cancel(self) -> None:
        self._driver.cancel()
        self._unsubscribe()

    def _steps(self) -> Steps[None]:
        while True:
            if self._queue or self._behind:
                yield self._turns.wait()
            else:
                self._waiting = Completion()
                yield self._waiting
            if self._behind and not self._queue:
                lost = self._read_log()
                if lost is not None:
                    yield self._emit(lost)
            for _ in range(min(len(self._queue), TURN_EVENTS)):
                event = self._queue.popleft()
                self._queued_bytes -= _event_bytes(event)
                yield self._emit(event_message(event, self._next - 1 - len(self._queue)))

    def _read_log(self) -> pb.Event | None:
        """Queues a part of the log; at its end new events come by themselves.

        Goes on with all there is, and answers with what to tell the reader, if what comes next is
        no longer there; a number that the view has not reached is one of an earlier daemon.
        """
        view = self._view
        oldest = view.oldest
        if not oldest <= self._next <= view.sequence + 1:
            self._next = oldest
            self._place, self._seen = view.place_before(oldest)
            return pb.Event(sequence=oldest, lost=pb.EventsLost(next_sequence=oldest))
        events = view.after(self._place, TURN_EVENTS)
        if not events:
            self._behind = False
            self._subscription = self._log.subscribe(None, 0, self._take)
            return None
        first = max(self._seen + 1, oldest)
        for number, event in enumerate(events, first):
            if number == self._next:
                self._push(event)
        self._place, self._seen = events[-1].sequence, first + len(events) - 1
        return None

    def _take(self, event: Any) -> None:
        if not self._view.wants(event):
            return
        size = _event_bytes(event)
        if len(self._queue) >= QUEUE_EVENTS or (
            self._queue and self._queued_bytes + size > QUEUE_BYTES
        ):
            self._behind = True
            self._place, self._seen = event.sequence - 1, self._next - 1
            self._unsubscribe()
            return
        self._push(event)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.resolve(None)

    def _push(self, event: Any) -> None:
        self._queue.append(event)
        self._queued_bytes += _event_bytes(event)
        self._next += 1

    def _unsubscribe(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()


def event_message(event: Any, number: int) -> pb.Event:
    message = pb.Event(sequence=number, wall_seconds=event.wall_seconds, space_id=event.space_id)
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
