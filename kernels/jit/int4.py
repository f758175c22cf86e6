"""Triton kernels of int4_kivi: an engine's pages <-> the store's blocks of 4-bit codes.

One program has a group of tokens of one head of one layer's K, or V (VALUES). A tile is [token,
channel group, channel] of half a row's channels, and there are two: byte j of a row has channel j
below and channel j + D/2 above. K's scales are over tokens, V's over the channels of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvstore.kernels.jit.blocks import PLAIN, _page_offset, _round


@triton.jit
def _floor_bf16(x):
    """The largest bfloat16 that is at most `x` (float32, finite)."""
    bits = x.to(tl.int32, bitcast=True)
    down = bits & -65536
    below = ((bits & 65535) != 0) & (x < 0)
    down = tl.where(below, down + 65536, down)
    return down.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _quantize_half(x, mask, AXIS: tl.constexpr, SCALE_MIN: tl.constexpr):
    """Codes of a tile, and its steps and zeros along AXIS (kept as 1)."""
    low = tl.min(tl.where(mask, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(mask, x, float("-inf")), AXIS, keep_dims=True)
    low = tl.where(low == float("inf"), 0.0, low)  # padding beyond the row's channels
    high = tl.where(high == float("-inf"), 0.0, high)
    zero = _floor_bf16(low)
    step = tl.maximum((high - zero.to(tl.float32)) * (1.0 / 15.0), SCALE_MIN).to(tl.bfloat16)
    inverse = tl.div_rn(1.0, step.to(tl.float32))
    code = _round((x - zero.to(tl.float32)) * inverse)
    return tl.where(mask, code, 0.0).to(tl.int32).to(tl.uint8), step, zero


@triton.jit(do_not_specialize=PLAIN)
def quantize_int4(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, HND: tl.constexpr,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, SPANS_P: tl.constexpr,
    SCALE_MIN: tl.constexpr,
):  # fmt: skip
    """Rows to 4-bit codes with a bfloat16 step and zero a group."""
    groups: tl.constexpr = TOKENS // GROUP
    half: tl.constexpr = D // 2
    head = tl.program_id(0) % (HEADS * groups)
    i = tl.program_id(0) // (HEADS * groups)
    h, group = head // groups, head % groups
    which = tl.program_id(1)
    t = group * GROUP + tl.arange(0, GROUP)
    c = tl.arange(0, SPANS_P)[None, :, None]
    d = tl.arange(0, CHANNELS_P)[None, None, :]
    mask = (t[:, None, None] >= 0) & (c < half // CHANNELS) & (d < CHANNELS)
    channel = c * CHANNELS + d
    offset = tl.load(offset_ptr + which * 2 + VALUES) + h.to(tl.int64) * head_stride
    at = _page_offset(page_ptr, i, t, t >= 0, page_stride, token_stride, PAGES, PAGE_TOKENS)
    at = pool_ptr + ((offset + at) * UNIT)[:, None, None] + channel
    x0 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x1 = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + which.to(tl.int64) * layer_stride
    scales = scale_ptr + layer * 8 + scale_offset
    if not VALUES:
        code0, step0, zero0 = _quantize_half(x0, mask, 0, SCALE_MIN)
        code1, step1, zero1 = _quantize_half(x1, mask, 0, SCALE_MIN)
        to = scales + head * (2 * D) + channel
        live = (c < half // CHANNELS) & (d < CHANNELS)
        tl.store(to, step0, mask=live)
        tl.store(to + half, step1, mask=live)
        tl.store(to + D, zero0, mask=live)
        tl.store(to + D + half, zero1, mask=live)
    else:
        code0, step0, zero0 = _quantize_half(x0, mask, 2, SCALE_MIN)
        code1, step1, zero1 = _quantize_half(x1, mask, 2, SCALE_MIN)
        to = scales + (h * (D // CHANNELS) + c) * (2 * TOKENS) + t[:, None, None]
        upper: tl.constexpr = half // CHANNELS * 2 * TOKENS
        live = (t[:, None, None] >= 0) & (c < half // CHANNELS)
        tl.store(to, step0, mask=live)
        tl.store(to + upper, step1, mask=live)
        tl.store(to + TOKENS, zero0, mask=live)
        tl.store(to + upper + TOKENS, zero1, mask=live)
    code = code0 | (code1 << 4)
    token_row: tl.constexpr = half if HND else half * HEADS
    head_row: tl.constexpr = half * TOKENS if HND else half
    to = code_ptr + (layer + VALUES * kv_stride) * 16 + h * head_row
    tl.store(to + (t * token_row)[:, None, None] + channel, code, mask=mask)


@triton.jit(do_not_specialize=PLAIN)
def dequantize_int4(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, HND: tl.constexpr,
    GROUP: tl.constexpr, CHANNELS: tl.constexpr, CHANNELS_P: tl.constexpr, SPANS_P: tl.constexpr,
):  # fmt: skip
    """4-bit codes to an engine's rows."""
    groups: tl.constexpr = TOKENS // GROUP
    half: tl.constexpr = D // 2
    head = tl.program_id(0) % (HEADS * groups)
    i = tl.program_id(0) // (HEADS * groups)
    h, group = head // groups, head % groups
    which = tl.program_id(1)
    t = group * GROUP + tl.arange(0, GROUP)
    c = tl.arange(0, SPANS_P)[None, :, None]
    d = tl.arange(0, CHANNELS_P)[None, None, :]
    mask = (t[:, None, None] >= 0) & (c < half // CHANNELS) & (d < CHANNELS)
    channel = c * CHANNELS + d
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + which.to(tl.int64) * layer_stride
    token_row: tl.constexpr = half if HND else half * HEADS
    head_row: tl.constexpr = half * TOKENS if HND else half
    source = code_ptr + (layer + VALUES * kv_stride) * 16 + h * head_row
    code = tl.load(source + (t * token_row)[:, None, None] + channel, mask=mask, other=0)
    scales = scale_ptr + layer * 8 + scale_offset
    if not VALUES:
        source = scales + head * (2 * D) + channel
        live = (c < half // CHANNELS) & (d < CHANNELS)
        step0 = tl.load(source, mask=live, other=0.0).to(tl.float32)
        step1 = tl.load(source + half, mask=live, other=0.0).to(tl.float32)
        zero0 = tl.load(source + D, mask=live, other=0.0).to(tl.float32)
        zero1 = tl.load(source + D + half, mask=live, other=0.0).to(tl.float32)
    else:
        source = scales + (h * (D // CHANNELS) + c) * (2 * TOKENS) + t[:, None, None]
        upper: tl.constexpr = half // CHANNELS * 2 * TOKENS
        live = (t[:, None, None] >= 0) & (c < half // CHANNELS)
        step0 = tl.load(source, mask=live, other=0.0).to(tl.float32)
        step1 = tl.load(source + upper, mask=live, other=0.0).to(tl.float32)
        zero0 = tl.load(source + TOKENS, mask=live, other=0.0).to(tl.float32)
        zero1 = tl.load(source + upper + TOKENS, mask=live, other=0.0).to(tl.float32)
    x0 = (code & 15).to(tl.float32) * step0 + zero0
    x1 = (code >> 4).to(tl.float32) * step1 + zero1
    offset = tl.load(offset_ptr + which * 2 + VALUES) + h.to(tl.int64) * head_stride
    at = _page_offset(page_ptr, i, t, t >= 0, page_stride, token_stride, PAGES, PAGE_TOKENS)
    to = pool_ptr + ((offset + at) * UNIT)[:, None, None] + channel
    tl.store(to, x0.to(pool_ptr.dtype.element_ty), mask=mask)
    tl.store(to + half, x1.to(pool_ptr.dtype.element_ty), mask=mask)
