"""What torch offers for the same attention: SDPA on contiguous KV, flex_attention, varlen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_sections.context import Context, graph_seconds, seconds

HEADS, KV_HEADS, WIDTH = 32, 8, 128


def run(context: Context, answer: dict[str, Any]) -> None:
    answer["rows"] = []
    for batch, length in ((16, 32768), (64, 8192), (1, 131072)):
        if context.left > 4:
            _guard(answer, context, "SDPA decode", _sdpa_decode, batch, length)
    for new in (2048, 8192):
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            if context.left > 4:
                _guard(answer, context, f"SDPA {backend}", _sdpa_prefill, new, backend)
    if context.left > 8:
        _guard(answer, context, "varlen", _varlen, 64, 8192)
    if context.left > 25:
        _guard(answer, context, "flex_attention", _flex, 16, 32768)


def _guard(
    answer: dict[str, Any], context: Context, what: str, work: Callable[..., Any], *arguments: Any
) -> None:
    row: dict[str, Any] = {"baseline": what, "arguments": [str(a) for a in arguments]}
    try:
        row |= work(*arguments)
        if "bytes_per_second" in row:
            row["read_ceiling_ratio"] = row["bytes_per_second"] / context.ceiling(
                "read_bytes_per_second"
            )
            end = f"{row['bytes_per_second'] / 1e9:.0f} GB/s = {row['read_ceiling_ratio']:.2f}"
        else:
            end = f"{row['flops_per_second'] / 1e12:.0f} TFLOP/s"
        row["line"] = f"{what} {row['arguments']}: {row['seconds'] * 1e6:.1f} us {end}"
    except Exception as error:
        row["error"] = row["line"] = f"{what}: {type(error).__name__}: {error}"[:300]
    answer["rows"].append(row)


def _tensors(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, HEADS, 1, WIDTH, device="cuda").bfloat16()
    shape = (batch, KV_HEADS, length, WIDTH)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    return q, k, v


def _decode_row(took: float, batch: int, length: int) -> dict[str, Any]:
    read = batch * length * KV_HEADS * WIDTH * 4
    return {"seconds": took, "bytes_per_second": read / took}


def _sdpa_decode(batch: int, length: int) -> dict[str, Any]:
    q, k, v = _tensors(batch, length)
    work = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    return _decode_row(graph_seconds([work]), batch, length)


def _sdpa_prefill(new: int, backend: str) -> dict[str, Any]:
    shape = (2, HEADS, new, WIDTH)
    q, k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
    with sdpa_kernel(getattr(SDPBackend, backend)):
        took = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    flops = 2 * 4 * HEADS * WIDTH * new * new / 2
    return {"seconds": took, "flops_per_second": flops / took}


def _varlen(batch: int, length: int) -> dict[str, Any]:
    """torch's variable-length attention with a block table, where this torch has it."""
    from torch.nn.attention.varlen import varlen_attn

    page = 256
    pages = batch * length // page
    q = torch.randn(batch, HEADS, WIDTH, device="cuda").bfloat16()
    shape = (pages, page, KV_HEADS, WIDTH)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    table = torch.randperm(pages, device="cuda").int().view(batch, -1)
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    took = seconds(
        lambda: varlen_attn(q, k, v, cu_q, None, 1, length, block_table=table, seqused_k=lens)
    )
    return _decode_row(took, batch, length)


def _flex(batch: int, length: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = _tensors(batch, length)
    compiled = torch.compile(flex_attention, dynamic=False)
    took = seconds(lambda: compiled(q, k, v, enable_gqa=True))
    return _decode_row(took, batch, length)
