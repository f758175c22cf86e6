"""`kvstore trace`: what a trace file holds, and files made from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import json_option, print_json, print_table
from kvstore.core.sizes import format_bytes

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
RATIOS = {
    "ceiling_token_hit_ratio": "token hits at most (full blocks, prefix-closed)",
    "ceiling_partial_token_hit_ratio": "  the same, last partial blocks counted",
    "ceiling_below_first_block_token_hit_ratio": "  the same, first blocks left out",
    "ceiling_block_hit_ratio": "block hits at most",
    "one_shot_block_ratio": "blocks seen once only",
    "same_time_ratio": "requests at the time of the one before",
}


@click.group()
def command() -> None:
    """Inspect and convert prefix traces (Mooncake JSONL, plain, .zst or .gz)."""


@command.command()
@click.argument("file", type=_FILE)
@click.option(
    "--bytes-per-token", type=click.IntRange(min=1), default=131_072, show_default=True,
    help="KV bytes of a token, for the size of what is unique (Llama-3-8B in bf16).",
)  # fmt: skip
@json_option
def info(file: Path, bytes_per_token: int, as_json: bool) -> None:
    """Check FILE and say what it holds and what a cache without limits could serve of it."""
    from kvstore.replay.formats import read_trace
    from kvstore.replay.info import trace_info

    figures = trace_info(read_trace(file))
    figures["unique_bytes"] = figures["unique_blocks"] * figures["block_size"] * bytes_per_token
    if as_json:
        print_json({"trace": str(file), **figures})
    else:
        print_table(["", str(file)], _rows(figures))


def _rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("requests", f"{figures['requests']:,} in {figures['span_seconds']:,.0f} s"),
        ("tokens in, out", f"{figures['input_tokens']:,}, {figures['output_tokens']:,}"),
        ("block size", f"{figures['block_size']} tokens"),
        ("block references", f"{figures['block_references']:,}"),
        ("unique blocks", f"{figures['unique_blocks']:,}"),
        ("KV of the unique blocks", format_bytes(figures["unique_bytes"])),
        ("tenants, sessions", f"{figures['tenant_count']:,}, {figures['session_count']:,}"),
        ("input tokens", _quantile_text(figures["input_length_quantiles"])),
        ("output tokens", _quantile_text(figures["output_length_quantiles"])),
    ]
    return rows + [(text, f"{figures[name]:.2%}") for name, text in RATIOS.items()]


def _quantile_text(quantiles: dict[str, int]) -> str:
    return "  ".join(f"{name} {value:,}" for name, value in quantiles.items())


@command.command()
@click.argument("source", type=_FILE)
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="Keep the first ...")
@click.option(
    "--block-size", type=click.IntRange(1, 4096), metavar="TOKENS",
    help="Cut blocks into equal smaller ones; exact.",
)  # fmt: skip
@click.option(
    "--spread-ticks", is_flag=True,
    help="Spread requests with one timestamp evenly at random up to the next timestamp.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of --spread-ticks.")
@json_option
def convert(
    source: Path,
    target: Path,
    seconds: float | None,
    block_size: int | None,
    spread_ticks: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Write SOURCE, cut or changed, to TARGET, compressed as its name says (.zst, .gz)."""
    from kvstore.replay import transform
    from kvstore.replay.formats import TraceRequest, read_trace, write_trace

    requests: Iterable[TraceRequest] = read_trace(source)
    if seconds:
        requests = transform.cut_time(requests, seconds)
    if spread_ticks:
        requests = transform.spread_ticks(requests, seed)
    if block_size:
        requests = transform.recut_blocks(requests, block_size)
    count = write_trace(target, requests)
    if as_json:
        print_json({"source": str(source), "target": str(target), "requests": count})
    else:
        click.echo(f"{count:,} requests written to {target}")
