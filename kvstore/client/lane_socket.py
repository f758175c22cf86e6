"""`LaneSocket`: whole frames over the daemon's side socket, by a deadline, with descriptors."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore.client.frames import Frame, FrameError, FrameReader, close_all
from kvstore.client.transport import CallTimeout, Disconnected
from kvstore.core.clock import Clock
from kvstore.core.lane import LANE_SUFFIX

RECEIVE_BYTES = 256 << 10
DESCRIPTOR_MAX = 253  # what Linux passes with one message
# Plain integers: arithmetic with the socket module's own flags takes longer than the call itself.
CTRUNC, CLOEXEC = int(socket.MSG_CTRUNC), int(socket.MSG_CMSG_CLOEXEC)
ANCILLARY_BYTES = socket.CMSG_SPACE(4 * DESCRIPTOR_MAX)

END = "the daemon closed the connection"
LOST = "descriptors were lost; raise this process's open file limit"


class LaneSocket:
    """One connection. Any thread may send; one at a time may receive, the owner sees to that.

    Once broken it stays so, and every later use raises Disconnected with the first reason.
    """

    def __init__(self, path: str, timeout: float, clock: Clock) -> None:
        self.clock = clock
        self.broken = ""
        self._socket = _connect(path, timeout)
        self._sending = threading.Lock()
        self._breaking = threading.Lock()
        self._frames = FrameReader()
        self._inbox = memoryview(bytearray(RECEIVE_BYTES))
        self._inboxes = [self._inbox]
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable.register(self._socket, select.POLLOUT)
        _sockets.add(self)

    def send(self, frame: bytes, deadline: float, method: str) -> None:
        """Sends a whole frame by `deadline`, or raises CallTimeout and has sent nothing of it."""
        if not self._sending.acquire(False):
            left = deadline - self.clock.now()
            if left <= 0 or not self._sending.acquire(timeout=left):
                raise timed_out(method, max(left, 0.0))
        try:
            if self.broken:
                raise Disconnected(self.broken)
            sent = self._socket.send(frame)
            if sent < len(frame):
                self._send_rest(frame, sent, deadline, method)
        except BlockingIOError:
            self._send_rest(frame, 0, deadline, method)
        except OSError as error:
            raise self._gone(error) from error
        finally:
            self._sending.release()

    def _send_rest(self, frame: bytes, sent: int, deadline: float, method: str) -> None:
        rest = memoryview(frame)[sent:]
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._wait_writable(deadline, method, begun=len(rest) < len(frame))
            except OSError as error:
                raise self._gone(error) from error

    def _gone(self, error: OSError) -> Disconnected:
        return self.fail(f"the daemon is gone ({error.strerror or error})")

    def _wait_writable(self, deadline: float, method: str, begun: bool) -> None:
        left = deadline - self.clock.now()
        if left > 0 and self._writable.poll(math.ceil(left * 1000)):
            return
        if begun:  # half a frame is sent: nothing more can follow it
            raise self.fail(f"the daemon stopped reading in the middle of a {method}")
        raise timed_out(method, max(left, 0.0))

    def wait_readable(self, seconds: float) -> bool:
        """Whether there is something to receive in time; takes nothing, whatever interrupts it."""
        if self.broken:
            raise Disconnected(self.broken)
        return bool(self._readable.poll(math.ceil(seconds * 1000)))

    def receive(self, dispatch: Callable[[Frame], None]) -> bool:
        """Reads once and gives each frame to `dispatch`; False when nothing was there."""
        if self.broken:
            raise Disconnected(self.broken)
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into(
                self._inboxes, ANCILLARY_BYTES, CLOEXEC
            )
            descriptors = _descriptors(ancillary) if ancillary else []
            if size == 0 or flags & CTRUNC:
                close_all(descriptors)
                raise self.fail(END if size == 0 else LOST)
            for frame in self._frames.feed(self._inbox[:size], descriptors):
                dispatch(frame)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(error) from error
        except (FrameError, DecodeError) as error:
            raise self.fail(f"the daemon sent what is no frame: {error}") from error
        return True

    def fail(self, reason: str) -> Disconnected:
        """Closes the connection; answers with the error that every later use raises."""
        with self._breaking:
            if not self.broken:
                self.broken = f"{reason}; the client reconnects by itself"
            with contextlib.suppress(OSError):  # the other side may have done so
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._frames.close()
        return Disconnected(self.broken)

    def forget(self) -> None:
        """Closes the descriptor without a word to the daemon: the connection is the parent's."""
        self.broken = "the connection belongs to the process that forked this one"
        self._socket.close()


_sockets: weakref.WeakSet[LaneSocket] = weakref.WeakSet()


def _forget_inherited() -> None:
    # A child that kept the socket open would hide its parent's death from the daemon.
    for inherited in list(_sockets):
        inherited.forget()


os.register_at_fork(after_in_child=_forget_inherited)


def timed_out(method: str, timeout: float) -> CallTimeout:
    return CallTimeout(
        f"the daemon did not answer {method} within {timeout:g} s; go on without the store"
    )


def _connect(path: str, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(path)
        connection.setblocking(False)
    except OSError as error:
        connection.close()
        raise Disconnected(_unreachable(path.removesuffix(LANE_SUFFIX), error)) from error
    return connection


def _unreachable(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            f"uid {os.geteuid()} may not connect to {path}; run as the daemon's user, or set "
            "server.socket_group to a group of yours"
        )
    return (
        f"no daemon answers at {path} ({error.strerror or error}); start `kvstore serve`, or say "
        "where it is with --socket or KVSTORE_SOCKET"
    )


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += memoryview(data)[: len(data) // 4 * 4].cast("i").tolist()
    return found
