"""`EventPublisher`: KV events on ZeroMQ, with a socket that sends what was missed again.

    PUB     (topic, sequence: 8 bytes big-endian, payload), one message a batch
    ROUTER  asked with a sequence, answers with that message and all after it, then with -1

Sequence 0 is AllBlocksCleared: a daemon that starts takes back what its predecessor has told, and
tells what it has taken over from there. The owner thread only puts events in a bounded queue; a
thread of its own encodes and sends. Needs pyzmq.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import zmq

from kvstore.core.errors import ConfigError
from kvstore.event_wire import Encoder
from kvstore.events import EventLog, KVEvent

QUEUE_EVENTS, QUEUE_BYTES = 65_536, 64 << 20
BATCH_EVENTS = 64
REPLAY_BYTES = 64 << 20
HIGH_WATER_MARK = 100_000
POLL_MS = 200
END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
STOP_SECONDS = 2.0

_log = logging.getLogger("kvstore.events")


class Endpoints(NamedTuple):
    """Where it publishes and replays (empty: not at all), under which topic, in which form.

    `{model}` and `{tenant}` in the topic stand for the space's. Only `tenants` are published.
    """

    publish: str
    replay: str = ""
    topic: str = "kvstore"
    form: str = "map"
    tenants: tuple[str, ...] = ("default",)


class Backlog:
    """Messages that can be sent again: the newest, bounded by count and bytes."""

    def __init__(self, messages_max: int, bytes_max: int = REPLAY_BYTES) -> None:
        self._messages: deque[tuple[int, bytes, bytes]] = deque()
        self._messages_max, self._bytes_max, self._bytes = messages_max, bytes_max, 0

    def keep(self, sequence: int, topic: bytes, payload: bytes) -> None:
        self._messages.append((sequence, topic, payload))
        self._bytes += len(payload)
        while len(self._messages) > self._messages_max or self._bytes > self._bytes_max:
            self._bytes -= len(self._messages.popleft()[2])

    def since(self, sequence: int) -> Iterator[tuple[int, bytes, bytes]]:
        return (message for message in self._messages if message[0] >= sequence)


class EventPublisher:
    """Publishes a log's events from now on, until `close`. Raises ConfigError."""

    def __init__(
        self,
        log: EventLog,
        endpoints: Endpoints,
        model_of: Callable[[bytes], str],
        is_root: Callable[[bytes, bytes], bool],
        kept_messages: int,
        on_dropped: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._endpoints, self._model_of, self._is_root = endpoints, model_of, is_root
        self._on_dropped = on_dropped
        self._encoder, self._backlog = Encoder(endpoints.form), Backlog(kept_messages)
        self._queue: deque[tuple[KVEvent, str]] = deque()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._sequence, self._is_lost, self._is_closed = 0, True, False
        self._context = zmq.Context()
        self._pub = self._bind(zmq.PUB, endpoints.publish, "events.publish")
        self._replay = None
        if endpoints.replay:
            self._replay = self._bind(zmq.ROUTER, endpoints.replay, "events.replay")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._subscription = log.subscribe(None, 0, self._hear)
        self._thread = threading.Thread(target=self._run, name="kvstore events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str, key: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(HIGH_WATER_MARK)
        socket.linger = 0
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"{key} is {endpoint!r}, which cannot be bound ({error.strerror}); pass another, "
                "such as 'tcp://127.0.0.1:5557', or '' to do without"
            ) from error
        return socket

    @property
    def addresses(self) -> tuple[str, str]:
        """What is listened on, with the real ports."""
        sockets = (self._pub, self._replay)
        names = ("" if s is None else s.getsockopt_string(zmq.LAST_ENDPOINT) for s in sockets)
        pub, replay = (name.rstrip("\0") for name in names)
        return pub, replay

    # ---- The owner thread ----

    def _hear(self, event: KVEvent) -> None:
        if event.tenant not in self._endpoints.tenants or event.kind == "cleared":
            return
        size = len(event.keys) + len(event.symbols)
        if event.parent_key and self._is_root(event.space_id, event.parent_key):
            event = event._replace(parent_key=b"")  # a root is no block that anybody could know
        with self._lock:
            if len(self._queue) >= QUEUE_EVENTS or self._queued_bytes + size > QUEUE_BYTES:
                self._lose()
            self._queue.append((event, self._topic(event)))
            self._queued_bytes += size
        os.eventfd_write(self._wake, 1)

    def _lose(self) -> None:
        """The queue is full: subscribers are told that nothing holds, and hear what comes next."""
        self._on_dropped(len(self._queue))
        _log.error(
            "%d KV events are dropped: they come faster than they can be sent; subscribers know "
            "no block now but those stored from here on", len(self._queue),
        )  # fmt: skip
        self._queue.clear()
        self._queued_bytes = 0
        self._is_lost = True

    def _topic(self, event: KVEvent) -> str:
        topic = self._endpoints.topic
        if "{" not in topic:
            return topic
        model = self._model_of(event.space_id)
        return topic.replace("{model}", model).replace("{tenant}", event.tenant)

    def close(self) -> None:
        """Sends what is queued, then ends."""
        if self._is_closed:
            return
        self._subscription.close()
        self._is_closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(STOP_SECONDS)
        os.close(self._wake)
        self._context.destroy(linger=0)

    # ---- The publisher's thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            closed = self._is_closed
            self._publish_queued()
            if closed:
                return
            ready = dict(poller.poll(POLL_MS))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._replay is not None and self._replay in ready:
                self._answer()

    def _publish_queued(self) -> None:
        with self._lock:
            waiting, lost = list(self._queue), self._is_lost
            self._queue.clear()
            self._queued_bytes, self._is_lost = 0, False
        if lost:
            self._send(self._endpoints.topic, self._encoder.batch(0.0, [self._encoder.cleared()]))
        for topic, group in groupby(waiting, key=lambda pair: pair[1]):
            events = [event for event, _ in group]
            for i in range(0, len(events), BATCH_EVENTS):
                part = events[i : i + BATCH_EVENTS]
                encoded = [self._encoder.event(event) for event in part]
                self._send(topic, self._encoder.batch(part[-1].wall_seconds, encoded))

    def _send(self, topic: str, payload: bytes) -> None:
        number, raw = self._sequence, topic.encode()
        self._sequence += 1
        self._backlog.keep(number, raw, payload)
        self._pub.send_multipart((raw, number.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        """Sends one asker what it has missed; a peer that does not take it is left."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        try:
            for sequence, topic, payload in self._backlog.since(start):
                number = sequence.to_bytes(8, "big")
                self._replay.send_multipart((peer, b"", topic, number, payload), zmq.DONTWAIT)
            self._replay.send_multipart((peer, b"", b"", END_SEQUENCE, b""), zmq.DONTWAIT)
        except zmq.ZMQError as error:
            _log.warning("a replay was not taken to its end: %s", error.strerror)
