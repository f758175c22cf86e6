"""Paged decode: one query a sequence attends to KV blocks in place, split along the context.

Split-KV with a running softmax (Flash-Decoding, Dao et al., 2023); all query heads of a KV head are
rows of one tile, so that each byte of KV is read once (as in FlashAttention-2's GQA packing).
Block ids and scales are loaded one tile ahead by hand: K and V then are the only loads that the
compiler pipelines, and it gives them all its stages. 8-bit keys become float16, which takes fewer
instructions; values, whose weights may be far smaller, stay in q's dtype.
"""

import triton
import triton.language as tl

from kvstore.kernels.jit.places import block_ids, row_pointers, scales
from kvstore.kernels.jit.softmax import finish, scores, step
from kvstore.kernels.jit.unpack import factor, part


@triton.jit
def split_range(
    n, split, window, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """Tokens [start, end) of a split, and the first token that counts; start is a tile's."""
    first = 0
    if WINDOW:
        first = tl.maximum(n - window, 0)
    base = first // BLOCK_N
    tiles = tl.cdiv(tl.cdiv(n, BLOCK_N) - base, SPLITS)
    start = (base + split * tiles) * BLOCK_N
    return start, tl.minimum(start + tiles * BLOCK_N, n), first


@triton.jit
def decode(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr, lens_ptr, sinks_ptr, o_ptr, lse_ptr,
    scale, cap, window,
    sq_b, sq_h, sk_n, sk_t, sk_h, sv_n, sv_t, sv_h,
    sks_n, sks_h, svs_n, svs_h, st_b, so_b, so_s, so_h, sl_b, sl_s,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, FORMAT: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Formats raw, int8_th and fp8_bh. Grid: KV heads, splits, sequences."""
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PARTS: tl.constexpr = 1 if FORMAT == "raw" else 2
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    KEYS: tl.constexpr = tl.float16 if PARTS == 2 and tl.bfloat16 == DTYPE else DTYPE
    n = tl.load(lens_ptr + b)
    start, end, first = split_range(n, split, window, SPLITS, BLOCK_N, WINDOW)
    r, w, i = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    rows = r < GROUP
    heads = head * GROUP + r
    channels = w < D // PARTS
    inside = rows[:, None] & channels[None, :]
    q_at = q_ptr + b.to(tl.int64) * sq_b + heads[:, None] * sq_h + w[None, :] * PARTS
    q0 = tl.load(q_at, mask=inside, other=0.0).to(KEYS)
    k_at, v_at = k_ptr + head.to(tl.int64) * sk_h, v_ptr + head.to(tl.int64) * sv_h
    table = table_ptr + b.to(tl.int64) * st_b
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc0 = tl.zeros([ROWS, WIDTH], tl.float32)
    ids = block_ids(table, start, end, i, PAGE, BLOCK_N)
    if PARTS == 2:
        q1 = tl.load(q_at + 1, mask=inside, other=0.0).to(KEYS)
        acc1 = acc0
        ks_at, vs_at = ks_ptr + head * sks_h, vs_ptr + head * svs_h
        ks = scales(ks_at, ids, start, end, i, sks_n, PAGE, BLOCK_N, FORMAT)
        vs = scales(vs_at, ids, start, end, i, svs_n, PAGE, BLOCK_N, FORMAT)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + i
        ok = t < end
        later = block_ids(table, t0 + BLOCK_N, end, i, PAGE, BLOCK_N)
        # Keys behind the end are whatever lies there: their scores are not looked at.
        k = tl.load(row_pointers(k_at, w, ids, t0, i, sk_n, sk_t, PAGE, BLOCK_N),
                    mask=channels[None, :], other=0)  # fmt: skip
        if PARTS == 1:
            s = tl.dot(q0, tl.trans(k), input_precision="ieee")
        else:
            k = tl.trans(k)
            s = tl.dot(q0, part(k, 0, FORMAT, KEYS, ASM), input_precision="ieee")
            s = tl.dot(q1, part(k, 1, FORMAT, KEYS, ASM), s, input_precision="ieee")
            s = s * (ks.to(tl.float32) * factor(FORMAT, KEYS))[None, :]
        s, by = scores(s, scale, cap, SOFTCAP)
        if WINDOW:
            s = tl.where((ok & (t >= first))[None, :], s, float("-inf"))
        else:
            s = tl.where(ok[None, :], s, float("-inf"))
        p, shrink, m = step(s, by, m)
        sums = sums * shrink[:, None] + p
        v = tl.load(row_pointers(v_at, w, ids, t0, i, sv_n, sv_t, PAGE, BLOCK_N),
                    mask=ok[:, None] & channels[None, :], other=0)  # fmt: skip
        acc0 = acc0 * shrink[:, None]
        if PARTS == 1:
            acc0 = tl.dot(p.to(DTYPE), v, acc0, input_precision="ieee")
        else:
            p = (p * (vs.to(tl.float32) * factor(FORMAT, DTYPE))[None, :]).to(DTYPE)
            acc0 = tl.dot(p, part(v, 0, FORMAT, DTYPE, ASM), acc0, input_precision="ieee")
            acc1 = tl.dot(p, part(v, 1, FORMAT, DTYPE, ASM), acc1 * shrink[:, None],
                          input_precision="ieee")  # fmt: skip
            ks = scales(ks_at, later, t0 + BLOCK_N, end, i, sks_n, PAGE, BLOCK_N, FORMAT)
            vs = scales(vs_at, later, t0 + BLOCK_N, end, i, svs_n, PAGE, BLOCK_N, FORMAT)
        ids = later
    inv, lse = finish(tl.sum(sums, 1), m, sinks_ptr + heads, rows, split, SINKS)
    o_at = o_ptr + b.to(tl.int64) * so_b + split * so_s + heads[:, None] * so_h + w[None, :] * PARTS
    tl.store(o_at, (acc0 * inv[:, None]).to(o_ptr.dtype.element_ty), mask=inside)
    if PARTS == 2:
        tl.store(o_at + 1, (acc1 * inv[:, None]).to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + b.to(tl.int64) * sl_b + split * sl_s + heads, lse, mask=rows)
