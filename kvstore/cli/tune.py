"""`kvstore tune`: which tier sizes and which policy a workload is worth."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import json_option, print_json, print_table
from kvstore.cli.replay import size_value
from kvstore.cli.simulate import HBM, engine_options, policies_of, setup_of, with_hbm
from kvstore.core.sizes import format_bytes

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=_FILE)
@click.option(
    "--budget", type=click.FloatRange(0, min_open=True), metavar="MONEY",
    help="Most that the tiers may cost a month.  [default: whatever pays]",
)  # fmt: skip
@click.option(
    "--prices", "price_file", type=_FILE, metavar="FILE",
    help="TOML with [prices]: gpu_hour, host_gib_month, disk_gib_month, hbm_gib_month, "
    "disk_terabyte_written.",
)  # fmt: skip
@click.option("--host-max", callback=size_value, metavar="SIZE", help="Most memory there is.")
@click.option("--disk-max", callback=size_value, metavar="SIZE", help="Most disk there is.")
@click.option("--no-disk", is_flag=True, help="Host memory only.")
@click.option(
    "--hbm-max", callback=size_value, metavar="SIZE",
    help="Most memory of all GPUs together for copies of host blocks.  [default: none]",
)  # fmt: skip
@click.option(
    "--hbm", metavar="SIZE", help="So much of it in any case, as a size or share: hbm=5%."
)  # fmt: skip
@click.option(
    "--endurance-dwpd", type=click.FloatRange(0, 1e6), default=0.0, show_default=True,
    help="Hold the disk to so many drive writes a day; 0: only the price of its wear does.",
)  # fmt: skip
@click.option(
    "--policy", "policy_text", default="saved_time,gdsf,lru", show_default=True,
    metavar="NAME[,NAME]|all", help="Sizes are found with the first, then all compete.",
)  # fmt: skip
@engine_options
@json_option
def command(
    trace: Path,
    budget: float | None,
    price_file: Path | None,
    host_max: int | None,
    disk_max: int | None,
    no_disk: bool,
    hbm_max: int | None,
    hbm: str | None,
    endurance_dwpd: float,
    policy_text: str,
    as_json: bool,
    **engine: Any,
) -> None:
    """Recommend tier sizes and a policy for TRACE, with what each step buys and how sure that is.

    GPU time saved is set against the price of memory, disk and its wear, and GPUs' memory.
    Intervals hold 90 % of what sessions drawn anew come to.
    """
    from kvstore.core.prices import load_prices
    from kvstore.replay.simulate import Bench
    from kvstore.replay.simulate_pool import Workers
    from kvstore.replay.tune import Limits, Tuner

    if no_disk and disk_max is not None:
        raise click.UsageError("--no-disk and --disk-max exclude each other; leave one out")
    if hbm is not None and hbm_max is not None:
        raise click.UsageError("--hbm and --hbm-max exclude each other; leave one out")
    policies, prices = policies_of(policy_text, offline=False), load_prices(price_file)
    bench = Bench(setup_of(trace, engine, endurance_dwpd=endurance_dwpd))
    if hbm is not None:
        with_hbm((f"{HBM}={hbm}",), bench, "--hbm")
    limits = Limits(budget, host_max, 0 if no_disk else disk_max, hbm_max or 0)
    jobs = min(2, engine["jobs"] or os.cpu_count() or 1)
    with Workers(bench, jobs) as workers, _probing() as advance:
        found = Tuner(bench, prices, limits, workers, advance).tune(policies)
    facts = {
        "trace": str(trace),
        "requests": len(bench.requests),
        "unique_blocks": bench.workload.unique_blocks,
        "prices": {name: getattr(prices, name) for name in prices.__struct_fields__},
        "budget_per_month": budget,
        "endurance_dwpd": endurance_dwpd,
        "hbm_blocks": bench.setup.hbm_blocks,
    }
    document = {**facts, **found}
    if as_json:
        print_json(document)
    else:
        _print(document)


@contextmanager
def _probing() -> Iterator[Callable[[], None]]:
    """Shows on a terminal that it goes on; how many probes there will be nobody knows."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("tuning: {task.completed} sizes tried"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda: progress.advance(task)


def _print(document: dict[str, Any]) -> None:
    if not document["steps"]:
        click.echo(_advice(document))
        return
    columns = ["step", "costs", "saves", "adds net", "90 % of resamples", "pays in", "TTFT p99"]
    chosen = document["recommended"] and document["recommended"]["tiers"]
    rows = [_step_row(step, step["tiers"] == chosen) for step in document["steps"]]
    print_table(columns, rows, right=columns[1:])
    click.echo()
    columns = ["policy", "saves", "net", "90 % of resamples", "at most as good in"]
    print_table(columns, [_policy_row(one) for one in document["policies"]], right=columns[1:])
    click.echo()
    if document["around"]:
        columns = ["a GiB of", "from", "to", "costs", "saves", "pays in", "mean TTFT"]
        rows = [_around_row(one) for one in document["around"]]
        print_table(columns, rows, right=columns[1:])
        click.echo()
    click.echo(_advice(document))


def _step_row(step: dict[str, Any], is_chosen: bool) -> tuple[str, ...]:
    return (
        _tiers(step) + (" <-" if is_chosen else ""),
        f"{step['cost_per_month']:,.0f}",
        f"{step['saves_per_month']:,.0f}",
        f"{step['adds_net_per_month']:+,.0f}",
        _interval(step["adds_net_per_month_interval"]),
        f"{step['confidence']:.0%}",
        f"{step['ttft_p99_seconds']:.2f} s",
    )


def _policy_row(one: dict[str, Any]) -> tuple[str, ...]:
    return (
        one["policy"],
        f"{one['saves_per_month']:,.0f}",
        f"{one['net_per_month']:+,.0f}",
        _interval(one["net_per_month_interval"]),
        f"{one['recommended_at_least_as_good']:.0%}",
    )


def _around_row(one: dict[str, Any]) -> tuple[str, ...]:
    before, after = one["ttft_mean_seconds"]
    return (
        one["tier"],
        format_bytes(one["from_bytes"]),
        format_bytes(one["to_bytes"]),
        f"{one['costs_per_gib_month']:,.2f}",
        f"{one['saves_per_gib_month']:,.2f}",
        f"{one['confidence']:.0%}",
        f"{1e3 * (after - before):+,.1f} ms",
    )


def _interval(ends: list[float]) -> str:
    return f"{ends[0]:+,.0f} to {ends[1]:+,.0f}"


def _tiers(one: dict[str, Any]) -> str:
    from kvstore.replay.simulate import share_text

    return ", ".join(
        f"{name} {format_bytes(tier['capacity_bytes'])} ({share_text(tier)})"
        for name, tier in one["tiers"].items()
    )


def _advice(document: dict[str, Any]) -> str:
    best = document["recommended"]
    if best is None:
        smallest = document["smallest"]
        if not document["steps"]:
            return (
                f"Recommended: no store; the smallest that is tried, {_tiers(smallest)} for "
                f"{smallest['cost_per_month']:,.2f} a month, is beyond a limit; raise --host-max "
                "or --budget."
            )
        return "Recommended: no store; none saves more GPU time than it costs."
    text = (
        f"Recommended: {_tiers(best)}, policy {best['policy']}: saves "
        f"{best['saves_per_month']:,.0f} a month in GPU time and costs "
        f"{best['cost_per_month']:,.0f}, net {best['net_per_month']:+,.0f} "
        f"({_interval(best['net_per_month_interval'])})."
    )
    writes = best["drive_writes_per_day"]
    if writes is not None and document["endurance_dwpd"]:
        text += " A day's allowance of disk writes is there at first: try a longer trace, too."
    elif writes is not None and writes > 1:
        text += f" Its disk is written {writes:,.0f} times a day here; set"
        text += " tiers.disk.endurance_dwpd so, or try --endurance-dwpd with less."
    return text
