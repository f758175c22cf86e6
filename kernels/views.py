"""A pool of blocks seen as tensors: the rows and scales of one layer, in place, by strides."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvstore.kernels.formats import BlockLayout

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
CODE_DTYPES = {
    "int8_th": torch.int8,
    "fp8_bh": torch.float8_e4m3fn,
    "int4_kivi": torch.uint8,
}


class LayerViews(NamedTuple):
    """One layer of every block of a pool; all share the pool's memory.

    `k`, `v`: [blocks, tokens, heads, head_dim] of the layout's dtype or code dtype (int4_kivi:
    head_dim/2 bytes), whatever the order of rows. `k_scale`, `v_scale`: [blocks, *scale_shape] in
    bfloat16, None in raw blocks. `v` and `v_scale` are None where kv_factor is 1.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def check_pool(pool: torch.Tensor, layout: BlockLayout) -> None:
    """Raises ValueError unless `pool` is uint8 [blocks, >= block_bytes], aligned to 16 bytes."""
    if pool.dtype is not torch.uint8 or pool.dim() != 2 or pool.stride(1) != 1:
        raise ValueError("the pool must be uint8 [blocks, bytes] with contiguous blocks")
    if pool.shape[1] < layout.block_bytes:
        raise ValueError(
            f"a block of the pool has {pool.shape[1]} bytes; the layout needs {layout.block_bytes}"
        )
    if pool.stride(0) % 16 or pool.data_ptr() % 16:
        raise ValueError("blocks of the pool must begin at multiples of 16 bytes")


def layer_views(pool: torch.Tensor, layout: BlockLayout, layer: int) -> LayerViews:
    """The views of one layer of `pool`, uint8 [blocks, block_bytes or more]. Raises ValueError."""
    check_pool(pool, layout)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} is not among the layout's {layout.num_layers}")
    base = layer * layout.layer_bytes
    rows, scales = [], []
    for kv in range(layout.kv_factor):
        rows.append(_rows(pool, layout, base + layout.row_offset(kv)))
        scales.append(_scales(pool, layout, base + layout.scale_offset(kv), kv))
    return LayerViews(
        rows[0], rows[1] if layout.kv_factor == 2 else None,
        scales[0], scales[1] if layout.kv_factor == 2 else None,
    )  # fmt: skip


def _rows(pool: torch.Tensor, layout: BlockLayout, offset: int) -> torch.Tensor:
    dtype = CODE_DTYPES.get(layout.kv_format) or DTYPES[layout.dtype]
    shape = (pool.shape[0], layout.block_size, layout.num_kv_heads, layout.row_bytes)
    strides = (pool.stride(0), layout.token_bytes, layout.head_bytes, 1)
    view = pool.as_strided(shape, strides, pool.storage_offset() + offset)
    return view.view(dtype)


def _scales(pool: torch.Tensor, layout: BlockLayout, offset: int, kv: int) -> torch.Tensor | None:
    if layout.kv_format == "raw":
        return None
    count = layout.scale_bytes(kv)
    flat = pool.as_strided(
        (pool.shape[0], count), (pool.stride(0), 1), pool.storage_offset() + offset
    )
    return flat.view(torch.bfloat16).unflatten(1, layout.scale_shape(kv))
