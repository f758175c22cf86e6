"""`kvstore serve`: its options, its refusals, its signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def own(serve: Callable[..., Any]) -> Any:
    """A daemon that is not started yet."""
    return serve()


@pytest.fixture
def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_options_beat_the_file(kv: Any, own: Any, free_address: str) -> None:
    """--socket, --metrics and --host-size override the configuration; /ready then says so."""
    own.socket = str(own.directory / "other.sock")
    own.start("--socket", own.socket, "--metrics", free_address, "--host-size", "32MiB")
    status = kv("status", "--json", "--socket", own.socket).json
    assert status["tiers"]["host"]["capacity_bytes"] == 32 << 20
    with urllib.request.urlopen(f"http://{free_address}/ready", timeout=5) as answer:
        assert answer.status == 200
    assert own.end(signal.SIGTERM) == 0


def test_json_says_where_it_listens(own: Any) -> None:
    """With --json standard output is one document with the addresses; logs go elsewhere."""
    process = subprocess.Popen(
        own.command("--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/"
    )
    assert process.stderr is not None
    while b"serving on" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert json.loads(out) == {"socket": own.socket, "metrics": ""}
    assert process.returncode == 0


def test_files_are_private(own: Any) -> None:
    """I7: sockets, pool and lock are the user's alone."""
    own.start()
    for name in ("kv.sock", "kv.sock.lane", "kv.sock.lock"):
        assert (own.directory / name).stat().st_mode & 0o777 == 0o600, name
    assert own.pool.stat().st_mode & 0o777 == 0o700
    for path in own.pool.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
    own.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signals_drain(own: Any, number: signal.Signals) -> None:
    """A stop signal ends an idle daemon with 0: sockets go, the pool stays."""
    own.start()
    assert own.end(number) == 0
    assert sorted(p.name for p in own.directory.glob("kv.sock*")) == ["kv.sock.lock"]
    assert (own.pool / "pool-0.data").exists()


def test_second_signal_ends_at_once(own: Any) -> None:
    """With leases alive the first SIGTERM waits for them, the second does not."""
    own.start()
    with own.client() as client:
        match = own.fill_and_lease(client)
        own.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            own.process.wait(0.5)
        began = time.monotonic()
        assert own.end(signal.SIGTERM) == 0
        assert time.monotonic() - began < 3
        match.release()


def test_killed_daemon_comes_back(kv: Any, own: Any) -> None:
    """I10: after kill -9 the next start takes sockets and blocks over, and says how many."""
    own.start()
    with own.client() as client:
        own.fill_and_lease(client).release()
    own.end(signal.SIGKILL)
    assert Path(f"{own.socket}.lane").exists()
    own.start()
    assert kv("status", "--json", "--socket", own.socket).json["readopted_blocks"] == 4
    assert "took back 4 blocks" in own.log.read_text()
    own.end()


def test_hangup_reloads_policy_and_quotas(kv: Any, own: Any) -> None:
    """SIGHUP takes quotas from the file anew, and names what waits for a restart.

    A file that is wrong changes nothing.
    """
    own.start()
    text = own.config.read_text()
    own.config.write_text(text.replace('name = "chat"', 'name = "chat"\nhost_cap = "2MiB"'))
    own.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "are reloaded" in own.log.read_text())
    assert cap_of(kv, own) == 2 << 20
    assert "reloaded (tenants)\n" in own.log.read_text()
    own.config.write_text(own.config.read_text().replace('"16MiB"', '"32MiB"'))
    own.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "a restart is needed for tiers.host.size" in own.log.read_text())
    own.config.write_text(text.replace('name = "chat"', 'name = "chat"\nhost_cap = "-1"'))
    own.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "was not reloaded" in own.log.read_text())
    assert cap_of(kv, own) == 2 << 20
    own.end()


def test_the_host_tier_shrinks_and_grows_while_it_serves(kv: Any, own: Any) -> None:
    """SIGHUP with a smaller size frees memory at once, and with the old one it is back."""
    own.start()
    data = own.pool / "pool-0.data"
    text = own.config.read_text()
    with own.client() as client:
        engine = own.engine(client)
        engine.fill(240)
        space = engine.fill(240, model="other")
        assert host(kv, own)["used_bytes"] == 2 * 240 * 4096
        own.config.write_text(text.replace('"16MiB"', '"5MiB"'))
        own.process.send_signal(signal.SIGHUP)
        wait_for(lambda: host(kv, own)["capacity_bytes"] == 5 << 20)
        wait_for(lambda: data.stat().st_blocks * 512 <= 1 << 20)
        assert host(kv, own)["used_bytes"] <= 1 << 20
        with space.lookup(engine.prompt(240)) as match:
            views = space.restore(match)
            assert [view[0] for view in views] == [7 + i for i in range(len(views))]
            del views
        own.config.write_text(text)
        own.process.send_signal(signal.SIGHUP)
        wait_for(lambda: host(kv, own)["capacity_bytes"] == 16 << 20)
    own.end()


def host(kv: Any, own: Any) -> Any:
    return kv("status", "--json", "--socket", own.socket).json["tiers"]["host"]


def cap_of(kv: Any, own: Any) -> int:
    (tenant,) = kv("quota", "get", "chat", "--json", "--socket", own.socket).json["tenants"]
    cap: int = tenant["tiers"]["host"]["cap_bytes"]
    return cap


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_second_daemon_is_refused(kv: Any, own: Any) -> None:
    """I20: a second daemon on the same socket, or on the same pool, ends with 2 and names the
    holder."""
    own.start()
    pid = str(own.process.pid)
    for options in ((), ("--socket", str(own.directory / "other.sock"))):
        outcome = own.refused(*options)
        assert outcome.code == 2
        assert f"process id {pid}" in outcome.sentence
    assert kv("status", "--json", "--socket", own.socket).json["state"] == "serving"
    own.end()


def test_socket_that_is_a_directory(own: Any) -> None:
    """A socket path where something else lies is left as it is, and named."""
    Path(own.socket).mkdir()
    outcome = own.refused()
    assert outcome.code in (1, 2)
    assert own.socket in outcome.sentence
    assert Path(own.socket).is_dir()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--host-size", "0"), "tiers.host.size"),
        (("--host-size", "-1GiB"), "tiers.host.size"),
        (("--host-size", "lots"), "tiers.host.size"),
        (("--host-size", "900TiB"), "tiers.host.size"),
        (("--metrics", "nowhere"), "server.metrics"),
        (("--metrics", "127.0.0.1:99999"), "server.metrics"),
        (("--socket", "/" + "x" * 120), "server.socket"),
        (("--config", "/nowhere/kvstore.toml"), "/nowhere/kvstore.toml"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_options_are_exit_2(kv: Any, own: Any, options: Any, words: str) -> None:
    """A daemon that cannot be as told does not start, and says which key is wrong."""
    outcome = kv("serve", "--config", str(own.config), *options)
    assert outcome.code == 2
    assert words in outcome.sentence


def test_unknown_keys_are_exit_2(kv: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typing errors in file and environment are not ignored."""
    text = own.config.read_text()
    own.config.write_text(text + '[tiers.hots]\nsize = "1GiB"\n')
    outcome = kv("serve", "--config", str(own.config))
    assert outcome.code == 2
    assert "hots" in outcome.sentence
    own.config.write_text(text)
    monkeypatch.setenv("KVSTORE_TIERS__HOST__SISE", "1GiB")
    outcome = kv("serve", "--config", str(own.config))
    assert outcome.code == 2
    assert "sise" in outcome.sentence.lower()


def test_missing_parent_directory(kv: Any, own: Any) -> None:
    """A pool below a directory that is not there is one sentence."""
    own.config.write_text(own.config.read_text().replace(str(own.pool), "/nowhere/at/all"))
    outcome = kv("serve", "--config", str(own.config))
    assert outcome.code == 2
    assert "/nowhere/at" in outcome.sentence


def test_directory_without_permission(own: Any) -> None:
    """A socket in somebody else's directory is one sentence."""
    outcome = own.refused("--socket", "/proc/kvstore/kv.sock")
    assert outcome.code == 2
    assert "server.socket" in outcome.sentence
