"""Triton kernels of int4_kivi: an engine's pages <-> the store's blocks of 4-bit codes.

One program has a group of tokens of one head of one layer's K, or V (VALUES), as four tiles
[token, channel], a quarter of the row's channels each, since a 16-bit word has one code of each.
K's scales are over the tokens, V's over the channels of a quarter or of two (PAIRED).
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
def _load_quarter(at, mask):
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _ends(x, mask, AXIS: tl.constexpr):
    """Least and greatest along AXIS, which is kept as 1; 0 where nothing is."""
    low = tl.min(tl.where(mask, x, float("inf")), AXIS, keep_dims=True)
    high = tl.max(tl.where(mask, x, float("-inf")), AXIS, keep_dims=True)
    return tl.where(low == float("inf"), 0.0, low), tl.where(high == float("-inf"), 0.0, high)


@triton.jit
def _scales(low, high, SCALE_MIN: tl.constexpr):
    """Step and zero, bfloat16, that put what lies between within 15 steps above zero."""
    zero = _floor_bf16(low)
    span = high - zero.to(tl.float32)
    return tl.maximum(span * (1.0 / 15.0), SCALE_MIN).to(tl.bfloat16), zero


@triton.jit
def _codes(x, step, zero):
    inverse = tl.div_rn(1.0, step.to(tl.float32))
    return _round((x - zero.to(tl.float32)) * inverse).to(tl.int32) & 15


@triton.jit
def _pack(c0, c1, c2, c3):
    return (c0 | (c1 << 4) | (c2 << 8) | (c3 << 12)).to(tl.int16)


@triton.jit
def _store_pair(at, step, zero, apart, mask):
    tl.store(at, step, mask=mask)
    tl.store(at + apart, zero, mask=mask)


@triton.jit(do_not_specialize=PLAIN)
def quantize_int4(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, HND: tl.constexpr,
    GROUP: tl.constexpr, QUARTER_P: tl.constexpr, PAIRED: tl.constexpr, SCALE_MIN: tl.constexpr,
):  # fmt: skip
    """Rows to 4-bit codes with a bfloat16 step and zero a group."""
    groups: tl.constexpr = TOKENS // GROUP
    quarter: tl.constexpr = D // 4
    head = tl.program_id(0) % (HEADS * groups)
    i = tl.program_id(0) // (HEADS * groups)
    h, group = head // groups, head % groups
    which = tl.program_id(1)
    t = group * GROUP + tl.arange(0, GROUP)
    d = tl.arange(0, QUARTER_P)[None, :]
    live = d < quarter
    mask = (t >= 0)[:, None] & live
    offset = tl.load(offset_ptr + which * 2 + VALUES) + h.to(tl.int64) * head_stride
    at = _page_offset(page_ptr, i, t, t >= 0, page_stride, token_stride, PAGES, PAGE_TOKENS)
    at = pool_ptr + ((offset + at) * UNIT)[:, None] + d
    x0, x1 = _load_quarter(at, mask), _load_quarter(at + quarter, mask)
    x2, x3 = _load_quarter(at + 2 * quarter, mask), _load_quarter(at + 3 * quarter, mask)
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + which.to(tl.int64) * layer_stride
    scales = scale_ptr + layer * 8 + scale_offset
    axis: tl.constexpr = 1 if VALUES else 0
    low0, high0 = _ends(x0, mask, axis)
    low1, high1 = _ends(x1, mask, axis)
    low2, high2 = _ends(x2, mask, axis)
    low3, high3 = _ends(x3, mask, axis)
    if VALUES and PAIRED:
        low0, high0 = tl.minimum(low0, low1), tl.maximum(high0, high1)
        low2, high2 = tl.minimum(low2, low3), tl.maximum(high2, high3)
        low1, high1, low3, high3 = low0, high0, low2, high2
    step0, zero0 = _scales(low0, high0, SCALE_MIN)
    step1, zero1 = _scales(low1, high1, SCALE_MIN)
    step2, zero2 = _scales(low2, high2, SCALE_MIN)
    step3, zero3 = _scales(low3, high3, SCALE_MIN)
    if VALUES:
        spans: tl.constexpr = 2 if PAIRED else 4
        tokens: tl.constexpr = TOKENS
        all_t = (t >= 0)[:, None]
        to = scales + h * (spans * 2 * tokens) + t[:, None]
        _store_pair(to, step0, zero0, tokens, all_t)
        _store_pair(to + 2 * tokens, step2 if PAIRED else step1, zero2 if PAIRED else zero1,
                    tokens, all_t)  # fmt: skip
        if not PAIRED:
            _store_pair(to + 4 * tokens, step2, zero2, tokens, all_t)
            _store_pair(to + 6 * tokens, step3, zero3, tokens, all_t)
    else:
        to = scales + head * (2 * D) + d
        _store_pair(to, step0, zero0, D, live)
        _store_pair(to + quarter, step1, zero1, D, live)
        _store_pair(to + 2 * quarter, step2, zero2, D, live)
        _store_pair(to + 3 * quarter, step3, zero3, D, live)
    word = _pack(
        _codes(x0, step0, zero0), _codes(x1, step1, zero1),
        _codes(x2, step2, zero2), _codes(x3, step3, zero3),
    )  # fmt: skip
    token_row: tl.constexpr = quarter if HND else quarter * HEADS
    head_row: tl.constexpr = quarter * TOKENS if HND else quarter
    to = code_ptr + (layer + VALUES * kv_stride) * 8 + h * head_row
    tl.store(to + (t * token_row)[:, None] + d, word, mask=mask)


@triton.jit
def _load_pair(at, apart, mask):
    step = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return step, tl.load(at + apart, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_quarter(to, word, SHIFT: tl.constexpr, step, zero, mask):
    code = (word >> SHIFT) & 15
    x = code.to(tl.float32) * step + zero
    tl.store(to, x.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=PLAIN)
def dequantize_int4(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, HND: tl.constexpr,
    GROUP: tl.constexpr, QUARTER_P: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """4-bit codes to an engine's rows."""
    groups: tl.constexpr = TOKENS // GROUP
    quarter: tl.constexpr = D // 4
    head = tl.program_id(0) % (HEADS * groups)
    i = tl.program_id(0) // (HEADS * groups)
    h, group = head // groups, head % groups
    which = tl.program_id(1)
    t = group * GROUP + tl.arange(0, GROUP)
    d = tl.arange(0, QUARTER_P)[None, :]
    live = d < quarter
    mask = (t >= 0)[:, None] & live
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + which.to(tl.int64) * layer_stride
    token_row: tl.constexpr = quarter if HND else quarter * HEADS
    head_row: tl.constexpr = quarter * TOKENS if HND else quarter
    source = code_ptr + (layer + VALUES * kv_stride) * 8 + h * head_row
    word = tl.load(source + (t * token_row)[:, None] + d, mask=mask, other=0).to(tl.int32)
    scales = scale_ptr + layer * 8 + scale_offset
    if VALUES:
        spans: tl.constexpr = 2 if PAIRED else 4
        apart: tl.constexpr = TOKENS
        next_quarter: tl.constexpr = 0 if PAIRED else 2 * TOKENS
        third: tl.constexpr = 2 * TOKENS if PAIRED else 4 * TOKENS
        source = scales + h * (spans * 2 * TOKENS) + t[:, None]
        there = (t >= 0)[:, None]
    else:
        apart: tl.constexpr = D
        next_quarter: tl.constexpr = quarter
        third: tl.constexpr = 2 * quarter
        source = scales + head * (2 * D) + d
        there = live
    step0, zero0 = _load_pair(source, apart, there)
    step1, zero1 = _load_pair(source + next_quarter, apart, there)
    step2, zero2 = _load_pair(source + third, apart, there)
    step3, zero3 = _load_pair(source + third + next_quarter, apart, there)
    offset = tl.load(offset_ptr + which * 2 + VALUES) + h.to(tl.int64) * head_stride
    at = _page_offset(page_ptr, i, t, t >= 0, page_stride, token_stride, PAGES, PAGE_TOKENS)
    to = pool_ptr + ((offset + at) * UNIT)[:, None] + d
    _store_quarter(to, word, 0, step0, zero0, mask)
    _store_quarter(to + quarter, word, 4, step1, zero1, mask)
    _store_quarter(to + 2 * quarter, word, 8, step2, zero2, mask)
    _store_quarter(to + 3 * quarter, word, 12, step3, zero3, mask)
