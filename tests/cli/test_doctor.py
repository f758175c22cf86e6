"""`kvstore doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.doctor import examine
from kvstore.cli.doctor_disk import direct_io, disk
from kvstore.cli.doctor_memory import hugepages
from kvstore.cli.main import run
from kvstore.core.config import load
from kvstore.core.machine import FixedMachine, file_system_type

GIB = 1 << 30


def test_doctor_prints_findings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--json holds every finding with its status, what was found and the fix."""
    assert run(["doctor", "--json", "--directory", str(tmp_path)]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    names = {finding["check"] for finding in document["findings"]}
    assert {
        "configuration", "memlock limit", "memory file system", "cgroup memory", "user",
        "hugepages", "kernel", "direct I/O", "python", "grpcio",
    } <= names  # fmt: skip
    counted = document["ok"] + document["warn"] + document["fail"]
    assert counted == len(document["findings"])
    for finding in document["findings"]:
        assert finding["found"]
        assert (finding["status"] == "ok") == (finding["fix"] == "")


def test_doctor_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json the findings are a table."""
    run(["doctor"])
    assert "memlock limit" in capsys.readouterr().out


def test_bad_configuration_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that the daemon would refuse is a failed finding, and exit 1."""
    file = tmp_path / "kvstore.toml"
    file.write_text('[tiers.host]\nsize = "900TiB"')
    finding = examine(file, str(tmp_path))[0]
    assert (finding.check, finding.status) == ("configuration", "fail")
    assert "tiers.host.size" in finding.found
    assert run(["doctor", "--config", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fail"] >= 1


def test_missing_huge_pages_fail_with_their_number() -> None:
    """Explicit huge pages that are not there: the finding says how many are needed."""
    host = {"size": "1GiB", "hugepages": "hugetlb"}
    config = load(None, {}, FixedMachine(), {"tiers": {"host": host}})
    memory = {"HugePages_Free": 10, "Hugepagesize": 2 << 20}
    finding = hugepages(config, memory)
    assert finding.status == "fail"
    assert "vm.nr_hugepages=512" in finding.fix
    assert hugepages(config, {**memory, "HugePages_Free": 512}).status == "ok"


def test_direct_io_is_tried(tmp_path: Path) -> None:
    """A directory that is missing is tried at its nearest parent, and nothing is left behind."""
    finding = direct_io(str(tmp_path / "later"))
    assert finding.status in ("ok", "warn")
    assert str(tmp_path) in finding.found
    assert list(tmp_path.iterdir()) == []


def test_file_system_type_is_the_nearest_mounts() -> None:
    """/proc is a proc file system, whatever the root is on."""
    assert file_system_type(Path("/proc/self")) == "proc"


def disk_findings(path: Path) -> dict[str, tuple[str, str]]:
    tiers = {"disk": {"path": str(path), "size": "16MiB", "reserve": "1MiB"}}
    config = load(None, {}, FixedMachine(), {"tiers": tiers})
    return {
        finding.check: (finding.status, finding.found + finding.fix) for finding in disk(config)
    }


def test_a_disk_tiers_directory_is_looked_at(tmp_path: Path) -> None:
    """With a disk tier: whether its directory can be had, is private, lasts, and has room."""
    path = tmp_path / "disk"
    found = disk_findings(path)
    assert set(found) == {
        "disk directory", "disk file system", "disk room", "disk adds hits",
        "disk against recompute",
    }  # fmt: skip
    assert found["disk directory"][0] == "ok"
    assert not path.exists()
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    assert found["disk room"][0] == "ok"
    assert disk_findings(path)["disk directory"] == (
        "fail", f"{path} has mode 755: others get inrun `chmod 700 {path}`",
    )  # fmt: skip
    path.chmod(0o700)
    assert disk_findings(path)["disk directory"][0] == "ok"


def test_a_disk_in_memory_is_a_warning() -> None:
    """A disk tier on a memory file system works, but nothing of it outlives a reboot."""
    status, text = disk_findings(Path("/dev/shm/kvstore-doctor"))["disk file system"]
    assert status == "warn"
    assert "gone with a reboot" in text


def test_direct_io_is_tried_where_the_disk_tier_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --directory it is the configured path, and without one the current directory."""
    file = tmp_path / "kvstore.toml"
    file.write_text(f'[tiers.disk]\npath = "{tmp_path}/d"\nsize = "16MiB"\nreserve = "1MiB"')
    monkeypatch.chdir("/")
    for config, where in ((file, str(tmp_path)), (None, "/:")):
        found = {finding.check: finding.found for finding in examine(config)}
        assert found["direct I/O"].startswith(where)


def test_a_running_daemon_is_asked(daemon: Any) -> None:
    """Of a daemon that runs: its state. Where none does, that is no fault."""
    assert daemon.socket
    found = {finding.check: finding for finding in examine(daemon.config)}["daemon"]
    assert (found.status, found.found.partition(",")[0]) == ("ok", "serving")
