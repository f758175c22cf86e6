"""`kvstore trace`: what a trace file holds, and files made from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import finish, json_option, print_json, print_table
from kvstore.cli.trace_record import record
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
SPREADS = {
    "references_per_block": "references of a block",
    "stack_distance": "distinct blocks between two uses of a block",
    "reuse_seconds": "seconds between them",
    "matched_blocks": "blocks matched, where two or more are",
    "predecessor_gap_seconds": "  seconds since the prompt they are of",
    "growth_blocks": "  blocks more than that prompt had",
    "new_blocks": "new blocks of a prompt",
    "turn": "turns",
}


@click.group()
def command() -> None:
    """Inspect, convert, make and record prefix traces (Mooncake JSONL, plain, .zst or .gz)."""


command.add_command(record)


@command.command()
@click.argument("file", type=_FILE)
@click.option(
    "--bytes-per-token", type=click.IntRange(min=1), default=131_072, show_default=True,
    help="KV bytes of a token, for the size of what is unique (Llama-3-8B in bf16).",
)  # fmt: skip
@json_option
def info(file: Path, bytes_per_token: int, as_json: bool) -> None:
    """Check FILE and say what it holds and what a cache without limits could serve of it."""
    from kvstore.replay.columns import trace_columns
    from kvstore.replay.formats import load_trace
    from kvstore.replay.info import trace_info
    from kvstore.replay.reuse import reuse_info

    requests = load_trace(file)
    figures = {**trace_info(requests), **reuse_info(trace_columns(requests))}
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
    rows += [(text, f"{figures[name]:.2%}") for name, text in RATIOS.items()]
    rows += [(text, _quantile_text(figures[f"{name}_quantiles"])) for name, text in SPREADS.items()]
    shares = figures["stack_distance_share_below"]
    near = "  ".join(f"{part} {share:.1%}" for part, share in shares.items())
    return [
        *rows,
        ("reuses nearer than a share of unique blocks", near),
        ("prompts that continue one before", f"{figures['matching_request_ratio']:.2%}"),
        ("  of those, with all but its last block", f"{figures['whole_prefix_ratio']:.2%}"),
        ("arrivals: mean gap, variation", _arrival_text(figures)),
        ("prefix tree: roots, branches, most children", _tree_text(figures)),
    ]


def _quantile_text(quantiles: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:,g}" for name, value in quantiles.items()) or "-"


def _arrival_text(figures: dict[str, Any]) -> str:
    mean, variation = figures["interarrival_mean_seconds"], figures["interarrival_cv"]
    return f"{mean:.3f} s, {variation:.2f}"


def _tree_text(figures: dict[str, Any]) -> str:
    names = ("root_count", "branching_block_count", "max_children")
    return ", ".join(f"{figures[name]:,}" for name in names)


@command.command()
@click.argument("file", metavar="JOURNAL", type=_FILE)
@json_option
def check(file: Path, as_json: bool) -> None:
    """Decide anew what a daemon decided, from its JOURNAL, and compare action by action.

    `kvstore serve --journal FILE` writes one. Exit 1 at the first action that differs.
    """
    from kvstore.replay.journal import check_journal

    result = check_journal(file)
    difference = None if result.difference is None else str(result.difference)
    if as_json:
        print_json({
            "journal": str(file), "identical": difference is None, "difference": difference,
            "inputs": result.inputs, "actions": result.actions, "is_whole": result.is_whole,
        })  # fmt: skip
    else:
        click.echo(_check_text(result, difference))
    finish(difference is None)


def _check_text(result: Any, difference: str | None) -> str:
    kinds = ", ".join(f"{count:,} {name}" for name, count in sorted(result.actions.items()))
    done = f"{result.inputs:,} inputs, {result.action_count:,} actions ({kinds or 'none'})"
    if difference is not None:
        return f"different after {done}: {difference}"
    return f"identical: {done}{'' if result.is_whole else '; the journal was cut off there'}"


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


@command.command()
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--preset", default="conversation", show_default=True, metavar="NAME|FILE",
    help="conversation, synthetic, toolagent-like, or a TOML file of the same kind.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds, equal traces.")
@click.option(
    "--rate", type=click.FloatRange(0, 1000, min_open=True), default=1.0, show_default=True,
    help="So many times the preset's sessions in the same time.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(0, 1e9, min_open=True),
    help="Span of the trace, at the same rate; else the preset's.",
)  # fmt: skip
@click.option(
    "--tenants", type=click.IntRange(1, 10_000), help="Split sessions among so many tenants."
)
@json_option
def generate(
    target: Path,
    preset: str,
    seed: int,
    rate: float,
    seconds: float | None,
    tenants: int | None,
    as_json: bool,
) -> None:
    """Write a generated trace to TARGET, compressed as its name says (.zst, .gz)."""
    from kvstore.replay.formats import write_trace
    from kvstore.replay.generate import generate as generated
    from kvstore.replay.generate import scaled
    from kvstore.replay.generate_preset import load_preset

    workload = scaled(load_preset(preset), rate, seconds, tenants)
    count = write_trace(target, generated(workload, seed))
    if as_json:
        facts = {"target": str(target), "preset": preset, "seed": seed, "requests": count}
        print_json({**facts, "description": workload.description})
    else:
        click.echo(f"{count:,} requests written to {target}: {workload.description}")
