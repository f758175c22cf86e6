"""`kvstore top`: what it shows of two readings."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvstore.cli.main import run
from kvstore.cli.top import SPARKS, Watch, bar, duration, spark
from kvstore.replay.own_daemon import OwnDaemon

GIB = 1 << 30


def status(pid: int = 7, lookups: float = 0, tokens: float = 0, hits: float = 0) -> dict[str, Any]:
    return {
        "state": "serving", "reason": "", "uptime_seconds": 3723.0, "pid": pid, "policy": "lru",
        "version": "0.1.0", "session_count": 2, "lease_count": 3, "leased_bytes": 4096,
        "reservation_count": 1, "pin_count": 0, "space_count": 1, "block_count": 1234,
        "tiers": {
            "host": {
                "capacity_bytes": 4 * GIB, "used_bytes": 3 * GIB, "resting_bytes": GIB // 2,
                "block_count": 1234, "state": "serving",
            },
        },
        "counters": {
            "kvstore_lookups_total": lookups, "kvstore_lookup_tokens_total": tokens,
            "kvstore_hit_tokens_total": hits,
        },
    }  # fmt: skip


def shown(watch: Watch) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(watch.view())
    return out.getvalue()


def test_rates_are_differences() -> None:
    """Rates are what was counted between two readings, divided by the time between them."""
    watch = Watch()
    watch.take(10.0, status(lookups=100, tokens=1000, hits=100))
    watch.take(12.0, status(lookups=150, tokens=3000, hits=1600))
    assert watch.rates["lookups"] == 25
    text = shown(watch)
    assert "75.0%" in text
    assert "53.3%" in text
    assert watch.document()["rates"]["hit_tokens_per_second"] == 750


def test_restart_begins_anew() -> None:
    """Counters of a restarted daemon are not compared with the old one's."""
    watch = Watch()
    watch.take(10.0, status(lookups=1000))
    watch.take(11.0, status(pid=8, lookups=5))
    assert watch.rates == {}
    watch.take(12.0, status(pid=8, lookups=9))
    assert watch.rates["lookups"] == 4


def test_view_names_what_matters() -> None:
    """The first reading alone is shown too: state, sessions, leases, tiers."""
    watch = Watch()
    watch.take(0.0, status())
    text = shown(watch)
    for words in ("serving", "up 1:02:03", "2 sessions", "3 leases", "host", "3 GiB", "1,234"):
        assert words in text


def test_bar_and_spark() -> None:
    """Bars keep their width whatever the numbers; an idle spark line is flat."""
    for used, resting, capacity in ((0, 0, 0), (5, 0, 10), (10, 10, 10), (3, 3, 10)):
        line = bar(used, resting, capacity).plain
        assert len(line.partition(" ")[0]) == 40
    assert spark([0, 0]) == SPARKS[0] * 2
    assert spark([1, 2, 4])[-1] == SPARKS[-1]
    assert duration(59.9) == "0:00:59"


def test_once_reads_a_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    """--once prints one view and leaves; --json prints one document and nothing else."""
    with OwnDaemon(64 << 20) as daemon:
        assert run(["top", "--once", "--interval", "0.1", "--socket", daemon.socket]) == 0
        assert "serving" in capsys.readouterr().out
        assert run(["top", "--json", "--interval", "0.1", "--socket", daemon.socket]) == 0
        out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["state"] == "serving"
    assert "lookups_per_second" in json.loads(out)["rates"]


def test_no_daemon_is_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a daemon there is one sentence and exit 3."""
    assert run(["top", "--once", "--socket", str(tmp_path / "nobody.sock")]) == 3
    assert capsys.readouterr().err.count("\n") == 1
