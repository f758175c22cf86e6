"""gRPC: who is let in, health, inline calls, TCP with mutual TLS."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
import http2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from peers import CallError, Engine, GrpcPeer

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


def test_opening_points_to_the_side_socket(client: Any) -> None:
    """On the Unix socket sessions open over the lane, and the error says so."""
    with pytest.raises(CallError) as caught:
        client.call("OpenSession", pb.OpenSessionRequest())
    assert caught.value.code == "UNAUTHENTICATED"
    assert ".lane" in caught.value.message


def test_token_ends_with_its_session(client: Any, daemon: Any) -> None:
    """I15: when the lane connection ends, the token opens nothing any more."""
    client.open()
    client.call("Status", pb.StatusRequest())
    client.lane.socket.close()
    assert daemon.eventually(lambda: not daemon.store.parts.sessions)
    with pytest.raises(CallError) as caught:
        client.call("Status", pb.StatusRequest())
    assert caught.value.code == "UNAUTHENTICATED"


def test_leases_cross_transports(client: Any) -> None:
    """A lease taken over gRPC is released over the lane of the same session."""
    client.open()
    engine = Engine(client)
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


def test_oversize_message(client: Any, daemon: Any) -> None:
    """A message over the limit is RESOURCE_EXHAUSTED, and the channel goes on."""
    client.open()
    limit = daemon.config.limits.message_bytes
    with pytest.raises(CallError) as caught:
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


def test_put_inline(client: Any) -> None:
    """Blocks sent in the messages are stored like any other, and read back whole."""
    client.open()
    engine = Engine(client)
    done = client.put_inline(engine.inline_messages(TOKENS, [0, 1, 2, 3]))
    assert (done.first_block, done.outcomes) == (0, b"\x04" * 4)
    lease = engine.lookup(TOKENS).lease_id
    fetched = client.stream("FetchInline", pb.FetchInlineRequest(lease_id=lease, first_block=2))
    got: dict[int, bytes] = {}
    for chunk in fetched:
        got[chunk.block] = got.get(chunk.block, b"") + chunk.data
    assert got == {2: engine.payload(2), 3: engine.payload(3)}
    again = client.put_inline(engine.inline_messages(TOKENS, [0, 1, 2, 3]))
    assert again.outcomes == b"\x02" * 4


def test_put_inline_in_part(client: Any, daemon: Any) -> None:
    """Blocks whose bytes never come are rejected, the ones before them stay, nothing leaks."""
    client.open()
    engine = Engine(client)
    done = client.put_inline(engine.inline_messages(TOKENS, [0, 1]))
    assert done.outcomes == b"\x04\x04\x00\x00"
    assert "no bytes came for 2" in done.reason
    assert daemon.on_owner(lambda: len(daemon.store.reservations)) == 0
    assert engine.lookup(TOKENS).matched_tokens == 32


def test_wrong_put_inline(client: Any, daemon: Any) -> None:
    """I4: messages out of order or size end the put; what it reserved is given up."""
    client.open()
    engine = Engine(client)
    good = engine.inline_messages(TOKENS, [0, 1])
    part = pb.PutInlineRequest
    for messages, names in (
        ([], "reserve"),
        ([part(block=0, data=b"x")], "reserve"),
        ([good[0], good[0]], "reserve"),
        ([good[0], *engine.inline_messages(TOKENS, [1, 0])[1:]], "block 0"),
        ([good[0], good[1], good[3]], "block 0"),
        ([good[0], good[1]], "block 0"),
        ([good[0], part(block=0, data=bytes(engine.attached.block_bytes + 1))], "block_bytes"),
        ([b"\xff\xff"], "PutInlineRequest"),
    ):
        with pytest.raises(CallError) as caught:
            client.put_inline(messages)
        assert caught.value.code == "INVALID_ARGUMENT", names
        assert names in caught.value.message
        assert daemon.eventually(lambda: len(daemon.store.reservations) == 0)


def test_a_put_that_dies(client: Any, daemon: Any) -> None:
    """I4: a stream that is cut in the middle of a block leaves nothing reserved."""
    client.open()
    engine = Engine(client)
    never = threading.Event()

    def messages() -> Iterator[Any]:
        yield from engine.inline_messages(TOKENS, [0, 1])[:2]
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


def test_streams_end_with_their_session(client: Any, daemon: Any) -> None:
    """I18: a subscription and a put under way end when their session does."""
    client.open()
    engine = Engine(client)
    events = client.method("Subscribe", "unary_stream")(
        pb.SubscribeRequest(), metadata=client.metadata(), timeout=TIMEOUT
    )
    over = threading.Event()

    def messages() -> Iterator[Any]:
        first, *rest = engine.inline_messages(TOKENS, [0])
        yield first
        over.wait(TIMEOUT)
        yield from rest

    put = client.method("PutInline", "stream_unary")
    storing = put.future(messages(), metadata=client.metadata(), timeout=TIMEOUT)
    assert daemon.eventually(lambda: len(daemon.store.reservations) == 1)
    client.lane.socket.close()
    assert daemon.eventually(lambda: not daemon.store.parts.sessions, seconds=1.0)
    assert outcome(lambda: list(events))[0] == "UNAUTHENTICATED"
    over.set()
    assert outcome(storing.result)[0] == "UNAUTHENTICATED"
    assert daemon.eventually(lambda: daemon.store.events.subscriber_count == 0)


def test_a_path_that_is_no_text(daemon: Any, client: Any) -> None:
    """I14, I18: a request with a path of no UTF-8, which ends the gRPC library's own server, costs
    its connections alone: it is open again within moments, and the lane's sessions stay."""
    client.open()
    engine = Engine(client)
    engine.put(TOKENS)
    for _ in range(2):
        headers = http2.headers(b"/kvstore.\xf61.KVStore/Lookup", b"")
        http2.send(daemon.socket, [http2.PREFACE + http2.frame(4, 0, 0, b"") + headers])
        assert client.answers(), "the server did not come back"
    assert client.lane.call("Status", pb.StatusRequest()).state == "serving"
    assert engine.lookup(TOKENS).matched_tokens == 64
    assert all("UnicodeDecodeError" in failure for failure in daemon.failures)
    daemon.failures.clear()
