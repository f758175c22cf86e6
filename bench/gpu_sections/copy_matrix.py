"""Copies and quantised formats against the reference: every layout, format, width and dtype."""

from __future__ import annotations

from itertools import product
from typing import Any
from zlib import crc32

import torch

from gpu_sections import pools
from gpu_sections.context import Context
from kvstore.kernels.block_copy import gather_blocks, scatter_blocks
from kvstore.kernels.formats import FORMATS, BlockLayout

CODE_DIFFERENCES_MAX = 1e-3


def measured() -> list[tuple[Any, ...]]:
    """What the section `copies` measures, of as many heads, so that it is compiled here."""
    return [
        (kv_format, kind, 128, block, "bfloat16", "NHD")
        for kv_format in FORMATS
        for kind in pools.KINDS
        for block in (16, 64)
    ]


def cases() -> list[tuple[Any, ...]]:
    """What is measured, and a stride through the product of everything that meets all of each."""
    widths, tokens, dtypes = (64, 80, 96, 128, 256), (16, 32, 64), ("bfloat16", "float16")
    whole = list(product(FORMATS, pools.KINDS, widths, tokens, dtypes, ("NHD", "HND")))
    return measured() + whole[::13]


def run(context: Context, answer: dict[str, Any]) -> None:
    answer.update(cases=0, left_out=0, failed=[], differing_ratio={})
    for case in context.share(cases()):
        if context.left < 3:
            answer["left_out"] += 1
            continue
        answer["cases"] += 1
        try:
            _check(case, answer)
        except Exception as error:
            if "CUDA" in str(error) or "illegal" in str(error):
                raise
            answer["failed"].append([*case, f"{type(error).__name__}: {error}"[:300]])


def _check(case: tuple[Any, ...], answer: dict[str, Any]) -> None:
    kv_format, kind, width, tokens, dtype, order = case
    heads = 8 if case in measured() else 4
    layout = BlockLayout(3, heads, width, tokens, dtype, order, kv_format)
    torch.manual_seed(crc32(repr(case).encode()))
    pool = pools.make(kind, layout, 11)
    pages, slots = pools.some_pages(pool, layout, 5), pools.some_slots(9, 5)
    layers = range(1, 3) if tokens == 32 else None
    stores = [torch.full((9, layout.block_bytes), 0xA5, dtype=torch.uint8, device="cuda")]
    stores.append(stores[0].clone())
    for store, backend in zip(stores, ("triton", "reference"), strict=True):
        gather_blocks(pool, pages, store, layout, slots=slots, layers=layers, backend=backend)
    differing = _differing(*stores)
    targets = [pools.make(kind, layout, 11, "nan") for _ in range(2)]
    for target, backend in zip(targets, ("triton", "reference"), strict=True):
        scatter_blocks(
            stores[1], target, pages, layout, slots=slots, layers=layers, backend=backend
        )
    pairs = zip(targets[0].tensors, targets[1].tensors, strict=True)
    back = max(
        float((a.view(torch.int16) != b.view(torch.int16)).double().mean()) for a, b in pairs
    )
    worst = answer["differing_ratio"]
    worst[kv_format] = max(differing, back, worst.get(kv_format, 0.0))
    allowed = 0.0 if kv_format == "raw" else CODE_DIFFERENCES_MAX
    if differing > allowed or back > 0:
        answer["failed"].append(
            [*case, f"gather differs in {differing:.2e}, scatter in {back:.2e}"]
        )


def _differing(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a != b).double().mean())
