"""TraceStart and TraceStop: one recording, to one reader, without a path or a token on the wire."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import CallError, Engine, GrpcPeer, LanePeer
from served import ServedStore, config_for_tests

from kvstore.core.config import AccessRule
from kvstore.proto.v1 import kvstore_pb2 as pb

TOKENS = list(range(128 * 3))


@pytest.fixture(params=["lane", "grpc"])
def reader(request: pytest.FixtureRequest, daemon: ServedStore) -> Iterator[Any]:
    """A peer that records, over each transport that has streams."""
    made = LanePeer(daemon.lane_path) if request.param == "lane" else GrpcPeer(daemon)
    made.open()
    yield made
    made.close()


@pytest.fixture
def engine(daemon: ServedStore) -> Iterator[Engine]:
    peer = LanePeer(daemon.lane_path)
    peer.open()
    yield Engine(peer)
    peer.close()


def ask(engine: Engine, tokens: list[int], request_id: str, output: int) -> None:
    hints = pb.ReuseHints(session="alice@example.com")
    engine.lookup(tokens, request_id=request_id, reuse=hints)
    engine.peer.call(
        "FinishRequest",
        pb.FinishRequestRequest(
            attachment=engine.number, request_id=request_id, output_tokens=output
        ),
    )


def recorded(stream: Iterator[Any]) -> tuple[list[Any], str]:
    """All records, and why it ended."""
    records: list[Any] = []
    ended = ""
    for response in stream:
        records += response.records
        ended = response.ended
    return records, ended


def test_a_recording_has_lengths_and_equal_blocks(reader: Any, engine: Engine) -> None:
    """Requests come in order with times, lengths and words that are equal where blocks are."""
    stream = reader.stream("TraceStart", pb.TraceStartRequest(requests=2))
    first = next(stream)
    assert (first.request_count, list(first.records), first.ended) == (0, [], "")
    ask(engine, [*TOKENS, 1], "a", 7)
    ask(engine, [*TOKENS[:256], *range(5000, 5128)], "b", 9)
    records, ended = recorded(stream)
    assert ended == "requests"
    one, two = records
    assert (one.input_tokens, one.output_tokens, two.input_tokens) == (385, 7, 384)
    assert 0 <= one.seconds <= two.seconds < 20
    assert (len(one.blocks), len(two.blocks)) == (3 * 8, 3 * 8)
    assert one.blocks[:16] == two.blocks[:16]
    assert one.blocks[16:] != two.blocks[16:]
    assert one.tenant == "default"
    assert one.session == two.session != 0


def test_words_lead_back_to_nothing(daemon: ServedStore, reader: Any, engine: Engine) -> None:
    """Two recordings of one prompt have other words, and the statistics' own are in neither."""
    told: list[bytes] = []
    book = daemon.store.parts.requests
    book.listeners.append(lambda space, request, use: told.append(request.digests))
    found = []
    for name in ("a", "b"):
        stream = reader.stream("TraceStart", pb.TraceStartRequest(requests=1))
        next(stream)
        ask(engine, TOKENS, name, 7)
        found.append(recorded(stream)[0][0])
    assert told[0] == told[1] != b""
    assert len({told[0], found[0].blocks, found[1].blocks}) == 3
    assert found[0].session != found[1].session


def test_one_at_a_time(daemon: ServedStore, reader: Any, engine: Engine) -> None:
    """A second recording is refused while there is one; TraceStop ends it from anywhere."""
    stream = reader.stream("TraceStart", pb.TraceStartRequest())
    next(stream)
    other = GrpcPeer(daemon)
    other.open()
    with pytest.raises(CallError, match="FAILED_PRECONDITION: a recording is under way"):
        list(other.stream("TraceStart", pb.TraceStartRequest()))
    engine.lookup(TOKENS, request_id="still computing")
    assert other.call("TraceStop", pb.TraceStopRequest()).request_count == 1
    [record], ended = recorded(stream)
    assert ended == "stopped"
    assert not record.HasField("output_tokens")
    with pytest.raises(CallError, match="FAILED_PRECONDITION: no recording is under way"):
        other.call("TraceStop", pb.TraceStopRequest())
    next(reader.stream("TraceStart", pb.TraceStartRequest(seconds=0.1)))
    other.close()


def test_it_ends_with_its_reader(daemon: ServedStore, engine: Engine) -> None:
    """A reader that dies leaves no recording behind, and nothing that listens."""
    for kind in (LanePeer, GrpcPeer):
        peer = kind(daemon.lane_path if kind is LanePeer else daemon)
        peer.open()
        next(peer.stream("TraceStart", pb.TraceStartRequest()))
        assert len(daemon.store.parts.requests.listeners) > 0
        peer.close()
        assert daemon.eventually(lambda: daemon.store.tracer.is_idle)
    with pytest.raises(CallError, match="no recording is under way"):
        engine.peer.call("TraceStop", pb.TraceStopRequest())


def test_a_reader_that_does_not_read_ends_it(daemon: ServedStore, engine: Engine) -> None:
    """I16: what waits for a reader is bounded; past that the recording ends, and says so."""
    peer = LanePeer(daemon.lane_path)
    peer.open()
    stream = peer.stream("TraceStart", pb.TraceStartRequest())
    next(stream)
    recording = daemon.store.tracer._recording
    recording._bytes_max = 20_000
    request = recording_request(daemon, engine)
    for _ in range(300):
        daemon.on_owner(request)
    assert daemon.on_owner(lambda: recording.ended).startswith("its reader is too slow")
    records, ended = recorded(stream)
    assert ended.startswith("its reader is too slow")
    assert 0 < len(records) < 300
    peer.close()


def recording_request(daemon: ServedStore, engine: Engine) -> Any:
    """Makes the recording hear of one more request, without a turn for its reader."""
    told: list[Any] = []
    book = daemon.store.parts.requests
    book.listeners.append(lambda *heard: told.append(heard))
    ask(engine, TOKENS, "first", 1)
    book.listeners.pop()
    recording = daemon.store.tracer._recording
    return lambda: [recording._heard(*told[0]) for _ in range(20)] and None


def test_bad_values_are_named(reader: Any) -> None:
    """Block sizes and durations out of range are INVALID_ARGUMENT, and no recording begins."""
    for request, names in (
        (pb.TraceStartRequest(block_size=5000), "block_size"),
        (pb.TraceStartRequest(seconds=-1), "seconds"),
        (pb.TraceStartRequest(seconds=float("nan")), "seconds"),
    ):
        with pytest.raises(CallError, match=f"INVALID_ARGUMENT: {names}"):
            list(reader.stream("TraceStart", request))
    with pytest.raises(CallError, match="no recording"):
        reader.call("TraceStop", pb.TraceStopRequest())


def test_an_engine_may_not_record(tmp_path: Path) -> None:
    """Recording needs the admin role: it tells of all tenants."""
    config = config_for_tests(access=(AccessRule(uid=os.getuid(), role="engine"),))
    daemon = ServedStore(tmp_path, config)
    peer = LanePeer(daemon.lane_path)
    peer.open()
    for request in ("TraceStart", "TraceStop"):
        with pytest.raises(CallError, match="PERMISSION_DENIED"):
            list(peer.stream(request, getattr(pb, f"{request}Request")()))
    peer.close()
    daemon.close()
