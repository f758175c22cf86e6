"""Triton kernels of block copies: an engine's pages <-> the store's blocks, quantised on the way.

Every kernel runs over (block, part of a layer's rows) x (layer, K or V). What it is told of the
engine's pool are a base pointer, each tensor's distance from it and three strides, in units of 16
bytes, so that the compiler knows that rows may be moved in 16-byte words. Offsets are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvstore.kernels.jit.e4m3 import e4m3_codes, e4m3_values

WORDS = tl.constexpr(2)  # 8-byte words in 16 bytes
# Multiplied by a constant before use, so that nothing is gained from a variant for a value.
PLAIN = (
    "page_stride", "token_stride", "head_stride", "slot_stride", "part_offset", "layer_stride",
    "kv_stride", "scale_offset", "scale_kv_stride",
)  # fmt: skip


@triton.jit
def _page_offset(
    page_ptr, i, t, mask, page_stride, token_stride,
    PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr,
):  # fmt: skip
    """Where token `t` of block `i` lies in its tensor, in 16-byte units."""
    if PAGES == 1:
        page = tl.load(page_ptr + i).to(tl.int64)
        return page * page_stride + t.to(tl.int64) * token_stride
    page = tl.load(page_ptr + i * PAGES + t // PAGE_TOKENS, mask=mask, other=0).to(tl.int64)
    return page * page_stride + (t % PAGE_TOKENS).to(tl.int64) * token_stride


@triton.jit
def _round(x):
    """To whole numbers, ties to even: below 2^22 the sum's last bit has the value 1."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=PLAIN[:7])
def copy_rows(
    pool_ptr, offset_ptr, page_ptr, store_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    PARTS: tl.constexpr, KV: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    ROW: tl.constexpr, PAGES: tl.constexpr, PAGE_TOKENS: tl.constexpr, HND: tl.constexpr,
    TO_STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of `ROW` 8-byte words as they are: between pages and the store's order of rows."""
    i = tl.program_id(0) // PARTS
    o = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    mask = o < TOKENS * HEADS * ROW
    row = o // ROW
    if HND:
        t, h = row % TOKENS, row // TOKENS
    else:
        t, h = row // HEADS, row % HEADS
    offset = tl.load(offset_ptr + part)
    at = _page_offset(page_ptr, i, t, mask, page_stride, token_stride, PAGES, PAGE_TOKENS)
    pool = pool_ptr + (offset + at + h.to(tl.int64) * head_stride) * WORDS + o % ROW
    slot = tl.load(slot_ptr + i).to(tl.int64)
    begin = part_offset + (part // KV).to(tl.int64) * layer_stride + (part % KV) * kv_stride
    store = store_ptr + (slot * slot_stride + begin) * WORDS + o
    if TO_STORE:
        tl.store(store, tl.load(pool, mask=mask), mask=mask)
    else:
        tl.store(pool, tl.load(store, mask=mask), mask=mask)


@triton.jit(do_not_specialize=PLAIN)
def quantize_int8(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset, scale_kv_stride,
    PARTS: tl.constexpr, KV: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr, PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HND: tl.constexpr, ROWS: tl.constexpr, SCALE_MIN: tl.constexpr,
):  # fmt: skip
    """Rows to int8 codes and a bfloat16 scale each."""
    i = tl.program_id(0) // PARTS
    row = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = row < TOKENS * HEADS
    if HND:
        t, h = row % TOKENS, row // TOKENS
    else:
        t, h = row // HEADS, row % HEADS
    d = tl.arange(0, DP)
    mask = live[:, None] & (d < D)[None, :]
    offset = tl.load(offset_ptr + part)
    at = _page_offset(page_ptr, i, t, live, page_stride, token_stride, PAGES, PAGE_TOKENS)
    at = (offset + at + h.to(tl.int64) * head_stride) * UNIT
    x = tl.load(pool_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) * (1.0 / 127.0), SCALE_MIN).to(tl.bfloat16)
    code = _round(x * tl.div_rn(1.0, scale.to(tl.float32))[:, None]).to(tl.int8)
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + (part // KV).to(tl.int64) * layer_stride
    begin = (layer + (part % KV) * kv_stride) * 16
    tl.store(code_ptr + begin + (row * D)[:, None] + d[None, :], code, mask=mask)
    at = layer * 8 + scale_offset + (part % KV) * scale_kv_stride
    tl.store(scale_ptr + at + h * TOKENS + t, scale, mask=live)


@triton.jit(do_not_specialize=PLAIN)
def quantize_fp8(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset, scale_kv_stride,
    KV: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr, PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HND: tl.constexpr, ROWS: tl.constexpr, SCALE_MIN: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """All tokens of a head to e4m3 codes under one bfloat16 scale; reads twice past ROWS tokens.

    BITS: codes are made by arithmetic and are bytes, where the chip has no float8.
    """
    i = tl.program_id(0) // HEADS
    h = tl.program_id(0) % HEADS
    part = tl.program_id(1)
    d = tl.arange(0, DP)
    offset = tl.load(offset_ptr + part) + h.to(tl.int64) * head_stride
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + (part // KV).to(tl.int64) * layer_stride
    begin = (layer + (part % KV) * kv_stride) * 16
    token_row: tl.constexpr = D if HND else D * HEADS
    head_row: tl.constexpr = D * TOKENS if HND else D
    most = 0.0
    for first in tl.static_range(0, TOKENS, ROWS):
        t = first + tl.arange(0, ROWS)
        mask = (t < TOKENS)[:, None] & (d < D)[None, :]
        at = _page_offset(page_ptr, i, t, t < TOKENS, page_stride, token_stride, PAGES, PAGE_TOKENS)
        at = (offset + at) * UNIT
        x = tl.load(pool_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.max(tl.abs(x), 1), 0))
    scale = tl.maximum(most * (1.0 / 448.0), SCALE_MIN).to(tl.bfloat16)
    inverse = tl.div_rn(1.0, scale.to(tl.float32))
    for first in tl.static_range(0, TOKENS, ROWS):
        t = first + tl.arange(0, ROWS)
        mask = (t < TOKENS)[:, None] & (d < D)[None, :]
        if TOKENS > ROWS:
            at = _page_offset(
                page_ptr, i, t, t < TOKENS, page_stride, token_stride, PAGES, PAGE_TOKENS
            )
            at = (offset + at) * UNIT
            x = tl.load(pool_ptr + at[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
        to = begin + (t * token_row + h * head_row)[:, None] + d[None, :]
        if BITS:
            tl.store(code_ptr + to, e4m3_codes(x * inverse), mask=mask)
        else:
            tl.store(code_ptr + to, (x * inverse).to(tl.float8e4nv), mask=mask)
    at = layer * 8 + scale_offset + (part % KV) * scale_kv_stride
    tl.store(scale_ptr + at + h, scale)


@triton.jit(do_not_specialize=PLAIN)
def dequantize_rows(
    pool_ptr, offset_ptr, page_ptr, code_ptr, scale_ptr, slot_ptr,
    page_stride, token_stride, head_stride, slot_stride, part_offset, layer_stride, kv_stride,
    scale_offset, scale_kv_stride,
    PARTS: tl.constexpr, KV: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, UNIT: tl.constexpr, PAGES: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, HND: tl.constexpr, ROWS: tl.constexpr, BY_TOKEN: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """int8 codes (a scale a row: BY_TOKEN) or e4m3 codes (a scale a head) to an engine's rows.

    BITS: e4m3 codes are bytes, and values are made by arithmetic.
    """
    i = tl.program_id(0) // PARTS
    row = (tl.program_id(0) % PARTS) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    live = row < TOKENS * HEADS
    if HND:
        t, h = row % TOKENS, row // TOKENS
    else:
        t, h = row // HEADS, row % HEADS
    d = tl.arange(0, DP)
    mask = live[:, None] & (d < D)[None, :]
    slot = tl.load(slot_ptr + i).to(tl.int64) * slot_stride + part_offset
    layer = slot + (part // KV).to(tl.int64) * layer_stride
    begin = (layer + (part % KV) * kv_stride) * 16
    code = tl.load(code_ptr + begin + (row * D)[:, None] + d[None, :], mask=mask, other=0.0)
    at = layer * 8 + scale_offset + (part % KV) * scale_kv_stride
    if BY_TOKEN:
        at += h * TOKENS + t
    else:
        at += h
    scale = tl.load(scale_ptr + at, mask=live, other=0.0).to(tl.float32)
    x = e4m3_values(code.to(tl.int32)) if BITS else code.to(tl.float32)
    x = (x * scale[:, None]).to(pool_ptr.dtype.element_ty)
    offset = tl.load(offset_ptr + part)
    at = _page_offset(page_ptr, i, t, live, page_stride, token_stride, PAGES, PAGE_TOKENS)
    at = (offset + at + h.to(tl.int64) * head_stride) * UNIT
    tl.store(pool_ptr + at[:, None] + d[None, :], x, mask=mask)
