"""Tenants on one daemon: what is another's answers as what is not there, field for field."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peers import CallError, Engine, GrpcPeer, LanePeer, pack
from served import ServedStore, config_for_tests, serving

from kvstore.core.config import AccessRule, TenantSection
from kvstore.core.sizes import Size
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.store.sessions import Identity

TOKENS, OTHERS = list(range(64)), list(range(900, 964))
MIB = 1 << 20
NOT_THERE = 987_654_321


def config() -> Any:
    """Everybody may use tenant b, which has a pool of its own; root may use both."""
    return config_for_tests(
        access=(AccessRule(uid=os.getuid()), AccessRule(uid=os.getuid(), tenant="b")),
        tenants=(TenantSection(name="b", isolated=True, host_size=Size(4 * MIB)),),
    )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ServedStore]:
    with serving(tmp_path, config()) as running:
        yield running


@pytest.fixture(params=["lane", "grpc"])
def connect(request: pytest.FixtureRequest, daemon: ServedStore) -> Iterator[Callable[..., Any]]:
    """Makes peers of one tenant only, over each transport in turn."""
    made: list[Any] = []

    def connect(tenant: str) -> Engine:
        peer = LanePeer(daemon.lane_path) if request.param == "lane" else GrpcPeer(daemon)
        peer.open()
        made.append(peer)
        session = daemon.store.parts.sessions[max(daemon.store.parts.sessions)]
        session.tenants = frozenset((tenant,))
        return engine_of(peer, tenant)

    yield connect
    for peer in made:
        peer.close()


def engine_of(peer: Any, tenant: str) -> Engine:
    return Engine(peer, tenant=tenant)


def answer(call: Callable[[], Any], *numbers: int) -> Any:
    """What a call answers, its own argument left out of the words."""
    try:
        got = call()
    except CallError as error:
        message = error.message
        for number in numbers:
            message = message.replace(str(number), "N")
        return error.code, message
    return got.SerializeToString(deterministic=True) if got is not None else b""


def last(stream: Iterator[Any]) -> Any:
    items = list(stream)
    return items[-1] if items else None


def test_prompts(connect: Callable[..., Engine]) -> None:
    """I1, I18: a prompt that another tenant stored, or is writing, answers byte for byte as one
    that nobody has: to a lookup, in every field, and to a put."""
    mine, yours = connect("default"), connect("b")
    nobody_has = yours.lookup(TOKENS).SerializeToString(deterministic=True)
    mine.put(TOKENS)
    mine.reserve(OTHERS)
    for tokens in (TOKENS, OTHERS, TOKENS[:32], [*TOKENS, *OTHERS]):
        found = yours.lookup(tokens).SerializeToString(deterministic=True)
        assert found == nobody_has, "the answer tells what another tenant has"
    assert yours.reserve(TOKENS).outcomes == b"\x01" * 4
    assert yours.lookup(TOKENS).matched_tokens == 0
    assert mine.lookup(TOKENS).matched_tokens == 64


def test_ids(connect: Callable[..., Engine]) -> None:
    """I6, I18: another session's lease or reservation is used by nobody else: each call answers
    the same, in code and words, as for an id that never was, and the owner keeps what it has."""
    mine, yours = connect("default"), connect("b")
    mine.put(TOKENS)
    lease = mine.lookup(TOKENS).lease_id
    reservation = mine.reserve(OTHERS).reservation_id
    peer, run = yours.peer, pb.CommitRun(block_count=4)
    calls: list[tuple[int, Callable[[int], Any]]] = [
        (lease, lambda n: last(peer.stream("Restore", pb.RestoreRequest(lease_id=n)))),
        (lease, lambda n: last(peer.stream("FetchInline", pb.FetchInlineRequest(lease_id=n)))),
        (lease, lambda n: peer.call("CancelRestore", pb.CancelRestoreRequest(lease_id=n))),
        (lease, lambda n: peer.call("Release", pb.ReleaseRequest(lease_ids=[n]))),
        (lease, lambda n: peer.call("LoadDevice", pb.LoadDeviceRequest(lease_id=n))),
        (reservation, lambda n: peer.call("Abort", pb.AbortRequest(reservation_id=n))),
        (
            reservation,
            lambda n: peer.call("Commit", pb.CommitRequest(reservation_id=n, runs=[run])),
        ),
    ]
    for number, call in calls:
        theirs = answer(lambda: call(number), number)  # noqa: B023
        assert theirs == answer(lambda: call(NOT_THERE), NOT_THERE)  # noqa: B023
    renewed = peer.call("Renew", pb.RenewRequest(lease_ids=[lease, NOT_THERE]))
    assert list(renewed.lost_leases) == [lease, NOT_THERE]
    assert not mine.peer.call("Renew", pb.RenewRequest(lease_ids=[lease])).lost_leases
    done = mine.peer.call("Commit", pb.CommitRequest(reservation_id=reservation, runs=[run]))
    assert done.results[0].outcomes == b"\x04" * 4


def test_requests_and_attachments(connect: Callable[..., Engine]) -> None:
    """I18: request ids and attachment numbers are a session's own: the same ones of another
    tenant end nothing and tell nothing."""
    mine, yours = connect("default"), connect("b")
    mine.put(TOKENS)
    lease = mine.lookup(TOKENS, request_id="r").lease_id
    finish = pb.FinishRequestRequest(attachment=yours.number, request_id="r")
    assert yours.peer.call("FinishRequest", finish).released_leases == 0
    assert not mine.peer.call("Renew", pb.RenewRequest(lease_ids=[lease])).lost_leases
    lookup = pb.LookupRequest(attachment=mine.number + 1, prompt=pb.Prompt(tokens=pack(TOKENS)))
    with pytest.raises(CallError, match="NOT_FOUND"):
        yours.peer.call("Lookup", lookup)


def test_tenants_that_are_not_there(connect: Callable[..., Engine]) -> None:
    """I18: attaching to another's tenant and to one that does not exist answer the same."""
    yours, said = connect("b"), set()
    for tenant in ("default", "nobody-s"):
        code, message = answer(lambda: engine_of(yours.peer, tenant))  # noqa: B023
        assert code == "PERMISSION_DENIED"
        said.add(message.replace(tenant, "T"))
    assert len(said) == 1


def map_for_writing(descriptor: int) -> None:
    """As a client might try: by the descriptor itself, or opened anew."""
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        mmap.mmap(again, 4096).close()
    finally:
        os.close(again)


def test_descriptors(daemon: ServedStore) -> None:
    """I7, I8: of two tenants, one isolated, neither is handed a descriptor of the other's pool,
    and none of them can be opened for writing or resized."""
    seen = []
    for tenant in ("default", "b"):
        peer = LanePeer(daemon.lane_path)
        peer.open()
        engine = engine_of(peer, tenant)
        descriptors = peer.take_descriptors()
        assert len(descriptors) == 2 * len(engine.attached.pools) == 2
        seen.append({os.fstat(descriptor).st_ino for descriptor in descriptors})
        for descriptor in descriptors:
            for attempt in (
                partial(mmap.mmap, descriptor, 4096),
                partial(map_for_writing, descriptor),
                partial(os.ftruncate, descriptor, 0),
            ):
                with pytest.raises(OSError, match=r"denied|permitted|Invalid argument"):
                    attempt()
            os.close(descriptor)
        peer.close()
    assert not seen[0] & seen[1]


def test_staging_of_ended_sessions(daemon: ServedStore) -> None:
    """I21: a session's staging holds nothing of earlier sessions', while they live or after."""
    living = LanePeer(daemon.lane_path)
    living.open()
    assert living.staging is not None
    living.staging[:] = b"\xaa" * len(living.staging)
    for _ in range(4):
        peer = LanePeer(daemon.lane_path)
        peer.open()
        assert peer.staging is not None
        assert not any(peer.staging[:]), "the staging shows what another session wrote"
        peer.staging[:] = b"\x55" * len(peer.staging)
        peer.close()
        assert daemon.eventually(lambda: len(daemon.store.parts.sessions) == 1)
    living.close()


def test_events(connect: Callable[..., Engine], daemon: ServedStore) -> None:
    """I18: an engine is sent the events of its own tenants and of no others, in numbers that
    leave none out: what others do does not show in them."""
    mine, yours = connect("default"), connect("b")
    mine.put(OTHERS)
    yours.put(TOKENS)
    mine.put([9] * 64)
    yours.put([8] * 64)
    found: list[Any] = []

    def begin() -> tuple[Callable[[], None], int]:
        store = daemon.store
        session = store.open_session(Identity(uid=os.getuid()), "engine", frozenset("b"), None)
        request = pb.SubscribeRequest(from_sequence=1)
        cancel = daemon.service.stream(
            session, "Subscribe", request, found.append, lambda _: None
        )  # fmt: skip

        def end() -> None:
            cancel()
            store.close_session(session)

        return end, store.events.count_of("b")

    end, last = daemon.on_owner(begin)
    assert daemon.eventually(lambda: bool(found) and found[-1].sequence == last)
    daemon.on_owner(end)
    assert {event.space_id for event in found} == {yours.attached.space_id}
    assert [event.sequence for event in found] == list(range(1, last + 1))
    assert last >= 2
