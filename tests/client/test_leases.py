"""A match covers its blocks for the time of its lease, and says so when it no longer does."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from kvstore.client import KVClient, LeaseLost
from kvstore.client.lane import LaneTransport
from kvstore.client.link import Timeouts
from kvstore.core.clock import ManualClock
from kvstore.proto.v1 import kvstore_pb2 as pb

SIZE, COUNT = 4096, 10
TOKENS = list(range(4 * COUNT))
BLOCKS = np.frombuffer(random.Random(7).randbytes(SIZE * COUNT), np.uint8).reshape(COUNT, SIZE)


@pytest.fixture
def manual(daemon, spec):
    """A client on a clock that the test moves, and its space."""
    clock = ManualClock()
    client = KVClient.over(
        lambda timeout: LaneTransport(daemon.path, timeout),
        timeouts=Timeouts(call_seconds=5.0), clock=clock, background=False,
    )  # fmt: skip
    yield client, clock, client.attach(spec)
    client.close()


def test_a_cleared_block_is_lease_lost(space, daemon):
    """I6: bytes that were un-published under the lease are refused after the copy."""
    space.put(TOKENS, BLOCKS)
    with space.lookup(TOKENS) as match:
        views = space.restore(match)
        daemon.generations[3] = 0
        with pytest.raises(LeaseLost, match="cleared"):
            space.restore_into(match, bytearray(SIZE * COUNT))
        with pytest.raises(LeaseLost):
            match.check()
        assert len(views) == COUNT


def test_a_reused_slot_is_lease_lost(space, daemon):
    """I6: a slot that holds another block by now has another generation."""
    space.put(TOKENS, BLOCKS)
    with space.lookup(TOKENS) as match:
        daemon.generations[3] += 1000
        with pytest.raises(LeaseLost):
            space.restore_into(match, bytearray(SIZE * COUNT))


def test_a_client_frozen_past_its_ttl_gets_lease_lost(manual, daemon):
    """I6: after its time, counted from before the call, a lease covers nothing more."""
    _, clock, space = manual
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS)
    clock.advance(9.9)
    space.restore_into(match, bytearray(SIZE * COUNT))
    clock.advance(0.2)
    with pytest.raises(LeaseLost, match=r"the lease ended .* ago"):
        space.restore_into(match, bytearray(SIZE * COUNT))
    with pytest.raises(LeaseLost):
        match.check()


def test_a_lease_that_ends_during_the_copy_is_lease_lost(manual, daemon, monkeypatch):
    """I6: the time is looked at after the copy, not only before it."""
    _, clock, space = manual
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS)
    copy = match.located.copy
    match.located.copy = lambda target: (copy(target), clock.advance(11))
    with pytest.raises(LeaseLost):
        space.restore_into(match, bytearray(SIZE * COUNT))


def test_leases_are_renewed_at_a_third_of_their_time(manual, daemon):
    """A live match stays readable for as long as it is held."""
    client, clock, space = manual
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS)
    clock.advance(3.0)
    client.keep()
    assert "Renew" not in daemon.calls
    for _ in range(5):
        clock.advance(3.4)
        client.keep()
    assert daemon.calls.count("Renew") == 5
    space.restore_into(match, bytearray(SIZE * COUNT))


def test_a_lost_renewal_is_lease_lost(manual, daemon):
    """I6: a lease that the daemon no longer has is lost, however much time it had left."""
    client, clock, space = manual
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS)
    daemon.before = lambda method, request: (
        pb.RenewResponse(lost_leases=request.lease_ids, lease_ttl_seconds=10)
        if method == "Renew"
        else None
    )
    clock.advance(4)
    client.keep()
    with pytest.raises(LeaseLost, match="the daemon ended it"):
        match.check()


def test_an_idle_session_says_that_it_lives(manual, daemon):
    """A client without leases sends a sign of life within a third of the session's time."""
    client, clock, _ = manual
    for _ in range(30):
        clock.advance(1.0)
        client.keep()
    assert daemon.calls.count("Renew") >= 2


def test_release_ends_the_lease_once(space, daemon, eventually):
    """A match is released by hand or by its context, once; afterwards it restores nothing."""
    space.put(TOKENS, BLOCKS)
    with space.lookup(TOKENS) as match:
        match.release()
    lease = match.lease.id
    eventually(lambda: daemon.released == [lease])
    with pytest.raises(LeaseLost, match="released"):
        space.restore_into(match, bytearray(SIZE * COUNT))
    match.release()
    space.lookup(TOKENS[:4]).release()
    assert daemon.released.count(lease) == 1


def test_a_forgotten_match_is_released(space, daemon, eventually):
    """A match that nobody holds any more does not keep its lease for ever."""
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS)
    lease = match.lease.id
    del match
    gc.collect()
    eventually(lambda: lease in daemon.released)


def test_two_matches_of_one_lease_release_it_together(space, daemon, eventually):
    """A repeated lookup shares its lease: it lives until both matches are released."""
    space.put(TOKENS, BLOCKS)
    first = space.lookup(TOKENS, request_id="r")

    def repeat(method, request):
        if method != "Lookup":
            return None
        response = daemon.on_lookup(None, request, [])
        response.lease_id = first.lease.id
        return response

    daemon.before = repeat
    second = space.lookup(TOKENS, request_id="r")
    assert second.lease is first.lease
    first.release()
    space.restore_into(second, bytearray(SIZE * COUNT))
    assert not daemon.released
    second.release()
    eventually(lambda: daemon.released == [first.lease.id])


def test_finishing_a_request_ends_its_leases(space, daemon):
    """I6: after finish_request its matches are over, and nothing renews them."""
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS, request_id="r1")
    space.finish_request("r1", output_tokens=7)
    with pytest.raises(LeaseLost, match="r1 is finished"):
        match.check()


def test_a_miss_has_nothing_to_restore(space):
    """Nothing stored is an empty match, not an error."""
    with space.lookup(TOKENS) as match:
        assert (match.matched_tokens, match.block_count) == (0, 0)
        assert space.restore(match) == []
        space.restore_into(match, [])


def test_pools_are_brought_in_before_they_are_needed(manual, daemon):
    """Pages of a pool are mapped in the background, so that a first restore takes no longer."""
    client, _, space = manual
    pool = space._link.attachment(space).pools[0]
    session = space._link.session()
    assert not session._cells_touched
    client.keep()
    assert session._cells_touched
    assert not session._untouched
    assert pool.touch(0, 10 * SIZE) == 10 * SIZE
    assert pool.touch(10 * SIZE, 1 << 40) == len(pool.data)


def test_a_late_answer_does_not_end_a_lease_that_is_in_use(space, daemon, eventually):
    """I6: a repeat that got the lease of a call given up before keeps it."""
    space.put(TOKENS, BLOCKS)
    match = space.lookup(TOKENS, request_id="r")
    late = pb.LookupResponse(lease_id=match.lease.id)
    match.attachment.session.late_lookup(late)
    space.lookup(TOKENS).release()
    space.lookup(TOKENS)
    assert match.lease.id not in daemon.released
    match.check()


def test_a_lease_that_no_match_has_is_not_renewed(manual, daemon):
    """I15: where an interrupt kept a match from being made, or ended, its lease runs out."""
    _, clock, space = manual
    space.put(TOKENS, BLOCKS)
    match, leases = space.lookup(TOKENS), space._link.session().leases
    forgotten = leases.hold(4711, "", clock.now(), 10.0)
    clock.advance(4.0)
    assert sorted(leases.due(clock.now(), 0.0)) == sorted([match.lease.id, 4711])
    del forgotten
    gc.collect()
    assert leases.due(clock.now(), 0.0) == [match.lease.id]
