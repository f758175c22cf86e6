"""`kvstore simulate`: JSON as documented, tables, and errors as exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvstore.cli.main import run
from kvstore.replay.formats import BUNDLED

FAST = ["--limit", "200", "--jobs", "1"]


def simulate(*options: str) -> int:
    return run(["simulate", str(BUNDLED), *FAST, *options])


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The document has the documented keys; a sweep has every policy at every size."""
    assert simulate("--policy", "lru,gdsf", "--tier", "host=5%,64GiB", "--json") == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert [r["policy"] for r in document["results"]] == ["lru", "gdsf", "lru", "gdsf"]
    first, *_, last = document["results"]
    assert first["tiers"]["host"]["capacity_fraction"] == pytest.approx(0.05, abs=0.001)
    assert last["tiers"]["host"]["capacity_blocks"] == 1024
    for name in (
        "token_hit_ratio", "prefill_seconds_saved", "prefill_seconds_saved_ratio",
        "ttft_p50_seconds", "ttft_p99_seconds", "residual_prefill_p99_seconds", "restored_bytes",
        "gap_closed_tokens_ratio", "gap_closed_seconds_ratio", "block_references_per_second",
        "bytes_per_saved_second", "deadline_misses", "endurance",
    ):  # fmt: skip
        assert name in first


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """People get a table; a what-if is marked as one."""
    options = ["--policy", "lru", "--tier", "host=5%", "--tier", "disk=20%"]
    assert simulate(*options, "--hints", "oracle:0.9") == 0
    out = capsys.readouterr().out
    assert re.search(r"policy +host +disk +token hits", out)
    assert re.search(r"lru +5% +20% ", out)
    assert "What-if" in out


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--report writes the page beside what is printed."""
    page = tmp_path / "out.html"
    assert simulate("--policy", "lru", "--tier", "host=5%", "--report", str(page), "--json") == 0
    json.loads(capsys.readouterr().out)
    assert page.read_text().startswith("<!doctype html>")


def test_links_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """Slower links and costs make first tokens later."""
    tiers = ["--tier", "host=20%", "--policy", "lru", "--json", "--engines", "2"]
    assert simulate(*tiers) == 0
    fast = json.loads(capsys.readouterr().out)
    assert fast["engine_count"] == 2
    assert simulate(*tiers, "--link", "host>hbm=1GB/s,1ms", "--prefill", "20ms,64us,2.6e-9") == 0
    slow = json.loads(capsys.readouterr().out)
    name = "ttft_mean_seconds"
    assert slow["results"][0][name] > fast["results"][0][name]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tier", "host=5%", "--policy", "lur"], "'lur' is unknown; choose one of"),
        (["--tier", "host=5%", "--policy", " ,"], "names none"),
        (["--tier", "ram=5%"], "write each of host, disk and hbm once"),
        (["--tier", "host=5%", "--tier", "host=6%"], "once"),
        (["--tier", "disk=5%"], "host is missing"),
        (["--tier", "host=5"], "holds not one block"),
        (["--tier", "host=-5%"], "is no size"),
        (["--tier", "host=nan%"], "is no size"),
        (["--tier", "host=inf%"], "is no size"),
        (["--tier", "host=much"], "is no size"),
        (["--tier", "host=5%,"], "is no size"),
        (["--tier", "host=5%", "--hints", "oracle:2"], "a number from 0 to 1"),
        (["--tier", "host=5%", "--hints", "often"], "such as oracle:0.9"),
        (["--tier", "host=5%", "--link", "disk=6GB/s"], "host>hbm or disk>host"),
        (["--tier", "host=5%", "--link", "disk>host=fast"], "such as disk>host=6GB/s,100us"),
        (["--tier", "host=5%", "--prefill", "1,2"], "a call, a token and a pair"),
        (["--tier", "host=5%", "--prefill", "0,0,0"], "a call, a token and a pair"),
        (["--tier", "host=5%", "--deadline", "0"], "deadline"),
        (["--tier", "host=5%", "--report", "/nowhere/out.html"], "/nowhere is no directory"),
        ([], "tier"),
    ],
)
def test_bad_options(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad options end in exit code 2 and one sentence that names them."""
    assert simulate(*options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert sentence in err


def test_sizes_that_add_nothing_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """More than all content, a disk below host, more copies than host: a sentence each."""
    for tiers, told in (
        (["host=5%"], []),
        (["host=9000%"], ["All blocks of the trace take "]),
        (["host=5%", "disk=4%"], ["A disk that is no larger"]),
        (["host=5%", "hbm=6%"], ["more of it than of host"]),
    ):
        options = [word for tier in tiers for word in ("--tier", tier)]
        assert simulate(*options, "--policy", "lru") == 0
        _, _, *notes = capsys.readouterr().out.splitlines()
        assert len(notes) == len(told)
        assert all(text in note for text, note in zip(told, notes, strict=True))


def test_bad_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken trace is exit code 1, a missing one 2."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    assert run(["simulate", str(path), "--tier", "host=5%"]) == 1
    assert "line 1" in capsys.readouterr().err
    assert run(["simulate", str(tmp_path / "none"), "--tier", "host=5%"]) == 2


def test_exact_bounds_without_the_solver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without SciPy, a sentence says how to get it."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.delitem(sys.modules, "kvstore.replay.bounds_flow", raising=False)
    assert simulate("--policy", "lru", "--tier", "host=5%", "--exact-bounds") == 2
    assert "pip install 'kvstore-daemon[bounds]'" in capsys.readouterr().err
