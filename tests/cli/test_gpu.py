"""What the command line shows of tier hbm."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import library
from rich.console import Console

from kvstore.cli.doctor_gpu import gpu
from kvstore.cli.findings import FAIL, OK, WARN
from kvstore.cli.output import by_speed
from kvstore.cli.status import _tier_rows
from kvstore.cli.top import Watch
from kvstore.core.config import Config, convert
from kvstore.cuda import driver

MIB = 1 << 20


def configured(**hbm: Any) -> Config:
    made: Config = convert({"tiers": {"hbm": hbm}}, Config)
    return made


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.Driver.__init__, "__defaults__", (str(library()),))


def test_without_the_tier_doctor_looks_at_no_gpu() -> None:
    """Nothing is said of GPUs where none is asked for."""
    assert gpu(Config()) == []


def test_a_missing_driver_or_gpu_fails() -> None:
    """Without a driver the finding says so, and what to do."""
    (finding,) = gpu(configured(size="1GiB"))
    assert finding.status == FAIL
    assert "libcuda.so.1" in finding.found
    assert "tiers.hbm" in finding.fix


@pytest.mark.usefixtures("fake")
def test_the_gpu_has_to_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the GPU is compared with the tier, then with the staging beside it."""
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(3 << 30))
    status = {size: gpu(configured(size=size))[0].status for size in ("512MiB", "2GiB", "4GiB")}
    assert status == {"512MiB": OK, "2GiB": WARN, "4GiB": FAIL}
    assert gpu(configured(size="2GiB", share="in_place"))[0].status == OK
    (other,) = gpu(configured(size="1MiB", device="GPU-1"))
    assert (other.status, "this machine has GPU-a0a0" in other.found) == (FAIL, True)
    monkeypatch.setenv("FAKE_CUDA_OLD", "1")
    (old,) = gpu(configured(size="1MiB"))
    assert (old.status, "12.8" in old.fix) == (WARN, True)


@pytest.mark.usefixtures("fake")
def test_each_of_several_gpus_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several GPUs each has a finding of its own, for its part of the size."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("FAKE_CUDA_BYTES", str(3 << 30))
    both = ["GPU-" + "-".join(b * n for n in (4, 2, 2, 2, 6)) for b in ("a0", "a1")]
    found = gpu(configured(size="4GiB", devices=both, share="in_place"))
    assert [(one.status, one.found.split()[0]) for one in found] == [(OK, each) for each in both]
    (_, other) = gpu(configured(size="1GiB", devices=[both[0], both[1][:-1] + "f"]))
    assert (other.status, "tiers.hbm.devices" in other.fix) == (FAIL, True)


def test_status_has_a_row_for_each_of_several_gpus() -> None:
    """One GPU is the tier itself; of several each has a row below it."""
    tier = {
        "capacity_bytes": 4 * MIB, "used_bytes": MIB, "resting_bytes": 0, "free_bytes": 3 * MIB,
        "block_count": 7, "state": "serving", "problem": "",
        "prefaulted_bytes": 0, "locked_bytes": 0,
    }  # fmt: skip
    hbm = {**tier, "devices": {"GPU-2": tier, "GPU-1": tier}}
    rows = list(_tier_rows({"host": tier, "hbm": hbm}))
    assert [row[0] for row in rows] == ["hbm", "  GPU-1", "  GPU-2", "host"]
    rows = list(_tier_rows({"host": tier, "hbm": {**tier, "devices": {"GPU-1": tier}}}))
    assert [row[0] for row in rows] == ["hbm", "host"]


def test_top_shows_the_tier_above_host(tmp_path: Path) -> None:
    """hbm comes first, and what goes there and comes from there has lines of its own."""
    tier = {
        "capacity_bytes": 4 * MIB, "used_bytes": MIB, "resting_bytes": 0, "block_count": 7,
        "state": "serving",
    }  # fmt: skip
    status = {
        "state": "serving", "reason": "", "uptime_seconds": 1.0, "pid": 1, "policy": "lru",
        "version": "0", "session_count": 0, "lease_count": 0, "leased_bytes": 0,
        "reservation_count": 0, "pin_count": 0, "space_count": 0, "block_count": 7,
        "tiers": {"host": tier, "hbm": tier}, "counters": {},
    }  # fmt: skip
    later = status | {"counters": {"kvstore_hbm_loaded_blocks_total": 30.0}}
    watch = Watch()
    watch.take(0.0, status)
    watch.take(2.0, later)
    assert watch.rates["blocks read on the GPU"] == 15
    out = io.StringIO()
    Console(file=out, width=100).print(watch.view())
    lines = [line.split()[0] for line in out.getvalue().splitlines() if line.strip()]
    assert lines.index("hbm") < lines.index("host")
    assert by_speed(["disk", "host", "hbm"]) == ["hbm", "host", "disk"]
    without = Watch()
    without.take(0.0, status | {"tiers": {"host": tier}})
    out = io.StringIO()
    Console(file=out, width=100).print(without.view())
    assert "GPU" not in out.getvalue()
