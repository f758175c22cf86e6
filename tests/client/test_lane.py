"""Calls over the lane: many threads on one connection, and answers for the right ones."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import threading
import time

import pytest

from kvstore.client import InvalidRequest, KVClient, NotFound, StoreUnavailable
from kvstore.client.lane import LaneTransport
from kvstore.client.transport import CallTimeout, Disconnected
from kvstore.core.errors import LimitReached
from kvstore.core.lane import FrameKind, pack_frame
from kvstore.proto.v1 import kvstore_pb2 as pb


@pytest.fixture
def transport(daemon):
    opened = LaneTransport(daemon.path, 5.0)
    opened.open(pb.OpenSessionRequest(), 5.0)
    yield opened
    opened.close()


def test_every_thread_gets_its_own_answers(daemon, transport):
    """I1: with many callers on one connection no answer reaches another call."""

    def number(method, request):
        if method == "Lookup":
            time.sleep(random.Random(request.local_tokens).random() / 2000)
            return pb.LookupResponse(matched_tokens=request.local_tokens)
        return None

    daemon.before = number
    wrong = []

    def ask(start):
        for i in range(start, start + 50):
            answer = transport.call("Lookup", pb.LookupRequest(local_tokens=i), 5.0)
            if answer.matched_tokens != i:
                wrong.append(i)

    threads = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong
    assert daemon.calls.count("Lookup") == 400
    assert not transport._calls
    assert not transport._followers


def test_a_caller_with_a_short_limit_is_not_held_by_one_with_a_long(daemon, transport, silence):
    """Each call keeps its own time limit, whoever reads the connection."""
    daemon.before = lambda method, request: silence

    def wait_long():
        with pytest.raises(CallTimeout):
            transport.call("Renew", pb.RenewRequest(), 1.0)

    slow = threading.Thread(target=wait_long)
    slow.start()
    time.sleep(0.05)
    start = time.perf_counter()
    with pytest.raises(CallTimeout):
        transport.call("Lookup", pb.LookupRequest(), 0.1)
    assert time.perf_counter() - start < 0.4
    slow.join()


def test_a_waiting_call_reads_on_when_the_reader_leaves(daemon, transport, silence):
    """The thread that reads for all hands over when its own answer has come."""

    def later(method, request):
        if method == "Lookup":
            time.sleep(0.1)
        return None

    daemon.before = later
    answers = []

    def ask():
        answers.append(transport.call("Lookup", pb.LookupRequest(), 5.0))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(answers) == 3


@pytest.mark.parametrize(
    ("error", "kind"), [(NotFound("n"), NotFound), (LimitReached("l"), LimitReached)]
)
def test_errors_come_back_as_they_were(daemon, transport, error, kind):
    """A status code is the exception it was made from, with its sentence."""
    daemon.before = lambda method, request: error
    with pytest.raises(kind, match=str(error)):
        transport.call("Lookup", pb.LookupRequest(), 1.0)


def test_a_stream_ends_with_its_response(daemon, transport):
    """Items of a stream come one by one, in order, and then it is over."""

    def stream(method, request):
        peer = next(iter(daemon.peers.values()))
        call_id = max(transport._calls)
        for first in (0, 4):
            item = pb.RestoreResponse(first_block=first, block_count=4).SerializeToString()
            peer.socket.send(pack_frame(FrameKind.STREAM, 3, 0, call_id, item))
        return pb.RestoreResponse()

    daemon.before = stream
    items = list(transport.stream("Restore", pb.RestoreRequest(), 1.0))
    assert [item.first_block for item in items] == [0, 4]


def test_a_stream_that_stalls_raises(daemon, transport, silence):
    """The time limit of a stream is for each item."""
    daemon.before = lambda method, request: silence
    with pytest.raises(CallTimeout):
        list(transport.stream("Restore", pb.RestoreRequest(), 0.05))


def test_a_frame_that_cannot_be_sent_whole_ends_the_connection(daemon, transport):
    """Half a frame is never followed by another one."""
    daemon.frozen.set()
    big = pb.LookupRequest(prompt=pb.Prompt(tokens=bytes(3 << 20)))
    with pytest.raises(Disconnected, match="stopped reading"):
        transport.call("Lookup", big, 0.1)
    with pytest.raises(Disconnected):
        transport.call("Lookup", pb.LookupRequest(), 0.1)


def test_a_message_over_the_limit_is_not_sent(daemon, transport):
    """A prompt too long for one message is the caller's error, not the connection's end."""
    calls = len(daemon.calls)
    big = pb.LookupRequest(prompt=pb.Prompt(tokens=bytes(5 << 20)))
    with pytest.raises(InvalidRequest, match="at most 4194304"):
        transport.call("Lookup", big, 1.0)
    assert len(daemon.calls) == calls
    transport.call("Lookup", pb.LookupRequest(), 1.0)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, pack_frame(1, 2, 0, 2, b"\xff\xff\xff")])
def test_garbage_from_the_daemon_is_a_lost_connection(daemon, transport, silence, garbage):
    """I19: what is no frame or no message ends the connection; nothing else happens."""

    def garble(method, request):
        next(iter(daemon.peers.values())).socket.send(garbage)
        return silence

    daemon.before = garble
    with pytest.raises(Disconnected, match="no frame"):
        transport.call("Lookup", pb.LookupRequest(), 1.0)


def test_a_pool_shorter_than_announced_is_refused(daemon, transport):
    """The client never maps more than a file holds: reading beyond would kill the engine."""
    daemon.on_attach = lambda peer, request, descriptors: (
        descriptors.extend([daemon.data_fd, daemon.map_fd]),
        pb.AttachResponse(pools=[pb.Pool(data_bytes=1 << 30, generation_bytes=1 << 21)]),
    )[1]
    with pytest.raises(StoreUnavailable, match="holds"):
        transport.attach(pb.AttachRequest(), 1.0)


def test_descriptors_do_not_pile_up(daemon, spec, eventually):
    """Attaching twice, closing and connecting again leave no descriptor behind."""

    def held():
        found = 0
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
        # Those of the daemon's own staging segments are in this process, too.
        return found - len(daemon.opened)

    gc.collect()  # of what tests before this one left
    before = held()
    for _ in range(3):
        with KVClient.connect(daemon.path) as client:
            client.attach(spec)
            client.attach(spec)
        del client
    eventually(lambda: held() <= before)


def test_a_forked_child_is_told_and_harms_nobody(daemon, spec):
    """A child may not talk over its parent's connection; the parent's goes on."""
    with KVClient.connect(daemon.path) as client:
        space = client.attach(spec)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                space.lookup(range(8))
                text = "it went through"
            except StoreUnavailable as error:
                text = str(error)
            client.close()
            os.write(write, text.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        text = os.read(read, 4096).decode()
        os.close(read)
        os.close(write)
        assert "which forked this one; call KVClient.connect() after the fork" in text
        space.lookup(list(range(8)))


def test_a_forked_child_does_not_hide_its_parents_death(daemon):
    """I15: the daemon sees the end of the connection though a child of the client lives on."""
    transport = LaneTransport(daemon.path, 5.0)
    descriptor = transport._socket._socket.fileno()
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(descriptor)
            status = 1
        except OSError:
            status = 0
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    transport.call("Status", pb.StatusRequest(), 1.0)
    transport.close()


def test_the_address_is_found_as_documented(daemon, monkeypatch, tmp_path):
    """Without an address KVSTORE_SOCKET counts first, then the runtime directory."""
    monkeypatch.setenv("KVSTORE_SOCKET", daemon.path)
    with KVClient.connect() as client:
        assert client.status().state == "serving"
    monkeypatch.delenv("KVSTORE_SOCKET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    with pytest.raises(StoreUnavailable, match=r"runtime/kvstore/kvstore\.sock"):
        KVClient.connect()


@pytest.mark.parametrize("address", ["localhost", "host:port", "unix://", ":80"])
def test_a_wrong_address_is_named(address):
    """An address that is neither a socket nor host:port is refused before anything is tried."""
    with pytest.raises(InvalidRequest, match="address"):
        KVClient.connect(address)


def test_the_network_needs_certificates():
    """host:port without tls is refused: there is no plain TCP."""
    with pytest.raises(InvalidRequest, match="pass tls=TLSConfig"):
        KVClient.connect("localhost:9751")


def test_nothing_secret_is_printed(client, spec):
    """The session's token shows in no representation."""
    space = client.attach(spec)
    shown = f"{client!r} {space!r} {client._link.session()!r} {client.admin!r}"
    assert "tttt" not in shown


def test_a_full_backlog_is_unavailable(tmp_path):
    """A daemon that accepts nobody is unavailable within the time limit."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{tmp_path}/s.sock.lane")
    listener.listen(0)
    waiting = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(f"{tmp_path}/s.sock.lane")
    with pytest.raises(StoreUnavailable, match="no daemon answers"):
        KVClient.connect(f"{tmp_path}/s.sock", attach_timeout_seconds=0.2)
    for one in (*waiting, listener):
        one.close()


def test_releases_ride_along_with_the_next_call(daemon, transport):
    """A release waits for company and reaches the daemon as the message it stands for."""
    released = []

    def note(method, request):
        if method == "Release":
            released.extend(request.lease_ids)
        return None

    daemon.before = note
    leases = [1, 2**64 - 1]
    for lease_id in leases:
        transport.release(lease_id)
    assert not released
    transport.call("Renew", pb.RenewRequest(), 5.0)
    assert released == leases
