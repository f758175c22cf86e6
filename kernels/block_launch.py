"""Which kernel, with which constants, carries a copy out: used by launches and compile checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvstore.kernels.dispatch import target_of
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import (
    DTYPE_BYTES,
    SCALE_BYTES,
    SCALE_MIN,
    WORD_BYTES,
    BlockLayout,
)
from kvstore.kernels.jit import blocks, int4

COPY_WORDS = 2048
TILE_VALUES = 4096
CODES = {"int8_th": tl.int8, "fp8_bh": tl.float8e4nv, "int4_kivi": tl.int16}
WITHOUT_FLOAT8 = ("sm_80",)
"""Targets for which Triton has no e4m3: there codes are bytes, made and read by arithmetic."""


class Variant(NamedTuple):
    """A kernel and its compile-time constants; `programs` of them for each block."""

    kernel: Any
    constants: dict[str, int | bool | float]
    num_warps: int
    programs: int


def variant(layout: BlockLayout, pages: int, to_store: bool, target: str) -> Variant:
    """The variant that moves blocks of this layout from or to `pages` pages each.

    int4_kivi has another for V, of the same constants but VALUES.
    """
    common: dict[str, int | bool | float] = {
        "TOKENS": layout.block_size,
        "HEADS": layout.num_kv_heads,
        "PAGES": pages,
        "PAGE_TOKENS": layout.block_size // pages,
        "HND": layout.order == "HND",
    }
    if layout.kv_format == "raw":
        return _copy(layout, common, to_store)
    common |= {"D": layout.head_dim, "UNIT": WORD_BYTES // DTYPE_BYTES[layout.dtype]}
    if to_store:
        common["SCALE_MIN"] = SCALE_MIN
    if layout.kv_format == "int4_kivi":
        return _int4(layout, common, to_store)
    return _rows(layout, common, to_store, target)


def by_bits(layout: BlockLayout, target: str) -> bool:
    """Whether codes are e4m3 and the chip has no such type."""
    return layout.kv_format == "fp8_bh" and target in WITHOUT_FLOAT8


def _copy(layout: BlockLayout, common: dict[str, Any], to_store: bool) -> Variant:
    words = layout.payload_bytes // 8
    block = min(COPY_WORDS, triton.next_power_of_2(words))
    parts = triton.cdiv(words, block)
    constants = common | {
        "PARTS": parts, "KV": layout.kv_factor, "ROW": layout.row_bytes // 8,
        "TO_STORE": to_store, "BLOCK": block,
    }  # fmt: skip
    return Variant(blocks.copy_rows, constants, 8 if block == COPY_WORDS else 4, parts)


def _rows(layout: BlockLayout, common: dict[str, Any], to_store: bool, target: str) -> Variant:
    padded = triton.next_power_of_2(layout.head_dim)
    by_head = to_store and layout.kv_format == "fp8_bh"
    most = layout.block_size if by_head else layout.rows
    rows = min(max(1, TILE_VALUES // padded), triton.next_power_of_2(most))
    constants = common | {"KV": layout.kv_factor, "DP": padded, "ROWS": rows}
    if layout.kv_format == "fp8_bh" or not to_store:
        constants["BITS"] = by_bits(layout, target)
    if by_head:
        return Variant(blocks.quantize_fp8, constants, 4, layout.num_kv_heads)
    parts = triton.cdiv(layout.rows, rows)
    constants["PARTS"] = parts
    if to_store:
        return Variant(blocks.quantize_int8, constants, 4, parts)
    constants["BY_TOKEN"] = layout.kv_format == "int8_th"
    return Variant(blocks.dequantize_rows, constants, 4, parts)


def _int4(layout: BlockLayout, common: dict[str, Any], to_store: bool) -> Variant:
    quarter = layout.head_dim // 4
    constants = common | {
        "VALUES": False, "GROUP": layout.token_group,
        "QUARTER_P": triton.next_power_of_2(quarter), "PAIRED": layout.channel_group > quarter,
    }  # fmt: skip
    kernel = int4.quantize_int4 if to_store else int4.dequantize_int4
    programs = layout.num_kv_heads * (layout.block_size // layout.token_group)
    values = layout.token_group * triton.next_power_of_2(quarter)
    warps = min(max(values // 256, 1), 8)  # of 32 threads with 8 values each: 16-byte words
    return Variant(kernel, constants, warps, programs)


def launch(
    pool: EnginePool,
    pages: torch.Tensor,
    store: torch.Tensor,
    slots: torch.Tensor,
    layout: BlockLayout,
    layers: range,
    to_store: bool,
) -> None:
    """Starts the kernel on the current stream; arguments are checked already."""
    target = target_of(store.device)
    chosen = variant(layout, pool.pages_per_block(layout), to_store, target)
    grid = (len(slots) * chosen.programs, len(layers) * layout.kv_factor)
    offsets = pool.offsets[layers.start * layout.kv_factor :]
    steps = _steps(pool, store, layout, layers)
    if layout.kv_format == "raw":
        words = triton.reinterpret(pool.first, tl.int64), triton.reinterpret(store, tl.int64)
        chosen.kernel[grid](
            words[0], offsets, pages, words[1], slots, *steps,
            **chosen.constants, num_warps=chosen.num_warps,
        )  # fmt: skip
        return
    codes = triton.reinterpret(
        store, tl.int8 if by_bits(layout, target) else CODES[layout.kv_format]
    )
    scales = triton.reinterpret(store, tl.bfloat16)
    tensors = (pool.first, offsets, pages, codes, scales, slots)
    at = [layout.scale_offset(kv) // SCALE_BYTES for kv in range(layout.kv_factor)]
    # Without fused multiply-adds codes are those of the reference, bit for bit.
    options = {"num_warps": chosen.num_warps, "enable_fp_fusion": False}
    if layout.kv_format == "int4_kivi":
        grid = (grid[0], len(layers))
        chosen.kernel[grid](*tensors, *steps, at[0], **chosen.constants, **options)
        values = chosen.constants | {"VALUES": True}
        chosen.kernel[grid](*tensors, *steps, at[1], **values, **options)
        return
    chosen.kernel[grid](*tensors, *steps, at[0], at[-1] - at[0], **chosen.constants, **options)


def _steps(
    pool: EnginePool, store: torch.Tensor, layout: BlockLayout, layers: range
) -> tuple[int, ...]:
    """Strides of pool and store in 16-byte units, in the order all kernels take them."""
    size = pool.first.element_size()
    strides = [step * size for step in pool.first.stride()[:3]]
    strides += [
        store.stride(0), layers.start * layout.layer_bytes, layout.layer_bytes,
        layout.payload_bytes,
    ]  # fmt: skip
    return tuple(step // WORD_BYTES for step in strides)
