"""A daemon's server parts on a loop of their own thread, and peers that talk to it raw."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from kvstore.core.clock import SystemClock
from kvstore.core.completion import Completion
from kvstore.core.config import AccessRule, Config, LimitsSection, TenantSection, TiersSection
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
from kvstore.core.sizes import Size
from kvstore.events import EventLog
from kvstore.mover import LINKS, ThreadMover
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.access import Access
from kvstore.server.budget import MessageBudget
from kvstore.server.grpc_server import GrpcServer
from kvstore.server.lane import LaneServer
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions
from kvstore.server.staging import Staging, StagingBudget
from kvstore.store.assemble import assemble
from kvstore.store.kvstore import KVStore
from kvstore.store.record import MemoryRecord
from kvstore.store.sessions import Identity, Session
from kvstore.tiers.host import HostTier, PoolConfig

MIB = 1 << 20
BLOCK_TOKENS = 16
TIMEOUT = 20.0


class CallError(Exception):
    """A status other than OK."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def config_for_tests(**changes: Any) -> Config:
    limits = LimitsSection(
        sessions=64,
        leased_bytes_per_session=Size(64 * MIB),
        leased_bytes_per_tenant=Size(64 * MIB),
        pinned_bytes_per_session=Size(8 * MIB),
        pinned_bytes_per_tenant=Size(8 * MIB),
        reserved_bytes_per_session=Size(32 * MIB),
        reserved_bytes_per_tenant=Size(32 * MIB),
        staging_bytes_per_session=Size(4 * MIB),
        staging_bytes=Size(64 * MIB),
    )
    access = (AccessRule(uid=os.getuid(), role="admin"), AccessRule(uid=os.getuid(), tenant="b"))
    config = Config(
        access=access,
        tenants=(TenantSection(name="b"),),
        tiers=TiersSection(),
        limits=msgspec.structs.replace(limits, **changes.pop("limits", {})),
    )
    return msgspec.structs.replace(config, **changes)


class Daemon:
    """Store, lane and gRPC servers on one loop thread, as the daemon has them on its main one."""

    def __init__(self, directory: Path, config: Config, tcp: Any = None) -> None:
        self.config = config
        self.socket = directory / "kvstore.sock"
        self.lane_path = directory / "kvstore.sock.lane"
        self.failures: list[str] = []
        self._tcp = tcp
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="daemon under test")
        self._thread.start()
        self._ready.wait(TIMEOUT)
        if self._error is not None:
            self._thread.join()
            raise self._error

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._error = error
            self._ready.set()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _main(self) -> None:
        self._loop.set_exception_handler(lambda _, context: self.failures.append(str(context)))
        self.store = self._build_store()
        limits = self.config.limits
        self.budget = MessageBudget(limits.inflight_message_bytes)
        self.staging = StagingBudget(MIB, limits.staging_bytes_per_session, limits.staging_bytes)
        access = Access(self.config.access, os.getuid())
        self.sessions = Sessions(self.store, access, limits, self.staging)
        self.service = Service(self.store)
        common = {"budget": self.budget, "message_bytes": limits.message_bytes}
        self.lane = LaneServer(
            self.service, self.sessions, self.lane_path, connections_max=80, **common
        )
        self.grpc = GrpcServer(self.service, self.sessions, self.socket, tcp=self._tcp, **common)
        self._stop = asyncio.Event()
        self.lane.start()
        await self.grpc.start()
        await self.grpc.set_serving(True)
        self._ready.set()
        while not self._stop.is_set():
            self.store.tick()
            try:
                await asyncio.wait_for(self._stop.wait(), 0.05)
            except TimeoutError:
                continue
        await self.lane.close()
        await self.grpc.stop(0.2)
        self.sessions.prune()
        self._mover.close()
        await asyncio.sleep(0.02)
        self.store.check_integrity()
        self._tier.close(keep=False)

    def _build_store(self) -> KVStore:
        post = self._loop.call_soon_threadsafe
        self._mover = ThreadMover(post, dict.fromkeys(LINKS, 1), 64 * MIB)
        self._tier = HostTier([PoolConfig("", 32 * MIB)], kind="sealed")
        clock = SystemClock()
        return assemble(
            self.config,
            clock,
            host=self._tier,
            record=MemoryRecord(),
            mover=self._mover,
            events=EventLog(clock.wall, self.config.limits.events_kept),
            defer=self._loop.call_soon,
            boot_id="boot-under-test",
        )

    def on_owner(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the owner thread; waits for a Completion that it returns."""

        async def run() -> Any:
            value = function()
            if isinstance(value, Completion):
                done = asyncio.Event()
                value.then(lambda _: done.set())
                await asyncio.wait_for(done.wait(), TIMEOUT)
                return value.result()
            return value

        return self.await_(run())

    def await_(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT)

    def eventually(self, condition: Callable[[], bool], seconds: float = 5.0) -> bool:
        """Whether `condition` becomes true on the owner thread within `seconds`."""
        waiting = threading.Event()
        for _ in range(int(seconds / 0.02)):
            if self.on_owner(condition):
                return True
            waiting.wait(0.02)
        return False

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the daemon under test did not stop"
        assert not self.failures, self.failures
        if self._error is not None:
            raise self._error
        assert self.budget.used_bytes == 0, "message bytes leaked"
        assert self.staging.used_bytes == 0, "staging bytes leaked"


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
        if method in ("Session", "Restore", "FetchInline", "Subscribe"):
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

    def __init__(self, daemon: Daemon, target: str | None = None, channel: Any = None) -> None:
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

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._session: Session
        self.staging: memoryview | None = None

    def open(self, staging_bytes: int = 0) -> None:
        segment = Staging(staging_bytes or MIB)
        self.staging = segment.view
        identity = Identity(uid=os.getuid())
        self._session = self._daemon.on_owner(
            lambda: self._daemon.store.open_session(
                identity, "admin", {"default", "b"}, segment.view, staging_release=segment.close
            )
        )

    def call(self, method: str, request: Any) -> Any:
        if isinstance(request, bytes):
            number = METHOD_NUMBERS[method]
            return self._run(lambda: self._daemon.service.call(self._session, number, request))
        return self._run(lambda: self._daemon.service.handle(self._session, method, request))

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
            self._daemon.service.stream(self._session, method, request, items.append, done)
            return ended

        self._run(start)
        yield from items

    def close(self) -> None:
        self._daemon.on_owner(lambda: self._daemon.sessions.close(self._session, "test is over"))
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


class Kit:
    """What tests of this folder build with."""

    CallError = CallError
    Daemon = Daemon
    Engine = Engine
    LanePeer = LanePeer
    GrpcPeer = GrpcPeer
    DirectPeer = DirectPeer
    attach_request = staticmethod(attach_request)
    spec_message = staticmethod(spec_message)
    config = staticmethod(config_for_tests)
    pack = staticmethod(pack)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path, config_for_tests())
    yield running
    running.close()


@pytest.fixture
def lane(daemon: Daemon) -> Iterator[LanePeer]:
    """A raw lane connection without a session yet."""
    peer = LanePeer(daemon.lane_path)
    yield peer
    peer.close()


@pytest.fixture(params=["lane", "grpc", "direct"])
def peer(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    """A peer with an open session, over each transport in turn."""
    makers: dict[str, Callable[[], Any]] = {
        "lane": lambda: LanePeer(daemon.lane_path),
        "grpc": lambda: GrpcPeer(daemon),
        "direct": lambda: DirectPeer(daemon),
    }
    made = makers[request.param]()
    made.open()
    yield made
    made.close()


@pytest.fixture
def engine(peer: Any) -> Engine:
    """An attached peer, over each transport in turn."""
    return Engine(peer)
