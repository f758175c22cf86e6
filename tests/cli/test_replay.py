"""`kvstore replay` and `kvstore demo`: real bytes through a real daemon, killed on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import run
from kvstore.cli.replay import bytes_per_token_for
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import ConfigError
from kvstore.core.machine import FixedMachine
from kvstore.replay.formats import BUNDLED, load_trace, write_trace
from kvstore.replay.live import LiveReplay, ReplayError, ReplayOptions
from kvstore.replay.own_daemon import MEMORY_FILE_SYSTEM, PREFIX, OwnDaemon, sweep
from kvstore.replay.own_disk import default_place, disk_section, fitting_disk_bytes, own_disk

MIB = 1 << 20
FAST = {"limits": {"lease_ttl_seconds": 1.0, "max_lease_ttl_seconds": 1.0}}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small trace in which every request comes twice."""
    path = tmp_path / "twice.jsonl.zst"
    requests = [r for r in load_trace(BUNDLED, 30) if r.full_blocks < 40][:12]
    write_trace(path, sorted([*requests, *requests], key=lambda r: r.timestamp))
    return path


@pytest.fixture
def own_daemon() -> Any:
    with OwnDaemon(64 * MIB, FAST) as daemon:
        yield daemon


def left_behind() -> set[str]:
    places = (Path(MEMORY_FILE_SYSTEM), default_place())
    return {str(path) for place in places for path in place.glob(f"{PREFIX}*")}


def options(**values: Any) -> ReplayOptions:
    return ReplayOptions(**{"clients": 2, "bytes_per_token": 8, **values})


def test_replay_hits_every_byte_right(trace: Path, own_daemon: OwnDaemon, tmp_path: Path) -> None:
    """What is asked for twice comes back, and all of it is what was put (I1, I3)."""
    with LiveReplay(trace, own_daemon.target, tmp_path, options(clients=1)) as replay:
        seen: list[int] = []
        result = replay.run(lambda totals: seen.append(totals["requests"]))
    assert result["requests"] == seen[-1] == replay.request_count
    assert result["wrong_bytes"] == 0
    assert result["token_hit_ratio"] > 0.4
    assert result["token_hit_ratio_by_tier"] == {"host": result["token_hit_ratio"]}
    assert result["restored_bytes"] == result["verified_bytes"] > 0
    assert result["rejected_blocks"] == result["lost_leases"] == result["store_unavailable"] == 0


def test_other_seed_shares_nothing(trace: Path, own_daemon: OwnDaemon, tmp_path: Path) -> None:
    """Another seed replays other prompts: a second run on one daemon starts cold."""
    ratios = []
    for seed in (0, 0, 1):
        with LiveReplay(trace, own_daemon.target, tmp_path, options(seed=seed)) as replay:
            ratios.append(replay.run()["token_hit_ratio"])
    assert ratios[1] > 0.9
    assert ratios[2] == pytest.approx(ratios[0], abs=0.1)


def test_killed_daemon_comes_back_with_its_blocks(
    trace: Path, own_daemon: OwnDaemon, tmp_path: Path
) -> None:
    """After kill -9 blocks stored before are hit again, right in every byte (I10, I11)."""
    with LiveReplay(trace, own_daemon.target, tmp_path, options()) as replay:
        replay.run()
        stored = own_daemon.status()["block_count"]
    own_daemon.kill()
    own_daemon.start()
    assert own_daemon.status()["readopted_blocks"] == stored > 0
    with LiveReplay(trace, own_daemon.target, tmp_path, options()) as replay:
        result = replay.run()
    assert result["wrong_bytes"] == 0
    assert result["token_hit_ratio"] > 0.9


def test_client_failure_is_one_sentence(trace: Path, tmp_path: Path) -> None:
    """A replay against nobody says so at once and leaves no process."""
    target = f"unix://{tmp_path}/nobody.sock"
    with (
        LiveReplay(trace, target, tmp_path, options()) as replay,
        pytest.raises(ReplayError, match=r"a client of the replay failed: .*nobody"),
    ):
        replay.run()


def test_replay_against_a_running_daemon(
    trace: Path, own_daemon: OwnDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json prints one document and nothing else; the figures of the contract are there."""
    arguments = ["replay", str(trace), "--socket", own_daemon.socket, "--clients", "2"]
    assert run([*arguments, "--bytes-per-token", "8", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    assert result["own_daemon"] is False
    for name in ("requests", "token_hit_ratio", "token_hit_ratio_by_tier", "readopted_blocks"):
        assert name in result
    assert result["wrong_bytes"] == 0


def test_replay_with_a_disk_of_its_own(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--disk gives a daemon of its own a disk tier, for this replay only."""
    monkeypatch.setattr("kvstore.replay.own_daemon.fitting_pool_bytes", lambda: 64 * MIB)
    arguments = ["replay", str(trace), "--clients", "2", "--bytes-per-token", "8", "--json"]
    with own_disk() as place:
        assert run([*arguments, "--disk", "64MiB", "--disk-path", str(place)]) == 0
        assert list(place.iterdir()) == []
    result = json.loads(capsys.readouterr().out)
    assert result["own_daemon"] is True
    assert result["wrong_bytes"] == 0
    assert result["token_hit_ratio"] > 0.4


def test_disk_options_that_make_no_sense(
    trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A disk for a daemon that runs already, a place without a size, no size: exit 2, a reason."""
    wrong = {
        ("--disk", "64MiB", "--socket", "/run/none.sock"): "leave --socket out",
        ("--disk-path", str(tmp_path)): "pass a size",
        ("--disk", "much"): "is no size",
        ("--disk", "64MiB", "--disk-path", MEMORY_FILE_SYSTEM): "is memory",
    }
    for options_, reason in wrong.items():
        assert run(["replay", str(trace), *options_]) == 2
        assert reason in capsys.readouterr().err


def test_own_daemon_comes_back_from_disk(trace: Path, tmp_path: Path) -> None:
    """What was flushed is served after a start with an empty pool, from disk (I9)."""
    with own_disk() as directory:
        sections = {**FAST, "tiers.disk": disk_section(directory, 64 * MIB)}
        with OwnDaemon(64 * MIB, sections) as daemon:
            with LiveReplay(trace, daemon.target, tmp_path, options()) as replay:
                replay.run()
            flushed = daemon.flush()
            daemon.stop(free=True)
            daemon.start()
            assert daemon.status()["tiers"]["host"]["block_count"] == 0
            with LiveReplay(trace, daemon.target, tmp_path, options()) as replay:
                result = replay.run()
    assert flushed["left_out_blocks"] == 0
    assert result["wrong_bytes"] == 0
    assert result["token_hit_ratio"] > 0.9
    assert result["hit_tokens_by_tier"]["disk"] > 0
    assert not directory.exists()


def test_named_daemon_must_run(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon that was named and is not there is exit 3, not a daemon of our own."""
    assert run(["replay", str(trace), "--socket", str(tmp_path / "nobody.sock")]) == 3
    assert capsys.readouterr().out == ""


def test_demo_kills_verifies_and_cleans_up() -> None:
    """The demo, short: killed, blocks hit again, rebooted, served from disk, nothing left (I9)."""
    before = left_behind()
    command = [sys.executable, "-m", "kvstore.cli.main", "demo", "--limit", "120", "--json"]
    done = subprocess.run(
        [*command, "--bytes-per-token", "8", "--clients", "2"],
        capture_output=True, text=True, timeout=100, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["requests"] == 120
    assert result["wrong_bytes"] == 0
    assert result["readopted_blocks"] > 0
    assert result["readopted_hit_tokens"] > 0
    assert set(result["token_hit_ratio_by_tier"]) == {"host", "disk"}
    assert result["flush"]["left_out_blocks"] == 0
    assert result["flush"]["durable_blocks"] == result["reboot_readopted_blocks"] > 0
    assert result["after_restart"]["requests"] == 24
    assert result["disk_served_after_restart_tokens"] > 0
    assert result["restored_from_disk_blocks"] > 0
    assert left_behind() <= before


def test_interrupted_demo_leaves_nothing() -> None:
    """Ctrl-C and SIGTERM in the middle of a demo remove daemon, pool and directories (exit 130)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        before = left_behind()
        demo = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli.main", "demo", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/",
            # Whoever runs the suite in the background may have it ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        mine = f"/{PREFIX}{demo.pid}-"
        until(lambda mine=mine: sum(mine in name for name in left_behind()) == 2)
        sleep(1.0)
        demo.send_signal(number)
        out, _ = demo.communicate(timeout=30)
        assert (demo.returncode, out) == (130, b"")
        assert left_behind() <= before


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = perf_seconds() + seconds
    while not condition():
        assert perf_seconds() < end, "it did not happen in time"
        sleep(0.02)


def test_sweep_removes_what_the_dead_left(tmp_path: Path) -> None:
    """Pools of a demo that was itself killed are removed by the next one, others' are kept."""
    gone = Path(MEMORY_FILE_SYSTEM) / f"{PREFIX}{2**22 + 1}-x"
    alive = Path(MEMORY_FILE_SYSTEM) / f"{PREFIX}1-x"
    gone.mkdir()
    alive.mkdir()
    try:
        sweep()
        assert not gone.exists()
        assert alive.exists()
    finally:
        alive.rmdir()


def test_own_disks_are_no_memory(tmp_path: Path) -> None:
    """A disk of one's own is never in memory, takes at most half of what is free, and goes."""
    with pytest.raises(ConfigError, match=r"/dev/shm is memory"), own_disk(Path("/dev/shm")):
        pass
    gone = tmp_path / f"{PREFIX}{2**22 + 1}-x"
    gone.mkdir()
    with own_disk(tmp_path, FixedMachine()) as directory:
        assert not gone.exists()
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
        assert fitting_disk_bytes(directory, 16 * MIB) == 16 * MIB
        assert fitting_disk_bytes(directory, 1 << 60) <= shutil.disk_usage(directory).free // 2
        with pytest.raises(ConfigError, match="free some or name another"):
            fitting_disk_bytes(directory, 1 << 60, least=1 << 60)
    assert not directory.exists()


def test_payload_is_scaled_to_fit() -> None:
    """Without a size, half of the trace's blocks fit, and never less than a slot each."""
    requests = load_trace(BUNDLED)
    scaled = bytes_per_token_for(requests, 4 << 30)
    assert scaled % 8 == 0
    assert 0.45 < (4 << 30) / (33_117 * 512 * scaled) < 0.55
    assert bytes_per_token_for(requests, 1 << 20) == 8
