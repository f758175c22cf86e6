"""Recordings: a trace that is replayed while a daemon records is the trace that comes back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import DaemonProcess

from kvstore.core.errors import StoreUnavailable
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import BUNDLED, TraceError, TraceRequest, load_trace, write_trace
from kvstore.replay.live import LiveReplay, ReplayOptions
from kvstore.replay.recording import GONE, RecordedTrace

REQUESTS = 250
QUICK = "tiers.host.prefault = false\ntiers.host.mlock = false\n"


@pytest.fixture(scope="module")
def original() -> list[TraceRequest]:
    return load_trace(BUNDLED, REQUESTS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[TraceRequest]:
    """The same trace as a daemon recorded it while one client replayed it, read from its file."""
    directory = tmp_path_factory.mktemp("recording")
    trace, out = RecordedTrace(), directory / "recorded.jsonl.zst"
    with DaemonProcess("16MiB", QUICK) as daemon, daemon.client() as client:
        begun = threading.Event()

        def record() -> None:
            stream = client.admin.trace_start(requests=REQUESTS)
            write_trace(out, trace.follow(stream, begun.set))

        recording = threading.Thread(target=record)
        recording.start()
        assert begun.wait(20)
        options = ReplayOptions(clients=1, bytes_per_token=8, limit=REQUESTS)
        with LiveReplay(BUNDLED, daemon.address, directory, options) as replay:
            assert replay.run()["wrong_bytes"] == 0
        recording.join(30)
        assert not recording.is_alive()
    assert (trace.requests, trace.left_out, trace.ended) == (REQUESTS, 0, "requests")
    return load_trace(out)


def pattern(requests: list[TraceRequest]) -> list[list[int]]:
    """Full blocks of each request, numbered by first appearance."""
    numbers: dict[int, int] = {}
    return [
        [numbers.setdefault(i, len(numbers)) for i in request.hash_ids[: request.full_blocks]]
        for request in requests
    ]


def test_shapes_are_the_same(original: list[TraceRequest], recorded: list[TraceRequest]) -> None:
    """Lengths and equal blocks, in the same order; only ids and times are others."""
    assert [r.input_length for r in recorded] == [r.input_length for r in original]
    assert [r.block_size for r in recorded] == [512] * REQUESTS
    assert pattern(recorded) == pattern(original)
    # The last request may end only after the recording has.
    outputs = [r.output_length for r in original]
    assert [r.output_length for r in recorded][:-1] == outputs[:-1]
    assert recorded[-1].output_length in (0, outputs[-1])
    assert recorded[0].hash_ids[0] == 0
    assert {(r.tenant, r.session) for r in recorded} == {("", "")}


@pytest.mark.parametrize("policy", ["lru", "gdsf", "s3fifo"])
def test_simulations_find_the_same_hits(
    original: list[TraceRequest], recorded: list[TraceRequest], policy: str
) -> None:
    """What does not depend on times is decided the same, request by request."""

    def hits(requests: list[TraceRequest]) -> list[Any]:
        simulation = CacheSimulation(Workload(requests), policy, (700,))
        simulation.run()
        return simulation.hits

    found = hits(recorded)
    assert found == hits(original)
    assert sum(hit.blocks for hit in found) > 200


# ---- Without a daemon ----


def response(*records: pb.TraceRecord, **fields: Any) -> pb.TraceStartResponse:
    return pb.TraceStartResponse(records=records, block_size=128, **fields)


def one(words: list[int], tokens: int, **fields: Any) -> pb.TraceRecord:
    return pb.TraceRecord(
        input_tokens=tokens, blocks=np.array(words, np.uint64).tobytes(), **fields
    )


def follow(trace: RecordedTrace, *responses: Any) -> list[TraceRequest]:
    return list(trace.follow(responses, lambda: None))


def test_ids_are_numbered_by_first_appearance() -> None:
    """Blocks that are not full, or that nobody counted, get ids that nothing shares."""
    top = (1 << 64) - 1
    trace = RecordedTrace()
    first, second = follow(
        trace,
        response(one([top, 7], 300, seconds=0.0125, output_tokens=0)),
        response(),
        response(one([top], 400, seconds=2, tenant="b", session=9), ended="stopped"),
    )
    assert first.hash_ids == [0, 1, 2]
    assert second.hash_ids == [0, 3, 4, 5]
    assert (first.timestamp, second.timestamp) == (12.5, 2000)
    assert (second.tenant, second.session) == ("b", "s1")
    assert (trace.without_output, trace.ended) == (1, "stopped")


def test_tenants_may_have_pseudonyms() -> None:
    """With them no name of a tenant is in the trace, and each stays one tenant."""
    names = ("default", "acme", "other", "acme")
    responses = [response(one([1], 128, tenant=name)) for name in names]
    requests = follow(RecordedTrace(with_pseudonyms=True), *responses)
    assert [r.tenant for r in requests] == ["", "t1", "t2", "t1"]
    assert [r.tenant for r in follow(RecordedTrace(), *responses)] == ["", "acme", "other", "acme"]


def test_a_daemon_that_goes_away_ends_it(tmp_path: Path) -> None:
    """What came until then is kept, whole; with nothing at all no file is left."""

    def broken(*responses: Any) -> Any:
        yield from responses
        raise StoreUnavailable("gone")

    trace, out = RecordedTrace(), tmp_path / "t.jsonl"
    count = write_trace(out, trace.follow(broken(response(one([1], 128))), lambda: None))
    assert (count, trace.ended, len(load_trace(out))) == (1, GONE, 1)
    out.unlink()
    with pytest.raises(TraceError, match="no request came"):
        write_trace(out, RecordedTrace().follow(broken(response()), lambda: None))
    assert list(tmp_path.iterdir()) == []


def test_who_watches_is_called_without_records_too() -> None:
    """Progress goes on while nothing comes: so a person can stop it."""
    called: list[int] = []
    trace = RecordedTrace()
    responses = [response(held_count=3), response(one([1], 128))]
    list(trace.follow(responses, lambda: called.append(trace.held)))
    assert called == [3, 0]
