"""`kvstore top`: the daemon as it runs, once a second."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import click
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kvstore.cli import shadows
from kvstore.cli.output import by_speed, json_option, print_json, socket_option, target
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import StoreUnavailable
from kvstore.core.sizes import format_bytes

BAR_WIDTH, HISTORY = 40, 30
SPARKS = "▁▂▃▄▅▆▇█"
RATES = {
    "lookups": "kvstore_lookups_total",
    "looked-up tokens": "kvstore_lookup_tokens_total",
    "hit tokens": "kvstore_hit_tokens_total",
    "restored": "kvstore_restored_bytes_total",
    "copied": "kvstore_copied_bytes_total",
    "put blocks": "kvstore_put_blocks_total",
    "written to disk": "kvstore_demoted_bytes_total",
    "read from disk": "kvstore_promoted_bytes_total",
    "evicted blocks": "kvstore_evicted_blocks_total",
    "corrupt blocks": "kvstore_corrupt_blocks_total",
}
GPU_RATES = {
    "copied to the GPU": "kvstore_hbm_promoted_bytes_total",
    "blocks read on the GPU": "kvstore_hbm_loaded_blocks_total",
}
"""Shown where there is a tier hbm."""


@click.command()
@click.option("--once", is_flag=True, help="Print one view and leave.")
@click.option(
    "--interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True,
    help="Seconds between two views.",
)  # fmt: skip
@socket_option
@json_option
def command(once: bool, interval: float, socket: str | None, as_json: bool) -> None:
    """Watch tiers, hits, traffic, sessions and leases; Ctrl-C leaves.

    Into a pipe it prints one view after the other.
    """
    from kvstore.replay.status import StatusReader

    with StatusReader(target(socket)) as reader:
        watch = Watch()
        watch.take(perf_seconds(), reader.read())
        if once or as_json:
            sleep(min(interval, 1.0))
            watch.take(perf_seconds(), reader.read())
            print_json(watch.document()) if as_json else _console().print(watch.view())
        else:
            _follow(watch, reader, interval)


def _follow(watch: Watch, reader: Any, interval: float) -> None:
    from rich.live import Live

    console = _console()
    if not console.is_terminal:
        while True:
            sleep(interval)
            watch.take(perf_seconds(), reader.read())
            console.print(watch.view())
            sys.stdout.flush()
    with Live(watch.view(), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                sleep(interval)
                try:
                    watch.take(perf_seconds(), reader.read())
                    live.update(watch.view(), refresh=True)
                except StoreUnavailable as error:
                    live.update(Group(watch.view(), Text(f"\n{error}", "red")), refresh=True)
        except KeyboardInterrupt:
            return


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    return console


class Watch:
    """Readings of the status, and what changed between the last two."""

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}
        self._time = 0.0
        self.rates: dict[str, float] = {}
        self._lookups: deque[float] = deque(maxlen=HISTORY)

    def take(self, time: float, status: dict[str, Any]) -> None:
        """Adds a reading; a daemon that was restarted begins anew."""
        before, seconds = self._status.get("counters", {}), time - self._time
        if self._status and status["pid"] == self._status["pid"] and seconds > 0:
            self.rates = rates(before, status["counters"], seconds, shown(status))
            self._lookups.append(self.rates["lookups"])
        self._status, self._time = status, time

    def document(self) -> dict[str, Any]:
        per_second = {f"{n.replace(' ', '_')}_per_second": v for n, v in self.rates.items()}
        return {**self._status, "rates": per_second}

    def view(self) -> Group:
        parts: list[Any] = [self._head(), Text(), self._tiers(), Text(), self._traffic()]
        parts.append(self._spark())
        if self._status.get("costs"):
            parts += [Text(), self._costs()]
        if self._status.get("shadow_request_count"):
            parts += [Text(), self._shadows(), Text(shadows.summary(self._status), "dim")]
        return Group(*parts)

    def _head(self) -> Text:
        status = self._status
        colour = {"serving": "green", "draining": "yellow"}.get(status["state"], "red")
        head = Text.assemble(
            ("kvstore ", "bold"), (status["state"], f"bold {colour}"),
            f"  up {duration(status['uptime_seconds'])}  pid {status['pid']}  "
            f"policy {status['policy']}  version {status['version']}",
        )  # fmt: skip
        head.append(
            f"\n{status['session_count']:,} sessions  {status['lease_count']:,} leases "
            f"({format_bytes(status['leased_bytes'])})  "
            f"{status['reservation_count']:,} puts under way  {status['pin_count']:,} pins  "
            f"{status['space_count']:,} spaces  {status['block_count']:,} blocks"
        )
        if status["reason"]:
            head.append(f"\n{status['reason']}", "red")
        if status.get("policy_reason"):
            head.append(f"\npolicy {shadows.policy_line(status)}", "yellow")
        return head

    def _tiers(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("tier", "", "used", "of", "blocks", "state"):
            table.add_column(name, justify="right" if name in ("used", "of", "blocks") else "left")
        for name in by_speed(self._status["tiers"]):
            tier = self._status["tiers"][name]
            capacity = tier["capacity_bytes"]
            table.add_row(
                name,
                bar(tier["used_bytes"], tier["resting_bytes"], capacity),
                format_bytes(tier["used_bytes"]),
                format_bytes(capacity),
                f"{tier['block_count']:,}",
                tier["state"],
            )
        return table

    def _traffic(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("traffic")
        for name in ("a second", "in all"):
            table.add_column(name, justify="right")
        counters = self._status["counters"]
        for label, name in shown(self._status).items():
            form = format_bytes if "bytes" in name else "{:,.0f}".format
            total = form(counters.get(name, 0.0))
            table.add_row(label, form(self.rates.get(label, 0.0)), total)
        looked = self.rates.get("looked-up tokens", 0.0)
        ratio = f"{self.rates.get('hit tokens', 0.0) / looked:.1%}" if looked else "-"
        everything = counters.get(RATES["looked-up tokens"], 0.0)
        overall = counters.get(RATES["hit tokens"], 0.0)
        table.add_row(
            "token hit ratio", ratio, f"{overall / everything:.1%}" if everything else "-"
        )
        return table

    def _costs(self) -> Table:
        from kvstore.cli.status import COST_COLUMNS, cost_row

        table = Table(box=None, pad_edge=False)
        for name in COST_COLUMNS:
            table.add_column(name, justify="right" if name in COST_COLUMNS[1:-1] else "left")
        for cost in self._status["costs"]:
            table.add_row(*cost_row(cost))
        return table

    def _shadows(self) -> Table:
        table = Table(box=None, pad_edge=False)
        first, *others = shadows.columns(self._status)
        table.add_column(first)
        for name in others:
            table.add_column(name, justify="right")
        for row in shadows.rows(self._status):
            table.add_row(*row)
        return table

    def _spark(self) -> Text:
        return Text(f"\nlookups a second  {spark(list(self._lookups))}" if self._lookups else "")


def shown(status: Mapping[str, Any]) -> dict[str, str]:
    """Counters by the words they are shown as."""
    return RATES | (GPU_RATES if "hbm" in status.get("tiers", ()) else {})


def rates(
    before: Mapping[str, float],
    after: Mapping[str, float],
    seconds: float,
    shown: Mapping[str, str] = RATES,
) -> dict[str, float]:
    """Growth a second of the counters that are `shown`."""
    return {
        label: max(after.get(name, 0.0) - before.get(name, 0.0), 0.0) / seconds
        for label, name in shown.items()
    }


def bar(used: float, resting: float, capacity: float) -> Text:
    """Used and resting bytes as parts of a line."""
    scale = BAR_WIDTH / capacity if capacity else 0.0
    full = round(used * scale)
    wait = max(min(round((used + resting) * scale), BAR_WIDTH) - full, 0)
    share = f" {used / capacity:.0%}" if capacity else ""
    rest = BAR_WIDTH - full - wait
    return Text.assemble(("█" * full, "green"), ("▒" * wait, "yellow"), "·" * rest, share)


def spark(values: list[float]) -> str:
    top = max(values, default=0.0)
    return "".join(SPARKS[int(v / top * (len(SPARKS) - 1)) if top else 0] for v in values)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
