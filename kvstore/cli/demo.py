"""`kvstore demo`: a real trace, real bytes, and a daemon killed in the middle of it."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import finish, json_option, print_json, print_table
from kvstore.cli.replay import (
    SHORT_LEASES,
    Bar,
    bytes_per_token_for,
    progress_bar,
    table_rows,
)


@click.command()
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--bytes-per-token", type=click.IntRange(min=1), default=None,
    help="Payload bytes of a token; else scaled so that half of the trace's blocks fit.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first N requests.")
@json_option
def command(clients: int, bytes_per_token: int | None, limit: int, as_json: bool) -> None:
    """Replay ten minutes of a published trace against a daemon of our own.

    Half way the daemon is killed with signal 9 and started again; it takes its pool back. Every
    restored byte is checked against what belongs there; exit 1 if one was wrong. Nothing is left
    behind.
    """
    from kvstore.replay.formats import BUNDLED

    with _interruptible():
        result = _run(BUNDLED, clients, bytes_per_token, limit, quiet=as_json)
    if as_json:
        print_json(result)
    else:
        print_table(["", "demo"], [*_kill_rows(result), *table_rows(result)])
    finish(result["wrong_bytes"] == 0)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Lets SIGTERM clean up as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    trace: Path, clients: int, bytes_per_token: int | None, limit: int, quiet: bool
) -> dict[str, Any]:
    from kvstore.replay.formats import load_trace
    from kvstore.replay.live import LiveReplay, ReplayOptions
    from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes

    pool_bytes = fitting_pool_bytes()
    options = ReplayOptions(
        clients=clients,
        bytes_per_token=bytes_per_token
        or bytes_per_token_for(load_trace(trace, limit), pool_bytes),
        limit=limit,
    )
    with (
        OwnDaemon(pool_bytes, SHORT_LEASES) as daemon,
        tempfile.TemporaryDirectory(prefix="kvstore-") as directory,
        LiveReplay(trace, daemon.target, directory, options) as replay,
    ):
        if not quiet:
            click.echo(
                f"Replaying {replay.request_count:,} requests ({replay.input_tokens:,} tokens) of "
                "the Mooncake conversation trace; the daemon will be killed half way.",
                err=True,
            )
        with progress_bar("replaying", replay.request_count) as bar:
            killer = Killer(daemon, replay, bar)
            result = replay.run(killer.on_progress)
        status = daemon.status()
    tokens = max(result["input_tokens"], 1)
    return {
        "trace": trace.name,
        **result,
        "readopted_blocks": status["readopted_blocks"],
        "readopted_token_hit_ratio": result["readopted_hit_tokens"] / tokens,
        "killed_at_request": killer.killed_at,
        "restart_seconds": killer.restart_seconds,
        "pool_bytes": pool_bytes,
    }


class Killer:
    """Kills the daemon half way through a replay and starts it again."""

    def __init__(self, daemon: Any, replay: Any, bar: Bar) -> None:
        self._daemon, self._replay, self._bar = daemon, replay, bar
        self.killed_at: int | None = None
        self.restart_seconds: float | None = None

    def on_progress(self, totals: dict[str, int]) -> None:
        self._bar.show(totals)
        if self.killed_at is None and totals["requests"] >= self._replay.request_count // 2:
            self._kill(totals["requests"])

    def _kill(self, at: int) -> None:
        self.killed_at = at
        self._bar.say("kill -9, restart")
        self._daemon.kill()
        self._replay.board.next_phase()
        self.restart_seconds = self._daemon.start()
        self._bar.say("replaying")


def _kill_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    if result["killed_at_request"] is None:
        return []
    return [
        ("daemon killed (signal 9)", f"at request {result['killed_at_request']:,}"),
        ("serving again after", f"{result['restart_seconds']:.2f} s"),
        ("blocks re-adopted", f"{result['readopted_blocks']:,}"),
        ("token hits on these", f"{result['readopted_hit_tokens']:,}"),
    ]
