"""Peers that speak to a daemon raw, over each transport: what a client would not let tests do."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from served import TIMEOUT, ServedStore

from kvstore.core.completion import Completion
from kvstore.core.errors import KVStoreError
from kvstore.core.lane import (
    ADMIN_METHODS,
    FLAG_FDS,
    FLAG_NO_REPLY,
    HEADER,
    HEADER_BYTES,
    METHOD_NUMBERS,
    FrameKind,
    pack_frame,
)
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.staging import Staging
from kvstore.store.sessions import Identity, Session

MIB = 1 << 20
BLOCK_TOKENS = 16


class CallError(Exception):
    """A status other than OK."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class LanePeer:
    """Speaks frames over a blocking socket: what a client library would not let a test do."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect(str(path))
        self.notices: list[pb.Notice] = []
        self.descriptors: list[int] = []
        self.token = b""
        self.staging: mmap.mmap | None = None
        self._next_id = 0

    def open(self, staging_bytes: int = 0, join_token: bytes = b"") -> pb.OpenSessionResponse:
        request = pb.OpenSessionRequest(
            client_name="test", staging_bytes=staging_bytes, join_token=join_token
        )
        response = self.call("OpenSession", request)
        self.token = response.token
        if response.staging_bytes:
            (descriptor,) = self.take_descriptors()
            self.staging = mmap.mmap(descriptor, response.staging_bytes)
            os.close(descriptor)
        return response

    def take_descriptors(self) -> list[int]:
        taken, self.descriptors = self.descriptors, []
        return taken

    def send(self, method: str | int, request: Any, flags: int = 0) -> int:
        self._next_id += 1
        number = method if isinstance(method, int) else METHOD_NUMBERS[method]
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        self.socket.sendall(pack_frame(FrameKind.REQUEST, number, flags, self._next_id, payload))
        return self._next_id

    def tell(self, method: str, request: Any) -> None:
        self.send(method, request, FLAG_NO_REPLY)

    def receive(self) -> tuple[int, int, int, bytes]:
        """(kind, method, call id, payload) of the next frame that is no notice."""
        while True:
            length, kind, method, flags, call_id = HEADER.unpack(self._exactly(HEADER_BYTES))
            payload = self._exactly(length)
            assert bool(flags & FLAG_FDS) <= bool(self.descriptors)
            if kind != FrameKind.NOTICE:
                return kind, method, call_id, payload
            self.notices.append(pb.Notice.FromString(payload))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            room = socket.CMSG_SPACE(16 * 4)
            piece, ancillary, _, _ = self.socket.recvmsg(size - len(data), room)
            for level, kind, rights in ancillary:
                assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                received = array("i")
                received.frombytes(rights)
                self.descriptors.extend(received)
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def answer(self, method: str, call_id: int) -> Any:
        kind, _, got, payload = self.receive()
        assert got == call_id
        if kind == FrameKind.ERROR:
            error = pb.LaneError.FromString(payload)
            raise CallError(error.code, error.message)
        assert kind == FrameKind.RESPONSE
        if method in ("Session", "Restore", "FetchInline", "Subscribe", "TraceStart"):
            return None
        return getattr(pb, f"{method}Response").FromString(payload)

    def call(self, method: str, request: Any) -> Any:
        return self.answer(method, self.send(method, request))

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        call_id = self.send(method, request)
        kind_of_item = pb.Event if method == "Subscribe" else getattr(pb, f"{method}Response")
        while True:
            kind, _, got, payload = self.receive()
            assert got == call_id
            if kind == FrameKind.ERROR:
                error = pb.LaneError.FromString(payload)
                raise CallError(error.code, error.message)
            if kind == FrameKind.RESPONSE:
                return
            yield kind_of_item.FromString(payload)

    def error(self) -> pb.LaneError:
        """The next frame, which is an error."""
        kind, _, _, payload = self.receive()
        assert kind == FrameKind.ERROR
        return pb.LaneError.FromString(payload)

    def at_eof(self) -> bool:
        """Whether the daemon has closed the connection; waits for it."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        for descriptor in self.take_descriptors():
            os.close(descriptor)
        if self.staging is not None:
            self.staging.close()
        self.socket.close()


class GrpcPeer:
    """The same over gRPC, with the token of a lane session."""

    def __init__(self, daemon: ServedStore, target: str | None = None, channel: Any = None) -> None:
        self.lane = LanePeer(daemon.lane_path)
        self.channel = channel or grpc.insecure_channel(target or f"unix:{daemon.socket}")
        self.token: bytes = b""

    def open(self, staging_bytes: int = 0) -> pb.OpenSessionResponse:
        response = self.lane.open(staging_bytes)
        self.token = response.token
        return response

    @property
    def staging(self) -> mmap.mmap | None:
        return self.lane.staging

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        return (("x-kv-session-bin", self.token),) if self.token else ()

    def method(self, method: str, shape: str = "unary_unary") -> Any:
        service = "Admin" if method in ADMIN_METHODS else "KVStore"
        kind = {"Subscribe": "Event", "Session": "Notice"}.get(method, f"{method}Response")
        return getattr(self.channel, shape)(
            f"/kvstore.v1.{service}/{method}",
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=getattr(pb, kind).FromString,
        )

    def call(self, method: str, request: Any) -> Any:
        try:
            return self.method(method)(request, metadata=self.metadata(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise CallError(error.code().name, error.details()) from None

    def answers(self, seconds: float = 15.0) -> bool:
        """Whether a call of the session gets through within `seconds`."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.05)):
            with contextlib.suppress(CallError):
                return bool(self.call("Status", pb.StatusRequest()).state)
            pause.wait(0.05)
        return False

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        call = self.method(method, "unary_stream")
        try:
            yield from call(request, metadata=self.metadata(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise CallError(error.code().name, error.details()) from None

    def put_inline(self, requests: list[Any]) -> Any:
        call = self.method("PutInline", "stream_unary")
        try:
            return call(iter(requests), metadata=self.metadata(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise CallError(error.code().name, error.details()) from None

    def close(self) -> None:
        self.channel.close()
        self.lane.close()


class DirectPeer:
    """The same in one process: messages straight to the service."""

    def __init__(self, daemon: ServedStore) -> None:
        self._daemon = daemon
        self.session: Session
        self.staging: memoryview | None = None

    def open(self, staging_bytes: int = 0) -> None:
        segment = Staging(staging_bytes or MIB)
        self.staging = segment.view
        identity = Identity(uid=os.getuid())
        self.session = self._daemon.on_owner(
            lambda: self._daemon.store.open_session(
                identity, "admin", {"default", "b"}, segment.view, staging_release=segment.close
            )
        )

    def call(self, method: str, request: Any) -> Any:
        if isinstance(request, bytes):
            number = METHOD_NUMBERS[method]
            return self._run(lambda: self._daemon.service.call(self.session, number, request))
        return self._run(lambda: self._daemon.service.handle(self.session, method, request))

    def _run(self, function: Callable[[], Any]) -> Any:
        try:
            return self._daemon.on_owner(function)
        except KVStoreError as error:
            raise CallError(error.code, str(error)) from None

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        items: list[Any] = []
        ended: Completion[None] = Completion()

        def done(error: BaseException | None) -> None:
            if error is None:
                ended.resolve(None)
            else:
                ended.fail(error)

        def start() -> Completion[None]:
            self._daemon.service.stream(self.session, method, request, items.append, done)
            return ended

        self._run(start)
        yield from items

    def close(self) -> None:
        self._daemon.on_owner(lambda: self._daemon.sessions.close(self.session, "test is over"))
        self.staging = None


class Engine:
    """An attached peer with helpers for the usual flows."""

    def __init__(self, peer: Any, **spec: Any) -> None:
        self.peer = peer
        self.attached = peer.call("Attach", attach_request(**spec))
        self.number = self.attached.attachment

    def lookup(self, tokens: list[int], **fields: Any) -> Any:
        prompt = pb.Prompt(tokens=pack(tokens))
        return self.peer.call(
            "Lookup", pb.LookupRequest(attachment=self.number, prompt=prompt, **fields)
        )

    def reserve(self, tokens: list[int], first_block: int = 0) -> Any:
        prompt = pb.Prompt(tokens=pack(tokens))
        request = pb.ReserveRequest(attachment=self.number, prompt=prompt, first_block=first_block)
        return self.peer.call("Reserve", request)

    def payload(self, block: int, seed: int = 0) -> bytes:
        size = self.attached.block_bytes
        return (struct.pack("<II", block, seed) * (size // 8 + 1))[:size]

    def put(self, tokens: list[int], seed: int = 0) -> bytes:
        """Stores a prompt from its start; answers with the outcomes of Commit."""
        reserved = self.reserve(tokens)
        wanted = [i for i, outcome in enumerate(reserved.outcomes) if outcome == 1]
        assert wanted == list(range(len(reserved.outcomes)))
        stride = self.attached.slot_bytes
        for i in wanted:
            data = self.payload(i, seed)
            self.peer.staging[i * stride : i * stride + len(data)] = data
        run = pb.CommitRun(first_block=0, block_count=len(wanted), staging_offset=0)
        request = pb.CommitRequest(reservation_id=reserved.reservation_id, runs=[run])
        results = self.peer.call("Commit", request).results
        return b"".join(result.outcomes for result in results)

    def inline_messages(self, tokens: list[int], blocks: list[int]) -> list[Any]:
        """Messages of a PutInline of `tokens` with the bytes of `blocks`, each in two pieces."""
        prompt = pb.Prompt(tokens=pack(tokens))
        reserve = pb.ReserveRequest(attachment=self.number, prompt=prompt)
        messages = [pb.PutInlineRequest(reserve=reserve)]
        for block in blocks:
            data = self.payload(block)
            half = len(data) // 2
            messages.append(pb.PutInlineRequest(block=block, data=data[:half]))
            messages.append(pb.PutInlineRequest(block=block, data=data[half:]))
        return messages


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def spec_message(**changes: Any) -> pb.KVSpec:
    fields: dict[str, Any] = {
        "model": "m", "revision": "r1", "num_layers": 2, "num_kv_heads": 2, "head_dim": 32,
        "dtype": "float16", "block_size": BLOCK_TOKENS, "kv_factor": 2, "layout": "LKNHD",
        "shard_count": 1, "pp_size": 1, "kv_format": "raw", "key_mode": "tokens",
    }  # fmt: skip
    return pb.KVSpec(**{**fields, **changes})


def attach_request(
    tenant: str = "default", shard: int = 0, engine_id: str = "", **spec: Any
) -> pb.AttachRequest:
    return pb.AttachRequest(
        spec=spec_message(**spec), tenant=tenant, shard=shard, engine_id=engine_id
    )
