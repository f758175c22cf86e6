"""`kvstore demo`: a real trace, real bytes, a daemon killed in the middle of it, and a reboot."""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
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
    hit_rows,
    progress_bar,
    table_rows,
)

POOL_BYTES = 1 << 30
# Room for every block of the trace, of which the pool holds half. Small blocks of many tokens want
# an index that is large beside them, and a tier gives it a fixed share.
DISK_POOLS = 6
REBOOT_SHARE = 5  # after the reboot, one request in so many comes again, from the first on
WRITTEN, READ = "kvstore_demoted_blocks_total", "kvstore_promoted_blocks_total"


@click.command()
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--bytes-per-token", type=click.IntRange(min=1), default=None,
    help="Payload bytes of a token; else scaled so that half of the trace's blocks fit in host.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first N requests.")
@click.option(
    "--path", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="Where the disk tier is made, and removed again; else in the user's cache or /var/tmp.",
)  # fmt: skip
@click.option(
    "--engine", is_flag=True,
    help="Let users chat with a small real model instead, with the store and without it.",
)  # fmt: skip
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write a page with the plot of what things cost here; with --engine only.",
)  # fmt: skip
@json_option
def command(
    clients: int, bytes_per_token: int | None, limit: int, path: Path | None, engine: bool,
    report: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay ten minutes of a published trace against a daemon of our own.

    What overflows its host pool goes to a disk tier and comes back from there. Half way the daemon
    is killed with signal 9 and started again; it takes its pool back. At the end it is flushed and
    started with an empty pool, as after a reboot, and serves a part of the trace again from disk.
    Every restored byte is checked against what belongs there; exit 1 if one was wrong. Nothing is
    left behind.

    With --engine, users chat with a small real model over one long system prompt, each turn with
    the store and without; the daemon is killed and rebooted in between. Exit 1 if an answer was
    another. It needs: make smollm2.
    """
    if engine:
        from kvstore.cli.demo_engine import run

        with _interruptible():
            run(path, report, as_json)
        return
    if report is not None:
        raise click.UsageError("--report is of no use without --engine; pass that, too")
    from kvstore.replay.formats import BUNDLED
    from kvstore.replay.own_disk import own_disk

    with _interruptible(), own_disk(path) as disk:
        result = _run(BUNDLED, disk, clients, bytes_per_token, limit, quiet=as_json)
    if as_json:
        print_json(result)
    else:
        rows = [*_kill_rows(result), *table_rows(result)]
        # The last two rows close the whole, after what follows the reboot.
        print_table(["", "demo"], [*rows[:-2], *_reboot_rows(result), *rows[-2:]])
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
    trace: Path, disk: Path, clients: int, bytes_per_token: int | None, limit: int, quiet: bool
) -> dict[str, Any]:
    from kvstore.replay.formats import load_trace
    from kvstore.replay.live import ReplayOptions
    from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
    from kvstore.replay.own_disk import disk_section, fitting_disk_bytes

    pool_bytes = fitting_pool_bytes(POOL_BYTES)
    disk_bytes = fitting_disk_bytes(disk, DISK_POOLS * pool_bytes)
    pool_bytes = min(pool_bytes, disk_bytes // DISK_POOLS // (2 << 20) * (2 << 20))
    options = ReplayOptions(
        clients=clients,
        bytes_per_token=bytes_per_token
        or bytes_per_token_for(load_trace(trace, limit), pool_bytes),
        limit=limit,
    )
    sections = {**SHORT_LEASES, "tiers.disk": disk_section(disk, disk_bytes)}
    with OwnDaemon(pool_bytes, sections) as daemon:
        demo = _Demo(trace, daemon, options, quiet)
        killed = demo.replay_with_a_kill()
        rebooted = demo.reboot_and_replay()
    return {
        "trace": trace.name,
        **killed,
        **rebooted,
        "wrong_bytes": killed["wrong_bytes"] + rebooted["after_restart"]["wrong_bytes"],
        "written_to_disk_blocks": demo.counters[WRITTEN],
        "restored_from_disk_blocks": demo.counters[READ],
        "pool_bytes": pool_bytes,
        "disk_bytes": disk_bytes,
    }


class _Demo:
    """The two halves of the demo, on one daemon."""

    def __init__(self, trace: Path, daemon: Any, options: Any, quiet: bool) -> None:
        self._trace, self._daemon, self._options, self._quiet = trace, daemon, options, quiet
        self.counters: Counter[str] = Counter()

    def replay_with_a_kill(self) -> dict[str, Any]:
        """The whole trace; half way the daemon is killed and started again."""
        with self._replay(self._options) as replay:
            self._say(
                f"Replaying {replay.request_count:,} requests ({replay.input_tokens:,} tokens) of "
                "the Mooncake conversation trace; the daemon will be killed half way."
            )
            with progress_bar("replaying", replay.request_count) as bar:
                killer = Killer(self._daemon, replay, bar, self.count)
                result = replay.run(killer.on_progress)
        self._request_count = replay.request_count
        tokens = max(result["input_tokens"], 1)
        by_tier = {"host": 0.0, "disk": 0.0, **result["token_hit_ratio_by_tier"]}
        return {
            **result,
            "token_hit_ratio_by_tier": by_tier,
            "readopted_blocks": self._daemon.status()["readopted_blocks"],
            "readopted_token_hit_ratio": result["readopted_hit_tokens"] / tokens,
            "killed_at_request": killer.killed_at,
            "restart_seconds": killer.restart_seconds,
        }

    def reboot_and_replay(self) -> dict[str, Any]:
        """Flush, then a start with nothing but the disk, then a part of the trace again."""
        from dataclasses import replace

        flush = self._daemon.flush()
        self.count()
        self._daemon.stop(free=True)
        seconds = self._daemon.start()
        readopted = self._daemon.status()["readopted_blocks"]
        limit = max(self._request_count // REBOOT_SHARE, 1)
        with self._replay(replace(self._options, limit=limit)) as replay:
            self._say(f"Flushed, and started again with an empty pool; {limit:,} requests again.")
            with progress_bar("from disk", replay.request_count) as bar:
                result = replay.run(bar.show)
        self.count()
        by_tier = {"host": 0.0, "disk": 0.0, **result["token_hit_ratio_by_tier"]}
        return {
            "flush": flush,
            "reboot_seconds": seconds,
            "reboot_readopted_blocks": readopted,
            "disk_served_after_restart_tokens": result["hit_tokens_by_tier"].get("disk", 0),
            "after_restart": {**result, "token_hit_ratio_by_tier": by_tier},
        }

    def count(self) -> None:
        """Adds up what the counters of this life of the daemon say."""
        counters = self._daemon.status()["counters"]
        for name in (WRITTEN, READ):
            self.counters[name] += int(counters.get(name, 0))

    @contextmanager
    def _replay(self, options: Any) -> Iterator[Any]:
        from kvstore.replay.live import LiveReplay

        with (
            tempfile.TemporaryDirectory(prefix="kvstore-") as directory,
            LiveReplay(self._trace, self._daemon.target, directory, options) as replay,
        ):
            yield replay

    def _say(self, text: str) -> None:
        if not self._quiet:
            click.echo(text, err=True)


class Killer:
    """Kills the daemon half way through a replay and starts it again.

    `before` is called just before.
    """

    def __init__(self, daemon: Any, replay: Any, bar: Bar, before: Any) -> None:
        self._daemon, self._replay, self._bar, self._before = daemon, replay, bar, before
        self.killed_at: int | None = None
        self.restart_seconds: float | None = None

    def on_progress(self, totals: dict[str, int]) -> None:
        self._bar.show(totals)
        if self.killed_at is None and totals["requests"] >= self._replay.request_count // 2:
            self._kill(totals["requests"])

    def _kill(self, at: int) -> None:
        self.killed_at = at
        self._bar.say("kill -9, restart")
        self._before()
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


def _reboot_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    flush, again = result["flush"], result["after_restart"]
    return [
        ("flushed in", f"{flush['seconds']:.2f} s"),
        ("blocks on disk, left out", f"{flush['durable_blocks']:,}, {flush['left_out_blocks']:,}"),
        ("started with an empty pool in", f"{result['reboot_seconds']:.2f} s"),
        ("blocks re-adopted from disk", f"{result['reboot_readopted_blocks']:,}"),
        ("first requests again", f"{again['requests']:,}"),
        *hit_rows(again),
        ("blocks written to disk", f"{result['written_to_disk_blocks']:,}"),
        ("blocks restored from disk", f"{result['restored_from_disk_blocks']:,}"),
    ]
