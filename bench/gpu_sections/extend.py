"""Extend by new tokens and context against the matmul ceiling; a shared prefix by cascade."""

from __future__ import annotations

from typing import Any

import torch

from gpu_sections.context import Context, graph_seconds, seconds
from gpu_sections.paged import Paged, paged
from kvstore.kernels.attention import cascade_decode, paged_decode, paged_extend
from kvstore.kernels.formats import BlockLayout

HEADS, KV_HEADS, WIDTH = 32, 8, 128
CASES = (
    ("raw", 2048, 8192), ("raw", 2048, 65536), ("raw", 8192, 0), ("raw", 2048, 0),
    ("raw", 128, 8192), ("raw", 128, 65536), ("int8_th", 2048, 8192), ("fp8_bh", 2048, 8192),
    ("int4_kivi", 2048, 8192),
)  # fmt: skip
REQUESTS, PREFIX, OWN = 64, 32768, 256


def run(context: Context, answer: dict[str, Any]) -> None:
    answer["rows"] = []
    for kv_format, new, before in CASES:
        if context.left > 4:
            _guard(answer, f"extend {kv_format}", _extend, context, kv_format, new, before)
    for kv_format in ("raw", "int8_th"):
        for tokens in (16, 64):
            if context.left > 4:
                _guard(answer, f"cascade {kv_format}", _cascade, kv_format, tokens)


def _guard(answer: dict[str, Any], what: str, work: Any, *arguments: Any) -> None:
    try:
        answer["rows"].append(work(*arguments))
    except Exception as error:
        text = f"{what} {arguments[-2:]}: {type(error).__name__}: {error}"[:300]
        answer["rows"].append({"error": text, "line": text})


def _extend(context: Context, kv_format: str, new: int, before: int) -> dict[str, Any]:
    sequences = 4 if new + before < 20000 else 1
    layout = BlockLayout(1, KV_HEADS, WIDTH, 64, kv_format=kv_format)
    pool = paged(layout, [new + before] * sequences, spare=0)
    q = torch.randn(new * sequences, HEADS, WIDTH, device="cuda").bfloat16()
    cu_q = torch.arange(0, new * sequences + 1, new, dtype=torch.int32, device="cuda")
    more = {"cu_q": cu_q, "max_q": new, "sm_scale": WIDTH**-0.5, **pool.arguments(0)}
    took = seconds(lambda: paged_extend(q, **more))
    flops = sequences * 4 * HEADS * WIDTH * (new * before + new * (new + 1) / 2) / took
    ratio = flops / context.ceiling("matmul_flops_per_second")
    return {
        "operation": "extend", "kv_format": kv_format, "new": new, "context": before,
        "sequences": sequences, "seconds": took, "flops_per_second": flops,
        "matmul_ceiling_ratio": ratio,
        "line": f"extend {kv_format:10} new={new:<5} ctx={before:<6} x{sequences} "
        f"{took * 1e3:8.2f} ms {flops / 1e12:5.0f} TFLOP/s = {ratio:.2f} of matmul",
    }  # fmt: skip


def _cascade(kv_format: str, tokens: int) -> dict[str, Any]:
    """64 requests on a prefix of 32,768 tokens, 256 of their own, against plain decode."""
    requests, prefix, own = REQUESTS, PREFIX, OWN
    layout = BlockLayout(1, KV_HEADS, WIDTH, tokens, kv_format=kv_format)
    pool = paged(layout, [own] * requests + [prefix], spare=0)
    q = torch.randn(requests, HEADS, WIDTH, device="cuda").bfloat16()
    arguments = pool.arguments(0)
    shared = {
        **arguments, "block_table": pool.block_table[:requests, : own // tokens].contiguous(),
        "seq_lens": pool.seq_lens[:requests], "prefix_table": pool.block_table[requests:],
        "prefix_lens": pool.seq_lens[requests:], "sm_scale": WIDTH**-0.5,
        "cu_group": torch.tensor([0, requests], dtype=torch.int32, device="cuda"),
        "max_group": requests,
    }  # fmt: skip
    cascade = graph_seconds([lambda: cascade_decode(q, **shared)])
    plain_arguments = {**arguments, **_joined(pool, requests, prefix, own), "sm_scale": WIDTH**-0.5}
    plain = graph_seconds([lambda: paged_decode(q, **plain_arguments)])
    return {
        "operation": "cascade", "kv_format": kv_format, "tokens": tokens, "seconds": cascade,
        "plain_seconds": plain, "times_plain": plain / cascade,
        "line": f"cascade {kv_format} P={tokens}: {requests} x {prefix} + {own}: "
        f"{cascade * 1e6:.0f} us, plain {plain * 1e6:.0f} us: {plain / cascade:.1f} x",
    }  # fmt: skip


def _joined(pool: Paged, requests: int, prefix: int, own: int) -> dict[str, torch.Tensor]:
    """Block tables with the prefix in front of every request's own blocks."""
    tokens = pool.layout.block_size
    front = pool.block_table[requests, : prefix // tokens].expand(requests, -1)
    table = torch.cat([front, pool.block_table[:requests, : own // tokens]], 1).contiguous()
    return {"block_table": table, "seq_lens": pool.seq_lens[:requests] + prefix}
