"""`LanePeer`: one connection of the local lane, from its OpenSession to its end."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from kvstore.core.completion import Completion
from kvstore.core.errors import InvalidRequest, LimitReached, NotImplementedYet, Unauthenticated
from kvstore.core.lane import (
    FLAG_FDS,
    FLAG_NO_REPLY,
    HEADER,
    METHOD_NUMBERS,
    METHODS,
    FrameKind,
    pack_frame,
)
from kvstore.server import sockets
from kvstore.server.access import Grant
from kvstore.server.budget import MessageBudget
from kvstore.server.frames import SCRATCH_BYTES, FrameSocket
from kvstore.server.service import STREAM, UNARY, Method, Service, error_payload, unreadable
from kvstore.server.sessions import Opened, Sessions
from kvstore.server.staging import Staging
from kvstore.server.streams import Cancel
from kvstore.server.translate import notice_message
from kvstore.store.sessions import Session

OPEN = METHOD_NUMBERS["OpenSession"]
ATTACH = METHOD_NUMBERS["Attach"]
SESSION = METHOD_NUMBERS["Session"]
RESPONSE = int(FrameKind.RESPONSE)
REQUEST = int(FrameKind.REQUEST)

HANDSHAKE_SECONDS = 5.0
HANDSHAKE_MESSAGE_BYTES = 64 << 10
CALLS_UNDER_WAY_MAX = 1024

_log = logging.getLogger("kvstore.server")


@dataclass(slots=True)
class Lane:
    """What all connections of the lane share."""

    service: Service
    sessions: Sessions
    budget: MessageBudget
    message_bytes: int
    scratch: memoryview = field(default_factory=lambda: memoryview(bytearray(SCRATCH_BYTES)))
    peers: set[LanePeer] = field(default_factory=set)


class LanePeer:
    """Takes calls off one connection and answers them.

    Its first call must be OpenSession: a new session, which then ends with this connection, or
    one more connection of an open session.
    """

    def __init__(
        self, lane: Lane, loop: asyncio.AbstractEventLoop, connection: socket.socket
    ) -> None:
        self._lane = lane
        self._loop = loop
        self._service = lane.service
        self._session: Session | None = None
        self._owns_session = False
        self._calls_under_way = 0
        self._streams: dict[int, Cancel] = {}
        self._handshake = loop.call_later(HANDSHAKE_SECONDS, self._handshake_over)
        self._identity, self._groups = sockets.peer(connection)
        self._frames = FrameSocket(
            loop, connection, lane.scratch, lane.budget, HANDSHAKE_MESSAGE_BYTES, self
        )
        lane.peers.add(self)

    def tick(self) -> None:
        """Closes the connection if its session is over."""
        if self._session is not None and self._session.closed:
            self._frames.close("its session ended")

    def _handshake_over(self) -> None:
        if self._session is None:
            self._frames.close("no session was opened in time")

    def close(self, reason: str) -> None:
        self._frames.close(reason)

    # ---- Frames ----

    def on_frame(
        self, kind: int, method: int, flags: int, call_id: int, payload: memoryview
    ) -> None:
        if kind != REQUEST:
            message = f"a frame of kind {kind} came; clients send requests only"
            self._refuse(method, call_id, InvalidRequest(message))
        elif self._session is None:
            self._open(method, call_id, payload)
        elif method >= len(METHODS):
            message = f"method number {method} is not in this version"
            self._answer_error(method, flags, call_id, NotImplementedYet(message))
        else:
            try:
                self._call(self._session, method, flags, call_id, payload)
            except Exception as error:
                self._answer_error(method, flags, call_id, error)
                if isinstance(error, Unauthenticated):
                    self._frames.close("its session ended")

    def on_refused(self, method: int, flags: int, call_id: int, message: str) -> None:
        if self._session is None:
            self._refuse(method, call_id, Unauthenticated("the first call must be OpenSession"))
        else:
            self._answer_error(method, flags, call_id, LimitReached(message))

    def on_closed(self, reason: str) -> None:
        self._lane.peers.discard(self)
        self._handshake.cancel()
        streams, self._streams = self._streams, {}
        for cancel in streams.values():
            cancel()
        session, self._session = self._session, None
        if session is not None and self._owns_session:
            self._lane.sessions.close(session, reason)

    def _send(self, kind: int, method: int, call_id: int, payload: bytes) -> None:
        self._frames.send(HEADER.pack(len(payload), kind, method, 0, call_id) + payload)

    def _answer_error(self, method: int, flags: int, call_id: int, error: BaseException) -> None:
        name = METHODS[method] if method < len(METHODS) else "the call"
        payload = error_payload(error, name)
        if not flags & FLAG_NO_REPLY:
            self._send(FrameKind.ERROR, method, call_id, payload)

    def _refuse(self, method: int, call_id: int, error: BaseException) -> None:
        """Answers with `error` and hangs up."""
        self._answer_error(method, 0, call_id, error)
        self._frames.close("it was refused")

    # ---- Calls ----

    def _call(
        self, session: Session, number: int, flags: int, call_id: int, payload: memoryview
    ) -> None:
        service = self._service
        entry = service.methods[number]
        if self._calls_under_way + len(self._streams) >= CALLS_UNDER_WAY_MAX:
            raise LimitReached(
                f"{CALLS_UNDER_WAY_MAX} calls of this connection are under way; await some first"
            )
        if entry.shape == UNARY and number != ATTACH:
            result = service.call(session, number, payload)
            if type(result) is bytes:
                if not flags & FLAG_NO_REPLY:
                    self._frames.send(
                        HEADER.pack(len(result), RESPONSE, number, 0, call_id) + result
                    )
            else:
                assert isinstance(result, Completion)
                self._answer_later(number, flags, call_id, result)
        elif number == ATTACH:
            self._attach(session, entry, flags, call_id, payload)
        elif entry.shape == STREAM:
            self._stream(session, entry, number, call_id, payload)
        elif number == SESSION:
            service.heartbeat(session)
            if not flags & FLAG_NO_REPLY:
                self._send(RESPONSE, number, call_id, b"")
        elif number == OPEN:
            raise InvalidRequest("OpenSession came twice; a connection has one session")
        else:
            raise NotImplementedYet(
                f"{entry.name} is for gRPC; on this socket use Reserve, staging and Commit"
            )

    def _answer_later(
        self, number: int, flags: int, call_id: int, result: Completion[bytes]
    ) -> None:
        self._calls_under_way += 1

        def answer(done: Completion[bytes]) -> None:
            self._calls_under_way -= 1
            try:
                payload = done.result()
            except Exception as error:
                self._answer_error(number, flags, call_id, error)
            else:
                if not flags & FLAG_NO_REPLY:
                    self._send(RESPONSE, number, call_id, payload)

        result.then(answer)

    def _attach(
        self, session: Session, entry: Method, flags: int, call_id: int, payload: memoryview
    ) -> None:
        """Attach, with the descriptors of the pools: two a pool, data and generations."""
        request = self._service.parse(session, entry, payload)
        response = self._service.handle(session, entry.name, request)
        attachment = session.attachments[response.attachment]
        descriptors = [
            descriptor
            for pool in self._service.engine_calls.pools(attachment)
            for descriptor in (pool.data_fd, pool.generations_fd)
        ]
        if not flags & FLAG_NO_REPLY:
            self._send_with(descriptors, ATTACH, call_id, response.SerializeToString())

    def _send_with(
        self, descriptors: Sequence[int], method: int, call_id: int, payload: bytes
    ) -> None:
        flags = FLAG_FDS if descriptors else 0
        self._frames.send(pack_frame(RESPONSE, method, flags, call_id, payload), descriptors)

    def _stream(
        self, session: Session, entry: Method, number: int, call_id: int, payload: memoryview
    ) -> None:
        request = self._service.parse(session, entry, payload)
        if call_id in self._streams:
            raise InvalidRequest(f"call id {call_id} is a stream under way; use another")
        ended = False

        def emit(message: Any) -> Completion[None] | None:
            self._send(FrameKind.STREAM, number, call_id, message.SerializeToString())
            return self._frames.drained()

        def done(error: BaseException | None) -> None:
            nonlocal ended
            ended = True
            self._streams.pop(call_id, None)
            if error is None:
                self._send(RESPONSE, number, call_id, b"")
            else:
                self._answer_error(number, 0, call_id, error)

        cancel = self._service.stream(session, entry.name, request, emit, done)
        if not ended:
            self._streams[call_id] = cancel

    # ---- Opening ----

    def _open(self, method: int, call_id: int, payload: memoryview) -> None:
        try:
            if method != OPEN:
                raise Unauthenticated("the first call must be OpenSession")
            grant = self._lane.sessions.admit(self._identity, self._groups)
            request = _parse(self._service.methods[OPEN], payload)
            if request.join_token:
                opened = self._lane.sessions.join(self._identity, request.join_token)
                self._opened(call_id, opened, ())
            else:
                self._make_staging(call_id, grant, request)
        except Exception as error:
            self._service.recorder.rpc("OpenSession", getattr(error, "code", "INTERNAL"))
            self._refuse(OPEN, call_id, error)

    def _make_staging(self, call_id: int, grant: Grant, request: Any) -> None:
        """Allocates the segment on a worker thread: the kernel zeroes every page of it."""
        size = self._lane.sessions.staging.take(request.staging_bytes)
        self._frames.pause()
        made = self._loop.run_in_executor(None, Staging, size)

        def finish(future: asyncio.Future[Staging]) -> None:
            error = future.exception()
            if error is not None:
                self._lane.sessions.staging.give_back(size)
                _log.error("no staging segment of %d bytes can be made: %s", size, error)
                error = LimitReached(f"the machine has no {size} bytes for a staging segment")
                self._refuse(OPEN, call_id, error)
            else:
                self._finish_open(call_id, grant, request, future.result())

        made.add_done_callback(finish)

    def _finish_open(self, call_id: int, grant: Grant, request: Any, staging: Staging) -> None:
        sessions = self._lane.sessions
        if self._frames.closed:
            sessions.staging.releaser(staging)()
            return
        try:
            descriptor = staging.take_descriptor()
            try:
                opened = sessions.open(self._identity, grant, request, staging, self._notify)
                self._owns_session = True
                self._opened(call_id, opened, (descriptor,))
            finally:
                # What is still to be sent was copied.
                os.close(descriptor)
        except Exception as error:
            self._service.recorder.rpc("OpenSession", getattr(error, "code", "INTERNAL"))
            self._refuse(OPEN, call_id, error)
        else:
            self._frames.resume()

    def _opened(self, call_id: int, opened: Opened, descriptors: Sequence[int]) -> None:
        self._session = opened.session
        self._handshake.cancel()
        self._frames.message_bytes = self._lane.message_bytes
        self._service.recorder.rpc("OpenSession", "OK")
        self._send_with(descriptors, OPEN, call_id, opened.response.SerializeToString())

    def _notify(self, kind: str, value: Any) -> None:
        payload = notice_message(kind, value).SerializeToString()
        self._send(FrameKind.NOTICE, SESSION, 0, payload)


def _parse(entry: Method, payload: memoryview) -> Any:
    try:
        return entry.parse(payload)
    except DecodeError:
        raise unreadable(entry) from None
