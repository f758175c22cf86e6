"""`kvstore tune`: a recommendation as text and JSON, and errors as exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import run
from kvstore.replay.formats import BUNDLED

FAST = ["--limit", "150", "--jobs", "1", "--policy", "lru", "--host-max", "60GiB", "--no-disk"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The document has the recommendation, what each step buys, and how sure that is."""
    assert run(["tune", str(BUNDLED), *FAST, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["prices"]["gpu_hour"] == 2.5
    assert {"adds_net_per_month", "confidence", "tiers"} <= set(document["steps"][0])
    assert document["policies"][0]["policy"] == "lru"


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People get steps, policies and one sentence, also where nothing pays."""
    assert run(["tune", str(BUNDLED), *FAST]) == 0
    assert "Recommended: " in capsys.readouterr().out
    prices = tmp_path / "prices.toml"
    prices.write_text("[prices]\ngpu_hour = 0\n")
    assert run(["tune", str(BUNDLED), *FAST, "--prices", str(prices)]) == 0
    assert "Recommended: no store; none saves more" in capsys.readouterr().out
    assert run(["tune", str(BUNDLED), *FAST, "--budget", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert "is beyond a limit; raise --host-max or --budget" in out


def test_a_gib_of_each_tier(capsys: pytest.CaptureFixture[str]) -> None:
    """People and scripts read what a GiB of host and of GPU memory costs and saves."""
    assert run(["tune", str(BUNDLED), *FAST, "--hbm-max", "8GiB"]) == 0
    out = capsys.readouterr().out
    assert "a GiB of" in out
    assert any(line.startswith("hbm ") and "24.00" in line for line in out.splitlines())
    assert run(["tune", str(BUNDLED), *FAST, "--hbm-max", "8GiB", "--json"]) == 0
    around = json.loads(capsys.readouterr().out)["around"]
    assert {one["tier"] for one in around} == {"host", "hbm"}


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--budget", "0"], 2, "budget"),
        (["--budget", "much"], 2, "budget"),
        (["--host-max", "big"], 2, "is no size"),
        (["--policy", "lur"], 2, "'lur' is unknown"),
        (["--policy", "lru,oracle"], 2, "'oracle' needs to know the future"),
        (["--disk-max", "1TiB", "--no-disk"], 2, "exclude each other"),
        (["--hbm-max", "1GiB", "--hbm", "5%"], 2, "exclude each other"),
        (["--hbm-max", "much"], 2, "is no size"),
        (["--hbm", "much"], 2, "--hbm"),
        (["--prices", "/nowhere"], 2, "does not exist"),
        (["--link", "x=1"], 2, "host>hbm or disk>host"),
    ],
)
def test_bad_options(
    options: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad options end in exit code 2 and one sentence that names them."""
    assert run(["tune", str(BUNDLED), *options]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


def test_trace_that_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace of no time or of no blocks is refused by a sentence."""
    path = tmp_path / "trace.jsonl"
    for length, ids, sentence in ((600, [1, 2], "spans no time"), (0, [], "has no block")):
        line = {"timestamp": 0, "input_length": length, "output_length": 1, "hash_ids": ids}
        path.write_text(json.dumps(line) + "\n")
        assert run(["tune", str(path), "--jobs", "1"]) == 1
        assert sentence in capsys.readouterr().err
