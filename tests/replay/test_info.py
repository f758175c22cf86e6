"""Figures of traces, and traces made from traces."""

from __future__ import annotations

import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace
from kvstore.replay.info import trace_info
from kvstore.replay.transform import cut_time, recut_blocks, spread_ticks


def request(time: float, length: int, *ids: int, block_size: int = 512) -> TraceRequest:
    return TraceRequest(
        timestamp=time, input_length=length, output_length=1, hash_ids=list(ids),
        block_size=block_size,
    )  # fmt: skip


def test_bundled_trace() -> None:
    """The shipped cut has the figures that its documentation states."""
    figures = trace_info(load_trace(BUNDLED))
    assert figures["requests"] == 1750
    assert figures["span_seconds"] == 597
    assert figures["input_tokens"] == 24_486_514
    assert figures["block_references"] == 48_671
    assert figures["unique_blocks"] == 34_850
    assert figures["unique_full_blocks"] == 33_117
    assert figures["ceiling_token_hit_ratio"] == pytest.approx(0.288676, abs=1e-6)
    assert figures["ceiling_partial_token_hit_ratio"] == pytest.approx(0.288855, abs=1e-6)
    assert figures["ceiling_block_hit_ratio"] == pytest.approx(0.283968, abs=1e-6)
    assert figures["one_shot_block_ratio"] == pytest.approx(0.779742, abs=1e-6)


def test_ceilings_by_hand() -> None:
    """Hits are tokens along an unbroken prefix; a partial block has its own figure."""
    figures = trace_info([request(0, 1124, 1, 2, 3), request(5, 1124, 1, 2, 3)])
    assert figures["ceiling_token_hit_ratio"] == 1024 / 2248
    assert figures["ceiling_partial_token_hit_ratio"] == 1124 / 2248
    assert figures["ceiling_below_first_block_token_hit_ratio"] == 612 / 1224
    assert figures["ceiling_block_hit_ratio"] == 0.5
    assert figures["one_shot_block_ratio"] == 0
    assert figures["span_seconds"] == 0.005


def test_recut_is_exact() -> None:
    """Blocks cut into smaller ones keep the same prefixes: equal where the old blocks are."""
    old = [request(0, 1124, 1, 2, 3), request(1, 1536, 1, 2, 4)]
    new = list(recut_blocks(old, 16))
    assert [len(r.hash_ids) for r in new] == [71, 96]
    assert new[0].hash_ids[:64] == new[1].hash_ids[:64]
    assert not set(new[0].hash_ids[64:]) & set(new[1].hash_ids[64:])
    assert {r.block_size for r in new} == {16}
    with pytest.raises(InvalidRequest, match="does not divide the trace's 512"):
        list(recut_blocks(old, 100))


def test_cut_time() -> None:
    """A cut keeps the requests of the first seconds, counted from the first request."""
    requests = [request(t, 10, i) for i, t in enumerate((5000, 6000, 7999, 8000))]
    assert len(list(cut_time(requests, 3))) == 3


def test_spread_ticks() -> None:
    """Ticks are spread up to the next one, in order, equal for equal seeds."""
    requests = [request(t, 10, i) for i, t in enumerate((0, 0, 0, 3000, 3000, 6000, 6000))]
    spread = list(spread_ticks(requests, 7))
    times = [r.timestamp for r in spread]
    assert times == sorted(times)
    assert len(set(times)) == 7
    assert all(0 <= t - r.timestamp < 3000 for t, r in zip(times, requests, strict=True))
    assert list(spread_ticks(requests, 7)) == spread
    assert list(spread_ticks(requests, 8)) != spread
