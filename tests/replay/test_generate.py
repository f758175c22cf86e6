"""Generated traces: valid, equal for equal seeds, and like what they were fitted to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.replay.columns import trace_columns
from kvstore.replay.formats import TraceChecker
from kvstore.replay.generate import generate, scaled
from kvstore.replay.generate_preset import load_preset, preset_names
from kvstore.replay.info import trace_info
from kvstore.replay.reuse import quantiles, reuse_info

# Of the published traces (kvcache-ai/Mooncake, FAST25-release), as `kvstore trace info` says.
PUBLISHED = {
    "conversation": {
        "token_hits": 0.3736, "one_shot": 0.758,
        "stack": [0.143, 0.533, 0.760, 0.965, 0.991],
        "reuse_seconds": [114, 519],
        "inputs": [901, 2306, 6909, 15_367, 27_367, 85_400],
        "matched": [2, 5, 12, 26, 49, 147],
    },
    "synthetic": {
        "token_hits": 0.6512, "one_shot": 0.584,
        "stack": [0.054, 0.242, 0.407, 0.693, 0.921],
        "reuse_seconds": [59.4, 281.8],
        "inputs": [22, 277, 11_587, 23_175, 38_611, 66_456],
        "matched": [7, 15, 35, 68, 89, 140],
    },
}  # fmt: skip


def moments(preset: str, rate: float, seed: int) -> dict[str, Any]:
    """What the presets were fitted on."""
    requests = list(generate(scaled(load_preset(preset), rate), seed))
    trace = trace_columns(requests)
    ceilings, reuse = trace_info(requests), reuse_info(trace)
    waits = reuse["reuse_seconds_quantiles"]
    return {
        "token_hits": ceilings["ceiling_partial_token_hit_ratio"],
        "one_shot": ceilings["one_shot_block_ratio"],
        "stack": list(reuse["stack_distance_share_below"].values()),
        "reuse_seconds": [waits["p50"], waits["p90"]],
        "inputs": list(quantiles(trace.inputs, (5, 25, 50, 75, 90, 99)).values()),
        "matched": list(reuse["matched_blocks_quantiles"].values()),
    }


def distance(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Moments of several seeds, in the mean, that are out of tolerance: 5 points for shares of
    stack distances, else 10 % or one block."""
    far = {}
    for key, wanted in PUBLISHED[name].items():
        mean = np.mean([np.atleast_1d(one[key]) for one in found], axis=0)
        goal = np.atleast_1d(wanted)
        room = 0.05 if key == "stack" else 0.1 * goal
        if key == "matched":
            room = np.maximum(room, 1)
        if (np.abs(mean - goal) > room).any():
            far[key] = (mean.tolist(), wanted)
    return far


@pytest.mark.parametrize("preset", sorted(PUBLISHED))
def test_generated_is_like_the_published_trace(preset: str) -> None:
    """The fit holds every moment within 10 % (5 points where it is a share of distances)."""
    found = [moments(preset, 2.0 if preset == "synthetic" else 1.0, seed) for seed in (1, 2, 3)]
    assert not distance(found, preset)


def test_toolagent_like_meets_published_means() -> None:
    """Requests an hour, mean lengths and the share of cached tokens are the published ones."""
    requests = list(generate(load_preset("toolagent-like"), 1))
    figures = trace_info(requests)
    assert figures["requests"] == pytest.approx(23_608, rel=0.05)
    assert figures["input_tokens"] / figures["requests"] == pytest.approx(8596, rel=0.05)
    assert figures["output_tokens"] / figures["requests"] == pytest.approx(182, rel=0.05)
    assert figures["ceiling_partial_token_hit_ratio"] == pytest.approx(0.59, rel=0.05)
    assert figures["tenant_count"] == 8


@pytest.mark.parametrize("preset", preset_names())
def test_generated_traces_are_valid(preset: str) -> None:
    """Every preset's trace passes the checks of the reader: one parent an id, time forward."""
    checker = TraceChecker()
    for request in generate(scaled(load_preset(preset), 0.05), 3):
        checker.check(request)


def test_seeds() -> None:
    """Equal seeds make equal traces, others do not; a scaled span ends in time."""
    preset = scaled(load_preset("conversation"), 0.1, seconds=600, tenants=5)
    first = list(generate(preset, 7))
    assert first == list(generate(preset, 7))
    assert first != list(generate(preset, 8))
    assert max(r.timestamp for r in first) <= 600_000
    assert len({r.tenant for r in first}) == 5


def test_bursts(tmp_path: Path) -> None:
    """A burst makes arrivals uneven: their variation grows far above that of a Poisson process."""
    file = tmp_path / "bursty.toml"
    file.write_text(_TOML.replace("sessions", "burst = 200\ndwell_seconds = 60\nsessions", 1))
    bursty = trace_columns(list(generate(load_preset(str(file)), 1)))
    file.write_text(_TOML)
    plain = trace_columns(list(generate(load_preset(str(file)), 1)))
    assert reuse_info(plain)["interarrival_cv"] == pytest.approx(1, abs=0.2)
    assert reuse_info(bursty)["interarrival_cv"] > 3


def test_documents_are_shared(tmp_path: Path) -> None:
    """Sessions about a document share all of it, and forget it when its time is over."""
    file = tmp_path / "documents.toml"
    file.write_text(_TOML + "documents = 20\ndocument_seconds = 300\n")
    figures = trace_info(list(generate(load_preset(str(file)), 1)))
    assert figures["ceiling_token_hit_ratio"] > 0.5
    file.write_text(_TOML)
    assert trace_info(list(generate(load_preset(str(file)), 1)))["ceiling_token_hit_ratio"] == 0


_TOML = """
description = "test"
sessions = 2000
span_seconds = 3600
[[kinds]]
name = "one"
share = 1
first_tokens = [[0, 4000], [100, 6000]]
output_tokens = [[0, 10], [100, 20]]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("share = 1", "share = 0", "share"),
        ("share = 1", "shares = 1", "shares"),
        ("[[0, 4000], [100, 6000]]", "[[0, 4000]]", "first_tokens is no quantile table"),
        ("[[0, 4000], [100, 6000]]", "[[0, 4000], [100, 60]]", "write rising pairs"),
        ("[[0, 4000], [100, 6000]]", "[[0, 4000], [100, inf]]", "not finite"),
        ("[[kinds]]", "[[kinds", "is no preset"),
        ("sessions = 2000", "sessions = 0", "sessions"),
    ],
)
def test_bad_presets(tmp_path: Path, old: str, new: str, message: str) -> None:
    """A wrong preset is refused by a sentence that names the fault."""
    file = tmp_path / "bad.toml"
    file.write_text(_TOML.replace(old, new))
    with pytest.raises(InvalidRequest, match=message):
        load_preset(str(file))


def test_unknown_preset() -> None:
    """A name that nobody knows answers with the list."""
    with pytest.raises(InvalidRequest, match="conversation, synthetic, toolagent-like"):
        load_preset("nothing")
