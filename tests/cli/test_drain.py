"""`kvstore drain`: it waits for what is under way, then for the daemon's end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import drain


@pytest.fixture
def own(serve: Callable[..., Any]) -> Any:
    """A daemon that may leave."""
    return serve().start()


def test_idle_daemon_leaves_at_once(kv: Any, own: Any) -> None:
    """The verb returns when the process is gone; pool, epochs and the way back stay."""
    outcome = kv("drain", "--socket", own.socket)
    assert outcome.code == 0
    assert "the daemon left after" in outcome.out
    assert "a shm pool stays for the next start" in outcome.out
    assert own.process.wait(1) == 0
    assert not Path(own.socket).exists()
    assert (own.pool / "pool-0.data").exists()
    own.start()


def test_free_gives_the_pool_up(kv: Any, own: Any) -> None:
    """--free unlinks the pool's memory: nothing is left of its bytes."""
    result = kv("drain", "--free", "--json", "--socket", own.socket).json
    assert result["gone"] is True
    assert result["freed"] is True
    assert (result["cut_leases"], result["cut_puts"]) == (0, 0)
    assert own.process.wait(1) == 0
    assert list(own.pool.glob("pool-*")) == []


def test_leases_are_waited_for(kv: Any, own: Any) -> None:
    """A live lease holds the daemon until the deadline; what was cut short is said."""
    with own.client() as client:
        match = own.fill_and_lease(client)
        result = kv("drain", "--deadline", "500ms", "--json", "--socket", own.socket).json
        match.release()
    assert result["gone"] is True
    assert result["cut_leases"] == 1
    assert result["seconds"] >= 0.5
    assert own.process.wait(1) == 0


def test_daemon_that_stays_is_exit_1(kv: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon still there long after the deadline is a failure, with its process id."""
    monkeypatch.setattr(drain, "CLOSE_SECONDS", -0.3)
    with own.client() as client:
        match = own.fill_and_lease(client)
        outcome = kv("drain", "--deadline", "700ms", "--socket", own.socket)
        match.release()
    assert outcome.code == 1
    assert f"(pid {own.process.pid}) is still there" in outcome.out
    own.process.wait(5)


def test_process_out_of_sight(kv: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process is not to be seen (another container), its socket's end is the sign."""

    def unseen(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", unseen)
    assert kv("drain", "--json", "--socket", own.socket).json["gone"] is True
    own.process.wait(5)


def test_ended_process_is_seen(own: Any) -> None:
    """What is watched is the process at the socket itself."""
    with drain._process(own.socket) as process:
        assert process is not None
        assert process.poll(0) == []
        own.end()
        assert process.poll(1000)


@pytest.mark.parametrize("deadline", ["soon", "-1", "2h", "nan"])
def test_bad_deadlines_are_exit_2(kv: Any, daemon: Any, deadline: str) -> None:
    """A deadline that is none drains nobody."""
    outcome = kv("drain", "--deadline", deadline)
    assert outcome.code == 2
    assert "--deadline" in outcome.sentence
    assert kv("status", "--json").json["state"] == "serving"
