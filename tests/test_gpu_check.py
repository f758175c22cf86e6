"""bench/gpu_check.py as far as it can be tried without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import library

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"


@pytest.fixture
def engine_side(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The section, as a worker imports it; small."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    from gpu_sections import engine_side

    return engine_side


def answer_of(section: Any) -> dict[str, Any]:
    from gpu_sections.context import Context

    answer: dict[str, Any] = {}
    section.run(Context(time.monotonic() + 60, driver=str(library())), answer)
    return answer


def test_the_engine_side_is_tried_out_without_a_gpu(
    engine_side: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registration, calibration, loads and saves of both ways and lengths run, and are right."""
    monkeypatch.setattr("kvstore.client.gpu.memory.GROUP_BYTES", 1)
    monkeypatch.setattr("kvstore.client.gpu.memory.GROUP_RUN_BYTES", 1)
    answer = answer_of(engine_side)
    groups = {(r["overlap"], r["layer_groups"]) for r in answer["rows"] if r["work"] == "load"}
    assert groups == {("none", 1), ("layerwise", engine_side.DryGround.layers)}
    assert answer["wrong"] == []
    assert not [row for row in answer["rows"] if "error" in row]
    done = {(r["work"], r["way"], r["overlap"], r["run_bytes"]) for r in answer["rows"]}
    lengths = {run_bytes for *_, run_bytes in done}
    assert len(lengths) == 2
    for run_bytes in lengths:
        for way in ("pieces", "staged"):
            assert ("load", way, "none", run_bytes) in done
            assert ("load", way, "layerwise", run_bytes) in done
            assert ("save", way, "none", run_bytes) in done
    assert answer["registration"]["bytes"] > 0
    assert answer["registration"]["problems"] == []
    assert [one["measured"] for one in answer["calibrations"]] == [True, True]
    from gpu_sections.table import table

    text = table({"engine_side": answer})
    assert "dry run" in text
    assert "wrong: 0" in text


def test_wrong_bytes_are_noticed(engine_side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that leaves one byte wrong, and a save that stores one, are in the answer."""
    read = engine_side.Engine.read

    def read_wrong(self: Any, rows: np.ndarray) -> np.ndarray:
        found = read(self, rows)
        found[-1, -1] ^= 1
        return found

    monkeypatch.setattr(engine_side.Engine, "read", read_wrong)
    answer = answer_of(engine_side)
    assert {row["work"] for row in answer["wrong"]} == {"load", "save"}
    assert len(answer["wrong"]) == len(answer["rows"])


def test_the_pages_of_vllm_are_tried_out_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves whose pages are written over at once, and loads both ways, are right; a wrong byte is
    noticed."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    from gpu_sections import vllm_pages
    from gpu_sections.table import table

    answer = answer_of(vllm_pages)
    assert answer["wrong"] == []
    assert not [row for row in answer["rows"] if "error" in row]
    done = {(row["work"], row["way"], row["kind"]) for row in answer["rows"]}
    for kind in vllm_pages.KINDS:
        assert {("save", "taken", kind), ("load", "pieces", kind)} <= done
    assert ("load", "staged", "kv-first") in done
    assert "wrong: 0" in table({"vllm_pages": answer})
    right = vllm_pages.Caches.bytes_of

    def wrong(self: Any, numbers: np.ndarray) -> Any:
        found = right(self, numbers)
        found[-1, -1] ^= 1
        return found

    monkeypatch.setattr(vllm_pages.Caches, "bytes_of", wrong)
    monkeypatch.setattr(vllm_pages, "KINDS", ("nhd",))
    answer = answer_of(vllm_pages)
    assert {row["work"] for row in answer["wrong"]} == {"load", "save"}


@pytest.mark.long
def test_a_dry_run_writes_its_document(tmp_path: Path) -> None:
    """--dry-run runs what can do without a GPU, and nothing else."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCH / "gpu_check.py"), "--json", str(path)]
    dry = ["--dry-run", str(library())]
    done = subprocess.run([*command, *dry], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document["engine_side"]["is_dry"]
    assert document["engine_side"]["wrong"] == []
    assert document["vllm_pages"]["is_dry"]
    assert "restore" not in document
    refused = subprocess.run(
        [*command, *dry, "--only", "restore"], capture_output=True, text=True, check=False,
        env=os.environ,
    )  # fmt: skip
    assert refused.returncode == 2
