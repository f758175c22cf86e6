"""`kvstore status`: the contract of its JSON, its table, and what an unreachable daemon means."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import VERBS


def test_json_has_the_contracted_keys(kv: Any, engine: Any) -> None:
    """Tools may rely on these keys, types and sums."""
    match = engine.lease(engine.fill(4))
    status = kv("status", "--json").json
    assert status["state"] == "serving"
    assert (status["session_count"], status["lease_count"]) == (2, 1)
    assert status["space_count"] >= 1
    assert status["policy"] == status["configured_policy"] == "saved_time"
    assert status["policy_reason"] == status["what_if"] == ""
    host = status["tiers"]["host"]
    assert host["capacity_bytes"] == 16 << 20
    assert (host["used_bytes"], host["block_count"], host["state"]) == (4 * 4096, 4, "serving")
    assert host["used_bytes"] + host["free_bytes"] + host["resting_bytes"] == 16 << 20
    assert status["leased_bytes"] == 4 * 4096
    assert status["block_count"] == 4
    assert {tenant["tenant"] for tenant in status["tenants"]} == {"default", "chat", "medical"}
    match.release()


def test_table_says_what_matters(kv: Any, engine: Any, daemon: Any) -> None:
    """A person sees state, place, process, tier, leases and blocks."""
    match = engine.lease(engine.fill(4))
    outcome = kv("status")
    assert outcome.code == 0
    for words in (
        f"is serving at {daemon.socket} (pid {daemon.process.pid}, up 0:",
        "host  16 KiB", "16 MiB", "1 on 16 KiB", "saved_time",
    ):  # fmt: skip
        assert words in outcome.out
    match.release()


def test_socket_option_beats_the_environment(
    kv: Any, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--socket is asked first, then KVSTORE_SOCKET, then $XDG_RUNTIME_DIR."""
    monkeypatch.setenv("KVSTORE_SOCKET", "/nowhere/kvstore.sock")
    assert kv("status", "--json", "--socket", daemon.socket).json["state"] == "serving"
    assert kv("status").code == 3
    monkeypatch.delenv("KVSTORE_SOCKET")
    runtime = Path(daemon.directory) / "run"
    (runtime / "kvstore").mkdir(parents=True, exist_ok=True)
    for name in ("kvstore.sock", "kvstore.sock.lane"):
        link = runtime / "kvstore" / name
        link.unlink(missing_ok=True)
        link.symlink_to(daemon.socket + name.removeprefix("kvstore.sock"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert kv("status", "--json").json["state"] == "serving"


DAEMON_VERBS = {
    "status": (), "spaces": (), "policy get": (), "policy set": ("lru",), "quota get": (),
    "quota set": ("default", "--cap", "1MiB"), "pin": ("r1",), "unpin": ("pin-1",),
    "clear": ("--all", "--yes"), "verify": (), "drain": (), "top": ("--once",),
    "flush": (), "explain": ("r1",),
}  # fmt: skip


@pytest.mark.parametrize("verb", DAEMON_VERBS)
def test_unreachable_daemon_is_exit_3(
    kv: Any, verb: str, directories: Callable[[], Path], tmp_path: Path
) -> None:
    """Without a daemon a verb ends with 3 and one sentence: the socket, and what to do."""
    path = str(tmp_path / "none.sock")
    for options in ((), ("--json",)):
        outcome = kv(*verb.split(), *DAEMON_VERBS[verb], "--socket", path, *options)
        assert outcome.code == 3
        assert path in outcome.sentence
        assert "kvstore serve" in outcome.sentence


def test_every_verb_of_a_daemon_is_tried() -> None:
    """Verbs that need no running daemon are these, the others are tested above."""
    alone = {
        "serve", "check", "doctor", "demo", "replay", "simulate", "tune", "trace", "estimate",
        "bench", "fsck",
    }  # fmt: skip
    assert {verb.split()[0] for verb in DAEMON_VERBS} == set(VERBS) - alone


def test_dead_socket_is_exit_3(kv: Any, directories: Callable[[], Path]) -> None:
    """A socket that a killed daemon left says the same."""
    path = directories() / "kv.sock"
    for name in (path, f"{path}.lane"):
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(name))
    outcome = kv("status", "--socket", str(path))
    assert outcome.code == 3
    assert str(path) in outcome.sentence


def test_network_address_is_a_usage_error(kv: Any) -> None:
    """Operators' verbs do not go over the network; a typed address says so."""
    outcome = kv("status", "--socket", "localhost:9751")
    assert outcome.code == 2
    assert "localhost:9751" in outcome.sentence


def test_engines_may_not_operate(kv: Any, serve: Callable[..., Any]) -> None:
    """A peer with the role of an engine gets one sentence that names role, user and fix."""
    daemon = serve(role="engine").start()
    for verb, options in DAEMON_VERBS.items():
        if verb == "top":
            continue
        outcome = kv(*verb.split(), *options, "--socket", daemon.socket)
        assert outcome.code == 1
        for words in (f"kvstore {verb}", "admin", f"uid {os.getuid()}", "[[access]]"):
            assert words in outcome.sentence
    assert daemon.end(signal.SIGTERM) == 0


def test_frozen_daemon_is_exit_3(kv: Any, serve: Callable[..., Any]) -> None:
    """A daemon that is stopped in its tracks keeps nobody waiting for longer than 6 s."""
    daemon = serve().start()
    daemon.process.send_signal(signal.SIGSTOP)
    outcome = kv("status", "--socket", daemon.socket)
    assert outcome.code == 3
    assert "did not answer" in outcome.sentence
    daemon.process.send_signal(signal.SIGCONT)
