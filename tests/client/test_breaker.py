"""A daemon that is gone, frozen or leaving costs the engine nothing but the hit."""

from __future__ import annotations

import threading
import time

import pytest

from kvstore.client import KVClient, LeaseLost, StoreUnavailable
from kvstore.core.errors import Draining, SpecMismatch, Unauthenticated
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(32))
BLOCKS = bytes(range(256)) * 16 * 8


def connect(daemon, **options):
    return KVClient.connect(f"unix://{daemon.path}", **options)


def is_back(space):
    try:
        space.lookup(TOKENS).release()
    except StoreUnavailable:
        return False
    return True


def test_no_daemon_says_so_and_how_to_start_one(tmp_path):
    """Connecting where nobody listens raises StoreUnavailable with the address and the fix."""
    with pytest.raises(StoreUnavailable, match=r"no daemon answers at .*kvstore serve"):
        KVClient.connect(f"unix://{tmp_path}/none.sock")


def test_a_frozen_daemon_costs_one_time_limit_and_then_nothing(daemon, spec, eventually):
    """The first call waits its limit, the next ones not at all, until the daemon answers again."""
    with connect(daemon, call_timeout_seconds=0.1) as client:
        space = client.attach(spec)
        space.put(TOKENS, BLOCKS)
        daemon.frozen.set()
        start = time.perf_counter()
        with pytest.raises(StoreUnavailable, match=r"did not answer Lookup within 0\.1 s"):
            space.lookup(TOKENS)
        assert 0.09 < time.perf_counter() - start < 0.5
        start = time.perf_counter()
        for _ in range(100):
            with pytest.raises(StoreUnavailable):
                space.lookup(TOKENS)
        assert time.perf_counter() - start < 0.1
        assert not client.available
        daemon.frozen.clear()
        eventually(lambda: is_back(space))
        assert daemon.calls.count("OpenSession") == 1, "the session was kept"


def test_a_frozen_daemon_is_noticed_without_a_call(daemon, spec, eventually):
    """Renewals find a frozen daemon, so that an idle engine's next lookup does not wait."""
    daemon.lease_ttl = 0.3
    with connect(daemon) as client:
        space = client.attach(spec)
        space.put(TOKENS, BLOCKS)
        match = space.lookup(TOKENS)
        daemon.frozen.set()
        eventually(lambda: not client.available)
        with pytest.raises(LeaseLost, match="ended"):
            match.check()


def test_a_late_lookup_gives_its_lease_back(daemon, spec, eventually):
    """A lease that is granted after the caller gave up is released, not left to its TTL."""
    with connect(daemon, call_timeout_seconds=0.05) as client:
        space = client.attach(spec)
        space.put(TOKENS, BLOCKS)
        daemon.frozen.set()
        with pytest.raises(StoreUnavailable):
            space.lookup(TOKENS)
        daemon.frozen.clear()
        eventually(lambda: daemon.released)


def test_a_late_reservation_is_aborted(daemon, spec, eventually):
    """What a Reserve kept room for after the caller gave up is given back."""
    with connect(daemon, put_timeout_seconds=0.05) as client:
        space = client.attach(spec)
        daemon.frozen.set()
        with pytest.raises(StoreUnavailable):
            space.put(TOKENS, BLOCKS)
        daemon.frozen.clear()
        eventually(lambda: daemon.aborted)


def test_an_unanswered_commit_keeps_its_staging_range(daemon, spec, silence):
    """I5: bytes of another block never get into a range that a thawing daemon may still copy."""
    with connect(daemon, put_timeout_seconds=0.05) as client:
        space = client.attach(spec)
        staging = client._link.session().staging
        daemon.before = lambda method, request: silence if method == "Commit" else None
        with pytest.raises(StoreUnavailable):
            space.put(TOKENS, BLOCKS)
        assert staging.free_bytes == staging.size - 8 * 4096
        assert staging.take(4096).offset == 8 * 4096


def test_a_late_commit_answer_frees_its_range(daemon, spec, eventually):
    """An answer that comes late is an answer: the daemon does not read the range any more."""
    with connect(daemon, put_timeout_seconds=0.3) as client:
        space = client.attach(spec)
        staging = client._link.session().staging

        def freeze(method, request):
            if method == "Commit" and not daemon.frozen.is_set():
                daemon.frozen.set()
                time.sleep(0.5)

        daemon.before = freeze
        with pytest.raises(StoreUnavailable):
            space.put(TOKENS, BLOCKS)
        daemon.before = lambda method, request: None
        daemon.frozen.clear()
        eventually(lambda: staging.free_bytes == staging.size)


def test_a_killed_daemon_is_gone_at_once_and_back_by_itself(daemon, spec, eventually):
    """After a restart the same Space works again, in a new session, without the caller's help."""
    with connect(daemon) as client:
        space = client.attach(spec)
        space.put(TOKENS, BLOCKS)
        match = space.lookup(TOKENS)
        daemon.kill()
        start = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            space.lookup(TOKENS)
        assert time.perf_counter() - start < 0.05
        eventually(lambda: not client.available)
        with pytest.raises(LeaseLost):
            match.check()
        daemon.start()
        eventually(lambda: is_back(space))
        assert daemon.calls.count("Attach") == 2
        match.release()


def test_all_waiting_calls_fail_when_the_daemon_dies(daemon, spec, silence):
    """No thread is left waiting for its time limit by a daemon that is gone."""
    with connect(daemon, call_timeout_seconds=30) as client:
        space = client.attach(spec)
        daemon.before = lambda method, request: silence if method == "Lookup" else None
        failures = []

        def look():
            with pytest.raises(StoreUnavailable) as caught:
                space.lookup(TOKENS)
            failures.append(caught.value)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        while daemon.calls.count("Lookup") < 4:
            time.sleep(0.01)
        daemon.kill()
        for thread in threads:
            thread.join(5)
        assert len(failures) == 4


def test_an_ended_session_is_replaced(daemon, spec, eventually):
    """A session the daemon forgot (the client was frozen) is opened anew, not used for ever."""
    with connect(daemon) as client:
        space = client.attach(spec)
        once = iter([Unauthenticated("the session has ended; open a new one")])
        daemon.before = lambda method, request: next(once, None) if method == "Lookup" else None
        with pytest.raises(StoreUnavailable, match="has ended"):
            space.lookup(TOKENS)
        eventually(lambda: is_back(space))
        assert daemon.calls.count("OpenSession") == 2


def test_draining_is_unavailable_with_the_reason(daemon, spec, eventually):
    """A daemon that leaves gets no new calls, but leases go on until it is gone."""
    with connect(daemon) as client:
        space = client.attach(spec)
        space.put(TOKENS, BLOCKS)
        match = space.lookup(TOKENS)
        daemon.notice(pb.Notice(draining=True, drain_seconds=3))
        eventually(lambda: not client.available)
        with pytest.raises(StoreUnavailable, match="draining"):
            space.lookup(TOKENS)
        match.check()
        space.restore_into(match, bytearray(8 * 4096))
        assert client.status().state == "serving"
        match.release()


def test_a_refusal_for_draining_opens_the_circuit(daemon, spec):
    """UNAVAILABLE as an answer is StoreUnavailable, and the next call does not ask again."""
    with connect(daemon) as client:
        space = client.attach(spec)
        daemon.before = lambda method, request: (
            Draining("the daemon is draining") if method == "Lookup" else None
        )
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="is draining"):
                space.lookup(TOKENS)
        assert daemon.calls.count("Lookup") == 1


def test_a_lost_lease_is_lost_to_its_match(daemon, spec, eventually):
    """I6: a notice of a lost lease makes the match raise LeaseLost."""
    with connect(daemon) as client:
        space = client.attach(spec)
        space.put(TOKENS, BLOCKS)
        match = space.lookup(TOKENS)
        daemon.notice(pb.Notice(lost_leases=[match.lease.id]))
        eventually(lambda: match.lease.lost)
        with pytest.raises(LeaseLost, match="the daemon ended it"):
            space.restore_into(match, bytearray(8 * 4096))


def test_one_space_that_is_refused_leaves_the_others_alone(daemon, spec, eventually):
    """After a restart with another configuration the spaces that still fit go on."""
    with connect(daemon) as client:
        good = client.attach(spec)
        bad = client.attach(spec, tenant="other")
        daemon.kill()

        def refuse(method, request):
            if method == "Attach" and request.tenant == "other":
                return SpecMismatch("block_bytes is another")
            return None

        daemon.before = refuse
        daemon.start()
        eventually(lambda: is_back(good))
        with pytest.raises(SpecMismatch, match="block_bytes is another"):
            bad.lookup(TOKENS)


def test_a_closed_client_says_so(daemon, spec):
    """Calls after close raise StoreUnavailable with the fix, and close may be called twice."""
    client = connect(daemon)
    space = client.attach(spec)
    client.close()
    client.close()
    with pytest.raises(StoreUnavailable, match="the client is closed"):
        space.lookup(TOKENS)
    assert "closed" in repr(client)
