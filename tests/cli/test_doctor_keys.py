"""`kvstore doctor` of a disk tier with keys: each condition is made for real."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.doctor import examine
from kvstore.cli.doctor_keys import aes, disks, key_place

GOOD = "new " + "1f" * 32 + "\nold " + "2e" * 32 + "\n"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away, or rights")


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another file system than `tmp_path`."""
    path = Path(tempfile.mkdtemp(prefix="kvt-doctor-keys-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def config(tmp_path: Path, key_file: Path | None) -> Path:
    text = f'[server]\nsocket = "{tmp_path}/run/kv.sock"\nmetrics = ""\n'
    text += f'[tiers.host]\ndirectory = "{tmp_path}/pool"\nsize = "16MiB"\n'
    text += f'[tiers.disk]\npath = "{tmp_path}/disk"\nsize = "64MiB"\nreserve = "1MiB"\n'
    text += f'key_file = "{key_file}"\n' if key_file else ""
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    return file


def found(tmp_path: Path, key_file: Path | None) -> dict[str, Any]:
    return {it.check: it for it in examine(config(tmp_path, key_file))}


def written(path: Path, text: str = GOOD, mode: int = 0o600) -> Path:
    path.touch(0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_file_in_order_is_named(tmp_path: Path, elsewhere: Path) -> None:
    """How many keys there are and which one is written with; no key is shown."""
    checks = found(tmp_path, written(elsewhere / "keys"))
    for name in ("key file", "key place", "cryptography"):
        assert checks[name].status == "ok", checks[name]
    assert "2 keys, new writes" in checks["key file"].found
    assert checks["cryptography"].found == importlib.metadata.version("cryptography")
    assert not any("1f" * 16 in str(it) or "2e" * 16 in str(it) for it in checks.values())
    assert checks["configuration"].status == "ok"


def test_without_keys_nothing_is_said_of_them(tmp_path: Path) -> None:
    """A disk tier in clear needs neither file nor package."""
    checks = found(tmp_path, None)
    assert "disk directory" in checks
    assert not {"key file", "key place", "cryptography", "AES instructions"} & set(checks)


@pytest.mark.parametrize(
    ("text", "mode", "what", "fix"),
    [
        (None, 0, "No such file", "correct the path or make the file"),
        (GOOD, 0o640, "has mode 0640", "chmod 600"),
        (GOOD, 0o604, "has mode 0604", "chmod 600"),
        ("", 0o600, "holds no key", "openssl rand -hex 32"),
        ("new 1f1f\n", 0o600, "line 1: the key of new is not 32 bytes", "openssl rand -hex 32"),
        (GOOD + GOOD, 0o600, "holds the same name twice", "remove one of the lines"),
        ("x" * 70_000, 0o600, "more than 65536 bytes", ""),
    ],
)
def test_a_key_file_that_the_daemon_refuses_fails(
    tmp_path: Path, text: str | None, mode: int, what: str, fix: str
) -> None:
    """Missing, open to others, empty, malformed: the sentence of the daemon and its fix."""
    key_file = tmp_path / "keys"
    if text is not None:
        written(key_file, text, mode)
    checks = found(tmp_path, key_file)
    finding = checks["key file"]
    assert finding.status == "fail"
    assert what in finding.found
    assert fix in finding.fix
    assert finding.fix
    assert checks["configuration"].status == "fail"
    assert "key place" in checks, "the other checks still run"


@root_only
def test_a_key_file_of_another_user_fails(tmp_path: Path) -> None:
    """The owner knows the keys: the fix gives the file to the daemon's user."""
    key_file = written(tmp_path / "keys")
    os.chown(key_file, 65534, 65534)
    finding = found(tmp_path, key_file)["key file"]
    assert (finding.status, "belongs to user 65534" in finding.found) == ("fail", True)
    assert f"chown {os.geteuid()} {key_file}" in finding.fix


@root_only
def test_a_key_file_that_cannot_be_reached_is_no_crash(elsewhere: Path) -> None:
    """For a user who may not enter its directory: one failure, and the other checks go on."""
    (elsewhere / "shut").mkdir(0o700)
    key_file = written(elsewhere / "shut" / "keys")
    file = config(elsewhere, key_file)
    os.chown(elsewhere, 65534, 65534)
    examine(file)  # loads what the other user cannot read
    os.seteuid(65534)
    try:
        checks = {it.check: it for it in examine(file)}
    finally:
        os.seteuid(0)
    assert "Permission denied" in checks["key file"].found
    assert checks["key file"].status == "fail"
    assert "key place" in checks


def test_keys_beside_the_blocks_are_a_warning(tmp_path: Path, elsewhere: Path) -> None:
    """Whoever takes the disk has them; a link to elsewhere counts as what it points to."""
    beside = written(tmp_path / "keys")
    finding = key_place(beside, tmp_path / "disk")
    assert (finding.status, "whoever takes the disk" in finding.found) == ("warn", True)
    written(elsewhere / "keys")
    (tmp_path / "link").symlink_to(elsewhere / "keys")
    assert key_place(tmp_path / "link", tmp_path / "disk").status == "ok"
    assert key_place(elsewhere / "keys", elsewhere / "disk").status == "warn"


def test_partitions_and_volumes_are_their_disks(tmp_path: Path) -> None:
    """As /sys has it: a partition is its disk's, a volume that of each part; memory has none."""
    for name in ("block/sda/sda1", "block/sdb", "virtual/dm-0/slaves"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "block/sda/sda1/partition").touch()
    (tmp_path / "virtual/dm-0/slaves/sda1").symlink_to(tmp_path / "block/sda/sda1")
    (tmp_path / "virtual/dm-0/slaves/sdb").symlink_to(tmp_path / "block/sdb")
    devices = tmp_path / "dev"
    devices.mkdir()
    for number, name in (("8:1", "block/sda/sda1"), ("253:0", "virtual/dm-0")):
        (devices / number).symlink_to(tmp_path / name)
    assert disks(os.makedev(8, 1), devices) == {"sda"}
    assert disks(os.makedev(253, 0), devices) == {"sda", "sdb"}
    assert disks(os.makedev(0, 42), devices) == frozenset()


def test_a_missing_package_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    """Keys without cryptography: the line to install it."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "cryptography":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = found(tmp_path, written(elsewhere / "keys"))["cryptography"]
    assert finding.status == "fail"
    assert finding.fix == "run `pip install 'kvstore-daemon[encryption]'`"


@pytest.mark.parametrize(
    ("cpuinfo", "status", "said"),
    [
        ("flags\t\t: fpu aes pclmulqdq\n\nflags\t\t: fpu aes pclmulqdq\n", "ok", "has them"),
        ("Features\t: fp asimd aes pmull\n", "ok", "has them"),
        ("flags\t\t: fpu sse2\n", "warn", "the processor has not"),
        ("flags\t\t: fpu aes\n", "warn", "the processor has not"),
        ("flags\t\t: aes pclmulqdq\n\nflags\t\t: sse2\n", "warn", "not every processor"),
        ("model name : x\n", "ok", "does not say"),
    ],
)
def test_a_processor_without_aes_is_a_warning(
    tmp_path: Path, cpuinfo: str, status: str, said: str
) -> None:
    """Of each kind of machine, and of one whose kernel does not say."""
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    finding = aes(file)
    assert (finding.status, said in finding.found) == (status, True), finding
    assert bool(finding.fix) == (status == "warn")
