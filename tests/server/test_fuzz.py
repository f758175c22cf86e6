"""Fuzzing in process: mutated messages to every call, in numbers that a wire would not carry."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from peers import DirectPeer, Engine, pack, spec_message
from served import ServedStore, config_for_tests, serving

from kvstore.core.completion import Completion
from kvstore.core.errors import KVStoreError
from kvstore.core.lane import METHOD_NUMBERS
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.store.sessions import Session

TOKENS = list(range(64))
SLICE = 500
DIGEST = bytes(32)


def seeds(engine: Engine, lease: int, reservation: int) -> list[tuple[int, bytes]]:
    """Valid requests of every unary call that may be repeated at will."""
    number, prompt = engine.number, pb.Prompt(tokens=pack(TOKENS), adapter="a", cache_salt="s")
    extra = pb.Prompt(tokens=pack(TOKENS), extra=[pb.ExtraKeys(block=1, digest=DIGEST)])
    run = pb.CommitRun(first_block=0, block_count=2, staging_offset=4096)
    hints = pb.ReuseHints(session="x", turn=2, expect_reuse=1, expect_reuse_seconds=3.0)
    requests = {
        "Attach": pb.AttachRequest(spec=spec_message(), tenant="default"),
        "Lookup": pb.LookupRequest(attachment=number, prompt=prompt, reuse=hints, request_id="q"),
        "Reserve": pb.ReserveRequest(attachment=number, prompt=extra, first_block=0),
        "Commit": pb.CommitRequest(reservation_id=reservation, runs=[run]),
        "Abort": pb.AbortRequest(reservation_id=reservation + 1),
        "Release": pb.ReleaseRequest(lease_ids=[lease + 1]),
        "Renew": pb.RenewRequest(lease_ids=[lease]),
        "FinishRequest": pb.FinishRequestRequest(attachment=number, request_id="q", reuse=hints),
        "CancelRestore": pb.CancelRestoreRequest(lease_id=lease),
        "ReportStep": pb.ReportStepRequest(attachment=number, seconds=0.1, clock="cpu"),
        "ReportTransfer": pb.ReportTransferRequest(attachment=number, link="a>b", seconds=1.0),
        "Status": pb.StatusRequest(with_spaces=True, with_tenants=True),
        "SetQuota": pb.SetQuotaRequest(tenant="b", tier="host", cap_bytes=1 << 20),
        "SetPolicy": pb.SetPolicyRequest(eviction="lru"),
        "Pin": pb.PinRequest(request_id="q", ttl_seconds=1.0),
        "Unpin": pb.UnpinRequest(pin_id="pin-1"),
        "Clear": pb.ClearRequest(space_id=engine.attached.space_id),
        "BumpEpoch": pb.BumpEpochRequest(space_id=engine.attached.space_id),
    }
    return [(METHOD_NUMBERS[name], m.SerializeToString()) for name, m in requests.items()]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes flipped, cut, repeated, or put in."""
    mutant = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(mutant) + 1)
        match rng.randrange(4):
            case 0 if at < len(mutant):
                mutant[at] ^= 1 << rng.randrange(8)
            case 1:
                del mutant[at : at + rng.randrange(1, 9)]
            case 2:
                mutant[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                mutant[at:at] = rng.choice((b"\xff" * 9 + b"\x01", bytes(10), mutant[:at][-8:]))
    return bytes(mutant)


def fuzz(daemon: ServedStore, session: Session, rng: random.Random, corpus: Any) -> list[str]:
    """A slice of mutated calls on the owner thread; answers with what should never happen."""
    problems = []
    for _ in range(SLICE):
        number, request = rng.choice(corpus)
        mutant = mutate(rng, request)
        try:
            answer = daemon.service.call(session, number, mutant)
        except KVStoreError as error:
            if error.code == "INTERNAL":
                problems.append(f"{number} {mutant.hex()}: {error!r}")
        except Exception as error:
            problems.append(f"{number} {mutant.hex()}: {error!r}")
        else:
            if not isinstance(answer, bytes | Completion):
                problems.append(f"{number} {mutant.hex()}: {answer!r}")
    return problems


@pytest.mark.parametrize(
    "calls", [10_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_mutated_calls(tmp_path: Path, calls: int) -> None:
    """I19: a mutated request is answered or refused with a status; the books stay in order."""
    seed = 20
    rng = random.Random(seed)
    config = config_for_tests(limits={"spaces": 64, "max_pin_ttl_seconds": 1.0})
    with serving(tmp_path, config) as daemon:
        peer = DirectPeer(daemon)
        peer.open()
        engine = Engine(peer)
        engine.put(TOKENS)
        for round_number in range(calls // SLICE):
            lease = engine.lookup(TOKENS, request_id="q").lease_id
            reserved = engine.reserve([round_number, *TOKENS])
            corpus = seeds(engine, lease, reserved.reservation_id)
            problems = daemon.on_owner(
                lambda corpus=corpus: fuzz(daemon, peer.session, rng, corpus)
            )
            assert not problems, f"seed {seed}: {problems[:3]}"
            if round_number % 10 == 0:
                daemon.on_owner(daemon.store.check_integrity)
        peer.close()
        assert daemon.eventually(lambda: len(daemon.store.reservations) == 0)
