"""`kvstore simulate`: policies and tier sizes on a trace, without a daemon or an engine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import json_option, print_json, print_table
from kvstore.core.sizes import format_bytes, parse_size

TIERS = ("host", "disk")  # those whose sizes are compared
HBM = "hbm"  # of one size: copies of host blocks, on all GPUs together
PERCENT_MAX = 1e9  # of a trace's blocks
LINKS = {"host>hbm": "host", "disk>host": "disk", "hbm>hbm": "hbm"}
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_TIME = re.compile(r"([0-9.]+)\s*(us|ms|s)")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def engine_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what engines and links are like; `costs_of` takes them."""
    for option in reversed(_ENGINE_OPTIONS):
        function = option(function)
    return function


_ENGINE_OPTIONS = (
    click.option(
        "--bytes-per-token", type=click.IntRange(min=1), default=131_072, show_default=True,
        help="KV bytes of a token (Llama-3-8B in bf16).",
    ),
    click.option(
        "--link", "links", multiple=True, metavar="NAME=RATE[,LATENCY]",
        help="host>hbm, disk>host or hbm>hbm, such as disk>host=6GB/s,100us.",
    ),
    click.option(
        "--prefill", metavar="A,B,C", default="10ms,32us,1.3e-9", show_default=True,
        help="Seconds of a call, a token, and a pair of tokens.",
    ),
    click.option(
        "--chunk-tokens", type=click.IntRange(min=1), default=2048, show_default=True,
        help="Tokens of a prefill step.",
    ),
    click.option(
        "--engines", type=click.IntRange(min=0), default=0,
        help="How many engines share the store.  [default: as many as the trace keeps busy]",
    ),
    click.option(
        "--deadline", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
        help="Count first tokens that come later.",
    ),
    click.option(
        "--noise", type=click.FloatRange(0, 2), default=0.0, show_default=True,
        help="Spread of true durations around the predicted ones, such as 0.2.",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Of all that is drawn."),
    click.option("--limit", type=click.IntRange(min=0), default=0, help="Only N requests."),
    click.option(
        "--jobs", type=click.IntRange(min=0), default=0, help="Processes.  [default: one a core]"
    ),
)  # fmt: skip


@click.command()
@click.argument("trace", type=_FILE)
@click.option(
    "--policy", "policy_text", default="saved_time", show_default=True, metavar="NAME[,NAME]|all"
)
@click.option(
    "--tier", "tiers", multiple=True, required=True, metavar="TIER=SIZE[,SIZE...]",
    help="host=64GiB, or a share of the trace's unique blocks: host=5%,10%; then disk=...; "
    "hbm=SIZE for copies of host blocks on all GPUs together.",
)  # fmt: skip
@click.option(
    "--hints", metavar="oracle:ACCURACY",
    help="What if engines told whether a prompt is continued, and were right so often?",
)  # fmt: skip
@click.option(
    "--endurance-dwpd", type=click.FloatRange(0, 1e6), default=1.0, show_default=True,
    help="Drive writes a day that the disk tier is held to, as the daemon does; 0: no limit.",
)  # fmt: skip
@click.option(
    "--admission", type=click.Choice(["measured", "all"]), default="measured", show_default=True,
    help="Write to disk what is worth it, or all that is due, as tiers.disk.admission says.",
)  # fmt: skip
@click.option(
    "--prices", "price_file", type=_FILE, metavar="FILE",
    help="TOML with [prices]: gpu_hour and disk_terabyte_written say what is worth a write.",
)  # fmt: skip
@click.option(
    "--exact-bounds", is_flag=True,
    help="Solve for the optimum of seconds instead of bounding it; needs SciPy.",
)  # fmt: skip
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.html",
    help="Write one self-contained page with plots.",
)  # fmt: skip
@engine_options
@json_option
def command(
    trace: Path,
    policy_text: str,
    tiers: tuple[str, ...],
    hints: str | None,
    endurance_dwpd: float,
    admission: str,
    price_file: Path | None,
    exact_bounds: bool,
    report: Path | None,
    as_json: bool,
    **engine: Any,
) -> None:
    """Simulate policies and tier sizes on TRACE: hits, seconds saved, time to the first token.

    The same index, residency, policies, planner and cost models as in the daemon, and engines as
    queues of chunked prefills. Each policy at each size is compared with the leaf-first LRU and
    with the offline optimum.
    """
    from kvstore.core.prices import load_prices
    from kvstore.replay.simulate import Bench
    from kvstore.replay.simulate_pool import simulate, task_count

    policies = policies_of(policy_text)
    if report is not None and not report.parent.is_dir():
        raise click.BadParameter(
            f"{report.parent} is no directory; make it or choose another", param_hint="--report"
        )
    setup = setup_of(
        trace, engine, hints=accuracy_of(hints), endurance_dwpd=endurance_dwpd,
        prices=load_prices(price_file) if admission == "measured" else None,
        exact=solver() if exact_bounds else None,
    )  # fmt: skip
    bench = Bench(setup)
    sizes = sizes_of(with_hbm(tiers, bench), bench)
    jobs = engine["jobs"] or os.cpu_count() or 1
    with counting_bar("simulating", task_count(policies, sizes)) as advance:
        document = simulate(bench, policies, sizes, jobs, advance)
    if report is not None:
        from kvstore.replay.report import write_report

        write_report(report, document)
    if as_json:
        print_json(document)
        return
    _print(document)
    for note in notes_of(sizes, bench):
        click.echo(note)


def notes_of(sizes: list[tuple[int, ...]], bench: Any) -> list[str]:
    """Sentences on sizes that change nothing, each with the one that is enough."""
    unique, hbm = bench.workload.unique_blocks, bench.setup.hbm_blocks
    notes = []
    if max(hbm, *(max(one) for one in sizes)) > unique:
        whole = format_bytes(unique * bench.trace.block_size * bench.setup.costs.bytes_per_token)
        notes.append(f"All blocks of the trace take {whole}: a tier of more adds nothing.")
    if any(one[1:] and one[1] <= one[0] for one in sizes):
        notes.append("A disk that is no larger than host adds next to nothing; make it larger.")
    if hbm > min(one[0] for one in sizes):
        notes.append("A tier hbm has copies of host blocks: more of it than of host adds nothing.")
    return notes


def policies_of(text: str, offline: bool = True) -> list[str]:
    """Policies by name, checked; `all` are those that a daemon can run.

    Without `offline` those that know the trace's future are refused.
    """
    from kvstore.policies import residency  # noqa: F401  (registers the policies)
    from kvstore.policies.base import policy_names

    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        return policy_names()
    known = policy_names(offline)
    if not names:
        raise click.BadParameter(
            f"{text!r} names none; choose of {', '.join(known)}, or all", param_hint="--policy"
        )
    for name in names:
        if name not in known:
            is_oracle = name in policy_names(offline=True)
            problem = "needs to know the future" if is_oracle else "is unknown"
            raise click.BadParameter(
                f"{name!r} {problem}; choose one of {', '.join(known)}, or all",
                param_hint="--policy",
            )
    return list(dict.fromkeys(names))


def accuracy_of(text: str | None) -> float | None:
    """The accuracy in `oracle:0.9`."""
    if text is None:
        return None
    kind, _, number = text.partition(":")
    try:
        accuracy = float(number)
    except ValueError:
        accuracy = -1.0
    if kind != "oracle" or not 0 <= accuracy <= 1:
        raise click.BadParameter(
            f"{text!r}; write oracle: and a number from 0 to 1, such as oracle:0.9",
            param_hint="--hints",
        )
    return accuracy


def solver() -> Any:
    """What solves for the optimum, if SciPy is installed."""
    try:
        from kvstore.replay.bounds_flow import exact_upper
    except ImportError:
        raise click.UsageError(
            "--exact-bounds needs SciPy; run: pip install 'kvstore-daemon[bounds]'"
        ) from None
    return exact_upper


def setup_of(trace: Path, engine: dict[str, Any], **more: Any) -> Any:
    """What the engine options and `more` describe."""
    from kvstore.replay.simulate import Setup

    return Setup(
        trace, costs_of(engine), engines=engine["engines"], seed=engine["seed"],
        limit=engine["limit"], **more,
    )  # fmt: skip


def costs_of(engine: dict[str, Any]) -> Any:
    """The engine options as costs."""
    from kvstore.policies.cost import CallCost
    from kvstore.replay.ttft import EngineCosts

    costs = EngineCosts()
    links = dict(_link(text, costs) for text in engine["links"])
    return costs._replace(
        **links,
        cost=CallCost(*_prefill(engine["prefill"])),
        chunk_tokens=engine["chunk_tokens"],
        bytes_per_token=engine["bytes_per_token"],
        deadline_seconds=engine["deadline"],
        noise=engine["noise"],
    )


def _link(text: str, costs: Any) -> tuple[str, Any]:
    from kvstore.policies.cost import LinkCost

    name, _, value = text.partition("=")
    rate, _, latency = value.partition(",")
    try:
        per_second = parse_size(rate.strip().removesuffix("/s"))
        field = LINKS[name.strip()]
        seconds = _seconds(latency) if latency else getattr(costs, field).latency_seconds
    except (KeyError, ValueError):
        raise click.BadParameter(
            f"{text!r}; write {' or '.join(LINKS)}, a rate and perhaps a latency, such as "
            "disk>host=6GB/s,100us",
            param_hint="--link",
        ) from None
    return field, LinkCost.of(seconds, per_second)


def _seconds(text: str) -> float:
    match = _TIME.fullmatch(text.strip())
    return float(match[1]) * _UNITS[match[2]] if match else float(text)


def _prefill(text: str) -> list[float]:
    try:
        values = [_seconds(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or min(values) < 0 or not 0 < max(values) < 1e3:
        raise click.BadParameter(
            f"{text!r}; write seconds of a call, a token and a pair, such as 10ms,32us,1.3e-9",
            param_hint="--prefill",
        )
    return values


def with_hbm(tiers: tuple[str, ...], bench: Any, option: str = "--tier") -> tuple[str, ...]:
    """Tells the bench of a tier hbm, if one is given; answers with the others."""
    given = [text for text in tiers if text.partition("=")[0] == HBM]
    if len(given) > 1 or any("," in text for text in given):
        raise click.BadParameter("hbm has one size; write it once", param_hint=option)
    for text in given:
        blocks = _blocks(HBM, text.partition("=")[2], bench, option)
        bench.setup = bench.setup._replace(hbm_blocks=blocks)
    return tuple(text for text in tiers if text not in given)


def sizes_of(tiers: tuple[str, ...], bench: Any) -> list[tuple[int, ...]]:
    """Sets of capacities in blocks: every host size with every disk size."""
    given: dict[str, list[int]] = {}
    for text in tiers:
        name, _, sizes = text.partition("=")
        if name not in TIERS or name in given or not sizes:
            raise click.BadParameter(
                f"{text!r}; write each of {', '.join(TIERS)} and {HBM} once, such as host=5%,64GiB",
                param_hint="--tier",
            )
        given[name] = [_blocks(name, size, bench) for size in sizes.split(",")]
    if "host" not in given:
        raise click.BadParameter("host is missing; add --tier host=SIZE", param_hint="--tier")
    ordered = [given[name] for name in TIERS if name in given]
    return list(dict.fromkeys(product(*ordered)))


def _blocks(tier: str, text: str, bench: Any, option: str = "--tier") -> int:
    text = text.strip()
    try:
        if text.endswith("%"):
            percent = float(text[:-1])
            if not 0 < percent < PERCENT_MAX:
                raise ValueError
            blocks = bench.workload.capacity(percent / 100)
        else:
            block = bench.trace.block_size * bench.setup.costs.bytes_per_token
            blocks = parse_size(text) // block
    except ValueError:
        blocks = -1
    if blocks < 1:
        problem = "is no size" if blocks < 0 else "holds not one block"
        raise click.BadParameter(
            f"{tier}={text} {problem}; write a size such as 64GiB or a share such as 5%",
            param_hint=option,
        )
    return int(blocks)


@contextmanager
def counting_bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error if that is a terminal; what it gives moves it on by one."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def _print(document: dict[str, Any]) -> None:
    results = document["results"]
    columns = ["policy", *results[0]["tiers"], *FIGURES]
    print_table(columns, [_row(result) for result in results], right=columns[1:])
    if document["what_if"]:
        click.echo("What-if: hints were made from the trace's own future.")


FIGURES = ("token hits", "seconds saved", "of gap", "TTFT p50", "p99")


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    from kvstore.replay.simulate import share_text

    gap = result["gap_closed_seconds_ratio"]
    return (
        result["policy"],
        *(share_text(tier) for tier in result["tiers"].values()),
        f"{result['token_hit_ratio']:.2%}",
        f"{result['prefill_seconds_saved_ratio']:.2%}",
        "-" if gap is None else f"{gap:.0%}",
        f"{result['ttft_p50_seconds']:.2f} s",
        f"{result['ttft_p99_seconds']:.2f} s",
    )
