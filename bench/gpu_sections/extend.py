"""Extend by new tokens and context against the matmul ceiling; a shared prefix by cascade."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu_sections.context import Context, graph_seconds, seconds
from gpu_sections.paged import Paged, paged, sham
from kvstore.kernels.attention import cascade_decode, paged_decode, paged_extend
from kvstore.kernels.formats import BlockLayout

HEADS, KV_HEADS, WIDTH = 32, 8, 128
CASES = (
    ("raw", 2048, 8192), ("raw", 2048, 65536), ("raw", 8192, 0), ("raw", 2048, 0),
    ("raw", 128, 8192), ("raw", 128, 65536), ("int8_th", 2048, 8192), ("fp8_bh", 2048, 8192),
    ("int4_kivi", 2048, 8192),
)  # fmt: skip
CASCADES = (("raw", 16), ("raw", 64), ("int8_th", 16), ("int8_th", 64))
REQUESTS, PREFIX, OWN = 64, 32768, 256


def run(context: Context, answer: dict[str, Any]) -> None:
    answer["rows"] = []
    for kv_format, new, before in CASES:
        if context.left > 4:
            _guard(answer, f"extend {kv_format}", _extend, context, kv_format, new, before)
    for kv_format, tokens in CASCADES:
        if context.left > 4:
            _guard(answer, f"cascade {kv_format}", _cascade, kv_format, tokens)


def _guard(answer: dict[str, Any], what: str, work: Any, *arguments: Any) -> None:
    try:
        answer["rows"].append(work(*arguments))
    except Exception as error:
        text = f"{what} {arguments[-2:]}: {type(error).__name__}: {error}"[:300]
        answer["rows"].append({"error": text, "line": text})


def _extend(context: Context, kv_format: str, new: int, before: int) -> dict[str, Any]:
    sequences = _sequences(new, before)
    pool = paged(_layout(kv_format, 64), [new + before] * sequences, spare=0)
    took = seconds(_extend_of(pool, new))
    flops = sequences * 4 * HEADS * WIDTH * (new * before + new * (new + 1) / 2) / took
    ratio = flops / context.ceiling("matmul_flops_per_second")
    return {
        "operation": "extend", "kv_format": kv_format, "new": new, "context": before,
        "sequences": sequences, "seconds": took, "flops_per_second": flops,
        "matmul_ceiling_ratio": ratio,
        "line": f"extend {kv_format:10} new={new:<5} ctx={before:<6} x{sequences} "
        f"{took * 1e3:8.2f} ms {flops / 1e12:5.0f} TFLOP/s = {ratio:.2f} of matmul",
    }  # fmt: skip


def warm_extend(kv_format: str, new: int, before: int) -> None:
    """Compiles what `_extend` of this case will run."""
    pool = sham(_layout(kv_format, 64), _sequences(new, before), new + before, new)
    _extend_of(pool, new)()


def _sequences(new: int, before: int) -> int:
    return 4 if new + before < 20000 else 1


def _layout(kv_format: str, tokens: int) -> BlockLayout:
    return BlockLayout(1, KV_HEADS, WIDTH, tokens, kv_format=kv_format)


def _extend_of(pool: Paged, new: int) -> Callable[[], Any]:
    count = len(pool.seq_lens)
    q = torch.randn(new * count, HEADS, WIDTH, device="cuda").bfloat16()
    cu_q = torch.arange(0, new * count + 1, new, dtype=torch.int32, device="cuda")
    more = {"cu_q": cu_q, "max_q": new, "sm_scale": WIDTH**-0.5, **pool.arguments(0)}
    return partial(paged_extend, q, **more)


def _cascade(kv_format: str, tokens: int) -> dict[str, Any]:
    """64 requests on a prefix of 32,768 tokens, 256 of their own, against plain decode."""
    pool = paged(_layout(kv_format, tokens), [OWN] * REQUESTS + [PREFIX], spare=0)
    shared, joined = _cascade_of(pool)
    cascade, plain = graph_seconds([shared]), graph_seconds([joined])
    return {
        "operation": "cascade", "kv_format": kv_format, "tokens": tokens, "seconds": cascade,
        "plain_seconds": plain, "times_plain": plain / cascade,
        "line": f"cascade {kv_format} P={tokens}: {REQUESTS} x {PREFIX} + {OWN}: "
        f"{cascade * 1e6:.0f} us, plain {plain * 1e6:.0f} us: {plain / cascade:.1f} x",
    }  # fmt: skip


def warm_cascade(kv_format: str, tokens: int) -> None:
    """Compiles what `_cascade` of this case will run."""
    for work in _cascade_of(sham(_layout(kv_format, tokens), REQUESTS + 1, PREFIX, tokens)):
        work()


def _cascade_of(pool: Paged) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Cascade over the pool's last sequence as prefix of the others; plain decode of the same."""
    tokens = pool.layout.block_size
    q = torch.randn(REQUESTS, HEADS, WIDTH, device="cuda").bfloat16()
    arguments = {**pool.arguments(0), "sm_scale": WIDTH**-0.5}
    own = pool.block_table[:REQUESTS, : OWN // tokens].contiguous()
    shared = {
        **arguments, "block_table": own, "seq_lens": pool.seq_lens[:REQUESTS],
        "prefix_table": pool.block_table[REQUESTS:], "prefix_lens": pool.seq_lens[REQUESTS:],
        "cu_group": torch.tensor([0, REQUESTS], dtype=torch.int32, device="cuda"),
        "max_group": REQUESTS,
    }  # fmt: skip
    front = pool.block_table[REQUESTS, : PREFIX // tokens].expand(REQUESTS, -1)
    joined = {
        **arguments, "block_table": torch.cat([front, own], 1).contiguous(),
        "seq_lens": pool.seq_lens[:REQUESTS] + pool.seq_lens[REQUESTS],
    }  # fmt: skip
    return partial(cascade_decode, q, **shared), partial(paged_decode, q, **joined)
