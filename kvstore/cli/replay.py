"""`kvstore replay`: a prefix trace against a daemon, with real bytes, each one checked."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import (
    by_speed,
    finish,
    json_option,
    print_json,
    print_table,
    socket_option,
    target,
)
from kvstore.cli.replay_engine import SCALE, replay_engine
from kvstore.core.errors import PermissionDenied, StoreUnavailable
from kvstore.core.sizes import format_bytes, parse_size

POOL_SHARE = 2  # of the trace's unique blocks, one in so many fits into a pool of our own
UNKNOWN_POOL_BYTES = 1 << 30
BYTES_PER_TOKEN_STEP = 8  # 512 tokens of 8 bytes are a 4 KiB slot, the smallest there is
# Adopted slots rest for one maximum lease before reuse: a short replay cannot wait a minute.
SHORT_LEASES = {"limits": {"lease_ttl_seconds": 2.0, "max_lease_ttl_seconds": 2.0}}


def size_value(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """A size such as 4GiB, as bytes."""
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--clients", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option(
    "--bytes-per-token", type=click.IntRange(min=1), default=None,
    help="Payload bytes of a token; else scaled so that half of the trace's blocks fit.",
)  # fmt: skip
@click.option(
    "--speed", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="1 is the trace's own pace, 0 as fast as possible.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0, 65535), default=0, show_default=True,
    help="Other seeds make other prompts, and other spreads of coarse timestamps.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first N requests.")
@click.option(
    "--disk", callback=size_value, metavar="SIZE",
    help="Give a daemon of its own a disk tier of this size, and use that daemon.",
)  # fmt: skip
@click.option(
    "--disk-path", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="Where that tier is made, and removed again; else in the user's cache or /var/tmp.",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["transformers", "vllm"]),
    help="Drive a small real model with the trace's prefixes, with the store and without.",
)  # fmt: skip
@click.option(
    "--scale", type=click.IntRange(min=1), metavar="N",
    help="With --engine: one token for N of the trace's. Else 32.",
)  # fmt: skip
@socket_option
@json_option
def command(
    trace: Path,
    clients: int,
    bytes_per_token: int | None,
    speed: float,
    seed: int,
    limit: int,
    disk: int | None,
    disk_path: Path | None,
    engine: str | None,
    scale: int | None,
    socket: str | None,
    as_json: bool,
) -> None:
    """Replay TRACE against the daemon; without a running one, against one of its own.

    Exit 1 if a restored byte was wrong. With --engine, requests go one after the other through a
    model that needs: make smollm2. With vllm, which needs make vllm-env as well, exit 1 if an
    answer was another than vLLM's alone.
    """
    from kvstore.replay.live import LiveReplay, ReplayOptions

    if scale is not None and engine is None:
        raise click.UsageError("--scale is of no use without --engine; pass that, too")
    if disk is None and disk_path is not None:
        raise click.UsageError("--disk-path is of no use without --disk; pass a size, too")
    if disk is not None and socket:
        raise click.UsageError("--disk is for a daemon of its own; leave --socket out")
    with ExitStack() as stack:
        daemon = stack.enter_context(
            daemon_for(socket) if disk is None else daemon_with_disk(disk, disk_path)
        )
        if engine is not None:
            replay_engine(trace, daemon, engine, limit, scale or SCALE, seed, as_json)
            return
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-"))
        options = ReplayOptions(
            clients=clients,
            bytes_per_token=bytes_per_token or fitting_bytes_per_token(trace, daemon, limit),
            speed=speed,
            seed=seed,
            limit=limit,
        )
        replay = stack.enter_context(LiveReplay(trace, daemon.target, directory, options))
        bar = stack.enter_context(progress_bar("replaying", replay.request_count))
        result = replay.run(bar.show)
        result = {"trace": str(trace), **result, **daemon.facts()}
    if as_json:
        print_json(result)
    else:
        print_table(["", "replay"], table_rows(result))
    finish(result["wrong_bytes"] == 0)


class RunningDaemon:
    """A daemon that somebody else runs."""

    def __init__(self, address: str) -> None:
        self.target = address

    def status(self) -> dict[str, Any] | None:
        """The status, None where this user may not read it; raises StoreUnavailable."""
        from kvstore.replay.status import read_status

        try:
            return read_status(self.target)
        except PermissionDenied:
            return None

    def pool_bytes(self) -> int:
        status = self.status()
        return int(status["tiers"]["host"]["capacity_bytes"]) if status else UNKNOWN_POOL_BYTES

    def facts(self) -> dict[str, Any]:
        status = self.status()
        return {"own_daemon": False, "readopted_blocks": status and status["readopted_blocks"]}


class OwnedDaemon(RunningDaemon):
    """A daemon that was started for this replay and goes with it."""

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "own_daemon": True}


@contextmanager
def daemon_for(socket: str | None) -> Iterator[RunningDaemon]:
    """The daemon that runs, or one of our own if none does; one that was named must run."""
    from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes

    running = RunningDaemon(target(socket))
    try:
        running.status()
    except StoreUnavailable:
        if socket:
            raise
    else:
        yield running
        return
    with OwnDaemon(fitting_pool_bytes(), SHORT_LEASES) as daemon:
        yield OwnedDaemon(daemon.target)


@contextmanager
def daemon_with_disk(disk_bytes: int, path: Path | None) -> Iterator[RunningDaemon]:
    """A daemon of our own that has a disk tier."""
    from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
    from kvstore.replay.own_disk import disk_section, own_disk

    with own_disk(path) as directory:
        sections = {**SHORT_LEASES, "tiers.disk": disk_section(directory, disk_bytes)}
        with OwnDaemon(fitting_pool_bytes(), sections) as daemon:
            yield OwnedDaemon(daemon.target)


def fitting_bytes_per_token(trace: Path, daemon: RunningDaemon, limit: int) -> int:
    """Payload of a token so that the pool holds a set share of the trace's blocks."""
    from kvstore.replay.formats import load_trace

    requests = load_trace(trace, limit)
    return bytes_per_token_for(requests, daemon.pool_bytes())


def bytes_per_token_for(requests: list[Any], pool_bytes: int) -> int:
    unique = {i for r in requests for i in r.hash_ids[: r.full_blocks]}
    tokens = max(len(unique), 1) * requests[0].block_size
    fitting: int = POOL_SHARE * pool_bytes // tokens
    # One request must neither fill the pool nor more than a client's buffer.
    longest = max(max(r.full_blocks for r in requests) * requests[0].block_size, 1)
    fitting = min(fitting, pool_bytes // 16 // longest, (1 << 29) // longest)
    return max(fitting // BYTES_PER_TOKEN_STEP, 1) * BYTES_PER_TOKEN_STEP


class Bar:
    """How far a replay is; this one shows nothing."""

    def show(self, totals: dict[str, int]) -> None:
        pass

    def say(self, text: str) -> None:
        """What goes on, in front of the bar."""


class TerminalBar(Bar):
    """A bar on a terminal."""

    def __init__(self, progress: Any, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, facts="")

    def show(self, totals: dict[str, int]) -> None:
        ratio = totals["hit_tokens"] / max(totals["input_tokens"], 1)
        restored = totals["restored_bytes"] / 1e9
        facts = f"hits {ratio:.1%}, {restored:.1f} GB back, {totals['wrong_bytes']:,} B wrong"
        self._progress.update(self._task, completed=totals["requests"], facts=facts)

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Bar]:
    """A bar on standard error if that is a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=16), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("{task.fields[facts]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = TerminalBar(progress, total)
        bar.say(text)
        yield bar


def table_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What a person wants to know of a replay."""
    return [
        ("requests", f"{result['requests']:,} from {result['client_count']} clients"),
        ("input tokens", f"{result['input_tokens']:,} ({result['bytes_per_token']} bytes each)"),
        *hit_rows(result),
        ("restored and verified", format_bytes(result["restored_bytes"])),
        ("restore, one client", _rate(result["restore_bytes_per_second"])),
        ("lookup p50, p99", _times(result, "lookup")),
        ("restore p50, p99", _times(result, "restore")),
        ("blocks stored", f"{result['stored_blocks']:,}"),
        ("blocks without room", f"{result['rejected_blocks']:,}"),
        ("requests without the store", f"{result['store_unavailable']:,}"),
        ("seconds", f"{result['wall_seconds']:.1f}"),
        ("wrong bytes", f"{result['wrong_bytes']:,}"),
    ]


def hit_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Hits over all input tokens, and the tier they came from."""
    by_tier = result["token_hit_ratio_by_tier"]
    tiers = [(f"  from {tier}", f"{by_tier[tier]:.2%}") for tier in by_speed(by_tier)]
    return [("token hits (prefix-closed)", f"{result['token_hit_ratio']:.2%}"), *tiers]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.2f} GB/s"


def _times(result: dict[str, Any], name: str) -> str:
    middle, late = result[f"{name}_p50_seconds"], result[f"{name}_p99_seconds"]
    return "-" if middle is None else f"{middle * 1e3:.2f} ms, {late * 1e3:.2f} ms"
