"""`FrameSocket`: frames of the local lane over one non-blocking socket of an event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvstore.core.completion import Completion
from kvstore.core.lane import HEADER, HEADER_BYTES
from kvstore.server.budget import MessageBudget

SCRATCH_BYTES = 256 << 10
# Frames of one connection that are handled before others have their turn.
FRAMES_A_TURN = 16
# Incomplete frames up to this size are not charged to the budget.
SMALL_FRAME_BYTES = 64 << 10
# Answers waiting to be read: above HIGH no more requests are taken in, above MAX it is over.
QUEUE_HIGH_BYTES = 1 << 20
QUEUE_MAX_BYTES = 16 << 20


class FrameHandler(Protocol):
    """Who hears of frames. None of these may raise."""

    def on_frame(
        self, kind: int, method: int, flags: int, call_id: int, payload: memoryview
    ) -> None:
        """A whole frame; `payload` is gone when this returns."""

    def on_refused(self, method: int, flags: int, call_id: int, message: str) -> None:
        """A frame was not taken in because `message`; the socket may be closed by the handler."""

    def on_closed(self, reason: str) -> None:
        """Nothing more comes or goes."""


class FrameSocket:
    """Cuts what arrives into frames and queues what leaves; it never blocks.

    `scratch` is the buffer that all connections of a loop receive into: a frame that came whole
    is handled right there. Closing always happens in a turn of its own, so that sending is safe
    in the middle of the store's work.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        scratch: memoryview,
        budget: MessageBudget,
        message_bytes: int,
        handler: FrameHandler,
    ) -> None:
        sock.setblocking(False)
        self.message_bytes = message_bytes
        self.closed = False
        self.queued_bytes = 0
        self._loop = loop
        self._sock = sock
        self._scratch = scratch
        self._budget = budget
        self._handler = handler
        self._buffer = bytearray()
        self._need = HEADER_BYTES
        self._charged = 0
        self._discard = 0
        self._paused = False
        self._continuing = False
        self._reading = False
        self._queue: deque[tuple[memoryview, list[int]]] = deque()
        self._drained: list[Completion[None]] = []
        self._update_reader()

    # ---- In ----

    def pause(self) -> None:
        """Handles no more frames until `resume`."""
        self._paused = True
        self._update_reader()

    def resume(self) -> None:
        self._paused = False
        self._continue_soon()

    def _update_reader(self) -> None:
        wanted = not (
            self.closed or self._paused or self._continuing or self.queued_bytes > QUEUE_HIGH_BYTES
        )
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._sock, self._on_readable)
            else:
                self._loop.remove_reader(self._sock)

    def _on_readable(self) -> None:
        try:
            count = self._sock.recv_into(self._scratch)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            return self.close(f"reading failed ({error.strerror})")
        if not count:
            return self.close("the peer closed it")
        skipped = min(count, self._discard)
        self._discard -= skipped
        with self._scratch[skipped:count] as view:
            if self._buffer:
                self._buffer += view
                if len(self._buffer) >= self._need:
                    self._consume_buffer()
            elif (consumed := self._consume(view)) < len(view) and not self.closed:
                self._buffer += view[consumed:]

    def _consume_buffer(self) -> None:
        with memoryview(self._buffer) as view:
            consumed = self._consume(view)
        del self._buffer[:consumed]

    def _consume(self, data: memoryview) -> int:
        """Handles whole frames at the start of `data`; returns how many bytes they took."""
        position, size = 0, len(data)
        for _ in range(FRAMES_A_TURN):
            self._need = HEADER_BYTES
            if size - position < HEADER_BYTES or self.closed or self._paused:
                return position
            length, kind, method, flags, call_id = HEADER.unpack_from(data, position)
            end = position + HEADER_BYTES + length
            if length > self.message_bytes:
                self._refuse_oversize(length, method, flags, call_id)
                return size
            if end > size:
                return self._wait_for(end - position, size - position, position, data)
            with data[position + HEADER_BYTES : end] as payload:
                self._handler.on_frame(kind, method, flags, call_id, payload)
            self._discharge()
            position = end
        if position < size:
            self._continue_soon()
        return position

    def _refuse_oversize(self, length: int, method: int, flags: int, call_id: int) -> None:
        self._handler.on_refused(
            method, flags, call_id,
            f"a message of {length} bytes passes limits.message_bytes, {self.message_bytes}",
        )  # fmt: skip
        self.close("a frame was too large")

    def _wait_for(self, need: int, have: int, position: int, data: memoryview) -> int:
        """The rest of a frame is to come; reads past it if there is no memory for it."""
        if need > SMALL_FRAME_BYTES and not self._charged:
            if not self._budget.take(need):
                _, _, method, flags, call_id = HEADER.unpack_from(data, position)
                self._handler.on_refused(
                    method, flags, call_id,
                    "limits.inflight_message_bytes is used up by messages under way; try again",
                )  # fmt: skip
                self._discard = need - have
                return len(data)
            self._charged = need
        self._need = need
        return position

    def _discharge(self) -> None:
        if self._charged:
            self._budget.give_back(self._charged)
            self._charged = 0

    def _continue_soon(self) -> None:
        if not self._continuing and not self.closed:
            self._continuing = True
            self._update_reader()
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        if self.closed:
            return
        self._continuing = False
        if len(self._buffer) >= self._need:
            self._consume_buffer()
        self._update_reader()

    # ---- Out ----

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends `frame`, or queues what does not go out at once; descriptors are copied."""
        if self.closed:
            return
        sent = 0
        if not self._queue:
            try:
                sent = self._send_now(frame, descriptors)
            except OSError as error:
                return self.close(f"writing failed ({error.strerror})")
            if sent == len(frame):
                return
        # A queued descriptor may outlive its owner's: its number must not become another file's.
        kept = [os.dup(descriptor) for descriptor in descriptors] if not sent else []
        self._enqueue(memoryview(frame)[sent:], kept)

    def _send_now(self, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
        try:
            if not descriptors:
                return self._sock.send(data)
            rights = array("i", descriptors)
            return self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except (BlockingIOError, InterruptedError):
            return 0

    def _enqueue(self, data: memoryview, descriptors: list[int]) -> None:
        first = not self._queue
        self._queue.append((data, descriptors))
        if not self._budget.take(len(data)):
            self._queue[-1] = (data[:0], descriptors)
            return self.close("no memory is left for answers that it does not read")
        self.queued_bytes += len(data)
        if self.queued_bytes > QUEUE_MAX_BYTES:
            return self.close("it does not read its answers")
        if first:
            self._loop.add_writer(self._sock, self._on_writable)
        self._update_reader()

    def _on_writable(self) -> None:
        while self._queue:
            data, descriptors = self._queue[0]
            try:
                sent = self._send_now(data, descriptors)
            except OSError as error:
                return self.close(f"writing failed ({error.strerror})")
            if not sent:
                break
            _close_all(descriptors)
            self._dequeue(sent)
            if sent < len(data):
                self._queue[0] = (data[sent:], [])
                break
            self._queue.popleft()
        if not self._queue:
            self._loop.remove_writer(self._sock)
        self._update_reader()
        if self.queued_bytes <= QUEUE_HIGH_BYTES // 2:
            self._resolve_drained()

    def _dequeue(self, byte_count: int) -> None:
        self.queued_bytes -= byte_count
        self._budget.give_back(byte_count)

    def drained(self) -> Completion[None] | None:
        """None if more can be sent; else done when the peer has read most of what is queued."""
        if self.queued_bytes <= QUEUE_HIGH_BYTES or self.closed:
            return None
        waiter: Completion[None] = Completion()
        self._drained.append(waiter)
        return waiter

    def _resolve_drained(self) -> None:
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            waiter.resolve(None)

    # ---- End ----

    def close(self, reason: str) -> None:
        """Nothing more goes in or out; the handler hears of it in a turn of its own."""
        if self.closed:
            return
        self.closed = True
        self._update_reader()
        if self._queue:
            self._loop.remove_writer(self._sock)
        self._loop.call_soon(self._finish, reason)

    def _finish(self, reason: str) -> None:
        self._sock.close()
        self._discharge()
        self._dequeue(self.queued_bytes)
        for _, descriptors in self._queue:
            _close_all(descriptors)
        self._queue.clear()
        self._drained.clear()
        self._handler.on_closed(reason)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()
