"""gRPC: who is let in, health, inline calls, TCP with mutual TLS."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.core.config import AccessRule
from kvstore.core.lane import METHODS
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(64))
TIMEOUT = 20.0
SHAPES = {
    "Restore": "unary_stream", "FetchInline": "unary_stream", "Subscribe": "unary_stream",
    "PutInline": "stream_unary", "Session": "stream_stream",
}  # fmt: skip


@pytest.fixture
def client(daemon: Any, kit: Any) -> Iterator[Any]:
    """A gRPC channel to the daemon, with no session yet."""
    peer = kit.GrpcPeer(daemon)
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


# ---- Who is let in ----


@pytest.mark.parametrize("method", METHODS)
def test_no_method_without_a_token(client: Any, method: str) -> None:
    """I18: every method, streams too, is UNAUTHENTICATED without the token of a live session."""
    for metadata in ((), (("x-kv-session-bin", bytes(32)),), (("x-kv-session-bin", b""),)):
        code, message = outcome(attempt(client, method, b"\xff\xff", metadata))
        assert code == "UNAUTHENTICATED"
        assert ".lane" in message


def test_unknown_methods_look_the_same(client: Any) -> None:
    """I18: without a token one cannot even tell which methods exist."""
    known = outcome(attempt(client, "Status", b"", ()))
    for path in ("/kvstore.v1.KVStore/Nothing", "/other.Service/Call"):
        assert outcome(partial(client.channel.unary_unary(path), b"", timeout=TIMEOUT)) == known
    client.open()
    stub = client.channel.unary_unary("/kvstore.v1.KVStore/Nothing")
    code, _ = outcome(lambda: stub(b"", metadata=client.metadata(), timeout=TIMEOUT))
    assert code == "UNIMPLEMENTED"


def test_opening_points_to_the_side_socket(client: Any, kit: Any) -> None:
    """On the Unix socket sessions open over the lane, and the error says so."""
    with pytest.raises(kit.CallError) as caught:
        client.call("OpenSession", pb.OpenSessionRequest())
    assert caught.value.code == "UNAUTHENTICATED"
    assert ".lane" in caught.value.message


def test_token_ends_with_its_session(client: Any, kit: Any, daemon: Any) -> None:
    """I15: when the lane connection ends, the token opens nothing any more."""
    client.open()
    client.call("Status", pb.StatusRequest())
    client.lane.socket.close()
    assert daemon.eventually(lambda: not daemon.store.parts.sessions)
    with pytest.raises(kit.CallError) as caught:
        client.call("Status", pb.StatusRequest())
    assert caught.value.code == "UNAUTHENTICATED"


def test_leases_cross_transports(client: Any, kit: Any) -> None:
    """A lease taken over gRPC is released over the lane of the same session."""
    client.open()
    engine = kit.Engine(client)
    engine.put(TOKENS)
    lease = engine.lookup(TOKENS).lease_id
    client.lane.tell("Release", pb.ReleaseRequest(lease_ids=[lease]))
    client.lane.call("Session", pb.Heartbeat())
    assert list(client.call("Renew", pb.RenewRequest(lease_ids=[lease])).lost_leases) == [lease]


def test_health_is_open_on_the_unix_socket(client: Any, daemon: Any) -> None:
    """Health checks need no session here, and follow the daemon's state."""
    stub = health_pb2_grpc.HealthStub(client.channel)
    kinds = health_pb2.HealthCheckResponse
    for name in ("", "kvstore.v1.KVStore", "kvstore.v1.Admin"):
        request = health_pb2.HealthCheckRequest(service=name)
        assert stub.Check(request, timeout=TIMEOUT).status == kinds.SERVING
    daemon.await_(daemon.grpc.set_serving(False))
    request = health_pb2.HealthCheckRequest()
    assert stub.Check(request, timeout=TIMEOUT).status == kinds.NOT_SERVING


def test_oversize_message(client: Any, kit: Any, daemon: Any) -> None:
    """A message over the limit is RESOURCE_EXHAUSTED, and the channel goes on."""
    client.open()
    limit = daemon.config.limits.message_bytes
    with pytest.raises(kit.CallError) as caught:
        client.call("Lookup", bytes(limit + 1))
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    client.call("Status", pb.StatusRequest())


def test_garbage_connections(client: Any, daemon: Any) -> None:
    """Raw garbage on the gRPC socket disturbs nobody."""
    rng = random.Random(3)
    client.open()
    for i in range(30):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(daemon.socket))
            preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if i % 2 else b""
            raw.sendall(preface + rng.randbytes(500))
    client.call("Status", pb.StatusRequest())


# ---- Streams ----


def test_session_stream_carries_notices(client: Any) -> None:
    """On the Unix socket the stream takes heartbeats; its end does not end the lane's session."""
    client.open()
    done = threading.Event()

    def beats() -> Iterator[pb.Heartbeat]:
        yield pb.Heartbeat()
        done.wait(TIMEOUT)

    stub = client.method("Session", "stream_stream")
    call = stub(beats(), metadata=client.metadata(), timeout=TIMEOUT)
    done.set()
    assert list(call) == []
    client.call("Status", pb.StatusRequest())


def chunks(engine: Any, tokens: list[int], blocks: list[int], kit: Any) -> list[Any]:
    reserve = pb.ReserveRequest(attachment=engine.number, prompt=pb.Prompt(tokens=kit.pack(tokens)))
    messages = [pb.PutInlineRequest(reserve=reserve)]
    for block in blocks:
        data = engine.payload(block)
        half = len(data) // 2
        messages.append(pb.PutInlineRequest(block=block, data=data[:half]))
        messages.append(pb.PutInlineRequest(block=block, data=data[half:]))
    return messages


def test_put_inline(client: Any, kit: Any) -> None:
    """Blocks sent in the messages are stored like any other, and read back whole."""
    client.open()
    engine = kit.Engine(client)
    done = client.put_inline(chunks(engine, TOKENS, [0, 1, 2, 3], kit))
    assert (done.first_block, done.outcomes) == (0, b"\x04" * 4)
    lease = engine.lookup(TOKENS).lease_id
    fetched = client.stream("FetchInline", pb.FetchInlineRequest(lease_id=lease, first_block=2))
    got: dict[int, bytes] = {}
    for chunk in fetched:
        got[chunk.block] = got.get(chunk.block, b"") + chunk.data
    assert got == {2: engine.payload(2), 3: engine.payload(3)}
    again = client.put_inline(chunks(engine, TOKENS, [0, 1, 2, 3], kit))
    assert again.outcomes == b"\x02" * 4


def test_put_inline_in_part(client: Any, kit: Any, daemon: Any) -> None:
    """Blocks whose bytes never come are rejected, the ones before them stay, nothing leaks."""
    client.open()
    engine = kit.Engine(client)
    done = client.put_inline(chunks(engine, TOKENS, [0, 1], kit))
    assert done.outcomes == b"\x04\x04\x00\x00"
    assert "no bytes came for 2" in done.reason
    assert daemon.on_owner(lambda: len(daemon.store.reservations)) == 0
    assert engine.lookup(TOKENS).matched_tokens == 32


def test_wrong_put_inline(client: Any, kit: Any, daemon: Any) -> None:
    """I4: messages out of order or size end the put; what it reserved is given up."""
    client.open()
    engine = kit.Engine(client)
    good = chunks(engine, TOKENS, [0, 1], kit)
    part = pb.PutInlineRequest
    for messages, names in (
        ([], "reserve"),
        ([part(block=0, data=b"x")], "reserve"),
        ([good[0], good[0]], "reserve"),
        ([good[0], *chunks(engine, TOKENS, [1, 0], kit)[1:]], "block 0"),
        ([good[0], good[1], good[3]], "block 0"),
        ([good[0], good[1]], "block 0"),
        ([good[0], part(block=0, data=bytes(engine.attached.block_bytes + 1))], "block_bytes"),
        ([b"\xff\xff"], "PutInlineRequest"),
    ):
        with pytest.raises(kit.CallError) as caught:
            client.put_inline(messages)
        assert caught.value.code == "INVALID_ARGUMENT", names
        assert names in caught.value.message
        assert daemon.eventually(lambda: len(daemon.store.reservations) == 0)


def test_a_put_that_dies(client: Any, kit: Any, daemon: Any) -> None:
    """I4: a stream that is cut in the middle of a block leaves nothing reserved."""
    client.open()
    engine = kit.Engine(client)
    never = threading.Event()

    def messages() -> Iterator[Any]:
        yield from chunks(engine, TOKENS, [0, 1], kit)[:2]
        never.wait(TIMEOUT)

    stub = client.method("PutInline", "stream_unary")
    call = stub.future(messages(), metadata=client.metadata(), timeout=TIMEOUT)
    assert daemon.eventually(lambda: len(daemon.store.reservations) == 1)
    call.cancel()
    assert daemon.eventually(lambda: len(daemon.store.reservations) == 0)
    never.set()


def test_a_cancelled_subscription_is_dropped(client: Any, daemon: Any) -> None:
    """A subscriber that leaves costs nothing afterwards."""
    client.open()
    stub = client.method("Subscribe", "unary_stream")
    call = stub(pb.SubscribeRequest(), metadata=client.metadata(), timeout=TIMEOUT)
    assert daemon.eventually(lambda: daemon.store.events.subscriber_count == 1)
    call.cancel()
    assert daemon.eventually(lambda: daemon.store.events.subscriber_count == 0)


# ---- TCP ----


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


def make_authority(directory: Path, name: str) -> None:
    openssl(
        directory, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
        "-subj", f"/CN={name}",
    )  # fmt: skip


def make_certificate(directory: Path, authority: str, name: str) -> None:
    openssl(
        directory, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}",
    )  # fmt: skip
    (directory / "names.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        directory, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem",
        "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2", "-out", f"{name}.pem",
        "-extfile", "names.ext",
    )  # fmt: skip


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
    return directory


@pytest.fixture
def tcp_daemon(tmp_path: Path, kit: Any, certificates: Path) -> Iterator[Any]:
    """A daemon that also listens on TCP, for engine-1 and engine-2."""
    tcp = SimpleNamespace(
        listen="127.0.0.1:0",
        cert=str(certificates / "daemon.pem"),
        key=str(certificates / "daemon.key"),
        client_ca=str(certificates / "good-ca.pem"),
    )
    access = (
        AccessRule(certificate="engine-1", tenant="default"),
        AccessRule(certificate="engine-2", tenant="b"),
    )
    daemon = kit.Daemon(tmp_path, kit.config(access=access), tcp)
    yield daemon
    daemon.close()


class TcpPeer:
    """A client on another host: its certificate, and a channel."""

    def __init__(self, kit: Any, daemon: Any, certificates: Path, name: str) -> None:
        credentials = grpc.ssl_channel_credentials(
            (certificates / "good-ca.pem").read_bytes(),
            (certificates / f"{name}.key").read_bytes(),
            (certificates / f"{name}.pem").read_bytes(),
        )
        target = f"127.0.0.1:{daemon.grpc.tcp_port}"
        self.peer = kit.GrpcPeer(daemon, channel=grpc.secure_channel(target, credentials))
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
def connect(kit: Any, tcp_daemon: Any, certificates: Path) -> Iterator[Any]:
    made: list[TcpPeer] = []

    def connect(name: str) -> TcpPeer:
        made.append(TcpPeer(kit, tcp_daemon, certificates, name))
        return made[-1]

    yield connect
    for peer in made:
        peer.close()


def test_tcp_session_from_open_to_end(connect: Any, tcp_daemon: Any, kit: Any) -> None:
    """A client on another host puts and fetches inline; its stream's end ends its session."""
    far = connect("engine-1")
    opened = far.open()
    assert (opened.role, list(opened.tenants), opened.staging_bytes) == ("engine", ["default"], 0)
    stream = far.session_stream()
    engine = kit.Engine(far.peer)
    assert not engine.attached.pools
    done = far.peer.put_inline(chunks(engine, TOKENS, [0, 1, 2, 3], kit))
    assert done.outcomes == b"\x04" * 4
    lease = engine.lookup(TOKENS).lease_id
    fetched = list(far.peer.stream("FetchInline", pb.FetchInlineRequest(lease_id=lease)))
    assert b"".join(c.data for c in fetched if c.block == 3) == engine.payload(3)
    reserved = engine.reserve([*TOKENS[:32], *range(900, 932)])
    run = pb.CommitRun(first_block=2, block_count=1)
    request = pb.CommitRequest(reservation_id=reserved.reservation_id, runs=[run])
    with pytest.raises(kit.CallError) as caught:
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


def test_certificates_without_a_rule(connect: Any, kit: Any) -> None:
    """I18: a good certificate that no rule names opens nothing."""
    far = connect("stranger")
    with pytest.raises(kit.CallError) as caught:
        far.open()
    assert caught.value.code == "UNAUTHENTICATED"


def test_forged_certificates(connect: Any, kit: Any) -> None:
    """I18: a certificate of another authority does not get past the handshake."""
    with pytest.raises(kit.CallError) as caught:
        connect("forged").open()
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


def test_a_token_is_bound_to_its_certificate(connect: Any, kit: Any) -> None:
    """I18: a token is worth nothing to another certificate, stream or not."""
    first, second = connect("engine-1"), connect("engine-2")
    first.open()
    second.peer.token = first.peer.token
    with pytest.raises(kit.CallError) as caught:
        second.peer.call("Renew", pb.RenewRequest())
    assert caught.value.code == "UNAUTHENTICATED"
    for method in ("Subscribe", "PutInline", "Session"):
        kind = pb.Heartbeat if method == "Session" else getattr(pb, f"{method}Request")
        code, _ = outcome(attempt(second.peer, method, kind(), second.peer.metadata()))
        assert code == "UNAUTHENTICATED"
    first.peer.call("Renew", pb.RenewRequest())


def test_tenants_are_bound_to_certificates(connect: Any, kit: Any) -> None:
    """I8: a certificate attaches to its own tenant only."""
    far = connect("engine-2")
    far.open()
    with pytest.raises(kit.CallError) as caught:
        kit.Engine(far.peer)
    assert caught.value.code == "PERMISSION_DENIED"
    kit.Engine(far.peer, tenant="b")


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
