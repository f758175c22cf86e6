"""`kvstore bench`: this store on this machine, each figure against a baseline measured with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import finish, json_option, print_json, print_table
from kvstore.core.errors import ConfigError

# What a figure should be, at least or at most.
TARGETS = {
    "restore": {
        "ratio_to_memcpy": (">=", 0.90),
        "ratio_to_memcpy_256mib": (">=", 0.97),
        "ratio_to_empty_rpc": ("<=", 0.5),
    },
    "put": {"ratio_to_memcpy": (">=", 0.40), "ratio_to_memcpy_8_clients": (">=", 0.40)},
    "lookup": {
        "ratio_to_empty_rpc": ("<=", 0.30),
        "ratio_to_empty_rpc_1000": ("<=", 0.45),
        "ratio_to_empty_rpc_1000_branched": ("<=", 3.0),
        "ratio_large_index": ("<=", 1.3),
        "loop_stall_p99_seconds": ("<=", 0.005),
    },
    "memory": {"rss_bytes_per_block": ("<=", 576.0)},
    "disk": {
        "ratio_to_device_read": (">=", 0.85),
        "ratio_to_device_write": (">=", 0.80),
        "ratio_to_device_write_fresh": (">=", 0.80),
        "lookup_p99_ratio_under_disk_load": ("<=", 3.0),
    },
    "start": {
        "serving_seconds": ("<=", 10.0),
        "serving_seconds_after_kill": ("<=", 5.0),
    },
    "decide": {
        "share_slower_than_recompute": ("<=", 0.01),
        "mean_regret_ratio": ("<=", 0.05),
        "live_ttft_ratio_to_store_off": ("<=", 1.01),
        "live_ttft_mean_ratio_to_store_off": ("<=", 1.01),
    },
    "predict": {
        "median_abs_error_ratio": ("<=", 0.20),
        "p99_coverage": (">=", 0.97),
        "p99_over_p50": ("<=", 3.0),
    },
    "watch": {"scrape_seconds": ("<=", 0.05)},
    "policies": {"worst_cell_points": ("<=", 0.5)},
    "engine": {
        "ttft_ratio_host": ("<=", 0.15),
        "ttft_ratio_disk": ("<=", 0.15),
        "store_share": ("<=", 0.03),
    },
    "overhead": {
        "throughput_ratio": (">=", 0.97),
        "tpot_ratio": ("<=", 1.03),
        "ttft_ratio_warm": ("<=", 0.25),
    },
    "quality": {
        "int8_th_perplexity_ratio": ("<=", 1.005),
        "int8_th_kl_mean": ("<=", 0.001),
        "fp8_bh_perplexity_ratio": ("<=", 1.01),
        "fp8_bh_kl_mean": ("<=", 0.005),
        "int4_kivi_perplexity_ratio": ("<=", 1.05),
        "int4_kivi_kl_mean": ("<=", 0.05),
    },
}
NEED_MODEL = ("engine", "overhead", "quality")
# Not with all others: it needs a package that only encrypted tiers need.
TARGETS_ALONE = {
    "encryption": {"read_ratio_to_plain": (">=", 0.85), "write_ratio_to_plain": (">=", 0.85)},
}
HELP = {
    "restore": "Lookup and restore of 1 MiB blocks against a plain copy and an empty gRPC call.",
    "put": "Puts of 1 MiB blocks against a plain copy, one client and eight.",
    "lookup": "Lookups over the local lane against an empty gRPC call, small index and large.",
    "memory": "The daemon's memory for an indexed block.",
    "disk": "Restores from disk and flushes to it against plain direct reads and writes.",
    "start": "Seconds until a daemon with a million blocks on disk serves, also after kill -9.",
    "decide": "Restore plans from learned costs against the best there are, and against no store.",
    "predict": "What restores from disk were predicted to take against what they took.",
    "watch": "A scrape of the metrics of a daemon with a hundred spaces.",
    "policies": "Policy saved_time against the better of lru and gdsf, cell by cell, simulated.",
    "engine": "First tokens of a small real model, from host and from disk, against all computed.",
    "overhead": "vLLM with the store against vLLM without: prompts anew, restored, and the others.",
    "quality": "A small real model's predictions from quantised blocks against exact ones.",
    "encryption": "Reads and writes of an encrypted disk tier against those of one in clear.",
}
path_option = click.option(
    "--path", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
    help="Where the disk tier is made, and removed again; else in the user's cache or /var/tmp.",
)  # fmt: skip
blocks_option = click.option(
    "--blocks", type=click.IntRange(min=640), metavar="N",
    help="Blocks on disk; a tenth of them for the start after a kill.",
)  # fmt: skip
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="Which engines, links, prompts and orders are drawn.",
)  # fmt: skip
workload_seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="Which workloads are generated, and which ids are given to blocks.",
)  # fmt: skip
traces_option = click.option(
    "--trace", "traces", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True, metavar="FILE",
    help="A trace to judge by; may be repeated. Else the shipped one.",
)  # fmt: skip
live_option = click.option(
    "--live/--no-live", default=True, show_default=True,
    help="Whether first tokens from a daemon with a slow disk are measured, too.",
)  # fmt: skip
OPTIONS = {
    "disk": [path_option],
    "start": [path_option, blocks_option],
    "decide": [seed_option, live_option, path_option],
    "predict": [seed_option, path_option],
    "policies": [workload_seed_option, traces_option],
    "engine": [path_option],
    "encryption": [path_option],
}


@click.group(invoke_without_command=True)
@json_option
@click.option("--quick", is_flag=True, help="A short run that shows it works; figures are rough.")
@click.pass_context
def command(context: click.Context, as_json: bool, quick: bool) -> None:
    """Measure this store on this machine; without a name, all of it, one after the other.

    All but `policies` and `quality` start a daemon. Exit 1 if a byte that came back was wrong.
    """
    if context.invoked_subcommand is None:
        results = {}
        for name in _measurable():
            results[name] = _measure(name, quick)
            if not as_json:
                _show(name, results[name])
        if as_json:
            print_json(results)
        finish(not any(result.get("wrong_bytes") for result in results.values()))


def _measurable() -> list[str]:
    """What can be measured here: some need a model, or vLLM, and say how to get it."""
    from kvstore.engines import smollm2
    from kvstore.engines.vllm import process

    if smollm2.is_there():
        return [name for name in TARGETS if name != "overhead" or process.is_there()]
    click.echo(f"bench {' and '.join(NEED_MODEL)} are left out; run: make smollm2", err=True)
    return [name for name in TARGETS if name not in NEED_MODEL]


def _measure(name: str, quick: bool, **options: Any) -> dict[str, Any]:
    if name in TARGETS_ALONE:
        return {"benchmark": name, **_encryption().run(quick=quick, **options)}
    from kvstore.bench import (
        decide,
        disk,
        engine,
        lookup,
        memory,
        overhead,
        policies,
        predict,
        put,
        quality,
        restore,
        start,
        watch,
    )  # fmt: skip

    modules: dict[str, Any] = {
        "restore": restore, "put": put, "lookup": lookup, "memory": memory, "disk": disk,
        "start": start, "decide": decide, "predict": predict, "policies": policies,
        "engine": engine, "overhead": overhead, "quality": quality, "watch": watch,
    }  # fmt: skip
    return {"benchmark": name, **modules[name].run(quick=quick, **options)}


def _encryption() -> Any:
    try:
        from kvstore.bench import encryption
    except ImportError as error:
        raise ConfigError(
            "bench encryption needs cryptography; run `pip install kvstore-daemon[encryption]`"
        ) from error
    return encryption


def _show(name: str, result: dict[str, Any]) -> None:
    rows = []
    for figure, (sign, target) in (TARGETS | TARGETS_ALONE)[name].items():
        value = result[figure]
        met = value >= target if sign == ">=" else value <= target
        rows.append([figure, f"{value:.4g}", f"{sign} {target:g}", "yes" if met else "no"])
    for figure, value in result.items():
        if figure.endswith("_per_second"):
            giga = figure.replace("bytes", "GB") if "bytes" in figure else figure
            rows.append([giga, f"{value / 1e9 if giga != figure else value:,.4g}", "", ""])
    if "wrong_bytes" in result:
        rows.append(["wrong_bytes", f"{result['wrong_bytes']:,}", "<= 0", ""])
    print_table([f"bench {name}", "value", "target", "met"], rows)
    if formats := result.get("formats"):
        figures = max((list(each) for each in formats.values()), key=len)
        lines = [[key, *(_short(of.get(each)) for each in figures)] for key, of in formats.items()]
        print_table(["format", *(each.replace("_", " ") for each in figures)], lines)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _add(name: str) -> None:
    def measure(quick: bool, as_json: bool, **options: Any) -> None:
        result = _measure(name, quick, **options)
        if as_json:
            print_json(result)
        else:
            _show(name, result)
        finish(not result.get("wrong_bytes"))

    for option in reversed(OPTIONS.get(name, [])):
        measure = option(measure)
    quick_option = click.option("--quick", is_flag=True, help="A short run; figures are rough.")
    command.command(name, help=HELP[name])(quick_option(json_option(measure)))


for _name in (*TARGETS, *TARGETS_ALONE):
    _add(_name)
