"""`kvstore bench`: the figures are there and the bytes right; speed is no test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.bench.measure import alternate, document
from kvstore.bench.scrape import stall_quantile
from kvstore.cli.bench import TARGETS, TARGETS_ALONE
from kvstore.cli.main import run


def test_contestants_take_turns() -> None:
    """Every contestant runs once a round; warm-up rounds do not count."""
    calls: list[str] = []

    def action(name: str) -> float:
        calls.append(name)
        return 1.0

    samples = alternate(
        {name: lambda name=name: action(name) for name in "abc"}, rounds=6, warmup=1
    )
    assert {name: len(values) for name, values in samples.items()} == {"a": 6, "b": 6, "c": 6}
    assert {"".join(sorted(calls[i : i + 3])) for i in range(0, len(calls), 3)} == {"abc"}
    assert len(calls) == 21


def test_document_says_where_it_was_measured() -> None:
    """Figures are top-level keys, with samples, medians, machine and commit beside them."""
    result = document({"ratio": 0.5}, {"copy": [1.0, 3.0, 2.0]}, block_count=3)
    assert result["ratio"] == 0.5
    assert result["medians_seconds"] == {"copy": 2.0}
    assert result["machine"]["cpu_count"] >= 1
    assert result["commit"]


def test_stall_quantile_is_an_upper_bound() -> None:
    """The quantile is the upper bound of its bucket, of what came between the readings."""
    before = {0.001: 10.0, 0.005: 10.0, float("inf"): 10.0}
    after = {0.001: 108.0, 0.005: 110.0, float("inf"): 110.0}
    assert stall_quantile(before, after, 0.98) == 0.001
    assert stall_quantile(before, after, 0.99) == 0.005


def test_quick_encryption(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An encrypted tier against one in clear: the same bytes from both, and processor time."""
    assert run(["bench", "encryption", "--quick", "--json", "--path", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["wrong_bytes"] == 0
    assert all(result[figure] > 0 for figure in TARGETS_ALONE["encryption"])
    assert result["cpu_seconds_per_gigabyte"]["read_sealed"] > 0


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.vllm if n == "overhead" else ()) for n in TARGETS],
)
def test_quick_benchmark(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each benchmark runs to its end and prints one JSON document with its figures."""
    assert run(["bench", name, "--quick", "--json"]) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    for figure in TARGETS[name]:
        assert result[figure] > 0 or figure.startswith(("share_", "worst_"))
    assert not result.get("wrong_bytes")
