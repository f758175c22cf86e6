"""`LaneTransport`: calls over the side socket of the daemon on this host.

Many threads share the connection and none is there only to read: whoever waits for an answer
reads, for itself and for the others, until its own has come; then it wakes another one that
waits. A lone caller so never pays for a switch of threads.

An exception from outside, such as KeyboardInterrupt, may come between any two lines. While a call
only waits for its answer it is merely given up. Anywhere else nobody knows which part of a frame
was sent or read, or who holds a lock: the connection is torn, and nothing uses it any more.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from kvstore.client.frames import Frame, close_all
from kvstore.client.gate import Gate
from kvstore.client.lane_call import LaneCall
from kvstore.client.lane_socket import LaneSocket, timed_out
from kvstore.client.pools import READ_WRITE, MappedPool, map_descriptor
from kvstore.client.transport import (
    INTERRUPTED,
    CallTimeout,
    Disconnected,
    LateHandler,
    NoticeHandler,
    ignore_notice,
)
from kvstore.client.wire import error_of
from kvstore.core.clock import Clock, SystemClock
from kvstore.core.errors import InvalidRequest, KVStoreError, NotImplementedYet
from kvstore.core.lane import (
    FLAG_NO_REPLY,
    HEADER,
    LANE_SUFFIX,
    METHOD_NUMBERS,
    FrameKind,
    pack_frame,
)
from kvstore.proto.v1 import kvstore_pb2 as pb

REPLIES: dict[str, Any] = {
    **{name: getattr(pb, f"{name}Response", None) for name in METHOD_NUMBERS},
    "Subscribe": pb.Event,
}
REQUEST, RESPONSE, ERROR = int(FrameKind.REQUEST), int(FrameKind.RESPONSE), int(FrameKind.ERROR)
STREAM, NOTICE = int(FrameKind.STREAM), int(FrameKind.NOTICE)
# A frame and ReleaseRequest as it is on the wire, tag and lease: releases are many, and put off
# to the next call, whose time they must not take.
RELEASE_FRAME, RELEASE_TAG = struct.Struct("<IBBHQBQ"), 1 << 3 | 1
RELEASE = METHOD_NUMBERS["Release"]
MESSAGE_BYTES = 4 << 20  # until the daemon says its own limit
FOLLOW_SECONDS = 0.05  # the longest that a follower trusts others to wake it


class LaneTransport:
    """One connection to the side socket beside the daemon's socket `path`."""

    def __init__(self, path: str, timeout: float, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.call_ids = itertools.count(1)
        self.on_notice: NoticeHandler = ignore_notice
        self.message_bytes = MESSAGE_BYTES
        self._calls: dict[int, LaneCall] = {}
        self._outbox: deque[bytes] = deque()
        self._followers: dict[int, Gate] = {}
        self._torn = False  # set by plain assignments, which nothing can come in between of
        self._reading = threading.Lock()
        self._state = threading.Lock()  # of calls: an answer and giving up exclude each other
        self._socket = LaneSocket(path + LANE_SUFFIX, timeout, self.clock)

    # ---- Calls ----

    def open(
        self, request: pb.OpenSessionRequest, timeout: float
    ) -> tuple[pb.OpenSessionResponse, memoryview | None]:
        call = self.start("OpenSession", request, timeout)
        try:
            response: pb.OpenSessionResponse = call.result()
            self.message_bytes = response.limits.message_bytes or self.message_bytes
            if not call.descriptors:
                return response, None
            size = response.staging_bytes
            return response, map_descriptor(call.descriptors[0], size, READ_WRITE, "staging")
        finally:
            close_all(call.descriptors)

    def attach(
        self, request: pb.AttachRequest, timeout: float
    ) -> tuple[pb.AttachResponse, list[MappedPool]]:
        call = self.start("Attach", request, timeout)
        try:
            response: pb.AttachResponse = call.result()
            return response, _map_pools(response, call.descriptors)
        finally:
            close_all(call.descriptors)

    def call(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> Any:
        call = self.start(method, request, timeout, on_late)
        self.wait(call)
        if call.error is not None:
            raise call.error
        return call.value

    def start(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> LaneCall:
        payload: bytes = request.SerializeToString()
        if len(payload) > self.message_bytes:
            raise self._too_long(method, len(payload))
        if self._torn:
            raise self._gone()
        call = LaneCall(self, method, timeout, on_late)
        header = HEADER.pack(len(payload), REQUEST, METHOD_NUMBERS[method], 0, call.id)
        self._calls[call.id] = call
        try:
            self._send(header + payload, call.deadline, method)
        except KVStoreError as error:
            self._calls.pop(call.id, None)
            if isinstance(error, Disconnected):
                self._fail_all(error)
            raise
        except BaseException:
            self._torn = True
            raise
        return call

    def send(self, method: str, request: Message) -> None:
        # With the next call it costs neither a system call nor a wake-up of the daemon.
        payload = request.SerializeToString()
        self._outbox.append(pack_frame(REQUEST, METHOD_NUMBERS[method], FLAG_NO_REPLY, 0, payload))

    def release(self, lease_id: int) -> None:
        self._outbox.append(
            RELEASE_FRAME.pack(9, REQUEST, RELEASE, FLAG_NO_REPLY, 0, RELEASE_TAG, lease_id)
        )

    def _send(self, frame: bytes, deadline: float, method: str) -> None:
        """Sends `frame` after what waits in the outbox."""
        if not self._outbox:
            self._socket.send(frame, deadline, method)
            return
        waiting = b""
        while self._outbox:
            try:
                waiting += self._outbox.popleft()
            except IndexError:  # another thread took the last one
                break
        try:
            self._socket.send(waiting + frame, deadline, method)
        except CallTimeout:  # nothing was sent
            if waiting:
                self._outbox.appendleft(waiting)
            raise

    def stream(self, method: str, request: Message, timeout: float) -> Iterator[Any]:
        call = self.start(method, request, timeout)
        try:
            while self._more(call):
                yield call.items.popleft()
                call.deadline = self.clock.now() + timeout
        finally:
            self._abandon(call)
        if call.error is not None:
            raise call.error

    def _more(self, call: LaneCall) -> bool:
        """Waits for an item of a stream; False at its end."""
        while not call.items:
            with self._state:
                if call.done:
                    return False
                call.ready = bool(call.items)
            self.wait(call)
        return True

    def upload(self, method: str, requests: Iterable[Message], timeout: float) -> Any:
        raise NotImplementedYet(f"{method} does not run over the local lane; use shared memory")

    def poll(self) -> None:
        if self._torn:
            raise self._gone()
        try:
            self._take_in()
        except KVStoreError:
            raise
        except BaseException:
            self._torn = True
            raise

    def _take_in(self) -> None:
        if self._outbox:
            with contextlib.suppress(CallTimeout):
                self._send(b"", 0.0, "Release")
        if not self._reading.acquire(blocking=False):
            return
        try:
            while self._socket.wait_readable(0.0) and self._socket.receive(self._dispatch):
                pass
        except Disconnected as error:
            self._fail_all(error)
            raise
        finally:
            self._reading.release()
            self._promote()

    def close(self) -> None:
        self._fail_all(self._socket.fail("the client closed the connection"))

    def _gone(self) -> Disconnected:
        """The end of a torn connection: no frame after it, and no lock of it, counts."""
        error = self._socket.fail(INTERRUPTED)
        self._fail_all(error)
        return error

    def _too_long(self, method: str, size: int) -> InvalidRequest:
        return InvalidRequest(
            f"{method} takes {size} bytes and a message at most {self.message_bytes}; "
            "send a shorter prompt or raise limits.message_bytes"
        )

    # ---- Waiting: one reads, the others follow ----

    def wait(self, call: LaneCall) -> None:
        """Until the call has something to take; raises CallTimeout at its deadline."""
        try:
            while not call.ready:
                if self._torn:
                    raise self._gone()
                if self._reading.acquire(False):
                    try:
                        self._lead(call)
                    finally:
                        self._reading.release()
                else:
                    self._follow(call)
        except CallTimeout:
            if self._abandon(call):
                raise
        except KVStoreError:
            raise
        except BaseException:
            before, self._torn = self._torn, True  # until the call is given up, should more come
            if call.is_idle:
                self._give_up(call)
                self._torn = before
            raise
        finally:
            if self._followers:
                self._promote()

    def _lead(self, call: LaneCall) -> None:
        wait_readable, receive, dispatch = (
            self._socket.wait_readable, self._socket.receive, self._dispatch,
        )  # fmt: skip
        now = self.clock.now
        try:
            while not call.ready:
                left = call.deadline - now()
                call.is_idle = True
                readable = wait_readable(left if left > 0 else 0.0)
                call.is_idle = False
                if readable:
                    receive(dispatch)
                elif call.deadline <= now():
                    raise timed_out(call.method, call.timeout)
        except Disconnected as error:
            self._fail_all(error)
            raise

    def _follow(self, call: LaneCall) -> None:
        """Waits until this call has something, or is to lead; now and then looks for itself."""
        gate = call.gate = Gate()
        self._followers[call.id] = gate
        try:
            # Registered before the second look: a reader who leaves from now on sees this one.
            if call.ready or not self._reading.locked():
                return
            left = call.deadline - self.clock.now()
            call.is_idle = True
            passed = gate.wait(min(left, FOLLOW_SECONDS))
            call.is_idle = False
            if not passed and not call.ready and left <= FOLLOW_SECONDS:
                raise timed_out(call.method, call.timeout)
        finally:
            del self._followers[call.id]

    def _promote(self) -> None:
        """Wakes one that waits, if nobody reads."""
        if self._followers and not self._reading.locked():
            for gate in list(self._followers.values())[:1]:
                gate.open()

    def _abandon(self, call: LaneCall) -> bool:
        """Gives a call up; False if its answer came just now."""
        with self._state:
            if call.done:
                return False
            call.abandoned = True
        return True

    def _give_up(self, call: LaneCall) -> None:
        """Nobody takes the answer any more, whether it comes or has come."""
        if not self._abandon(call) and call.on_late is not None:
            call.on_late(call.error or call.value)

    # ---- What arrives ----

    def _dispatch(self, frame: Frame) -> None:
        kind, _, call_id, payload, descriptors = frame
        if kind == NOTICE:
            self.on_notice(pb.Notice.FromString(payload))
            return
        call = self._calls.get(call_id)
        if call is None:
            close_all(descriptors)
        elif kind == STREAM:
            item = REPLIES[call.method].FromString(payload)
            with self._state:
                if not call.abandoned:
                    call.items.append(item)
                    call.signal()
        else:
            if kind == ERROR:
                failure = pb.LaneError.FromString(payload)
                call.error = error_of(failure.code, failure.message)
            else:
                call.value = REPLIES[call.method].FromString(payload)
            self._calls.pop(call_id, None)
            with self._state:
                late = call.abandoned
                if not late:
                    call.descriptors = descriptors
                    call.done = True
                    call.signal()
            if late:
                close_all(descriptors)
                if call.on_late is not None:
                    call.on_late(call.error or call.value)

    def _fail_all(self, error: Disconnected) -> None:
        """Every call under way fails with `error`."""
        while self._calls:
            try:
                _, call = self._calls.popitem()
            except KeyError:  # another thread took the last one
                return
            with self._state:
                call.error, call.done = error, True
                call.signal()


def _map_pools(response: pb.AttachResponse, descriptors: Sequence[int]) -> list[MappedPool]:
    if len(descriptors) != 2 * len(response.pools):
        raise Disconnected(
            f"the daemon handed {len(descriptors)} descriptors over for {len(response.pools)} "
            "pools; run the daemon's version of the client"
        )
    pairs = zip(descriptors[::2], descriptors[1::2], strict=True)
    return [
        MappedPool.map(pool.pool_id, data, pool.data_bytes, generations, pool.generation_bytes)
        for pool, (data, generations) in zip(response.pools, pairs, strict=True)
    ]
