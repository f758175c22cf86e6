"""Gather and scatter between engines' pools and blocks, raw and quantised: bytes a second."""

from __future__ import annotations

from typing import Any

import torch

from gpu_sections import pools
from gpu_sections.context import Context, seconds
from kvstore.kernels.block_copy import gather_blocks, scatter_blocks
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.quantize import dequantize_blocks, quantize_blocks

TOTAL_BYTES = 1 << 30


def run(context: Context, answer: dict[str, Any]) -> None:
    """32 layers of 8 heads of 128 in bfloat16; bytes count once read and once written."""
    answer["rows"] = []
    for tokens, kind in [
        (16, "vllm_nhd"), (64, "vllm_nhd"), (16, "vllm_hnd"), (16, "vllm_blocks_first"),
        (64, "vllm_packed"), (64, "sglang_1"), (64, "sglang_page"),
    ]:  # fmt: skip
        if context.left > 3:
            _raw(context, answer, tokens, kind)
    for kv_format in ("int8_th", "fp8_bh", "int4_kivi"):
        for tokens in (16, 64):
            if context.left > 4:
                _quantised(context, answer, tokens, kv_format)


def _row(context: Context, answer: dict[str, Any], moved: int, took: float, **what: Any) -> None:
    rate = moved / took
    ratio = rate / context.ceiling("copy_bytes_per_second")
    answer["rows"].append({**what, "bytes_per_second": rate, "copy_ceiling_ratio": ratio})


def _raw(context: Context, answer: dict[str, Any], tokens: int, kind: str) -> None:
    layout = BlockLayout(32, 8, 128, tokens)
    count = TOTAL_BYTES // layout.block_bytes
    pool = pools.make(kind, layout, count)
    pages = pools.some_pages(pool, layout, count)
    slots = pools.some_slots(count, count)
    store = torch.zeros(count, layout.block_bytes, dtype=torch.uint8, device="cuda")
    for name, layers in (("all", None), ("8 of 32", range(8, 16))):
        moved = 2 * count * layout.block_bytes // (1 if layers is None else 4)
        what = {"kind": kind, "tokens": tokens, "layers": name}
        took = seconds(
            lambda ls=layers: gather_blocks(pool, pages, store, layout, slots=slots, layers=ls)
        )
        _row(context, answer, moved, took, operation="gather", **what)
        took = seconds(
            lambda ls=layers: scatter_blocks(store, pool, pages, layout, slots=slots, layers=ls)
        )
        _row(context, answer, moved, took, operation="scatter", **what)
        if kind != "vllm_nhd":
            break


def _quantised(context: Context, answer: dict[str, Any], tokens: int, kv_format: str) -> None:
    layout = BlockLayout(32, 8, 128, tokens, kv_format=kv_format)
    count = TOTAL_BYTES // layout.raw.block_bytes
    pool = pools.make("vllm_nhd", layout, count)
    pages, slots = pools.some_pages(pool, layout, count), pools.some_slots(count, count)
    store = torch.zeros(count, layout.block_bytes, dtype=torch.uint8, device="cuda")
    raw = torch.zeros(count, layout.raw.block_bytes, dtype=torch.uint8, device="cuda")
    moved = count * (layout.block_bytes + layout.raw.block_bytes)
    works = {
        "gather": lambda: gather_blocks(pool, pages, store, layout, slots=slots),
        "scatter": lambda: scatter_blocks(store, pool, pages, layout, slots=slots),
        "dequantize": lambda: dequantize_blocks(store, raw, layout),
        "quantize": lambda: quantize_blocks(raw, store, layout),
    }
    for operation, work in works.items():
        what = {"kind": kv_format, "tokens": tokens, "layers": "all"}
        _row(context, answer, moved, seconds(work), operation=operation, **what)
