"""One suite for every transport: the same calls, answers and error codes."""

from __future__ import annotations

from typing import Any

import pytest
from peers import CallError, Engine, LanePeer

from kvstore.core.plan import BlockOutcome
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(64))


def test_put_then_lookup(engine: Any) -> None:
    """What was put is matched, leased, and found again by an identical lookup."""
    assert set(engine.put(TOKENS)) == {BlockOutcome.STORED}
    found = engine.lookup([*TOKENS, 1, 2, 3], request_id="r")
    assert found.matched_tokens == found.restore_tokens == 64
    assert found.lease_id
    assert found.lease_ttl_seconds > 0
    assert found.plan.kind == "load_all"
    assert found.reason
    assert len(found.slots.places) == 8
    again = engine.lookup([*TOKENS, 1, 2, 3], request_id="r")
    assert again.lease_id == found.lease_id


def test_empty_and_short_prompts(engine: Any) -> None:
    """A prompt without a full block matches nothing, wants nothing, and is no error."""
    for tokens in ([], [1], list(range(15))):
        found = engine.lookup(tokens)
        assert (found.lease_id, found.matched_tokens) == (0, 0)
        reserved = engine.reserve(tokens)
        assert (reserved.reservation_id, reserved.outcomes) == (0, b"")


def test_one_block_prompt(engine: Any) -> None:
    """A prompt of exactly one block is stored and matched."""
    assert engine.put(TOKENS[:16]) == bytes([BlockOutcome.STORED])
    assert engine.lookup(TOKENS[:16]).matched_tokens == 16


def test_partial_last_block_is_left_out(engine: Any) -> None:
    """A prompt that is no multiple of the block size counts its full blocks."""
    engine.put(TOKENS[:40])
    assert engine.lookup(TOKENS[:47]).matched_tokens == 32


def test_restore_answers_slots(engine: Any) -> None:
    """Restore says again where leased blocks lie, whole or in part."""
    engine.put(TOKENS)
    lease = engine.lookup(TOKENS).lease_id
    (whole,) = engine.peer.stream("Restore", pb.RestoreRequest(lease_id=lease))
    assert (whole.first_block, whole.block_count) == (0, 4)
    request = pb.RestoreRequest(lease_id=lease, first_block=1, block_count=2)
    (part,) = engine.peer.stream("Restore", request)
    assert (part.first_block, part.block_count) == (1, 2)


def test_fetch_inline(engine: Any) -> None:
    """FetchInline sends the bytes that were put, with a checksum at each block's end."""
    engine.put(TOKENS, seed=9)
    lease = engine.lookup(TOKENS).lease_id
    chunks = list(engine.peer.stream("FetchInline", pb.FetchInlineRequest(lease_id=lease)))
    for block in range(4):
        mine = [chunk for chunk in chunks if chunk.block == block]
        assert b"".join(chunk.data for chunk in mine) == engine.payload(block, 9)
        assert len(mine[-1].checksum) == 16


def test_lease_life(engine: Any) -> None:
    """Renew keeps a lease, names lost ones; release and finish end it."""
    engine.put(TOKENS)
    lease = engine.lookup(TOKENS, request_id="a").lease_id
    renewed = engine.peer.call("Renew", pb.RenewRequest(lease_ids=[lease, 12345]))
    assert list(renewed.lost_leases) == [12345]
    engine.peer.call("Release", pb.ReleaseRequest(lease_ids=[lease, 777]))
    assert list(engine.peer.call("Renew", pb.RenewRequest(lease_ids=[lease])).lost_leases)
    engine.lookup(TOKENS, request_id="b")
    finish = pb.FinishRequestRequest(attachment=engine.number, request_id="b", output_tokens=5)
    assert engine.peer.call("FinishRequest", finish).released_leases == 1
    assert engine.peer.call("FinishRequest", finish).released_leases == 0


def test_double_commit(engine: Any) -> None:
    """A reservation that was committed whole answers NOT_FOUND, and nothing changes."""
    reserved = engine.reserve(TOKENS)
    run = pb.CommitRun(first_block=0, block_count=4)
    request = pb.CommitRequest(reservation_id=reserved.reservation_id, runs=[run])
    engine.peer.call("Commit", request)
    with pytest.raises(CallError) as caught:
        engine.peer.call("Commit", request)
    assert caught.value.code == "NOT_FOUND"
    assert engine.lookup(TOKENS).matched_tokens == 64


def test_abort_leaves_nothing(engine: Any) -> None:
    """I4: an aborted put is not visible, and its blocks are wanted again."""
    reserved = engine.reserve(TOKENS)
    engine.peer.call("Abort", pb.AbortRequest(reservation_id=reserved.reservation_id))
    assert engine.lookup(TOKENS).matched_tokens == 0
    assert set(engine.put(TOKENS)) == {BlockOutcome.STORED}


def test_two_writers_of_one_block(engine: Any, daemon: Any) -> None:
    """The second writer of a block is told PENDING, and a lookup counts pending tokens."""
    other = LanePeer(daemon.lane_path)
    other.open()
    writer = Engine(other)
    writer.reserve(TOKENS)
    assert set(engine.reserve(TOKENS).outcomes) == {BlockOutcome.PENDING}
    assert engine.lookup(TOKENS).pending_tokens == 64
    other.close()


def test_external_keys(peer: Any) -> None:
    """An external space takes hashes of 16 to 32 bytes."""
    spec = {"key_mode": "external", "hash_algorithm": "sha256_cbor", "model": "ext"}
    engine = Engine(peer, **spec)
    prompt = pb.Prompt(hashes=bytes(64), hash_bytes=32)
    request = pb.LookupRequest(attachment=engine.number, prompt=prompt, local_tokens=47)
    assert peer.call("Lookup", request).matched_tokens == 0


def test_measurements_are_accepted(engine: Any) -> None:
    """ReportStep and ReportTransfer are checked, and show in the costs of Status."""
    step = pb.ReportStepRequest(
        attachment=engine.number, seconds=0.1, clock="device",
        prefill=[pb.PrefillPart(new_tokens=5)],
    )  # fmt: skip
    engine.peer.call("ReportStep", step)
    transfer = pb.ReportTransferRequest(
        attachment=engine.number, link="host>hbm", bytes=5, seconds=0.1
    )
    engine.peer.call("ReportTransfer", transfer)
    costs = engine.peer.call("Status", pb.StatusRequest()).costs
    assert {(cost.subject, cost.unit) for cost in costs} == {("m", "tokens"), ("host>hbm", "bytes")}
    assert {(cost.state, cost.sample_count) for cost in costs} == {("prior", 1)}
    assert all(cost.predicted_seconds > 0 and cost.reason for cost in costs)


def test_status_and_spaces(engine: Any) -> None:
    """Status counts what is there; spaces and tenants come if asked for."""
    engine.put(TOKENS)
    plain = engine.peer.call("Status", pb.StatusRequest())
    assert plain.state == "serving"
    assert plain.tiers["host"].block_count == plain.block_count == 4
    assert not plain.spaces
    full = engine.peer.call("Status", pb.StatusRequest(with_spaces=True, with_tenants=True))
    (space,) = full.spaces
    assert space.space_id == engine.attached.space_id
    assert space.spec.model == "m"
    assert space.used_bytes["host"] == 4 * engine.attached.slot_bytes
    assert {tenant.tenant for tenant in full.tenants} >= {"default", "b"}


def test_quota_pin_clear_epoch(engine: Any) -> None:
    """An operator's calls change what they say, and answer with what they did."""
    call = engine.peer.call
    engine.put(TOKENS)
    quota = call("SetQuota", pb.SetQuotaRequest(tenant="b", tier="host", cap_bytes=1 << 20))
    assert quota.tenant.cap_bytes["host"] == 1 << 20
    engine.lookup(TOKENS, request_id="pinned")
    pin = call("Pin", pb.PinRequest(request_id="pinned", ttl_seconds=60))
    assert pin.block_count == 4
    assert call("Unpin", pb.UnpinRequest(pin_id=pin.pin_id)).released_pins == 1
    cleared = call("Clear", pb.ClearRequest(space_id=engine.attached.space_id))
    assert cleared.removed_blocks == 4
    assert engine.lookup(TOKENS).matched_tokens == 0
    engine.put(TOKENS)
    bumped = call("BumpEpoch", pb.BumpEpochRequest(space_id=engine.attached.space_id))
    assert (bumped.epoch, bumped.removed_blocks) == (engine.attached.epoch + 1, 4)


def test_verify_hashes_everything(engine: Any) -> None:
    """Verify reads every stored block again."""
    engine.put(TOKENS)
    result = engine.peer.call("Verify", pb.VerifyRequest())
    assert (result.verified_blocks, result.corrupt_blocks) == (4, 0)


def test_events_from_a_number(engine: Any) -> None:
    """Subscribe replays what the log still has, in order."""
    if type(engine.peer).__name__ == "DirectPeer":
        pytest.skip("this peer waits for the end of a stream")
    engine.put(TOKENS)
    events = engine.peer.stream("Subscribe", pb.SubscribeRequest(from_sequence=1))
    first = next(events)
    assert first.sequence == 1
    assert first.WhichOneof("kind") == "stored"
    assert first.stored.medium == "host"
    assert len(first.stored.block_keys) % 16 == 0
    assert first.space_id == engine.attached.space_id


def test_events_from_the_future_are_lost(engine: Any) -> None:
    """A number that the log does not reach (of an earlier daemon) gets EventsLost."""
    if type(engine.peer).__name__ == "DirectPeer":
        pytest.skip("this peer waits for the end of a stream")
    events = engine.peer.stream("Subscribe", pb.SubscribeRequest(from_sequence=1 << 40))
    assert next(events).lost.next_sequence == 1
