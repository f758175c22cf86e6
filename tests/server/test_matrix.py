"""Who gets in and what they may call: every user, socket mode, token, role and method."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from peers import GrpcPeer, LanePeer
from served import ServedStore, config_for_tests, serving

from kvstore.core.config import AccessRule
from kvstore.core.lane import METHODS, FrameKind
from kvstore.proto.v1 import kvstore_pb2 as pb

SERVICES = pb.DESCRIPTOR.services_by_name
ADMIN = {method.name for method in SERVICES["Admin"].methods}
ENGINE = {method.name for method in SERVICES["KVStore"].methods}
NEVER_ENDING = 0.25
SHAPES = {
    "Restore": "unary_stream", "FetchInline": "unary_stream", "Subscribe": "unary_stream",
    "PutInline": "stream_unary", "Session": "stream_stream", "TraceStart": "unary_stream",
}  # fmt: skip
DENIED, STRANGER = "PERMISSION_DENIED", "UNAUTHENTICATED"

GROUP, MEMBER, NAMED, RULED_BY_GROUP, NOBODY = 4100, 4101, 4102, 4103, 4104
MANY = range(5000, 5100)
RULES = (
    AccessRule(uid=os.getuid(), role="admin"),
    AccessRule(uid=NAMED, role="engine"),
    AccessRule(gid=RULED_BY_GROUP, role="admin"),
)
# uid and groups, and what a rule says of them; whether the socket lets them is its mode's word.
PEERS = {
    "the daemon's own user": (os.getuid(), [], "admin"),
    "a user with a rule": (NAMED, [], "engine"),
    "one with a rule, in the socket's group": (NAMED, [GROUP], "engine"),
    "one whose other group has a rule": (MEMBER, [GROUP, *MANY, RULED_BY_GROUP], "admin"),
    "one without a rule, in the socket's group": (MEMBER, [GROUP], STRANGER),
    "one without anything": (NOBODY, [], STRANGER),
}
# Becomes each user in turn and opens a session on each socket; says what came of it. A process of
# its own, without anything of ours.
TRY = """
import json, os, socket, struct, sys
def attempt(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(20)
        try:
            one.connect(path)
        except PermissionError:
            return "no entry"
        one.sendall(struct.pack("<IBBHQ", 0, 0, 0, 0, 1))
        answer = one.recv(65536)[16:]
        words = ("UNAUTHENTICATED", "engine", "admin")
        return next((word for word in words if word.encode() in answer), "no lane")
for uid, groups in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        if uid != os.getuid():
            os.setgroups(groups); os.setgid(uid); os.setuid(uid)
        print(json.dumps([attempt(path) for path in sys.argv[2:]]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_every_method_is_in_the_table() -> None:
    """I18: the matrix below covers both services, and the daemon serves nothing beside them."""
    assert set(METHODS) == ENGINE | ADMIN
    assert not ENGINE & ADMIN


# ---- Users and socket modes ----


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may enter, so that only the socket's mode counts."""
    path = Path(tempfile.mkdtemp(prefix="kvstore-matrix-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def may_connect(uid: int, groups: list[int], mode: int) -> bool:
    """What the kernel says of a socket of ours that belongs to GROUP."""
    if uid in (0, os.getuid()):
        return True
    return bool(mode & (0o020 if GROUP in groups else 0o002))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")
def test_users_and_socket_modes(open_directory: Path) -> None:
    """I18: a user gets in when the socket's mode and an access rule both say so, with the role of
    the rule; where the mode is too wide by mistake, the rules alone keep strangers out."""
    config = config_for_tests(access=RULES)
    with serving(open_directory, config) as daemon:
        os.chown(daemon.lane_path, -1, GROUP)
        for mode in (0o600, 0o660, 0o666):
            daemon.lane_path.chmod(mode)
            found = attempts(daemon.lane_path)
            for who, (uid, groups, rule) in PEERS.items():
                wanted = rule if may_connect(uid, groups, mode) else "no entry"
                assert found[who] == [wanted], f"{who}, mode {mode:o}"


def attempts(*paths: Path) -> dict[str, list[str]]:
    """What each of PEERS gets at each of the sockets."""
    users = json.dumps([(uid, groups) for uid, groups, _ in PEERS.values()])
    done = subprocess.run(
        [sys.executable, "-ISc", TRY, users, *map(str, paths)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return dict(zip(PEERS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")
def test_sockets_are_made_for_their_owner_or_group(open_directory: Path) -> None:
    """I18: without a socket group neither socket lets another user connect, rule or not."""
    with serving(open_directory, config_for_tests(access=RULES)) as daemon:
        found = attempts(daemon.lane_path, daemon.socket)
        del found["the daemon's own user"]
        assert set(map(tuple, found.values())) == {("no entry", "no entry")}


# ---- Tokens, roles and methods ----


GARBAGE = b"\xff" * 9


def over_grpc(peer: GrpcPeer, method: str, token: bytes, payload: bytes = b"") -> str:
    """The status of a request, an empty one; OK also for a stream that has begun."""
    shape = SHAPES.get(method, "unary_unary")
    stub = peer.method(method, shape)
    metadata = (("x-kv-session-bin", token),) if token else ()
    argument = iter([payload]) if shape.startswith("stream") else payload
    limit = NEVER_ENDING if method in ("Subscribe", "TraceStart", "Session") else 20.0
    try:
        answer = stub(argument, metadata=metadata, timeout=limit)
        if shape.endswith("stream"):
            list(answer)
    except grpc.RpcError as error:
        name = str(error.code().name)
        return "OK" if limit == NEVER_ENDING and name == "DEADLINE_EXCEEDED" else name
    return "OK"


def over_lane(peer: LanePeer, method: str, payload: bytes = b"") -> str:
    """The same; OK, too, for what has not ended when a later call is answered."""
    call_id = peer.send(method, payload)
    mark = peer.send("Session", b"")
    status = "OK"
    while True:
        kind, _, got, payload = peer.receive()
        if got == call_id and kind == FrameKind.ERROR:
            status = pb.LaneError.FromString(payload).code
        if got == mark:
            return status


def may_call(role: str, method: str) -> bool:
    return role == "admin" or method in ENGINE


@pytest.mark.parametrize("role", ["engine", "admin"])
def test_roles_and_methods(tmp_path: Path, role: str) -> None:
    """I18: on the lane and over gRPC an engine may call every method of the KVStore service and
    none of the Admin service, an admin all of both; no other answer depends on the role."""
    rules = (AccessRule(uid=os.getuid(), role=role), AccessRule(uid=os.getuid(), tenant="b"))
    with serving(tmp_path, config_for_tests(access=rules)) as daemon:
        peer = GrpcPeer(daemon)
        assert peer.open().role == role
        for method in [*sorted(ENGINE | ADMIN - {"Drain"}), "Drain"]:
            found = {"gRPC": over_grpc(peer, method, peer.token)}
            found["lane"] = over_lane(peer.lane, method)
            allowed = may_call(role, method)
            for transport, status in found.items():
                assert (status != DENIED) == allowed, (role, method, transport, status)
                # Sessions of this host open on the lane alone.
                assert (status == STRANGER) == (method == "OpenSession" and transport == "gRPC")
        peer.close()


def test_garbage_tells_nothing_of_what_one_may_not_call(tmp_path: Path) -> None:
    """I18: an engine that calls an admin method hears that it may not, whatever bytes it sends."""
    rules = (AccessRule(uid=os.getuid(), role="engine"),)
    with serving(tmp_path, config_for_tests(access=rules)) as daemon:
        peer = GrpcPeer(daemon)
        peer.open()
        for method in sorted(ADMIN):
            assert over_grpc(peer, method, peer.token, GARBAGE) == DENIED, method
            assert over_lane(peer.lane, method, GARBAGE) == DENIED, method
        assert over_grpc(peer, "Lookup", peer.token, GARBAGE) == "INVALID_ARGUMENT"
        assert over_lane(peer.lane, "Lookup", GARBAGE) == "INVALID_ARGUMENT"
        peer.close()


def test_tokens_and_methods(tmp_path: Path) -> None:
    """I18: with no token, a made-up one, one cut short or one of an ended session every method of
    both services answers UNAUTHENTICATED, on the lane every one but OpenSession before that."""
    with serving(tmp_path, config_for_tests()) as daemon:
        peer, ended = GrpcPeer(daemon), LanePeer(daemon.lane_path)
        peer.open()
        old = ended.open().token
        ended.close()
        assert daemon.eventually(lambda: len(daemon.store.parts.sessions) == 1)
        for method in METHODS:
            for token in (b"", bytes(32), peer.token[:31], peer.token + b"x", old):
                assert over_grpc(peer, method, token) == STRANGER, (method, token)
        peer.close()
        for method in set(METHODS) - {"OpenSession"}:
            assert refusal_before_opening(daemon, method) == STRANGER


def refusal_before_opening(daemon: ServedStore, method: str) -> str:
    stranger = LanePeer(daemon.lane_path)
    stranger.send(method, b"")
    code = str(stranger.error().code)
    assert stranger.at_eof()
    stranger.close()
    return code
