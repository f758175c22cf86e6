"""The systemd unit: verified, its command lines run, and started by a real systemd."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.main import run

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "kvstore.service"
EXAMPLE = ROOT / "deploy" / "kvstore.toml"
MANAGER = ROOT / "tests" / "support" / "systemd_user.sh"
COMMAND = "/opt/kvstore/bin/kvstore"


def settings() -> dict[str, list[str]]:
    """Settings of the unit's [Service] with all their values."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvt-unit-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def command(place: Path) -> Path:
    """The command as a file that can be run, as an installed one is."""
    file = place / "kvstore"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -Im kvstore.cli.main "$@"\n')
    file.chmod(0o755)
    return file


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_unit_is_valid(place: Path, command: Path) -> None:
    """systemd finds nothing wrong with the unit once the command is where it says."""
    unit = place / UNIT.name
    unit.write_text(UNIT.read_text().replace(COMMAND, str(command)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.replace("\n", "")) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_unit_is_hardened() -> None:
    """systemd's own measure of exposure, 0 (none) to 10, stays below 2."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-300:]


def test_the_command_lines_are_right(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the unit runs are verbs with options that there are, on the example configuration.

    Only paths differ: /run/kvstore and /dev/shm/kvstore become directories of the test.
    """
    text = EXAMPLE.read_text().replace(
        'socket_group = "kvstore"', f'socket_group = "{os.getgid()}"'
    )
    file = place / "kvstore.toml"
    file.write_text(
        text.replace("/run/kvstore", str(place)).replace("/dev/shm/kvstore", str(place))
    )
    check, hang_up = settings()["ExecReload"]
    (serve,) = settings()["ExecStart"]
    assert hang_up == "/bin/kill -HUP $MAINPID"
    for line in (check, serve):
        program, verb, *options = shlex.split(line)
        assert (program, verb) == (COMMAND, "check" if line is check else "serve")
        assert options[:2] == ["--config", "/etc/kvstore/kvstore.toml"]
        assert run([verb, "--help"]) == 0
        help_text = capsys.readouterr().out
        assert all(option in help_text for option in options if option.startswith("--"))
    assert run(["check", "--config", str(file), "--json"]) == 0


def test_a_wrong_configuration_is_not_tried_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` ends with the code that systemd does not restart after, and nothing runs before it.

    systemd looks at the code of the main process alone: after a failed ExecStartPre= it restarts.
    """
    (serve,) = settings()["ExecStart"]
    file = place / "kvstore.toml"
    file.write_text("nonsense = 3\n")
    verb, *options = shlex.split(serve)[1:]
    code = run([verb, *(str(file) if word.startswith("/etc/") else word for word in options)])
    assert settings()["RestartPreventExitStatus"] == [str(code)]
    assert "nonsense is no setting" in capsys.readouterr().err
    assert "ExecStartPre" not in settings()


def test_times_of_the_unit_fit_the_daemons() -> None:
    """The unit waits longer than a drain and a slow close take, and a watchdog's beat is sooner."""
    from kvstore.core.config import load
    from kvstore.core.machine import FixedMachine
    from kvstore.daemon.daemon import CLOSE_SECONDS, TICK_SECONDS
    from kvstore.daemon.service_manager import BEAT_SHARE

    drain = load(None, {}, FixedMachine()).server.drain_seconds
    stop = float(settings()["TimeoutStopSec"][0].removesuffix("s"))
    assert stop >= 2 * (drain + CLOSE_SECONDS)
    watchdog = float(settings()["WatchdogSec"][0].removesuffix("s"))
    assert watchdog * BEAT_SHARE > 10 * TICK_SECONDS


def test_the_user_is_a_system_user() -> None:
    """The unit's user is the one that sysusers makes, of a kind that logind leaves alone."""
    (line,) = [
        line
        for line in (UNIT.parent / "kvstore.sysusers").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert shlex.split(line)[:2] == ["u", settings()["User"][0]]


SESSION = """
set -e
systemctl --user start kvstore.service
systemctl --user show kvstore.service -p SubState,StatusText,MainPID
systemctl --user reload kvstore.service
systemctl --user show kvstore.service -p SubState
kill -STOP $(systemctl --user show kvstore.service -p MainPID --value)
sleep 2.5
systemctl --user is-active kvstore.service || true
for _ in $(seq 100); do
    systemctl --user is-active --quiet kvstore.service && break
    sleep 0.1
done
systemctl --user show kvstore.service -p NRestarts,StatusText
systemctl --user stop kvstore.service
systemctl --user show kvstore.service -p SubState,Result
"""


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get("KVSTORE_TEST_SYSTEMD"), reason="set KVSTORE_TEST_SYSTEMD")
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace")
@pytest.mark.skipif(not Path("/lib/systemd/systemd").exists(), reason="no systemd here")
def test_a_real_systemd_runs_the_unit(place: Path, command: Path) -> None:
    """It is ready when it says so, reloads, is restarted when its owner thread hangs, and stops.

    The sandbox of the unit is in force but for three lines: no other user (Python may be where only
    root can read it), homes to be read for the same reason, and the way to a user's manager.
    """
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(UNIT.read_text())
    assert parser["Service"]["ProtectHome"] == "yes"
    text = UNIT.read_text().replace(COMMAND, str(command)).replace("/etc/kvstore/", f"{place}/")
    for old, new in (
        ("User=kvstore\nGroup=kvstore", ""),
        ("ProtectHome=yes", "ProtectHome=read-only\nBindPaths=/run/kvt-user/systemd/notify"),
        ("WatchdogSec=30s", "WatchdogSec=1s\nWatchdogSignal=SIGKILL"),
        ("RestartSec=2s", "RestartSec=100ms"),
    ):
        assert old in text
        text = text.replace(old, new)
    unit = place / UNIT.name
    unit.write_text(text)
    (place / "kvstore.toml").write_text(
        '[server]\nsocket = "/run/kvt-user/kvstore/kv.sock"\nmetrics = ""\n'
        f'[tiers.host]\ndirectory = "{place}/pool"\nsize = "16MiB"\n'
    )
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", "sh", str(MANAGER), str(unit),
         "sh", "-c", SESSION],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    serving = "StatusText=serving on /run/kvt-user/kvstore/kv.sock"
    assert "SubState=running" in lines[:3], lines
    assert lines.count(serving) == 2
    assert "NRestarts=1" in lines
    assert lines[-2:] == ["Result=success", "SubState=dead"] or lines[-2:] == [
        "SubState=dead", "Result=success",
    ]  # fmt: skip
