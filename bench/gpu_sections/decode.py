"""Decode by batch, context and format: bytes a second against the read ceiling, in graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gpu_sections.context import Context, graph_seconds
from gpu_sections.paged import paged, sham
from kvstore.kernels.attention import mla_decode, paged_decode
from kvstore.kernels.formats import FORMATS, BlockLayout

HEADS, KV_HEADS, WIDTH = 32, 8, 128
CACHE_BYTES = 60 << 20
SHAPES = (
    (16, 32768), (64, 8192), (64, 32768), (1, 8192), (1, 131072), (16, 8192), (256, 1024),
    (256, 8192), (1, 32768), (16, 1024), (64, 1024),
)  # fmt: skip


def cases() -> list[tuple[str, int, int, int]]:
    """(format, tokens of a block, batch, context), bf16 before the others of its shape."""
    return [
        (kv_format, tokens, batch, length)
        for tokens, shapes in ((16, SHAPES), (64, SHAPES[:4]))
        for batch, length in shapes
        for kv_format in FORMATS
    ]


def warm(kv_format: str, tokens: int, batch: int, length: int) -> None:
    """Compiles what `_measure` of this case will run."""
    layout = BlockLayout(2, KV_HEADS, WIDTH, tokens, kv_format=kv_format)
    pool = sham(layout, batch, length)
    q = torch.randn(batch, HEADS, WIDTH, device="cuda").bfloat16()
    paged_decode(q, **pool.arguments(0), sm_scale=WIDTH**-0.5)


def run(context: Context, answer: dict[str, Any]) -> None:
    answer["rows"] = []
    bf16: dict[tuple[int, int, int], float] = {}
    for case in cases():
        if context.left > 4:
            _measure(context, answer, bf16, *case)
    if context.left > 4:
        _latents(context, answer)


def _measure(
    context: Context, answer: dict[str, Any], bf16: dict[tuple[int, int, int], float],
    kv_format: str, tokens: int, batch: int, length: int,
) -> None:  # fmt: skip
    one = batch * length * KV_HEADS * WIDTH * 4
    layers = max(1, min(32, 6 * CACHE_BYTES // one))  # rotates past what the L2 keeps
    layout = BlockLayout(layers, KV_HEADS, WIDTH, tokens, kv_format=kv_format)
    row: dict[str, Any] = {"kv_format": kv_format, "tokens": tokens, "batch": batch}
    row["context"] = length
    try:
        pool = paged(layout, [length] * batch, spare=0)
        q = torch.randn(batch, HEADS, WIDTH, device="cuda").bfloat16()
        out = torch.empty_like(q)

        def work(layer: int) -> None:
            paged_decode(q, **pool.arguments(layer), sm_scale=WIDTH**-0.5, out=out)

        took = graph_seconds([lambda i=i: work(i) for i in range(layers)])
        bf16.setdefault((tokens, batch, length), took)
        rate = pool.kv_bytes / took
        row |= {
            "seconds": took, "kv_bytes": pool.kv_bytes, "bytes_per_second": rate,
            "read_ceiling_ratio": rate / context.ceiling("read_bytes_per_second"),
            "times_bf16": bf16[tokens, batch, length] / took,
        }  # fmt: skip
        row["line"] = (
            f"{kv_format:10} P={tokens:<3} B={batch:<4} ctx={length:<7} {took * 1e6:9.1f} us "
            f"{rate / 1e9:7.0f} GB/s = {row['read_ceiling_ratio']:.2f} of read, "
            f"{row['times_bf16']:.2f} x bf16, {pool.kv_bytes / 1e9:.2f} GB"
        )
    except Exception as error:
        row["error"] = row["line"] = f"{type(error).__name__}: {error}"[:300]
    answer["rows"].append(row)


def _latents(context: Context, answer: dict[str, Any]) -> None:
    for batch, length, heads in ((64, 8192, 16), (64, 8192, 128)):
        row: dict[str, Any] = {"kv_format": "mla", "batch": batch, "context": length}
        try:
            pool = paged(BlockLayout(1, 1, 576, 64, kv_factor=1), [length] * batch, spare=0)
            nope, rope = (torch.randn(batch, heads, n, device="cuda").bfloat16() for n in (512, 64))
            latents = pool.views[0].k[:, :, 0]
            more = (latents, pool.block_table, pool.seq_lens)
            took = graph_seconds([partial(mla_decode, nope, rope, *more, sm_scale=0.07)])
            rate = pool.kv_bytes / took
            flops = 2 * batch * length * heads * (576 + 512) / took
            row |= {"seconds": took, "bytes_per_second": rate, "flops_per_second": flops}
            row["line"] = (
                f"mla H={heads:<4} B={batch} ctx={length} {took * 1e6:9.1f} us {rate / 1e9:.0f} "
                f"GB/s, {flops / 1e12:.0f} TFLOP/s"
            )
        except Exception as error:
            row["error"] = row["line"] = f"{type(error).__name__}: {error}"[:300]
        answer["rows"].append(row)
