"""gRPC: who is let in, health, inline calls, TCP with mutual TLS."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import http2
import pytest
from certificates import make_authority, make_certificate, make_expired_certificate
from grpc_health.v1 import health_pb2, health_pb2_grpc
from peers import CallError, Engine, GrpcPeer
from served import ServedStore, config_for_tests

from kvstore.core.config import AccessRule
from kvstore.core.errors import AlreadyRunning, ConfigError
from kvstore.core.lane import METHODS
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(64))
TIMEOUT = 20.0
SHAPES = {
    "Restore": "unary_stream", "FetchInline": "unary_stream", "Subscribe": "unary_stream",
    "PutInline": "stream_unary", "Session": "stream_stream", "TraceStart": "unary_stream",
}  # fmt: skip


@pytest.fixture
def client(daemon: Any) -> Iterator[Any]:
    """A gRPC channel to the daemon, with no session yet."""
    peer = GrpcPeer(daemon)
    yield peer
    peer.close()


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, caught.value.details()


def attempt(peer: Any, method: str, request: Any, metadata: Any) -> Callable[[], Any]:
    """A call of whatever shape, to the end of its answers."""
    shape = SHAPES.get(method, "unary_unary")
    stub = peer.method(method, shape)
    argument = iter([request]) if shape.startswith("stream") else request

    def call() -> Any:
        answer = stub(argument, metadata=metadata, timeout=TIMEOUT)
        return list(answer) if shape.endswith("stream") else answer

    return call


# ---- TCP ----


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    directory = tmp_path_factory.mktemp("certificates")
    for authority in ("good-ca", "other-ca"):
        make_authority(directory, authority)
    for name in ("daemon", "engine-1", "engine-2", "stranger"):
        make_certificate(directory, "good-ca", name)
    make_certificate(directory, "other-ca", "forged")
    make_expired_certificate(directory, "good-ca", "expired", "engine-1")
    return directory


def tcp_settings(certificates: Path, listen: str) -> SimpleNamespace:
    return SimpleNamespace(
        listen=listen,
        cert=str(certificates / "daemon.pem"),
        key=str(certificates / "daemon.key"),
        client_ca=str(certificates / "good-ca.pem"),
    )


@pytest.fixture
def tcp_daemon(tmp_path: Path, certificates: Path) -> Iterator[Any]:
    """A daemon that also listens on TCP, for engine-1 and engine-2."""
    tcp = tcp_settings(certificates, "127.0.0.1:0")
    access = (
        AccessRule(certificate="engine-1", tenant="default"),
        AccessRule(certificate="engine-2", tenant="b"),
    )
    daemon = ServedStore(tmp_path, config_for_tests(access=access), tcp)
    yield daemon
    daemon.close()


class TcpPeer:
    """A client on another host: its certificate, and a channel."""

    def __init__(self, daemon: Any, certificates: Path, name: str) -> None:
        credentials = grpc.ssl_channel_credentials(
            (certificates / "good-ca.pem").read_bytes(),
            (certificates / f"{name}.key").read_bytes(),
            (certificates / f"{name}.pem").read_bytes(),
        )
        target = f"127.0.0.1:{daemon.grpc.tcp_port}"
        self.peer = GrpcPeer(daemon, channel=grpc.secure_channel(target, credentials))
        self.end = threading.Event()

    def open(self) -> Any:
        response = self.peer.call("OpenSession", pb.OpenSessionRequest(client_name="far"))
        self.peer.token = response.token
        return response

    def session_stream(self) -> Any:
        def beats() -> Iterator[pb.Heartbeat]:
            yield pb.Heartbeat()
            self.end.wait(TIMEOUT)

        stub = self.peer.method("Session", "stream_stream")
        return stub(beats(), metadata=self.peer.metadata(), timeout=TIMEOUT)

    def close(self) -> None:
        self.end.set()
        self.peer.close()


@pytest.fixture
def connect(tcp_daemon: Any, certificates: Path) -> Iterator[Any]:
    made: list[TcpPeer] = []

    def connect(name: str) -> TcpPeer:
        made.append(TcpPeer(tcp_daemon, certificates, name))
        return made[-1]

    yield connect
    for peer in made:
        peer.close()


def test_tcp_session_from_open_to_end(connect: Any, tcp_daemon: Any) -> None:
    """A client on another host puts and fetches inline; its stream's end ends its session."""
    far = connect("engine-1")
    opened = far.open()
    assert (opened.role, list(opened.tenants), opened.staging_bytes) == ("engine", ["default"], 0)
    stream = far.session_stream()
    engine = Engine(far.peer)
    assert not engine.attached.pools
    done = far.peer.put_inline(engine.inline_messages(TOKENS, [0, 1, 2, 3]))
    assert done.outcomes == b"\x04" * 4
    lease = engine.lookup(TOKENS).lease_id
    fetched = list(far.peer.stream("FetchInline", pb.FetchInlineRequest(lease_id=lease)))
    assert b"".join(c.data for c in fetched if c.block == 3) == engine.payload(3)
    reserved = engine.reserve([*TOKENS[:32], *range(900, 932)])
    run = pb.CommitRun(first_block=2, block_count=1)
    request = pb.CommitRequest(reservation_id=reserved.reservation_id, runs=[run])
    with pytest.raises(CallError) as caught:
        far.peer.call("Commit", request)
    assert caught.value.code == "FAILED_PRECONDITION"
    assert "PutInline" in caught.value.message
    far.end.set()
    list(stream)
    store = tcp_daemon.store
    assert tcp_daemon.eventually(
        lambda: not store.parts.sessions and len(store.parts.leases) == 0, seconds=1.0
    )


def test_tcp_notices(connect: Any, tcp_daemon: Any) -> None:
    """A drain reaches TCP clients through their stream."""
    far = connect("engine-1")
    far.open()
    stream = far.session_stream()
    assert tcp_daemon.eventually(lambda: bool(tcp_daemon.store.parts.sessions))
    tcp_daemon.on_owner(lambda: tcp_daemon.store.drain(5.0, False))
    assert next(stream).draining


def test_tcp_death_ends_the_session(connect: Any, tcp_daemon: Any) -> None:
    """I15: when a TCP client's connection breaks, its session ends within a second."""
    far = connect("engine-1")
    far.open()
    stream = far.session_stream()
    far.peer.call("Renew", pb.RenewRequest())
    far.peer.channel.close()
    assert tcp_daemon.eventually(lambda: not tcp_daemon.store.parts.sessions, seconds=1.0)
    stream.cancel()


def test_no_method_without_a_good_certificate(
    connect: Any, tcp_daemon: Any, certificates: Path
) -> None:
    """I18: over TCP every method is refused, with a live token of another's session, to a peer
    with no, a foreign, an expired or an unnamed certificate, or one that is another's."""
    owner = connect("engine-1")
    owner.open()
    peers = {name: connect(name).peer for name in ("engine-2", "stranger", "forged", "expired")}
    credentials = grpc.ssl_channel_credentials((certificates / "good-ca.pem").read_bytes())
    channel = grpc.secure_channel(f"127.0.0.1:{tcp_daemon.grpc.tcp_port}", credentials)
    peers["none"] = GrpcPeer(tcp_daemon, channel=channel)
    shaken_hands = ("engine-2", "stranger")
    for name, peer in peers.items():
        for method in set(METHODS) - {"OpenSession"}:
            no_token = outcome(attempt(peer, method, b"", ()))
            stolen = outcome(attempt(peer, method, b"", owner.peer.metadata()))
            code = "UNAUTHENTICATED" if name in shaken_hands else "UNAVAILABLE"
            assert (no_token[0], stolen[0]) == (code, code), (name, method)
            if name in shaken_hands:
                assert stolen == no_token, "the answer tells a live token from none"
    peers["none"].close()


def test_certificates_without_a_rule(connect: Any) -> None:
    """I18: a good certificate that no rule names opens nothing."""
    far = connect("stranger")
    with pytest.raises(CallError) as caught:
        far.open()
    assert caught.value.code == "UNAUTHENTICATED"


def test_forged_certificates(connect: Any) -> None:
    """I18: a certificate of another authority does not get past the handshake."""
    with pytest.raises(CallError) as caught:
        connect("forged").open()
    assert caught.value.code == "UNAVAILABLE"


def test_expired_certificates(connect: Any) -> None:
    """I18: a certificate past its date does not get past the handshake, whatever its name."""
    with pytest.raises(CallError) as caught:
        connect("expired").open()
    assert caught.value.code == "UNAVAILABLE"


def test_plaintext_and_no_certificate(tcp_daemon: Any, certificates: Path) -> None:
    """I18: without TLS, or without a certificate, nothing answers on TCP."""
    target = f"127.0.0.1:{tcp_daemon.grpc.tcp_port}"
    authority = (certificates / "good-ca.pem").read_bytes()
    for channel in (
        grpc.insecure_channel(target),
        grpc.secure_channel(target, grpc.ssl_channel_credentials(authority)),
    ):
        stub = channel.unary_unary("/kvstore.v1.KVStore/OpenSession")
        code, _ = outcome(partial(stub, b"", timeout=5))
        assert code in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        channel.close()


def test_a_token_is_bound_to_its_certificate(connect: Any) -> None:
    """I18: a token is worth nothing to another certificate, stream or not."""
    first, second = connect("engine-1"), connect("engine-2")
    first.open()
    second.peer.token = first.peer.token
    with pytest.raises(CallError) as caught:
        second.peer.call("Renew", pb.RenewRequest())
    assert caught.value.code == "UNAUTHENTICATED"
    for method in ("Subscribe", "PutInline", "Session"):
        kind = pb.Heartbeat if method == "Session" else getattr(pb, f"{method}Request")
        code, _ = outcome(attempt(second.peer, method, kind(), second.peer.metadata()))
        assert code == "UNAUTHENTICATED"
    first.peer.call("Renew", pb.RenewRequest())


def test_tenants_are_bound_to_certificates(connect: Any) -> None:
    """I8: a certificate attaches to its own tenant only."""
    far = connect("engine-2")
    far.open()
    with pytest.raises(CallError) as caught:
        Engine(far.peer)
    assert caught.value.code == "PERMISSION_DENIED"
    Engine(far.peer, tenant="b")


def test_a_path_that_is_no_text_on_tcp(connect: Any, tcp_daemon: Any, certificates: Path) -> None:
    """I14: the gRPC library's server, which such a path ends, is open again at the same port."""
    port = tcp_daemon.grpc.tcp_port
    settings = ssl.create_default_context(cafile=certificates / "good-ca.pem")
    settings.load_cert_chain(certificates / "engine-2.pem", certificates / "engine-2.key")
    settings.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        settings.wrap_socket(plain, server_hostname="localhost") as raw,
    ):
        raw.sendall(http2.PREFACE + http2.frame(4, 0, 0, b"") + http2.headers(b"/\xf6", b""))
        while raw.recv(1 << 16):
            pass
    assert tcp_daemon.eventually(lambda: bool(tcp_daemon.failures)), "the library was mended"
    tcp_daemon.failures.clear()
    assert connect_again(connect), "the server did not come back"
    assert tcp_daemon.grpc.tcp_port == port


def connect_again(connect: Any) -> bool:
    pause = threading.Event()
    for _ in range(100):
        with contextlib.suppress(CallError):
            return bool(connect("engine-1").open().token)
        pause.wait(0.05)
    return False


def test_health_needs_a_token_on_tcp(connect: Any) -> None:
    """I18: on TCP even health is behind the token."""
    far = connect("engine-1")
    stub = health_pb2_grpc.HealthStub(far.peer.channel)
    request = health_pb2.HealthCheckRequest()
    code, _ = outcome(lambda: stub.Check(request, timeout=TIMEOUT))
    assert code == "UNAUTHENTICATED"
    far.open()
    metadata = far.peer.metadata()
    assert stub.Check(request, metadata=metadata, timeout=TIMEOUT).status == 1


def test_a_second_daemon_on_the_port(
    tcp_daemon: Any, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """I20: a TCP address that is taken is refused, and the error names the key."""
    port = tcp_daemon.grpc.tcp_port
    tcp = tcp_settings(certificates, f"127.0.0.1:{port}")
    with pytest.raises(AlreadyRunning, match=r"server\.tcp\.listen"):
        ServedStore(tmp_path_factory.mktemp("second"), config_for_tests(), tcp)


def test_a_certificate_file_that_is_missing(certificates: Path, tmp_path: Path) -> None:
    """A PEM file that cannot be read is named."""
    tcp = tcp_settings(certificates, "127.0.0.1:0")
    tcp.client_ca = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"server\.tcp\.client_ca"):
        ServedStore(tmp_path, config_for_tests(), tcp)
