"""Columns of a trace, and figures of how its prompts come back."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.replay.columns import stack_distances, trace_columns
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace
from kvstore.replay.reuse import reuse_info


def request(time: float, length: int, *ids: int) -> TraceRequest:
    return TraceRequest(timestamp=time, input_length=length, output_length=1, hash_ids=list(ids))


def test_columns_by_hand() -> None:
    """References know their request, depth, tokens and the same block's use before and after."""
    trace = trace_columns([request(1000, 1124, 7, 2, 3), request(3000, 1536, 7, 2, 9)])
    assert trace.times.tolist() == [0, 2]
    assert trace.blocks.tolist() == [0, 1, 2, 0, 1, 3]
    assert trace.before.tolist() == [-1, -1, -1, 0, 1, -1]
    assert trace.after.tolist() == [3, 4, -1, -1, -1, -1]
    assert trace.tokens.tolist() == [512, 512, 100, 512, 512, 512]
    assert trace.full.tolist() == [True, True, False, True, True, True]
    assert trace.unique_blocks == 4


def test_no_request_is_an_error() -> None:
    """A trace without requests is refused by a sentence."""
    with pytest.raises(InvalidRequest, match="holds no request"):
        trace_columns([])


def test_stack_distances_are_distinct_blocks_between() -> None:
    """The fast count equals the plain one on random references."""
    rng = random.Random(5)
    for size in (1, 2, 3, 64, 65, 200):
        blocks = [rng.randrange(20) for _ in range(size)]
        before = [max((j for j in range(i) if blocks[j] == blocks[i]), default=-1)
                  for i in range(size)]  # fmt: skip
        plain = [len(set(blocks[b + 1 : i])) if b >= 0 else -1 for i, b in enumerate(before)]
        assert stack_distances(np.array(before)).tolist() == plain


def test_reuse_by_hand() -> None:
    """A prompt continues the last one that had all it matched; turns count from 1."""
    trace = trace_columns([
        request(0, 1024, 1, 2),
        request(1000, 1536, 1, 2, 3),
        request(4000, 2048, 1, 2, 3, 4),
        request(9000, 1024, 1, 8),
    ])  # fmt: skip
    figures = reuse_info(trace)
    assert figures["matching_request_ratio"] == 0.5
    assert figures["matched_blocks_quantiles"]["p50"] == 2.5
    assert figures["predecessor_gap_seconds_quantiles"]["p50"] == 2.0
    assert figures["turn_quantiles"]["p100"] == 3
    assert figures["whole_prefix_ratio"] == 1
    assert (figures["root_count"], figures["branching_block_count"]) == (1, 1)
    assert figures["max_children"] == 2


def test_reuse_of_the_bundled_trace() -> None:
    """The shipped cut has these figures of reuse, measured when it was added."""
    figures = reuse_info(trace_columns(load_trace(BUNDLED)))
    assert figures["root_count"] == 1
    assert figures["references_per_block_quantiles"]["p100"] == 1750
    assert figures["reuse_share_within_seconds"]["600"] == 1
    assert 0.25 < figures["matching_request_ratio"] < 0.3
