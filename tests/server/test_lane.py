"""The local lane on the wire: opening, dying, garbage, floods, fairness."""

from __future__ import annotations

import mmap
import os
import random
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.config import AccessRule
from kvstore.core.lane import FLAG_NO_REPLY, HEADER, METHOD_NUMBERS, METHODS, FrameKind, pack_frame
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import peer as peer_module

TOKENS = list(range(64))
PROMPT = pb.Prompt(tokens=bytes(4 * 256))


@contextmanager
def running(kit: Any, directory: Path, config: Any) -> Iterator[Any]:
    daemon = kit.Daemon(directory, config)
    try:
        yield daemon
    finally:
        daemon.close()


def session_count(daemon: Any) -> int:
    count: int = daemon.on_owner(lambda: len(daemon.store.parts.sessions))
    return count


def error_of(lane: Any) -> pb.LaneError:
    kind, _, _, payload = lane.receive()
    assert kind == FrameKind.ERROR
    return pb.LaneError.FromString(payload)


# ---- Opening ----


def test_sockets_are_private(daemon: Any) -> None:
    """The daemon's sockets are 0600: nobody else may connect."""
    for path in (daemon.socket, daemon.lane_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_opening_hands_a_sealed_segment_over(lane: Any, daemon: Any) -> None:
    """A session gets a token, its limits, and a staging segment within the limits."""
    response = lane.open(staging_bytes=1 << 40)
    assert len(response.token) == 32
    assert response.boot_id == "boot-under-test"
    assert response.staging_bytes == daemon.config.limits.staging_bytes_per_session
    assert (response.role, list(response.tenants)) == ("admin", ["b", "default"])
    assert response.limits.message_bytes == daemon.config.limits.message_bytes
    assert response.limits.reserve_blocks > 0
    assert response.session_ttl_seconds > 0


def test_attach_hands_read_only_pools_over(lane: Any, kit: Any) -> None:
    """I7: pool descriptors are read-only, two a pool, and cannot be mapped writable."""
    lane.open()
    engine = kit.Engine(lane)
    descriptors = lane.take_descriptors()
    assert len(descriptors) == 2 * len(engine.attached.pools) > 0
    for descriptor in descriptors:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        os.close(descriptor)


def test_first_call_must_open(lane: Any) -> None:
    """I18: any other first call is UNAUTHENTICATED, and the daemon hangs up."""
    lane.send("Status", b"")
    assert error_of(lane).code == "UNAUTHENTICATED"
    assert lane.at_eof()


def test_unknown_identity_learns_nothing(tmp_path: Path, kit: Any) -> None:
    """I18: a peer without a rule gets the same refusal whatever it sends, and no session."""
    config = kit.config(access=(AccessRule(uid=os.getuid() + 1, tenant="b"),))
    with running(kit, tmp_path, config) as daemon:
        answers = set()
        for request in (
            pb.OpenSessionRequest(),
            pb.OpenSessionRequest(join_token=bytes(32)),
            b"\xff\xff",
        ):
            peer = kit.LanePeer(daemon.lane_path)
            peer.send("OpenSession", request)
            error = error_of(peer)
            answers.add((error.code, error.message))
            assert peer.at_eof()
            peer.close()
        ((code, message),) = answers
        assert code == "UNAUTHENTICATED"
        assert "boot-under-test" not in message
        assert session_count(daemon) == 0


def test_large_first_frame_is_refused_unread(lane: Any) -> None:
    """I16: a peer without a session cannot make the daemon keep a large message."""
    lane.socket.sendall(HEADER.pack(1 << 20, 0, 0, 0, 1))
    assert error_of(lane).code == "UNAUTHENTICATED"
    assert lane.at_eof()


def test_a_silent_stranger_is_hung_up_on(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that opens no session is closed after a while."""
    monkeypatch.setattr(peer_module, "HANDSHAKE_SECONDS", 0.1)
    with running(kit, tmp_path, kit.config()) as daemon:
        peer = kit.LanePeer(daemon.lane_path)
        assert peer.at_eof()
        peer.close()


def test_join_adds_a_connection(lane: Any, daemon: Any, kit: Any) -> None:
    """A joined connection works on the same session, and its end does not end it."""
    lane.open()
    engine = kit.Engine(lane)
    other = kit.LanePeer(daemon.lane_path)
    joined = other.open(join_token=lane.token)
    assert joined.staging_bytes == 0
    found = other.call("Lookup", pb.LookupRequest(attachment=engine.number, prompt=PROMPT))
    assert found.matched_tokens == 0
    assert session_count(daemon) == 1
    other.close()
    engine.lookup(TOKENS)


def test_join_dies_with_its_session(lane: Any, daemon: Any, kit: Any) -> None:
    """I15: when the opening connection ends, joined ones are closed too."""
    lane.open()
    other = kit.LanePeer(daemon.lane_path)
    other.open(join_token=lane.token)
    lane.close()
    assert other.at_eof()
    other.close()


def test_join_with_a_wrong_token(lane: Any) -> None:
    """A token that is none opens nothing."""
    lane.send("OpenSession", pb.OpenSessionRequest(join_token=bytes(32)))
    assert error_of(lane).code == "UNAUTHENTICATED"
    assert lane.at_eof()


def test_opening_twice_is_refused(lane: Any, kit: Any) -> None:
    """A connection has one session; the connection goes on."""
    lane.open()
    with pytest.raises(kit.CallError) as caught:
        lane.call("OpenSession", pb.OpenSessionRequest())
    assert caught.value.code == "INVALID_ARGUMENT"
    lane.call("Status", pb.StatusRequest())


def test_session_limit(tmp_path: Path, kit: Any) -> None:
    """Over limits.sessions a peer is told RESOURCE_EXHAUSTED; its staging is given back."""
    with running(kit, tmp_path, kit.config(limits={"sessions": 2})) as daemon:
        peers = [kit.LanePeer(daemon.lane_path) for _ in range(3)]
        peers[0].open()
        peers[1].open()
        with pytest.raises(kit.CallError) as caught:
            peers[2].open()
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert "limits.sessions" in caught.value.message
        for peer in peers:
            peer.close()


# ---- Dying ----


def test_death_frees_everything_at_once(lane: Any, daemon: Any, kit: Any) -> None:
    """I15: when a client dies, its leases, reservations and staging are free within 1 s."""
    lane.open()
    engine = kit.Engine(lane)
    engine.put(TOKENS)
    engine.lookup(TOKENS)
    engine.reserve([9, *TOKENS])
    lane.socket.close()
    store = daemon.store
    assert daemon.eventually(
        lambda: (
            not store.parts.sessions
            and len(store.parts.leases) == 0
            and len(store.reservations) == 0
            and daemon.staging.used_bytes == 0
        ),
        seconds=1.0,
    )


def test_death_in_the_middle_of_a_copy(lane: Any, daemon: Any, kit: Any) -> None:
    """I4: a client that dies while its Commit is copied leaves nothing visible or leaked."""
    lane.open(staging_bytes=4 << 20)
    engine = kit.Engine(lane)
    tokens = list(range(16 * 200))
    reserved = engine.reserve(tokens)
    run = pb.CommitRun(block_count=len(reserved.outcomes))
    lane.tell("Commit", pb.CommitRequest(reservation_id=reserved.reservation_id, runs=[run]))
    lane.socket.close()
    assert daemon.eventually(
        lambda: not daemon.store.parts.sessions and daemon.staging.used_bytes == 0
    )
    daemon.on_owner(daemon.store.check_integrity)


def test_half_closed_is_dead(lane: Any, daemon: Any) -> None:
    """A peer that shuts its sending side has nothing more to say: its session ends."""
    lane.open()
    lane.socket.shutdown(socket.SHUT_WR)
    assert lane.at_eof()
    assert daemon.eventually(lambda: not daemon.store.parts.sessions)


def test_silent_session_ends(lane: Any, daemon: Any) -> None:
    """I15: a session that is silent past its time to live ends, and its connection with it."""
    lane.open()
    session = next(iter(daemon.store.parts.sessions.values()))

    def age() -> None:
        session.last_seen -= 3600

    daemon.on_owner(age)
    assert lane.at_eof()
    assert session_count(daemon) == 0


def test_heartbeats_keep_a_session(lane: Any, daemon: Any) -> None:
    """Heartbeats have no answer unless asked for, and count as a sign of life."""
    lane.open()
    session = next(iter(daemon.store.parts.sessions.values()))
    daemon.on_owner(lambda: setattr(session, "last_seen", session.last_seen - 9))
    seen = session.last_seen
    lane.tell("Session", pb.Heartbeat())
    lane.call("Session", pb.Heartbeat())
    assert session.last_seen > seen


def test_notices_arrive(lane: Any, daemon: Any) -> None:
    """A drain is announced to every session before the next answer."""
    lane.open()
    lane.call("Drain", pb.DrainRequest(deadline_seconds=7))
    lane.call("Status", pb.StatusRequest())
    (notice,) = lane.notices
    assert (notice.draining, notice.drain_seconds) == (True, 7)


def test_lost_leases_are_told(lane: Any, daemon: Any) -> None:
    """A session hears of its leases that ran out."""
    lane.open()

    def tell() -> None:
        session = next(iter(daemon.store.parts.sessions.values()))
        session.notify("lost_leases", [3, 4])

    daemon.on_owner(tell)
    lane.call("Status", pb.StatusRequest())
    assert list(lane.notices[0].lost_leases) == [3, 4]


# ---- Frames ----


def test_a_frame_a_byte_at_a_time(lane: Any) -> None:
    """Frames may arrive in any pieces."""
    frame = pack_frame(FrameKind.REQUEST, 0, 0, 1, pb.OpenSessionRequest().SerializeToString())
    for i in range(len(frame)):
        lane.socket.sendall(frame[i : i + 1])
    assert lane.answer("OpenSession", 1).token


def test_frames_in_random_pieces(lane: Any, kit: Any) -> None:
    """Many frames cut at random places are answered in order."""
    lane.open()
    number = kit.Engine(lane).number
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


def test_largest_message(lane: Any, kit: Any, daemon: Any) -> None:
    """A prompt that fills a whole message is looked up."""
    lane.open()
    number = kit.Engine(lane).number
    limit = daemon.config.limits.message_bytes
    prompt = pb.Prompt(tokens=bytes(limit - 1024))
    request = pb.LookupRequest(attachment=number, prompt=prompt)
    assert lane.call("Lookup", request).matched_tokens == 0


def test_oversize_frame(lane: Any, daemon: Any) -> None:
    """A frame over the limit is RESOURCE_EXHAUSTED, and the connection ends unread."""
    lane.open()
    limit = daemon.config.limits.message_bytes
    lane.socket.sendall(HEADER.pack(limit + 1, 0, METHOD_NUMBERS["Lookup"], 0, 5))
    error = error_of(lane)
    assert error.code == "RESOURCE_EXHAUSTED"
    assert "limits.message_bytes" in error.message
    assert lane.at_eof()


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5, 77, 255])
def test_frames_that_are_no_requests(lane: Any, kind: int) -> None:
    """Clients send requests only; anything else ends the connection."""
    lane.open()
    lane.socket.sendall(pack_frame(kind, 0, 0, 9, b""))
    assert error_of(lane).code == "INVALID_ARGUMENT"
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


def test_inline_put_is_for_grpc(lane: Any, kit: Any) -> None:
    """PutInline has no frames on the lane: staging is there."""
    lane.open()
    with pytest.raises(kit.CallError) as caught:
        lane.call("PutInline", pb.PutInlineRequest())
    assert caught.value.code == "UNIMPLEMENTED"


def test_no_reply_calls_stay_silent(lane: Any, kit: Any) -> None:
    """With NO_REPLY nothing is answered, errors included; order is kept."""
    lane.open()
    engine = kit.Engine(lane)
    engine.put(TOKENS)
    lease = engine.lookup(TOKENS).lease_id
    lane.tell("Release", pb.ReleaseRequest(lease_ids=[lease]))
    lane.tell("Lookup", pb.LookupRequest(attachment=99))
    lane.send("Lookup", b"\xff\xff", FLAG_NO_REPLY)
    assert list(lane.call("Renew", pb.RenewRequest(lease_ids=[lease])).lost_leases) == [lease]


def test_garbage(daemon: Any, kit: Any) -> None:
    """Random bytes end their connection and nothing else; no memory or session is left."""
    rng = random.Random(17)
    witness = kit.LanePeer(daemon.lane_path)
    witness.open()
    for i in range(150):
        peer = kit.LanePeer(daemon.lane_path)
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


def test_random_requests(lane: Any, daemon: Any, kit: Any) -> None:
    """I19: well-framed random payloads to every method never break the daemon or end it."""
    lane.open()
    kit.Engine(lane)
    rng = random.Random(23)
    streams = {"Restore", "FetchInline", "Subscribe"}
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
def test_a_slow_subscriber(
    lane: Any, daemon: Any, kit: Any, event_count: int, may_lose: bool
) -> None:
    """A slow subscriber costs a bounded queue: it goes on in the log, or is told what it lost."""
    lane.open()
    kit.Engine(lane)
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


def test_a_flood_does_not_starve_others(daemon: Any, kit: Any) -> None:
    """Connections take turns: a quiet client is answered while another floods."""
    flooding, quiet = kit.LanePeer(daemon.lane_path), kit.LanePeer(daemon.lane_path)
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


def test_budget_of_messages_under_way(tmp_path: Path, kit: Any) -> None:
    """I16: large messages over the common budget are refused and read past; others go on."""
    with running(kit, tmp_path, kit.config(limits={"inflight_message_bytes": 3 << 20})) as daemon:
        first, second = kit.LanePeer(daemon.lane_path), kit.LanePeer(daemon.lane_path)
        first.open()
        second.open()
        number = METHOD_NUMBERS["Lookup"]
        size = 2 << 20
        request = pb.LookupRequest(prompt=pb.Prompt(tokens=bytes(size))).SerializeToString()
        frame = pack_frame(FrameKind.REQUEST, number, 0, 1, request)
        first.socket.sendall(frame[: size // 2])
        assert daemon.eventually(lambda: daemon.budget.used_bytes > size)
        second.socket.sendall(frame)
        error = error_of(second)
        assert error.code == "RESOURCE_EXHAUSTED"
        assert "limits.inflight_message_bytes" in error.message
        second.call("Status", pb.StatusRequest())
        first.socket.sendall(frame[size // 2 :])
        assert error_of(first).code == "NOT_FOUND"
        first.close()
        second.close()


def test_too_many_connections(daemon: Any, kit: Any) -> None:
    """Connections over the limit are told so and closed; the others keep working."""
    first = kit.LanePeer(daemon.lane_path)
    first.open()
    others = [kit.LanePeer(daemon.lane_path) for _ in range(100)]
    assert error_of(others[-1]).code == "RESOURCE_EXHAUSTED"
    assert others[-1].at_eof()
    first.call("Status", pb.StatusRequest())
    for peer in (first, *others):
        peer.close()
    assert daemon.eventually(lambda: daemon.lane.connection_count == 0)
