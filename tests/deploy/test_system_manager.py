"""The unit under a system's own manager (PID 1), installed by the lines of docs/deploy.md.

For a machine or a container to spare, with systemd, and kvstore in /opt/kvstore. What it installs
it takes away again. It needs nothing but the standard library and pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_page import console

ROOT = Path(__file__).parents[2]
PYTHON, KVSTORE = "/opt/kvstore/bin/python", "/opt/kvstore/bin/kvstore"
CONFIG = Path("/etc/kvstore/kvstore.toml")
UNIT = Path("/etc/systemd/system/kvstore.service")
USERS = Path("/usr/lib/sysusers.d/kvstore.conf")
ENGINE, STRANGER = "kvtengine", "kvtstranger"
ENGINE_UID = 29_431
# A loaded or an emulated machine is slow; the unit's own times are what is looked at.
PATIENCE_SECONDS = 600
CLIENT = """
import sys
from kvstore.client import KVClient, KVSpec
spec = KVSpec(model="m", revision="1", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16",
              block_size=16)
prompt = list(range(64))
with KVClient.connect(call_timeout_seconds=60) as client:
    space = client.attach(spec)
    blocks = [bytes([i + 7]) * space.spec.block_bytes for i in range(4)]
    if "put" in sys.argv:
        space.put(prompt, blocks)
    with space.lookup(prompt, request_id="r") as match:
        print(match.matched_tokens, [bytes(each) for each in space.restore(match)] == blocks)
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.environ.get("KVSTORE_TEST_SYSTEMD") != "system",
        reason="set KVSTORE_TEST_SYSTEMD=system, on a machine to spare with /opt/kvstore",
    ),
    pytest.mark.skipif(not Path("/run/systemd/system").exists(), reason="PID 1 is no systemd"),
    pytest.mark.skipif(os.geteuid() != 0, reason="installs a unit"),
    pytest.mark.skipif(UNIT.exists(), reason="kvstore is installed here, and in use"),
]


def tell(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    environ = {name: it for name, it in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert not check or done.returncode == 0, (command, done.stdout[-500:], done.stderr[-500:])
    return done


def show(key: str) -> str:
    return tell("systemctl", "show", "kvstore", "-p", key, "--value").stdout.strip()


def status() -> dict[str, object]:
    answer: dict[str, object] = json.loads(tell(KVSTORE, "status", "--json").stdout)
    return answer


def may_raise_limits() -> bool:
    """Whether PID 1 has CAP_SYS_RESOURCE, as that of a container may not."""
    (line,) = [it for it in Path("/proc/1/status").read_text().splitlines() if "CapEff" in it]
    return bool(int(line.split()[1], 16) >> 24 & 1)


def wait_for(key: str, value: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while show(key) != value:
        assert time.monotonic() < end, f"{key} is {show(key)}, not {value}"
        time.sleep(0.2)


def engine(*arguments: str, user: str = ENGINE) -> subprocess.CompletedProcess[str]:
    """A client of another user, logged in and out again: logind sees it go."""
    return tell("su", "-", user, "-c", f"{PYTHON} /tmp/kvt-client.py {' '.join(arguments)}",
                check=False)  # fmt: skip


@pytest.fixture(scope="module")
def machine() -> Iterator[None]:
    """Installed by the page's lines, but for that of pip, and two users beside."""
    try:
        Path("/tmp/kvt-client.py").write_text(CLIENT)
        tell("sh", "-euc", "\n".join(console("systemd")[1:4]))
        tell("useradd", "-m", "-u", str(ENGINE_UID), "-G", "kvstore", ENGINE)
        tell("useradd", "-m", STRANGER)
        tell("sh", "-euc", "\n".join(console("systemd")[4:]))
        yield
    finally:
        take_away()


def take_away() -> None:
    tell("systemctl", "disable", "--now", "kvstore", check=False)
    tell("systemctl", "revert", "kvstore", check=False)
    for path in (UNIT, USERS, CONFIG, Path("/tmp/kvt-client.py")):
        path.unlink(missing_ok=True)
    for user in (ENGINE, STRANGER, "kvstore"):
        tell("loginctl", "terminate-user", user, check=False)
        tell("userdel", "-rf", user, check=False)
    tell("rm", "-rf", "/dev/shm/kvstore", "/var/lib/kvstore")
    tell("systemctl", "daemon-reload")


@pytest.fixture
def running(machine: None) -> None:
    """Running, with the page's configuration and a rule for the engine."""
    text = (ROOT / "deploy" / "kvstore.toml").read_text()
    assert text.count("[tiers.host]\n") == 1
    rule = f'[[access]]\nuid = {ENGINE_UID}\n[tiers.host]\nsize = "64MiB"\n'
    CONFIG.write_text(text.replace("[tiers.host]\n", rule))
    tell("systemctl", "reset-failed", "kvstore", check=False)
    tell("systemctl", "restart", "kvstore")


def test_the_page_installs_what_serves(machine: None) -> None:
    """enable --now returns when it serves: as user kvstore, locked, with the page's directories."""
    assert (show("SubState"), show("UnitFileState")) == ("running", "enabled")
    assert show("StatusText") == "serving on /run/kvstore/kvstore.sock"
    assert status()["state"] == "serving"
    pid = show("MainPID")
    owner = Path(f"/proc/{pid}").stat().st_uid
    assert 0 < owner < 1000, "no system user: logind would remove its pools"
    for path, mode in (("/run/kvstore", 0o750), ("/var/lib/kvstore", 0o700)):
        found = os.stat(path)
        assert (found.st_uid, found.st_mode & 0o777) == (owner, mode)
    if may_raise_limits():
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "-500\n"
        assert "Max locked memory         unlimited" in Path(f"/proc/{pid}/limits").read_text()


def test_users_get_in_by_the_group(running: None) -> None:
    """One of the group is served, another told in a sentence; no log-out takes the pools away."""
    assert engine("put").stdout == "64 True\n"
    told = engine("get", user=STRANGER)
    assert told.returncode != 0
    assert "may not connect to /run/kvstore/kvstore.sock" in told.stderr
    mine = Path("/dev/shm/kvt-mine")
    mine.touch()
    os.chown(mine, ENGINE_UID, -1)
    tell("su", "-", "kvstore", "-s", "/bin/sh", "-c", "true")
    tell("su", "-", ENGINE, "-c", "true")
    end = time.monotonic() + PATIENCE_SECONDS
    while mine.exists():  # logind does remove what another user leaves
        assert time.monotonic() < end
        time.sleep(0.5)
    assert engine("get").stdout == "64 True\n"
    tell("systemctl", "restart", "kvstore")
    assert engine("get").stdout == "64 True\n"


def test_a_reload_takes_what_is_right_only(running: None) -> None:
    """A changed file is taken; with a fault in it the reload fails, and the daemon goes on."""
    pid = show("MainPID")
    CONFIG.write_text(CONFIG.read_text().replace(str(ENGINE_UID), str(ENGINE_UID + 1)))
    tell("systemctl", "reload", "kvstore")
    assert "has no access" in engine("get").stderr
    CONFIG.write_text(CONFIG.read_text().replace(str(ENGINE_UID + 1), str(ENGINE_UID)) + "x = 3\n")
    assert tell("systemctl", "reload", "kvstore", check=False).returncode != 0
    assert (show("SubState"), show("MainPID")) == ("running", pid)


def test_a_wrong_configuration_is_tried_once(running: None) -> None:
    """A start fails with the sentence, and is not tried again."""
    CONFIG.write_text("nonsense = 3\n")
    assert tell("systemctl", "restart", "kvstore", check=False).returncode != 0
    time.sleep(5)  # RestartSec=2s
    assert (show("ActiveState"), show("NRestarts"), show("ExecMainStatus")) == ("failed", "0", "2")
    assert "nonsense is no setting" in tell("systemctl", "status", "kvstore", check=False).stdout


def test_a_daemon_that_hangs_or_dies_is_started_again(running: None) -> None:
    """By the watchdog of 30 s, and after a kill; blocks are taken back."""
    assert engine("put").stdout == "64 True\n"
    for restarts, signal in (("1", "STOP"), ("2", "KILL")):
        tell("kill", f"-{signal}", show("MainPID"))
        wait_for("NRestarts", restarts)
        wait_for("SubState", "running")
        assert engine("get").stdout == "64 True\n"


def test_a_memory_limit_is_taken(running: None) -> None:
    """The page's set-property, of a running daemon."""
    tell("systemctl", "set-property", "kvstore", "MemoryMax=80G")
    assert show("MemoryMax") == str(80 << 30)
    unified = Path("/sys/fs/cgroup/system.slice/kvstore.service/memory.max")
    if unified.exists():
        assert unified.read_text() == f"{80 << 30}\n"


def test_a_stop_is_quick_and_clean(running: None) -> None:
    """Nobody uses a block: it leaves well before TimeoutStopSec, socket gone, pools there."""
    start = time.monotonic()
    tell("systemctl", "stop", "kvstore")
    assert time.monotonic() - start < 45
    assert (show("Result"), show("ExecMainStatus")) == ("success", "0")
    assert not Path("/run/kvstore").exists()
    assert Path("/dev/shm/kvstore/pool-0.data").exists()
