"""The local lane on the wire: opening, dying, garbage, floods, fairness."""

from __future__ import annotations

import mmap
import os
import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peers import CallError, Engine, LanePeer
from served import ServedStore, config_for_tests, serving

from kvstore.core.config import AccessRule
from kvstore.core.errors import AlreadyRunning
from kvstore.core.lane import HEADER
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import peer as peer_module

TOKENS = list(range(64))
PROMPT = pb.Prompt(tokens=bytes(4 * 256))


def session_count(daemon: Any) -> int:
    count: int = daemon.on_owner(lambda: len(daemon.store.parts.sessions))
    return count


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


def test_attach_hands_read_only_pools_over(lane: Any) -> None:
    """I7: pool descriptors are read-only, two a pool, and cannot be mapped writable."""
    lane.open()
    engine = Engine(lane)
    descriptors = lane.take_descriptors()
    assert len(descriptors) == 2 * len(engine.attached.pools) > 0
    for descriptor in descriptors:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4096)
        os.close(descriptor)


def test_first_call_must_open(lane: Any) -> None:
    """I18: any other first call is UNAUTHENTICATED, and the daemon hangs up."""
    lane.send("Status", b"")
    assert lane.error().code == "UNAUTHENTICATED"
    assert lane.at_eof()


def test_unknown_identity_learns_nothing(tmp_path: Path) -> None:
    """I18: a peer without a rule gets the same refusal whatever it sends, and no session."""
    config = config_for_tests(access=(AccessRule(uid=os.getuid() + 1, tenant="b"),))
    with serving(tmp_path, config) as daemon:
        answers = set()
        for request in (
            pb.OpenSessionRequest(),
            pb.OpenSessionRequest(join_token=bytes(32)),
            b"\xff\xff",
        ):
            peer = LanePeer(daemon.lane_path)
            peer.send("OpenSession", request)
            error = peer.error()
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
    assert lane.error().code == "UNAUTHENTICATED"
    assert lane.at_eof()


def test_a_silent_stranger_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that opens no session is closed after a while."""
    monkeypatch.setattr(peer_module, "HANDSHAKE_SECONDS", 0.1)
    with serving(tmp_path, config_for_tests()) as daemon:
        peer = LanePeer(daemon.lane_path)
        assert peer.at_eof()
        peer.close()


def test_join_adds_a_connection(lane: Any, daemon: Any) -> None:
    """A joined connection works on the same session, and its end does not end it."""
    lane.open()
    engine = Engine(lane)
    other = LanePeer(daemon.lane_path)
    joined = other.open(join_token=lane.token)
    assert joined.staging_bytes == 0
    found = other.call("Lookup", pb.LookupRequest(attachment=engine.number, prompt=PROMPT))
    assert found.matched_tokens == 0
    assert session_count(daemon) == 1
    other.close()
    engine.lookup(TOKENS)


def test_join_dies_with_its_session(lane: Any, daemon: Any) -> None:
    """I15: when the opening connection ends, joined ones are closed too."""
    lane.open()
    other = LanePeer(daemon.lane_path)
    other.open(join_token=lane.token)
    lane.close()
    assert other.at_eof()
    other.close()


def test_join_with_a_wrong_token(lane: Any) -> None:
    """A token that is none opens nothing."""
    lane.send("OpenSession", pb.OpenSessionRequest(join_token=bytes(32)))
    assert lane.error().code == "UNAUTHENTICATED"
    assert lane.at_eof()


def test_opening_twice_is_refused(lane: Any) -> None:
    """A connection has one session; the connection goes on."""
    lane.open()
    with pytest.raises(CallError) as caught:
        lane.call("OpenSession", pb.OpenSessionRequest())
    assert caught.value.code == "INVALID_ARGUMENT"
    lane.call("Status", pb.StatusRequest())


def test_session_limit(tmp_path: Path) -> None:
    """Over limits.sessions a peer is told RESOURCE_EXHAUSTED; its staging is given back."""
    config = config_for_tests(limits={"sessions": 2})
    # Operators have places of their own; these peers are engines.
    config = msgspec.structs.replace(config, access=(AccessRule(uid=os.getuid()),))
    with serving(tmp_path, config) as daemon:
        peers = [LanePeer(daemon.lane_path) for _ in range(3)]
        peers[0].open()
        peers[1].open()
        with pytest.raises(CallError) as caught:
            peers[2].open()
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        assert "limits.sessions" in caught.value.message
        for peer in peers:
            peer.close()


def test_a_second_daemon_on_the_socket(lane: Any, daemon: Any) -> None:
    """I20: a second daemon on the socket is refused, and the first one's clients notice nothing."""
    lane.open()
    with pytest.raises(AlreadyRunning, match="another process serves"):
        ServedStore(daemon.socket.parent, config_for_tests())
    assert daemon.socket.is_socket()
    assert daemon.lane_path.is_socket()
    lane.call("Status", pb.StatusRequest())


# ---- Dying ----


def test_death_frees_everything_at_once(lane: Any, daemon: Any) -> None:
    """I15: when a client dies, its leases, reservations and staging are free within 1 s."""
    lane.open()
    engine = Engine(lane)
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


def test_death_in_the_middle_of_a_copy(lane: Any, daemon: Any) -> None:
    """I4: a client that dies while its Commit is copied leaves nothing visible or leaked."""
    lane.open(staging_bytes=4 << 20)
    engine = Engine(lane)
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
