"""A daemon with a disk tier: what outlives what, who is refused, and the verbs about it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually

from kvstore.cli.main import run

TOKENS = list(range(256))  # 64 blocks of 16 KiB
BLOCKS = 64
QUICK = "tiers.host.prefault = false\ntiers.host.mlock = false\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the disk tier will be."""
    return tmp_path / "disk"


@pytest.fixture
def daemon(path: Path) -> Iterator[DaemonProcess]:
    """A daemon with a disk tier of 32 MiB, not started yet."""
    made = DaemonProcess("16MiB", with_disk(path))
    yield made
    made.close()


def with_disk(path: Path, more: str = "") -> str:
    return (
        f'{QUICK}tiers.disk.path = "{path}"\ntiers.disk.size = "32MiB"\n'
        f'tiers.disk.reserve = "1MiB"\n{more}'
    )


def put(daemon: DaemonProcess, tokens: list[int] = TOKENS, epoch: int = 0) -> None:
    with daemon.client() as client:
        blocks = Tagged(epoch=epoch).blocks(tokens)
        assert client.attach(SPEC).put(tokens, blocks).stored == len(blocks)


def found(daemon: DaemonProcess, tokens: list[int] = TOKENS) -> int:
    """Blocks that are restored, after making sure that each byte of them is right."""
    with daemon.client() as client:
        space = client.attach(SPEC)
        with space.lookup(tokens) as match:
            if not match.matched_tokens:
                return 0
            views = space.restore(match)
            assert Tagged().wrong(tokens, views) == 0
            match.check()
            return len(views)


def kv(daemon: DaemonProcess, *arguments: str) -> int:
    return run([*arguments, "--socket", str(daemon.socket)])


def output(capfd: pytest.CaptureFixture[str], daemon: DaemonProcess, *arguments: str) -> Any:
    """What a verb prints with --json."""
    capfd.readouterr()
    code = kv(daemon, *arguments, "--json")
    return code, json.loads(capfd.readouterr().out)


def reboot(daemon: DaemonProcess) -> None:
    """The process dies, and everything in memory with it."""
    daemon.kill()
    shutil.rmtree(daemon.pool)


# ---- What outlives what ----


def test_what_was_flushed_outlives_a_reboot(
    daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """I9: `kvstore flush` returns when everything is on disk; after a reboot it is all there."""
    daemon.start()
    put(daemon)
    code, flushed = output(capfd, daemon, "flush")
    assert (code, flushed["durable_blocks"], flushed["left_out_blocks"]) == (0, BLOCKS, 0)
    reboot(daemon)
    daemon.start()
    status = daemon.status()
    assert status.readopted_blocks == BLOCKS
    assert status.tiers["disk"].block_count == BLOCKS
    assert status.tiers["host"].block_count == 0
    assert found(daemon) == BLOCKS
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def test_a_flush_of_one_space_leaves_others(
    daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """`flush --space` takes the first digits of an id, and counts that space alone."""
    daemon.start()
    put(daemon, TOKENS[:64])
    _, spaces = output(capfd, daemon, "spaces")
    (space,) = spaces["spaces"]
    code, flushed = output(capfd, daemon, "flush", "--space", space["space_id"][:8])
    assert (code, flushed["durable_blocks"]) == (0, 16)
    _, spaces = output(capfd, daemon, "spaces")
    assert spaces["spaces"][0]["used_bytes"]["disk"] > 0
    assert kv(daemon, "flush", "--space", "00000000") == 1


def test_a_flush_that_leaves_blocks_out_fails(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A disk that is smaller than the pool takes what it can, and the exit code is 1."""
    daemon = DaemonProcess("48MiB", with_disk(path).replace("32MiB", "16MiB"))
    try:
        daemon.start()
        put(daemon, list(range(4 * 2000)))
        code, flushed = output(capfd, daemon, "flush")
        durable, left_out = flushed["durable_blocks"], flushed["left_out_blocks"]
        assert (code, durable + left_out) == (1, 2000)
        assert 500 < durable < 1000
        assert kv(daemon, "flush") == 1
        assert "left out" in capfd.readouterr().out
        assert sum(f.stat().st_blocks * 512 for f in path.rglob("*") if f.is_file()) <= 16 << 20
        assert daemon.status().state == "serving"
    finally:
        daemon.close()


def test_the_first_start_with_a_disk_keeps_the_pool(daemon: DaemonProcess, path: Path) -> None:
    """I10: epochs and spaces move to the disk's directory, and the pool's blocks stay."""
    daemon.configure(QUICK)
    daemon.start()
    put(daemon)
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert (daemon.pool / "epochs").exists()
    daemon.configure(with_disk(path))
    daemon.start()
    assert daemon.status().readopted_blocks == BLOCKS
    assert found(daemon) == BLOCKS
    assert not (daemon.pool / "epochs").exists()
    assert not (daemon.pool / "spaces.json").exists()
    assert {"epochs", "epochs.copy", "spaces.json"} <= set(os.listdir(path))


def test_a_bump_while_the_disk_is_off_counts(
    daemon: DaemonProcess, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """I13: what was made void without the disk does not come back with it."""
    daemon.start()
    put(daemon)
    assert kv(daemon, "flush") == 0
    daemon.kill()
    daemon.configure(QUICK)
    daemon.start()
    assert found(daemon) == 0
    with daemon.client() as client:
        client.admin.bump_epoch(client.attach(SPEC).space_id)
    daemon.kill()
    daemon.configure(with_disk(path))
    daemon.start()
    assert found(daemon) == 0
    assert daemon.status().tiers["disk"].block_count == 0


def test_a_clear_holds_over_a_reboot(
    daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """I13: blocks on disk that were cleared do not come back; what was put after them does."""
    daemon.start()
    put(daemon)
    assert kv(daemon, "flush") == 0
    assert kv(daemon, "clear", "--all", "--yes") == 0
    later = list(range(1000, 1064))
    put(daemon, later)
    assert kv(daemon, "flush") == 0
    reboot(daemon)
    daemon.start()
    assert found(daemon) == 0
    assert found(daemon, later) == 16


def test_sealed_pools_have_a_record_on_the_disk(daemon: DaemonProcess, path: Path) -> None:
    """I9: with sealed memory, too, the disk's blocks, spaces and epochs are there again."""
    daemon.configure(with_disk(path, 'tiers.host.pool = "sealed"\n'))
    daemon.start()
    put(daemon)
    assert kv(daemon, "flush") == 0
    daemon.kill()
    daemon.start()
    assert found(daemon) == BLOCKS


# ---- What it looks like ----


def test_the_disk_is_shown(daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]) -> None:
    """`status`, `top`, `spaces` and `quota` have the disk after the host, in tables and JSON."""
    daemon.start()
    put(daemon)
    assert kv(daemon, "flush") == 0
    _, status = output(capfd, daemon, "status")
    disk = status["tiers"]["disk"]
    assert (disk["state"], disk["problem"], disk["block_count"]) == ("serving", "", BLOCKS)
    assert 0 < disk["capacity_bytes"] <= 32 << 20
    assert disk["used_bytes"] + disk["free_bytes"] + disk["resting_bytes"] == disk["capacity_bytes"]
    assert status["state"] == "serving"
    for verb in (["status"], ["top", "--once"], ["spaces"], ["quota", "get", "default"]):
        capfd.readouterr()
        assert kv(daemon, *verb) == 0
        text = capfd.readouterr().out
        assert 0 <= text.index("host") < text.index("disk"), text
        assert "prefaulted" not in text.partition("disk")[2]


def test_quotas_of_the_disk_are_set_and_reloaded(
    daemon: DaemonProcess, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """I17: `quota set --tier disk` works at once, SIGHUP takes caps from the file."""
    tenant = '[[tenants]]\nname = "chat"\n'
    daemon.configure(with_disk(path, tenant))
    daemon.start()

    def cap() -> Any:
        _, quota = output(capfd, daemon, "quota", "get", "chat")
        return quota["tenants"][0]["tiers"]["disk"]["cap_bytes"]

    assert kv(daemon, "quota", "set", "chat", "--tier", "disk", "--cap", "8MiB") == 0
    assert cap() == 8 << 20
    daemon.configure(with_disk(path, tenant + 'disk_cap = "4MiB"\n'))
    daemon.signal(signal.SIGHUP)
    assert eventually(lambda: "are reloaded" in daemon.log)
    assert cap() == 4 << 20
    assert kv(daemon, "quota", "set", "chat", "--tier", "tape", "--cap", "8MiB") == 1


def test_files_are_private(daemon: DaemonProcess, path: Path) -> None:
    """I7: everything of the disk tier is the daemon's user's alone."""
    daemon.start()
    put(daemon)
    assert kv(daemon, "flush") == 0
    assert path.stat().st_mode & 0o777 == 0o700
    for file in path.rglob("*"):
        assert file.stat().st_mode & 0o077 == 0, file


# ---- Who is refused ----


def refused(daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and sentence of a daemon that does not start."""
    daemon.log_path.unlink(missing_ok=True)
    code = daemon.launch().wait(30)
    lines = [line for line in daemon.log.splitlines() if line.startswith("kvstore: ")]
    assert len(lines) == 1, daemon.log
    assert "Traceback" not in daemon.log
    return code, lines[0]


def test_one_daemon_a_disk(
    daemon: DaemonProcess, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """I20: a second daemon on the directory is refused, and so is fsck while one runs."""
    daemon.start()
    second = DaemonProcess("16MiB", with_disk(path))
    try:
        code, sentence = refused(second, capfd)
    finally:
        second.close()
    assert (code, f"process id {daemon.pid}" in sentence) == (2, True)
    assert str(path) in sentence
    capfd.readouterr()
    assert run(["fsck", str(path)]) == 2
    assert f"process id {daemon.pid}" in capfd.readouterr().err
    assert daemon.status().state == "serving"


def test_a_directory_of_others_is_left_alone(
    daemon: DaemonProcess, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A directory with other files is refused before anything is written into it."""
    path.mkdir(mode=0o700)
    (path / "thesis.tex").write_text("mine")
    code, sentence = refused(daemon, capfd)
    assert code == 1
    assert "thesis.tex" in sentence
    assert os.listdir(path) == ["thesis.tex"]


def test_another_versions_directory_is_refused(
    daemon: DaemonProcess, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A format that this daemon does not know is named, and nothing of it is changed."""
    daemon.start()
    daemon.kill()
    text = json.loads((path / "format.json").read_text())
    (path / "format.json").write_text(json.dumps({**text, "version": 99}))
    code, sentence = refused(daemon, capfd)
    assert code == 1
    assert "format 99" in sentence


def test_a_directory_that_others_enter_is_refused(
    daemon: DaemonProcess, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """I7: blocks are not written where others can read."""
    path.mkdir()
    path.chmod(0o755)
    code, sentence = refused(daemon, capfd)
    assert code == 1
    assert "chmod 700" in sentence


def test_flush_without_a_disk_is_refused(
    daemon: DaemonProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a disk tier there is nothing to flush to, and the sentence says how to get one."""
    daemon.configure(QUICK)
    daemon.start()
    capfd.readouterr()
    assert kv(daemon, "flush") == 1
    assert "tiers.disk.path" in capfd.readouterr().err
