"""`kvstore trace`: figures, conversions, errors as exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import run
from kvstore.replay.formats import BUNDLED, load_trace


def test_info_json_is_pure(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one JSON document and nothing else."""
    assert run(["trace", "info", str(BUNDLED), "--json"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert err == ""
    assert figures["requests"] == 1750
    assert figures["unique_bytes"] == 34_850 * 512 * 131_072


def test_info_table(capsys: pytest.CaptureFixture[str]) -> None:
    """People get the same figures as a table."""
    assert run(["trace", "info", str(BUNDLED)]) == 0
    out = capsys.readouterr().out
    assert "1,750 in 597 s" in out
    assert "28.87%" in out


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace is cut, spread and cut into smaller blocks on the way to a compressed file."""
    target = tmp_path / "cut.jsonl.gz"
    options = ["--seconds", "30", "--spread-ticks", "--block-size", "64", "--json"]
    assert run(["trace", "convert", str(BUNDLED), str(target), *options]) == 0
    count = json.loads(capsys.readouterr().out)["requests"]
    requests = load_trace(target)
    assert len(requests) == count
    assert {r.block_size for r in requests} == {64}
    assert len({r.timestamp for r in requests}) > count * 0.9


def test_bad_trace_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong line ends in exit code 1 and a sentence with its number; a missing file is 2."""
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    assert run(["trace", "info", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "line 1" in err
    assert run(["trace", "info", str(tmp_path / "missing")]) == 2


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A generated trace is written, read again and described."""
    target = tmp_path / "made.jsonl.zst"
    options = [
        "--preset",
        "synthetic",
        "--seed",
        "3",
        "--rate",
        "0.1",
        "--seconds",
        "500",
        "--json",
    ]
    assert run(["trace", "generate", str(target), *options]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["requests"] == len(load_trace(target))
    assert "synthetic trace" in made["description"]
    assert run(["trace", "info", str(target), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["matching_request_ratio"] > 0.2
    assert run(["trace", "generate", str(target), "--preset", "nothing"]) == 1
    assert run(["trace", "generate", str(target), "--rate", "0"]) == 2
