"""Engines' pools of every layout, filled at random, for copies and their checks."""

from __future__ import annotations

import torch

from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.views import DTYPES

KINDS = ("vllm_nhd", "vllm_hnd", "vllm_blocks_first", "vllm_packed", "sglang_1", "sglang_page")


def make(kind: str, layout: BlockLayout, blocks: int, like: str = "random") -> EnginePool:
    """A pool with room for `blocks` blocks of the layout; `like`: random, or nan."""
    tokens, heads, width = layout.block_size, layout.num_kv_heads, layout.head_dim
    shape = {
        "vllm_nhd": (2, blocks, tokens, heads, width),
        "vllm_hnd": (blocks, 2, heads, tokens, width),
        "vllm_blocks_first": (blocks, 2, tokens, heads, width),
        "vllm_packed": (blocks, heads, tokens, 2 * width),
    }.get(kind, (blocks * tokens, heads, width))
    per_layer = 2 if kind.startswith("sglang") else 1
    tensors = [_tensor(shape, layout, like) for _ in range(layout.num_layers * per_layer)]
    if kind == "vllm_nhd":
        return EnginePool.vllm(tensors)
    if kind == "vllm_hnd":
        return EnginePool.vllm(tensors, "HND", 1)
    if kind == "vllm_blocks_first":
        return EnginePool.vllm(tensors, "NHD", 1)
    if kind == "vllm_packed":
        return EnginePool.vllm_packed(tensors)
    page = 1 if kind == "sglang_1" else tokens
    return EnginePool.sglang(tensors[::2], tensors[1::2], page)


def _tensor(shape: tuple[int, ...], layout: BlockLayout, like: str) -> torch.Tensor:
    dtype = DTYPES[layout.dtype]
    if like == "nan":
        return torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    tensor = torch.empty(shape, dtype=dtype, device="cuda").normal_()
    tensor[..., 3] *= 10  # an outlier channel, as keys have
    return tensor


def some_pages(pool: EnginePool, layout: BlockLayout, count: int) -> torch.Tensor:
    """Pages of `count` blocks, drawn without repeats: int32 [count, pages a block]."""
    per_block = pool.pages_per_block(layout)
    drawn = torch.randperm(pool.first.shape[0], device="cuda")[: count * per_block]
    return drawn.to(torch.int32).view(count, per_block)


def some_slots(of: int, count: int) -> torch.Tensor:
    return torch.randperm(of, device="cuda")[:count].to(torch.int32)
