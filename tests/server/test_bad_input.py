"""Bad input, over every transport: an error that names the field, and nothing changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from peers import CallError, Engine, GrpcPeer, attach_request
from served import ServedStore, config_for_tests

from kvstore.core.config import AccessRule
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(64))
NAN = float("nan")


def refused(peer: Any, method: str, request: Any, code: str, names: str) -> None:
    with pytest.raises(CallError) as caught:
        peer.call(method, request)
    assert caught.value.code == code, caught.value
    assert names in caught.value.message
    assert "Traceback" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": ""}, "model"),
        ({"revision": ""}, "revision"),
        ({"model": "x" * 1025}, "spec.model"),
        ({"num_layers": 0}, "num_layers"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1 << 20}, "block_size"),
        ({"block_bytes": 17}, "block_bytes"),
        ({"layout": "opaque"}, "block_bytes"),
        ({"layout": "opaque", "block_bytes": 1 << 63}, "block_bytes"),
        ({"dtype": "float17"}, "dtype"),
        ({"kv_factor": 3}, "kv_factor"),
        ({"kv_format": "zip"}, "kv_format"),
        ({"key_mode": "guess"}, "key_mode"),
        ({"key_mode": "external"}, "hash_algorithm"),
        ({"key_mode": "external", "hash_algorithm": "builtin random"}, "hash_algorithm"),
        ({"layer_first": 1 << 31}, "layer_first"),
        ({"shard_count": 0}, "shard"),
        ({"attention": {str(i): "" for i in range(257)}}, "spec.attention"),
        ({"attention": {"k" * 2000: ""}}, "spec.attention"),
    ],
)
def test_wrong_spec(peer: Any, changes: dict[str, Any], names: str) -> None:
    """A KVSpec field that is wrong is named."""
    refused(peer, "Attach", attach_request(**changes), "INVALID_ARGUMENT", names)


@pytest.mark.parametrize(
    ("fields", "code", "names"),
    [
        ({"shard": 1}, "INVALID_ARGUMENT", "shard"),
        ({"tenant": ""}, "INVALID_ARGUMENT", "tenant"),
        ({"tenant": "somebody-else"}, "PERMISSION_DENIED", "tenant"),
        ({"engine_id": "e" * 5000}, "INVALID_ARGUMENT", "engine_id"),
    ],
)
def test_wrong_attach(peer: Any, fields: dict[str, Any], code: str, names: str) -> None:
    """An attach for a shard or tenant that is not one's own is refused."""
    refused(peer, "Attach", attach_request(**fields), code, names)


def test_wrong_plan_shapes(peer: Any) -> None:
    """What an engine cannot execute is not guessed."""
    request = attach_request()
    request.plan_shapes.append("magic")
    refused(peer, "Attach", request, "INVALID_ARGUMENT", "plan_shapes")
    request = attach_request()
    request.overlap = "sideways"
    refused(peer, "Attach", request, "INVALID_ARGUMENT", "overlap")


def prompt(**fields: Any) -> pb.Prompt:
    return pb.Prompt(**fields)


LONG = "s" * 1025
DIGEST = bytes(32)


@pytest.mark.parametrize(
    ("fields", "code", "names"),
    [
        ({"prompt": prompt(tokens=b"123")}, "INVALID_ARGUMENT", "prompt.tokens"),
        ({"prompt": prompt(hashes=DIGEST, hash_bytes=32)}, "FAILED_PRECONDITION", "prompt.hashes"),
        ({"prompt": prompt(tokens=bytes(64), hashes=DIGEST)}, "INVALID_ARGUMENT", "prompt"),
        ({"prompt": prompt(adapter=LONG)}, "INVALID_ARGUMENT", "prompt.adapter"),
        ({"prompt": prompt(cache_salt=LONG)}, "INVALID_ARGUMENT", "prompt.cache_salt"),
        (
            {"prompt": prompt(tokens=bytes(64), extra=[pb.ExtraKeys(block=0, digest=b"short")])},
            "INVALID_ARGUMENT",
            "prompt.extra",
        ),
        (
            {"prompt": prompt(tokens=bytes(64), extra=2 * [pb.ExtraKeys(digest=DIGEST)])},
            "INVALID_ARGUMENT",
            "prompt.extra",
        ),
        ({"request_id": LONG}, "INVALID_ARGUMENT", "request_id"),
        ({"local_tokens": 17, "prompt": prompt(tokens=bytes(64))}, "INVALID_ARGUMENT", "local_t"),
        ({"local_tokens": (1 << 64) - 1}, "INVALID_ARGUMENT", "local_tokens"),
        ({"deadline_seconds": -1.0}, "INVALID_ARGUMENT", "deadline_seconds"),
        ({"deadline_seconds": NAN}, "INVALID_ARGUMENT", "deadline_seconds"),
        ({"deadline_seconds": float("inf")}, "INVALID_ARGUMENT", "deadline_seconds"),
        ({"load": pb.LoadHints(gpu_busy_ratio=1.5)}, "INVALID_ARGUMENT", "load.gpu_busy_ratio"),
        ({"load": pb.LoadHints(gpu_busy_ratio=NAN)}, "INVALID_ARGUMENT", "load.gpu_busy_ratio"),
        ({"reuse": pb.ReuseHints(expect_reuse=9)}, "INVALID_ARGUMENT", "reuse.expect_reuse"),
        (
            {"reuse": pb.ReuseHints(expect_reuse_seconds=NAN)},
            "INVALID_ARGUMENT",
            "reuse.expect_reuse_seconds",
        ),
    ],
)
def test_wrong_lookup(engine: Any, fields: dict[str, Any], code: str, names: str) -> None:
    """A lookup field out of range is named."""
    request = pb.LookupRequest(attachment=engine.number, **fields)
    refused(engine.peer, "Lookup", request, code, names)


@pytest.mark.parametrize(
    ("fields", "code", "names"),
    [
        ({"tokens": bytes(64)}, "FAILED_PRECONDITION", "prompt.tokens"),
        ({"hashes": bytes(33), "hash_bytes": 32}, "INVALID_ARGUMENT", "hashes"),
        ({"hashes": bytes(30), "hash_bytes": 15}, "INVALID_ARGUMENT", "hash_bytes"),
        ({"hashes": bytes(66), "hash_bytes": 33}, "INVALID_ARGUMENT", "hash_bytes"),
        ({"hashes": bytes(32)}, "INVALID_ARGUMENT", "hash_bytes"),
        (
            {"hashes": bytes(32), "hash_bytes": 32, "extra": [pb.ExtraKeys(digest=DIGEST)]},
            "INVALID_ARGUMENT",
            "prompt.extra",
        ),
    ],
)
def test_wrong_hashes(peer: Any, fields: dict[str, Any], code: str, names: str) -> None:
    """Hashes of another length, or tokens for an external space, are refused."""
    engine = Engine(peer, key_mode="external", hash_algorithm="sha256_cbor")
    request = pb.LookupRequest(attachment=engine.number, prompt=pb.Prompt(**fields))
    refused(peer, "Lookup", request, code, names)


def test_unknown_attachment(peer: Any) -> None:
    """Calls on an attachment that was never made answer NOT_FOUND."""
    for method, request in (
        ("Lookup", pb.LookupRequest(attachment=3)),
        ("Reserve", pb.ReserveRequest(attachment=3)),
        ("FinishRequest", pb.FinishRequestRequest(attachment=3, request_id="r")),
        ("ReportStep", pb.ReportStepRequest(attachment=3)),
        ("ReportTransfer", pb.ReportTransferRequest(attachment=3)),
    ):
        refused(peer, method, request, "NOT_FOUND", "attachment")


def test_unknown_lease_and_reservation(engine: Any) -> None:
    """Ids that are not one's own answer NOT_FOUND where they matter and nothing where not."""
    with pytest.raises(CallError) as caught:
        list(engine.peer.stream("Restore", pb.RestoreRequest(lease_id=5)))
    assert caught.value.code == "NOT_FOUND"
    with pytest.raises(CallError) as caught:
        list(engine.peer.stream("FetchInline", pb.FetchInlineRequest(lease_id=5)))
    assert caught.value.code == "NOT_FOUND"
    run = [pb.CommitRun(block_count=1)]
    request = pb.CommitRequest(reservation_id=5, runs=run)
    refused(engine.peer, "Commit", request, "NOT_FOUND", "reservation")
    engine.peer.call("Abort", pb.AbortRequest(reservation_id=5))
    engine.peer.call("CancelRestore", pb.CancelRestoreRequest(lease_id=5))


def test_ranges_beyond_the_lease(engine: Any) -> None:
    """A restore past the end of its lease is refused, also where 32 bits would overflow."""
    engine.put(TOKENS)
    lease = engine.lookup(TOKENS).lease_id
    top = (1 << 32) - 1
    for first, count in ((0, 5), (5, 0), (4, 1), (top, top), (1, top)):
        for method, kind in (
            ("Restore", pb.RestoreRequest),
            ("FetchInline", pb.FetchInlineRequest),
        ):
            request = kind(lease_id=lease, first_block=first, block_count=count)
            with pytest.raises(CallError) as caught:
                list(engine.peer.stream(method, request))
            assert caught.value.code == "INVALID_ARGUMENT"


def test_wrong_commit_runs(engine: Any) -> None:
    """Runs outside the staging segment, unsorted, empty or not reserved change nothing."""
    reserved = engine.reserve(TOKENS).reservation_id
    size, slot = len(engine.peer.staging), engine.attached.slot_bytes
    run = pb.CommitRun
    for runs, code, names in (
        ([], "INVALID_ARGUMENT", "runs"),
        ([run(block_count=0)], "INVALID_ARGUMENT", "runs.block_count"),
        ([run(block_count=1, staging_offset=size)], "INVALID_ARGUMENT", "staging_offset"),
        ([run(block_count=2, staging_offset=size - slot)], "INVALID_ARGUMENT", "staging_offset"),
        ([run(block_count=1, staging_offset=(1 << 64) - 1)], "INVALID_ARGUMENT", "staging_offset"),
        ([run(block_count=(1 << 32) - 1)], "RESOURCE_EXHAUSTED", "blocks"),
        (
            [run(first_block=1, block_count=1), run(first_block=1, block_count=1)],
            "INVALID_ARGUMENT",
            "runs.first_block",
        ),
        (
            [run(first_block=2, block_count=1), run(first_block=0, block_count=1)],
            "INVALID_ARGUMENT",
            "runs.first_block",
        ),
        ([run(first_block=4, block_count=1)], "INVALID_ARGUMENT", "block 4"),
    ):
        request = pb.CommitRequest(reservation_id=reserved, runs=runs)
        refused(engine.peer, "Commit", request, code, names)
    good = pb.CommitRequest(reservation_id=reserved, runs=[run(block_count=4)])
    (result,) = engine.peer.call("Commit", good).results
    assert result.outcomes == b"\x04" * 4


def test_reserve_beyond_the_prompt(engine: Any) -> None:
    """A put that begins after its own prompt is refused."""
    request = pb.ReserveRequest(
        attachment=engine.number, prompt=pb.Prompt(tokens=bytes(64)), first_block=2
    )
    refused(engine.peer, "Reserve", request, "INVALID_ARGUMENT", "first_block")


def test_wrong_measurements(engine: Any) -> None:
    """Measurements that cannot be true are refused before they spoil a model."""
    step, transfer = pb.ReportStepRequest, pb.ReportTransferRequest
    number = engine.number
    for method, request, names in (
        ("ReportStep", step(attachment=number, seconds=NAN, clock="cpu"), "seconds"),
        ("ReportStep", step(attachment=number, seconds=-1, clock="cpu"), "seconds"),
        ("ReportStep", step(attachment=number, seconds=1, clock="sundial"), "clock"),
        (
            "ReportStep",
            step(attachment=number, seconds=1, clock="cpu", prefill=[pb.PrefillPart()]),
            "prefill",
        ),
        ("ReportTransfer", transfer(attachment=number, seconds=1), "link"),
        ("ReportTransfer", transfer(attachment=number, seconds=1e300, link="a>b"), "seconds"),
    ):
        refused(engine.peer, method, request, "INVALID_ARGUMENT", names)


def test_wrong_admin_calls(peer: Any) -> None:
    """Operators' calls name what is wrong or unknown."""
    space = bytes(32)
    for method, request, code, names in (
        ("SetPolicy", pb.SetPolicyRequest(eviction="magic"), "INVALID_ARGUMENT", "lru"),
        ("SetQuota", pb.SetQuotaRequest(tier="host"), "INVALID_ARGUMENT", "tenant"),
        ("SetQuota", pb.SetQuotaRequest(tenant="b"), "INVALID_ARGUMENT", "tier"),
        ("SetQuota", pb.SetQuotaRequest(tenant="zz", tier="host"), "NOT_FOUND", "zz"),
        ("Pin", pb.PinRequest(ttl_seconds=5), "INVALID_ARGUMENT", "request_id"),
        (
            "Pin",
            pb.PinRequest(request_id="r", block_key=bytes(16), ttl_seconds=5),
            "INVALID_ARGUMENT",
            "exactly one",
        ),
        ("Pin", pb.PinRequest(block_key=b"xx", ttl_seconds=5), "INVALID_ARGUMENT", "block_key"),
        ("Pin", pb.PinRequest(block_key=bytes(16), ttl_seconds=5), "NOT_FOUND", "block"),
        ("Pin", pb.PinRequest(request_id="r", ttl_seconds=NAN), "INVALID_ARGUMENT", "ttl_seconds"),
        ("Unpin", pb.UnpinRequest(), "INVALID_ARGUMENT", "pin_id"),
        ("Unpin", pb.UnpinRequest(pin_id="pin-9"), "NOT_FOUND", "pin-9"),
        ("Clear", pb.ClearRequest(), "INVALID_ARGUMENT", "exactly one"),
        ("Clear", pb.ClearRequest(all=True, tenant="b"), "INVALID_ARGUMENT", "exactly one"),
        ("Clear", pb.ClearRequest(space_id=b"x"), "INVALID_ARGUMENT", "space_id"),
        ("Clear", pb.ClearRequest(space_id=space), "NOT_FOUND", "space"),
        ("Clear", pb.ClearRequest(tenant="b"), "NOT_FOUND", "tenant"),
        ("BumpEpoch", pb.BumpEpochRequest(), "INVALID_ARGUMENT", "space_id"),
        ("BumpEpoch", pb.BumpEpochRequest(space_id=space), "NOT_FOUND", "space"),
        ("Drain", pb.DrainRequest(deadline_seconds=-1), "INVALID_ARGUMENT", "deadline_seconds"),
        ("Drain", pb.DrainRequest(deadline_seconds=1e6), "INVALID_ARGUMENT", "deadline_seconds"),
        ("Verify", pb.VerifyRequest(tier="attic"), "INVALID_ARGUMENT", "attic"),
        ("Flush", pb.FlushRequest(), "FAILED_PRECONDITION", "disk"),
        ("Explain", pb.ExplainRequest(request_id="r"), "NOT_FOUND", "limits.decisions_kept"),
        ("TraceStop", pb.TraceStopRequest(), "FAILED_PRECONDITION", "no recording"),
    ):
        refused(peer, method, request, code, names)


def test_bytes_that_are_no_message(peer: Any) -> None:
    """I19: bytes that do not parse are INVALID_ARGUMENT, for every method."""
    for method in ("Attach", "Lookup", "Reserve", "Commit", "Status", "Pin"):
        refused(peer, method, b"\xff\xff\xff", "INVALID_ARGUMENT", f"{method}Request")


def test_engine_role_cannot_administer(tmp_path: Any) -> None:
    """Calls of the Admin service need the admin role, and say so."""
    config = config_for_tests(access=(AccessRule(uid=os.getuid(), role="engine"),))
    daemon = ServedStore(tmp_path, config)
    peer = GrpcPeer(daemon)
    assert peer.open().role == "engine"
    for caller in (peer, peer.lane):
        refused(caller, "Status", pb.StatusRequest(), "PERMISSION_DENIED", "admin role")
        request = pb.ClearRequest(all=True)
        refused(caller, "Clear", request, "PERMISSION_DENIED", "admin role")
    peer.close()
    daemon.close()


def test_a_bug_inside_tells_nothing(
    engine: Any, daemon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected exception is INTERNAL with a number; the log has the number and the rest."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret detail")

    daemon.store.lookup = broken
    if type(engine.peer).__name__ == "DirectPeer":
        pytest.skip("in one process the caller is who may see it")
    with pytest.raises(CallError) as caught:
        engine.lookup(TOKENS)
    assert caught.value.code == "INTERNAL"
    assert "secret" not in caught.value.message
    number = caught.value.message.split("incident ")[1].split()[0]
    assert f"incident {number}" in caplog.text
    assert "secret detail" in caplog.text
