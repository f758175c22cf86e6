"""The local lane on the wire: opening, dying, garbage, floods, fairness."""

from __future__ import annotations

import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from peers import CallError, Engine, LanePeer
from served import config_for_tests, serving

from kvstore.core.lane import FLAG_NO_REPLY, HEADER, METHOD_NUMBERS, METHODS, FrameKind, pack_frame
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(64))
PROMPT = pb.Prompt(tokens=bytes(4 * 256))


def session_count(daemon: Any) -> int:
    count: int = daemon.on_owner(lambda: len(daemon.store.parts.sessions))
    return count


# ---- Frames ----


def test_a_frame_a_byte_at_a_time(lane: Any) -> None:
    """Frames may arrive in any pieces."""
    frame = pack_frame(FrameKind.REQUEST, 0, 0, 1, pb.OpenSessionRequest().SerializeToString())
    for i in range(len(frame)):
        lane.socket.sendall(frame[i : i + 1])
    assert lane.answer("OpenSession", 1).token


def test_frames_in_random_pieces(lane: Any) -> None:
    """Many frames cut at random places are answered in order."""
    lane.open()
    number = Engine(lane).number
    request = pb.LookupRequest(attachment=number, prompt=PROMPT).SerializeToString()
    stream = b"".join(
        pack_frame(FrameKind.REQUEST, METHOD_NUMBERS["Lookup"], 0, i, request)
        for i in range(100, 300)
    )
    rng = random.Random(4)
    position = 0
    while position < len(stream):
        size = rng.choice((1, 3, 17, 900, 5000))
        lane.socket.sendall(stream[position : position + size])
        position += size
    for i in range(100, 300):
        assert lane.receive()[2] == i


def test_calls_piled_up_in_the_opening(lane: Any) -> None:
    """Calls sent right behind OpenSession wait until the session is open."""
    first = lane.send("OpenSession", pb.OpenSessionRequest())
    second = lane.send("Status", pb.StatusRequest())
    lane.answer("OpenSession", first)
    assert lane.answer("Status", second).state == "serving"


def test_largest_message(lane: Any, daemon: Any) -> None:
    """A prompt that fills a whole message is looked up."""
    lane.open()
    number = Engine(lane).number
    limit = daemon.config.limits.message_bytes
    prompt = pb.Prompt(tokens=bytes(limit - 1024))
    request = pb.LookupRequest(attachment=number, prompt=prompt)
    assert lane.call("Lookup", request).matched_tokens == 0


def test_oversize_frame(lane: Any, daemon: Any) -> None:
    """A frame over the limit is RESOURCE_EXHAUSTED, and the connection ends unread."""
    lane.open()
    limit = daemon.config.limits.message_bytes
    lane.socket.sendall(HEADER.pack(limit + 1, 0, METHOD_NUMBERS["Lookup"], 0, 5))
    error = lane.error()
    assert error.code == "RESOURCE_EXHAUSTED"
    assert "limits.message_bytes" in error.message
    assert lane.at_eof()


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 77, 255])
def test_frames_that_are_no_requests(lane: Any, kind: int) -> None:
    """Clients send requests only; anything else ends the connection."""
    lane.open()
    lane.socket.sendall(pack_frame(kind, 0, 0, 9, b""))
    assert lane.error().code == "INVALID_ARGUMENT"
    assert lane.at_eof()


def test_unknown_method(lane: Any) -> None:
    """A method of a later version is UNIMPLEMENTED, and the connection goes on."""
    lane.open()
    for number in (len(METHODS), 255):
        call_id = lane.send(number, b"")
        kind, _, got, payload = lane.receive()
        assert (kind, got) == (FrameKind.ERROR, call_id)
        assert pb.LaneError.FromString(payload).code == "UNIMPLEMENTED"
    lane.call("Status", pb.StatusRequest())


def test_inline_put_is_for_grpc(lane: Any) -> None:
    """PutInline has no frames on the lane: staging is there."""
    lane.open()
    with pytest.raises(CallError) as caught:
        lane.call("PutInline", pb.PutInlineRequest())
    assert caught.value.code == "UNIMPLEMENTED"


def test_no_reply_calls_stay_silent(lane: Any) -> None:
    """With NO_REPLY nothing is answered, errors included; order is kept."""
    lane.open()
    engine = Engine(lane)
    engine.put(TOKENS)
    lease = engine.lookup(TOKENS).lease_id
    lane.tell("Release", pb.ReleaseRequest(lease_ids=[lease]))
    lane.tell("Lookup", pb.LookupRequest(attachment=99))
    lane.send("Lookup", b"\xff\xff", FLAG_NO_REPLY)
    assert list(lane.call("Renew", pb.RenewRequest(lease_ids=[lease])).lost_leases) == [lease]


def test_garbage(daemon: Any) -> None:
    """Random bytes end their connection and nothing else; no memory or session is left."""
    rng = random.Random(17)
    witness = LanePeer(daemon.lane_path)
    witness.open()
    for i in range(150):
        peer = LanePeer(daemon.lane_path)
        try:
            if i % 3 == 0:
                peer.open()
            peer.socket.sendall(rng.randbytes(rng.randrange(1, 3000)))
            peer.socket.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert peer.at_eof()
        peer.close()
    witness.call("Status", pb.StatusRequest())
    witness.close()
    assert daemon.eventually(lambda: daemon.lane.connection_count == 0)
    assert session_count(daemon) == 0


def test_random_requests(lane: Any, daemon: Any) -> None:
    """I19: well-framed random payloads to every method never break the daemon or end it."""
    lane.open()
    Engine(lane)
    rng = random.Random(23)
    streams = {"Restore", "FetchInline", "Subscribe", "TraceStart"}
    for _ in range(2000):
        method = rng.choice([m for m in METHODS if m not in ("OpenSession", "Drain", *streams)])
        lane.send(method, rng.randbytes(rng.choice((0, 1, 2, 5, 20, 80))))
        kind, _, _, payload = lane.receive()
        if kind == FrameKind.ERROR:
            assert pb.LaneError.FromString(payload).code != "INTERNAL", payload
    for descriptor in lane.take_descriptors():
        os.close(descriptor)
    daemon.on_owner(daemon.store.check_integrity)


# ---- Floods ----


def test_a_reader_that_never_reads_is_held_back(lane: Any, daemon: Any) -> None:
    """I16: answers that nobody reads stop further requests; the daemon's memory stays bounded."""
    lane.open()
    lane.socket.settimeout(1.0)
    frame = pack_frame(FrameKind.REQUEST, METHOD_NUMBERS["Status"], 0, 1, b"\x08\x01")
    with pytest.raises(TimeoutError):
        lane.socket.sendall(frame * 200_000)
    assert daemon.on_owner(lambda: daemon.budget.used_bytes) <= 4 << 20
    assert session_count(daemon) == 1


@pytest.mark.parametrize(("event_count", "may_lose"), [(8_000, False), (24_000, True)])
def test_a_slow_subscriber(lane: Any, daemon: Any, event_count: int, may_lose: bool) -> None:
    """A slow subscriber costs a bounded queue: it goes on in the log, or is told what it lost."""
    lane.open()
    Engine(lane)
    for descriptor in lane.take_descriptors():
        os.close(descriptor)
    lane.send("Subscribe", pb.SubscribeRequest())
    lane.send("Session", pb.Heartbeat())
    assert lane.receive()[1] == METHOD_NUMBERS["Session"]
    events = daemon.store.events
    (space,) = daemon.store.parts.spaces.values()

    def emit() -> None:
        for _ in range(200):
            events.stored(space, "host", bytes(160), bytes(16), bytes(1000))

    for _ in range(event_count // 200):
        daemon.on_owner(emit)
    assert daemon.on_owner(lambda: daemon.budget.used_bytes) <= 4 << 20
    seen = lost = 0
    while seen < event_count:
        event = pb.Event.FromString(lane.receive()[3])
        if event.WhichOneof("kind") == "lost":
            lost += event.lost.next_sequence - seen - 1
            seen = event.lost.next_sequence - 1
        else:
            assert event.sequence == seen + 1
            seen = event.sequence
    assert bool(lost) == may_lose


def test_a_flood_does_not_starve_others(daemon: Any) -> None:
    """Connections take turns: a quiet client is answered while another floods."""
    flooding, quiet = LanePeer(daemon.lane_path), LanePeer(daemon.lane_path)
    flooding.open()
    quiet.open()
    frame = pack_frame(
        FrameKind.REQUEST, METHOD_NUMBERS["Release"], FLAG_NO_REPLY, 1, b"\x0a\x08" + bytes(8)
    )
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            flooding.socket.sendall(frame * 1000)

    thread = threading.Thread(target=flood)
    thread.start()
    quiet.socket.settimeout(2.0)
    for _ in range(50):
        quiet.call("Status", pb.StatusRequest())
    stop.set()
    thread.join()
    flooding.close()
    quiet.close()


def test_budget_of_messages_under_way(tmp_path: Path) -> None:
    """I16: large messages over the common budget are refused and read past; others go on."""
    with serving(tmp_path, config_for_tests(limits={"inflight_message_bytes": 3 << 20})) as daemon:
        first, second = LanePeer(daemon.lane_path), LanePeer(daemon.lane_path)
        first.open()
        second.open()
        number = METHOD_NUMBERS["Lookup"]
        size = 2 << 20
        request = pb.LookupRequest(prompt=pb.Prompt(tokens=bytes(size))).SerializeToString()
        frame = pack_frame(FrameKind.REQUEST, number, 0, 1, request)
        first.socket.sendall(frame[: size // 2])
        assert daemon.eventually(lambda: daemon.budget.used_bytes > size)
        second.socket.sendall(frame)
        error = second.error()
        assert error.code == "RESOURCE_EXHAUSTED"
        assert "limits.inflight_message_bytes" in error.message
        second.call("Status", pb.StatusRequest())
        first.socket.sendall(frame[size // 2 :])
        assert first.error().code == "NOT_FOUND"
        first.close()
        second.close()


def test_too_many_connections(daemon: Any) -> None:
    """Connections over the limit are told so and closed; the others keep working."""
    first = LanePeer(daemon.lane_path)
    first.open()
    others = [LanePeer(daemon.lane_path) for _ in range(100)]
    assert others[-1].error().code == "RESOURCE_EXHAUSTED"
    assert others[-1].at_eof()
    first.call("Status", pb.StatusRequest())
    for peer in (first, *others):
        peer.close()
    assert daemon.eventually(lambda: daemon.lane.connection_count == 0)
