"""`kvstore estimate`: how many KV bytes a model makes, and what bounds reading them."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from kvstore.cli.output import json_option, print_json, print_table
from kvstore.core.sizes import format_bytes
from kvstore.core.spec import DTYPE_BYTES


class Geometry(NamedTuple):
    """What of a model decides its KV bytes; `query_heads` is for the roofline only."""

    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    kv_factor: int = 2


PRESETS = {
    "llama-3.1-8b": Geometry(32, 8, 128, 32),
    "llama-3.1-70b": Geometry(80, 8, 128, 64),
    "mistral-7b": Geometry(32, 8, 128, 32),
    "qwen2.5-7b": Geometry(28, 4, 128, 28),
    "qwen2.5-72b": Geometry(80, 8, 128, 64),
    "qwen3-32b": Geometry(64, 8, 128, 64),
    "deepseek-v3": Geometry(61, 1, 576, 128, kv_factor=1),
}
# Dense bf16 FLOP/s and bytes/s of the memory, from the vendor's data sheets.
DEVICES = {
    "a100": (312e12, 2.039e12),
    "h100": (989e12, 3.35e12),
    "h200": (989e12, 4.8e12),
}
DEFAULT = Geometry(32, 8, 128, 32)


class Demand(NamedTuple):
    """The sequences that are kept: `tokens` live in each, `reserved` set aside for each."""

    tokens: int
    sequences: int
    reserved: int | None
    block_size: int


def estimate(geometry: Geometry, value_bytes: float, demand: Demand) -> dict[str, Any]:
    """Bytes of the demand, and what a contiguous reservation would waste of its memory."""
    per_token = (
        geometry.kv_factor * geometry.layers * geometry.kv_heads * geometry.head_dim * value_bytes
    )
    per_sequence = int(per_token * demand.tokens)
    result: dict[str, Any] = {
        "bytes_per_token": int(per_token),
        "bytes_per_sequence": per_sequence,
        "total_bytes": per_sequence * demand.sequences,
        "block_bytes": int(per_token * demand.block_size),
        "tokens": demand.tokens,
        "sequence_count": demand.sequences,
        "block_size": demand.block_size,
    }
    if demand.reserved is not None:
        reserved = int(per_token * demand.reserved) * demand.sequences
        result["reserved_tokens"] = demand.reserved
        result["reserved_bytes"] = reserved
        result["wasted_bytes"] = reserved - result["total_bytes"]
        result["waste_ratio"] = 1 - demand.tokens / demand.reserved
    return result


def roofline(
    geometry: Geometry, value_bytes: float, flops: float, bandwidth: float
) -> dict[str, Any]:
    """Machine balance, and the FLOP per KV byte that decode attention does.

    A query head does 2 FLOP a value for the scores and 2 for the sum; K and V (or the one latent
    that serves as both) are read once for the query heads that share them.
    """
    shared_by = geometry.query_heads / geometry.kv_heads
    intensity = 4 * shared_by / (geometry.kv_factor * value_bytes)
    balance = flops / bandwidth
    return {
        "machine_balance_flops_per_byte": balance,
        "decode_flops_per_byte": intensity,
        "decode_bound_by": "memory" if intensity < balance else "compute",
    }


@click.command()
@click.option("--model", type=click.Choice(sorted(PRESETS)), help="Take the geometry of a model.")
@click.option("--layers", type=click.IntRange(1), help="Layers that keep KV.  [default: 32]")
@click.option("--heads", type=click.IntRange(1), help="KV heads.  [default: 8]")
@click.option("--head-dim", type=click.IntRange(1), help="Values in a head.  [default: 128]")
@click.option("--query-heads", type=click.IntRange(1), help="Query heads.  [default: 32]")
@click.option(
    "--kv-factor", type=click.IntRange(1, 2), help="2 for K and V, 1 for latents.  [default: 2]"
)
@click.option(
    "--dtype", type=click.Choice(sorted(DTYPE_BYTES)), default="bfloat16", show_default=True
)
@click.option("--tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--sequences", type=click.IntRange(1), default=1, show_default=True)
@click.option("--reserved", type=click.IntRange(1), help="Tokens set aside for each sequence.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True)
@click.option("--device", type=click.Choice(sorted(DEVICES)), help="Take a device's peak figures.")
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="Peak TFLOP/s.")
@click.option("--gbps", type=click.FloatRange(0, min_open=True), help="Memory GB/s.")
@json_option
def command(model: str | None, dtype: str, as_json: bool, **given: Any) -> None:
    """KV bytes per token and sequence, waste of contiguous reservation, roofline.

    Start from --model or the defaults (32 layers, 8 heads of 128) and override what differs.
    """
    geometry = _geometry(model, given)
    demand = Demand(given["tokens"], given["sequences"], given["reserved"], given["block_size"])
    if demand.reserved is not None and demand.reserved < demand.tokens:
        raise click.UsageError(
            f"--reserved is {demand.reserved}, below --tokens {demand.tokens}; raise it"
        )
    value_bytes = DTYPE_BYTES[dtype]
    result = {
        "model": model,
        "dtype": dtype,
        **geometry._asdict(),
        **estimate(geometry, value_bytes, demand),
    }
    peak = _peak(given)
    if peak is not None:
        result |= roofline(geometry, value_bytes, *peak)
    if as_json:
        print_json(result)
    else:
        print_table(("what", "value"), _rows(result))


def _geometry(model: str | None, given: dict[str, Any]) -> Geometry:
    names = {"layers": "layers", "heads": "kv_heads", "head_dim": "head_dim"}
    names |= {"query_heads": "query_heads", "kv_factor": "kv_factor"}
    overrides = {field: given[flag] for flag, field in names.items() if given[flag] is not None}
    return (PRESETS[model] if model else DEFAULT)._replace(**overrides)


def _peak(given: dict[str, Any]) -> tuple[float, float] | None:
    """(FLOP/s, bytes/s) from --device, --tflops and --gbps; None if none is given."""
    if given["device"] is None and given["tflops"] is None and given["gbps"] is None:
        return None
    flops, bandwidth = DEVICES.get(given["device"], (None, None))
    flops = given["tflops"] * 1e12 if given["tflops"] else flops
    bandwidth = given["gbps"] * 1e9 if given["gbps"] else bandwidth
    if flops is None or bandwidth is None:
        raise click.UsageError("the roofline needs --tflops and --gbps, or --device")
    return flops, bandwidth


def _rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in result.items():
        if value is None:
            continue
        text = f"{value:,.4g}" if isinstance(value, float) else str(value)
        if name.endswith("_ratio"):
            text = f"{value:.0%}"
        elif name.endswith("bytes") or name.startswith("bytes"):
            text = f"{value:,} B ({format_bytes(value)})"
        rows.append((name.replace("_", " "), text))
    return rows
