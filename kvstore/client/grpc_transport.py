"""`GrpcTransport`: calls to a daemon on another host, over TCP with mutual TLS.

Bytes of blocks travel in the messages. The session lives as long as its stream of heartbeats and
notices. A call that is interrupted, by KeyboardInterrupt say, ends it: what gRPC keeps in Python
may have been left locked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore.client.address import TLSConfig
from kvstore.client.pools import MappedPool
from kvstore.client.transport import (
    INTERRUPTED,
    CallTimeout,
    Disconnected,
    LateHandler,
    NoticeHandler,
    ignore_notice,
)
from kvstore.client.wire import error_of
from kvstore.core.errors import InvalidRequest, KVStoreError
from kvstore.core.lane import ADMIN_METHODS
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.proto.v1 import kvstore_pb2_grpc as pb_grpc

TOKEN_KEY = "x-kv-session-bin"
MESSAGE_BYTES_MAX = 64 << 20
KEEPALIVE_MILLISECONDS = 10_000


class GrpcCall:
    """A call that was sent."""

    def __init__(self, transport: GrpcTransport, method: str, timeout: float, future: Any) -> None:
        self._transport = transport
        self._method = method
        self._timeout = timeout
        self._future = future

    def result(self) -> Any:
        with self._transport.calling(self._method, self._timeout):
            return self._future.result()


class GrpcTransport:
    """One channel and the session on it."""

    def __init__(self, host: str, tls: TLSConfig, timeout: float) -> None:
        self.on_notice: NoticeHandler = ignore_notice
        self._host = host
        self._channel = grpc.secure_channel(host, _credentials(tls), _options(tls))
        try:
            grpc.channel_ready_future(self._channel).result(timeout)
        except grpc.FutureTimeoutError as error:
            self._channel.close()
            raise Disconnected(
                f"no daemon answers at {host} within {timeout:g} s; check the address, "
                "server.tcp of the daemon, and the certificates"
            ) from error
        self._engine = pb_grpc.KVStoreStub(self._channel)
        self._admin = pb_grpc.AdminStub(self._channel)
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        self._heartbeats: queue.SimpleQueue[pb.Heartbeat | None] = queue.SimpleQueue()
        self._over = ""
        self._is_interrupted = False

    def open(
        self, request: pb.OpenSessionRequest, timeout: float
    ) -> tuple[pb.OpenSessionResponse, memoryview | None]:
        response: pb.OpenSessionResponse = self.call("OpenSession", request, timeout)
        self._metadata = ((TOKEN_KEY, response.token),)
        beats: Iterator[pb.Heartbeat] = iter(self._heartbeats.get, None)
        notices = self._engine.Session(beats, metadata=self._metadata)
        threading.Thread(
            target=self._listen, args=(notices,), name="kvstore-notices", daemon=True
        ).start()
        return response, None

    def attach(
        self, request: pb.AttachRequest, timeout: float
    ) -> tuple[pb.AttachResponse, list[MappedPool]]:
        return self.call("Attach", request, timeout), []

    def call(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> Any:
        with self.calling(method, timeout):
            return self._stub(method)(request, timeout=timeout, metadata=self._metadata)

    def start(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> GrpcCall:
        with self.calling(method, timeout):
            stub = self._stub(method)
            future = stub.future(request, timeout=timeout, metadata=self._metadata)
            return GrpcCall(self, method, timeout, future)

    def send(self, method: str, request: Message) -> None:
        # gRPC drops a call nobody holds; its own thread holds this one until it ends.
        call = self.start(method, request, timeout=5.0)
        call._future.add_done_callback(lambda ended: None)

    def release(self, lease_id: int) -> None:
        self.send("Release", pb.ReleaseRequest(lease_ids=[lease_id]))

    def stream(self, method: str, request: Message, timeout: float) -> Iterator[Any]:
        with self.calling(method, timeout):
            call = self._stub(method)(request, metadata=self._metadata)
            timer = _Watch(call, timeout)
            yield from self._items(call, timer, method, timeout)

    def _items(self, call: Any, timer: _Watch, method: str, timeout: float) -> Iterator[Any]:
        try:
            for item in call:
                timer.restart()
                yield item
        except grpc.RpcError as error:
            if timer.expired:
                raise self._timed_out(method, timeout) from error
            raise self.failure(method, timeout, error) from error
        finally:
            timer.stop()
            call.cancel()

    def upload(self, method: str, requests: Iterable[Message], timeout: float) -> Any:
        with self.calling(method, timeout):
            stub = self._stub(method)
            return stub(iter(requests), timeout=timeout, metadata=self._metadata)

    def poll(self) -> None:
        self._heartbeats.put(pb.Heartbeat())
        self.check()

    def close(self) -> None:
        self._over = self._over or "the client closed the connection"
        self._heartbeats.put(None)
        if not self._is_interrupted:
            self._channel.close()
            return
        # It waits for gRPC's own thread, which waits for ever if the interrupt left a lock of the
        # call taken: then nobody else may. The daemon ends such a session by its time to live.
        threading.Thread(target=self._channel.close, name="kvstore-close", daemon=True).start()

    def calling(self, method: str, timeout: float) -> _Calling:
        """A context for what gRPC does: its errors become ours, an interrupt ends the session."""
        return _Calling(self, method, timeout)

    def ended(self, error: BaseException, method: str, timeout: float) -> KVStoreError | None:
        """What to raise for an exception within a call; None: as it is."""
        if isinstance(error, grpc.RpcError):
            return self.failure(method, timeout, error)
        if isinstance(error, ValueError) and self._over:  # another thread closed the channel
            return Disconnected(self._over)
        if not isinstance(error, Exception | GeneratorExit):
            self._is_interrupted = True
            self._over = self._over or f"{INTERRUPTED}; the client reconnects by itself"
        return None

    def check(self) -> None:
        """Raises Disconnected once the session is over: its channel is not touched any more."""
        if self._over:
            raise Disconnected(self._over)

    def failure(self, method: str, timeout: float, error: Any) -> KVStoreError:
        """What a failed call is to the caller."""
        code, details = error.code(), error.details() or "no details"
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._timed_out(method, timeout)
        if self._over or code is grpc.StatusCode.CANCELLED:
            return Disconnected(self._over or f"{self._host} cancelled {method}")
        if code is grpc.StatusCode.UNAVAILABLE and not _was_answered(error):
            return Disconnected(f"the daemon at {self._host} is gone ({details})")
        return error_of(code.name, details)

    def _timed_out(self, method: str, timeout: float) -> CallTimeout:
        return CallTimeout(
            f"the daemon at {self._host} did not answer {method} within {timeout:g} s; go on "
            "without the store"
        )

    def _stub(self, method: str) -> Any:
        return getattr(self._admin if method in ADMIN_METHODS else self._engine, method)

    def _listen(self, notices: Any) -> None:
        """Takes notices until the stream, and so the session, is over."""
        try:
            for notice in notices:
                self.on_notice(notice)
            reason = "the daemon ended the session"
        except grpc.RpcError as error:
            reason = f"the session's stream broke ({error.details()})"
        self._over = self._over or f"{reason}; the client reconnects by itself"


class _Calling:
    """See `GrpcTransport.calling`."""

    def __init__(self, transport: GrpcTransport, method: str, timeout: float) -> None:
        self._transport, self._method, self._timeout = transport, method, timeout

    def __enter__(self) -> None:
        self._transport.check()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            instead = self._transport.ended(error, self._method, self._timeout)
            if instead is not None:
                raise instead from error


class _Watch:
    """Cancels a stream that brings nothing for `timeout` seconds."""

    def __init__(self, call: Any, timeout: float) -> None:
        self._call = call
        self._timeout = timeout
        self.expired = False
        self._timer = self._start()

    def _start(self) -> threading.Timer:
        timer = threading.Timer(self._timeout, self._expire)
        timer.daemon = True
        timer.start()
        return timer

    def _expire(self) -> None:
        self.expired = True
        self._call.cancel()

    def restart(self) -> None:
        self._timer.cancel()
        self._timer = self._start()

    def stop(self) -> None:
        self._timer.cancel()


def _was_answered(error: Any) -> bool:
    """Whether the status came from the daemon: gRPC's own have no metadata from it."""
    return bool(error.trailing_metadata()) or bool(error.initial_metadata())


def _credentials(tls: TLSConfig) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=_read("ca", tls.ca),
        private_key=_read("key", tls.key),
        certificate_chain=_read("cert", tls.cert),
    )


def _options(tls: TLSConfig) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return options


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"tls.{field}: {path} cannot be read ({error.strerror}); correct the path"
        ) from error
