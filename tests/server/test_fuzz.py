"""Fuzzing in process: mutated messages to every call, in numbers that a wire would not carry."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path
from typing import Any

import http2
import pytest
from fuzzing import Corpus, mutate
from google.protobuf.message import DecodeError
from peers import DirectPeer, Engine, GrpcPeer, pack, spec_message
from served import ServedStore, config_for_tests, serving

from kvstore.core.completion import Completion
from kvstore.core.errors import KVStoreError
from kvstore.core.lane import HEADER, METHOD_NUMBERS, METHODS, FrameKind, pack_frame
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.store.sessions import Session

TOKENS = list(range(64))
SLICE = 500
DIGEST = bytes(32)


def seeds(engine: Engine, lease: int, reservation: int) -> list[tuple[int, bytes]]:
    """Valid requests of every call that may be repeated at will: all but OpenSession, Drain."""
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
        "Explain": pb.ExplainRequest(request_id="q"),
        "Verify": pb.VerifyRequest(tier="host"),
        "Flush": pb.FlushRequest(),
        "TraceStop": pb.TraceStopRequest(),
        "AttachDevice": pb.AttachDeviceRequest(device_uuid="GPU-1", staging_bytes=4096),
        "LoadDevice": pb.LoadDeviceRequest(lease_id=lease, block_count=2, staging_bytes=4096),
        "Restore": pb.RestoreRequest(lease_id=lease, first_block=1, block_count=2),
        "FetchInline": pb.FetchInlineRequest(lease_id=lease, first_block=1, block_count=2),
        "Subscribe": pb.SubscribeRequest(from_sequence=1),
        "TraceStart": pb.TraceStartRequest(),
        "PutInline": pb.PutInlineRequest(
            reserve=pb.ReserveRequest(attachment=number, prompt=prompt), block=1, data=b"x" * 64
        ),
    }
    return [(METHOD_NUMBERS[name], m.SerializeToString()) for name, m in requests.items()]


class Fuzzer:
    """Mutated calls on the owner thread; `problems` are answers that should never be.

    A mutant whose status and words were not seen before for its method is mutated further.
    """

    def __init__(self, daemon: ServedStore, session: Session, rng: random.Random) -> None:
        self._daemon, self._session, self._rng = daemon, session, rng
        self._corpora = {number: Corpus([]) for number in range(len(METHODS))}
        self.problems: list[str] = []

    def slice(self, requests: list[tuple[int, bytes]]) -> None:
        for number, request in requests:
            self._corpora[number].seeds = [request]
        for _ in range(SLICE):
            number, _ = self._rng.choice(requests)
            corpus = self._corpora[number]
            mutant = corpus.draw(self._rng)
            try:
                answer = self._call(number, mutant)
            except KVStoreError as error:
                corpus.saw(mutant, f"{error.code}: {error}")
                if error.code == "INTERNAL":
                    self.problems.append(f"{METHODS[number]} {mutant.hex()}: {error!r}")
            except DecodeError:
                corpus.saw(mutant, "no message")
            except Exception as error:
                self.problems.append(f"{METHODS[number]} {mutant.hex()}: {error!r}")
            else:
                corpus.saw(mutant, type(answer).__name__)

    def _call(self, number: int, mutant: bytes) -> Any:
        service, session, name = self._daemon.service, self._session, METHODS[number]
        if name == "PutInline":
            return self._put(pb.PutInlineRequest.FromString(mutant))
        entry = service.methods[number]
        if entry.call is not None:
            answer = service.call(session, number, mutant)
            assert isinstance(answer, bytes | Completion), answer
            return answer
        failed: list[BaseException] = []
        cancel = service.stream(
            session, name, entry.parse(mutant), lambda item: None,
            lambda error: failed.append(error) if error is not None else None,
        )  # fmt: skip
        cancel()
        if failed:
            raise failed[0]
        return None

    def _put(self, message: pb.PutInlineRequest) -> None:
        put = self._daemon.service.put_inline(self._session, self._daemon.budget)
        try:
            for _ in range(2):
                fed = put.feed(message)
                if not fed.done:
                    break
                fed.result()
        finally:
            put.abort()


@pytest.mark.parametrize(
    "calls",
    [
        5_000,
        pytest.param(100_000, marks=pytest.mark.long),
        pytest.param(
            1_000_000, marks=[pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(7200)]
        ),
    ],
)
def test_mutated_calls(tmp_path: Path, calls: int) -> None:
    """I19: a mutated request of any method is answered or refused with a status, a stream too;
    the books stay in order."""
    seed = 20
    config = config_for_tests(limits={"spaces": 64, "max_pin_ttl_seconds": 1.0})
    with serving(tmp_path, config) as daemon:
        peer = DirectPeer(daemon)
        peer.open()
        engine = Engine(peer)
        engine.put(TOKENS)
        fuzzer = Fuzzer(daemon, peer.session, random.Random(seed))
        for round_number in range(calls // SLICE):
            lease = engine.lookup(TOKENS, request_id="q").lease_id
            reserved = engine.reserve([round_number, *TOKENS])
            requests = seeds(engine, lease, reserved.reservation_id)
            daemon.on_owner(lambda requests=requests: fuzzer.slice(requests))
            assert not fuzzer.problems, f"seed {seed}: {fuzzer.problems[:3]}"
            if round_number % 10 == 0:
                daemon.on_owner(daemon.store.check_integrity)
        peer.close()
        # A path of no UTF-8 ends the gRPC library's own server; it was opened anew.
        assert all("UnicodeDecodeError" in failure for failure in daemon.failures), daemon.failures
        daemon.failures.clear()
        assert daemon.eventually(lambda: len(daemon.store.reservations) == 0)


# ---- Over the wire ----

PATHS = [
    f"/kvstore.v1.{service.name}/{method.name}"
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"
]


def http2_garbage(rng: random.Random, token: bytes, request: bytes) -> bytes:
    """A connection's worth: a real call, mutated as bytes or frame by frame, or just noise."""
    headers = http2.block(rng.choice(PATHS).encode(), token)
    data = struct.pack(">BI", rng.choice((0, 0, 1)), len(request)) + request
    made = [
        (4, 0, 0, b""), (1, 4, 1, headers), (0, 1, 1, data), (6, 0, 0, bytes(8)),
        (8, 0, 0, b"\x7f\xff\xff\xff"), (3, 0, 1, bytes(4)), (9, 4, 1, headers),
        (2, 0, 1, bytes(5)), (7, 0, 0, bytes(8)),
        (rng.randrange(256), rng.randrange(256), rng.randrange(9), rng.randbytes(20)),
    ]  # fmt: skip
    frames = [http2.frame(*one) for one in made]
    match rng.randrange(4):
        case 0:
            return http2.PREFACE + b"".join(frames[:1] + [mutate(rng, one) for one in frames[1:3]])
        case 1:
            return http2.PREFACE + b"".join(rng.choices(frames, k=12))
        case 2:
            return mutate(rng, http2.PREFACE + b"".join(frames[:3]))
        case _:
            return rng.randbytes(300)


def lane_garbage(rng: random.Random, requests: list[tuple[int, bytes]]) -> bytes:
    """A frame: a call whose message or whose frame was mutated, another kind, or noise."""
    number, request = rng.choice(requests)
    frame = pack_frame(FrameKind.REQUEST, number, rng.randrange(4), 9, mutate(rng, request))
    match rng.randrange(24):
        case 0:
            return mutate(rng, frame)
        case 1:
            return pack_frame(rng.randrange(256), number, 0, 9, request)
        case 2:
            return HEADER.pack(rng.choice((1 << 31, len(request))), 0, rng.randrange(256), 0, 1)
        case _:
            return frame


@pytest.mark.parametrize(
    "count",
    [
        200,
        pytest.param(2_000, marks=pytest.mark.long),
        pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(7200)]),
    ],
)
def test_garbage_on_the_wire(tmp_path: Path, count: int) -> None:
    """I16, I18, I19: frames of either protocol that were mutated, turned around or made up leave
    the daemon serving everybody else, and no session, descriptor or byte of theirs behind."""
    rng, seed_open = random.Random(31), pack_frame(FrameKind.REQUEST, 0, 0, 1, b"")
    with serving(tmp_path, config_for_tests(limits={"spaces": 64})) as daemon:
        peer = GrpcPeer(daemon)
        peer.open()
        engine = Engine(peer)
        engine.put(TOKENS)
        requests = seeds(engine, 5, 5)
        sessions = lambda: len(daemon.store.parts.sessions)  # noqa: E731
        before = len(os.listdir("/proc/self/fd"))
        for done in range(0, count, 20):
            http2.send(
                daemon.lane_path, [seed_open, *(lane_garbage(rng, requests) for _ in range(10))]
            )
            for _ in range(2):
                _, request = rng.choice(requests)
                calls = [http2_garbage(rng, peer.token, mutate(rng, request)) for _ in range(5)]
                http2.send(daemon.socket, calls)
            if done % 200 == 0:
                assert peer.answers(), "gRPC does not answer any more"
                peer.lane.call("Session", pb.Heartbeat())
        assert daemon.eventually(lambda: sessions() == 1, seconds=10.0)
        assert daemon.eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 4, 10.0)
        daemon.on_owner(daemon.store.check_integrity)
        peer.close()
        # A path of no UTF-8 ends the gRPC library's own server; it was opened anew.
        assert all("UnicodeDecodeError" in failure for failure in daemon.failures), daemon.failures
        daemon.failures.clear()
