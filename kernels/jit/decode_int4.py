"""Paged decode on int4_kivi blocks: a token group's K scales go into the queries of its own rows.

K is c s + z, with c the code less 8, and s and z a channel's in a group of tokens (z is the stored
zero plus 8 s), so q . K = (q s) . c + q . z; q s is rounded to float16, whose error is the least.
Rows of the tile that decode pads with nothing hold the queries once more, each set multiplied by
the scales of another group in the tile; a row then counts only its group's tokens, as if groups
were splits, and the merge of splits joins them. V is c s + z with s and z a token's in a quarter of
the channels, which is what one part of a word holds: p V = (p s) c + p z.
"""

import triton
import triton.language as tl

from kvstore.kernels.jit.decode import split_range
from kvstore.kernels.jit.places import block_ids, row_pointers, token_pointers
from kvstore.kernels.jit.softmax import finish, scores, step
from kvstore.kernels.jit.unpack import part


@triton.jit
def _query(q, at, ok, D: tl.constexpr, DTYPE: tl.constexpr):
    """Queries times a group's scales of some channels, and times its zeros, channel by channel."""
    s = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(at + D, mask=ok, other=0.0).to(tl.float32)
    return (q * s).to(DTYPE), q * (z + 8.0 * s)


@triton.jit
def _value_scale(
    at, ids, t0, end, i, s_n,
    PART: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """V's scales of a part of the channels, one a token of the tile."""
    row: tl.constexpr = 2 * (PART if D >= 128 else PART // 2)
    at = token_pointers(at + row * PAGE, ids, t0, i, s_n, 1, PAGE, BLOCK_N)
    return tl.load(at, mask=t0 + i < end, other=0.0)


@triton.jit
def _zero(sums, c, PART: tl.constexpr, D: tl.constexpr):
    """What a part's zeros add to the output, from weights' sums with scales and zeros by row."""
    row: tl.constexpr = 2 * (PART if D >= 128 else PART // 2)
    by = tl.where(c == row, 8.0, tl.where(c == row + 1, 1.0, 0.0))
    return tl.sum(sums * by[None, :], 1)[:, None]


@triton.jit
def decode_int4(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr, lens_ptr, sinks_ptr, o_ptr, lse_ptr,
    scale, cap, window,
    sq_b, sq_h, sk_n, sk_t, sk_h, sv_n, sv_t, sv_h,
    sks_n, sks_h, svs_n, svs_h, st_b, so_b, so_s, so_h, sl_b, sl_s,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: KV heads, splits, sequences. Writes SPLITS * ROWS // HEADS states a sequence.

    `TOKENS` of a group. Scales of a block's head lie in one piece, as `formats.py` says: K's
    [group, (s, z), channel], V's [channel group, (s, z), token].
    """
    head, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    KEYS: tl.constexpr = tl.float32 if tl.float32 == DTYPE else tl.float16
    Q: tl.constexpr = D // 4
    n = tl.load(lens_ptr + b)
    start, end, first = split_range(n, split, window, SPLITS, BLOCK_N, WINDOW)
    r, w, i = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    group, rows = r // HEADS, r % HEADS < GROUP
    heads = head * GROUP + r % HEADS
    channels = w < Q
    inside = rows[:, None] & channels[None, :]
    q_at = q_ptr + b.to(tl.int64) * sq_b + heads[:, None] * sq_h + w[None, :]
    q0 = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    q1 = tl.load(q_at + Q, mask=inside, other=0.0).to(tl.float32)
    q2 = tl.load(q_at + 2 * Q, mask=inside, other=0.0).to(tl.float32)
    q3 = tl.load(q_at + 3 * Q, mask=inside, other=0.0).to(tl.float32)
    k_at, v_at = k_ptr + head.to(tl.int64) * sk_h, v_ptr + head.to(tl.int64) * sv_h
    ks_at, vs_at = ks_ptr + head * sks_h, vs_ptr + head * svs_h
    c = tl.arange(0, 8)
    v_rows = c < (8 if D >= 128 else 4)
    table = table_ptr + b.to(tl.int64) * st_b
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc0 = tl.zeros([ROWS, WIDTH], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    zeros = tl.zeros([ROWS, 8], tl.float32)
    ids = block_ids(table, start, end, i, PAGE, BLOCK_N)
    row_ids = block_ids(table, start, end, group * TOKENS, PAGE, BLOCK_N)
    s0 = _value_scale(vs_at, ids, start, end, i, svs_n, 0, D, PAGE, BLOCK_N)
    s1 = _value_scale(vs_at, ids, start, end, i, svs_n, 1, D, PAGE, BLOCK_N)
    s2 = _value_scale(vs_at, ids, start, end, i, svs_n, 2, D, PAGE, BLOCK_N)
    s3 = _value_scale(vs_at, ids, start, end, i, svs_n, 3, D, PAGE, BLOCK_N)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + i
        ok = t < end
        later = block_ids(table, t0 + BLOCK_N, end, i, PAGE, BLOCK_N)
        later_rows = block_ids(table, t0 + BLOCK_N, end, group * TOKENS, PAGE, BLOCK_N)
        some = (t0 + group * TOKENS < end)[:, None] & channels[None, :]
        s_at = row_pointers(ks_at, w, row_ids, t0 // TOKENS, group, sks_n, 2 * D, PAGE // TOKENS,
                            BLOCK_N // TOKENS)  # fmt: skip
        p0, z0 = _query(q0, s_at, some, D, KEYS)
        p1, z1 = _query(q1, s_at + Q, some, D, KEYS)
        p2, z2 = _query(q2, s_at + 2 * Q, some, D, KEYS)
        p3, z3 = _query(q3, s_at + 3 * Q, some, D, KEYS)
        # Keys behind the end are whatever lies there: their scores are not looked at.
        k = tl.load(row_pointers(k_at, w, ids, t0, i, sk_n, sk_t, PAGE, BLOCK_N),
                    mask=channels[None, :], other=0)  # fmt: skip
        k = tl.trans(k)
        s = tl.dot(p0, part(k, 0, "int4_kivi", KEYS, ASM), input_precision="ieee")
        s = tl.dot(p1, part(k, 1, "int4_kivi", KEYS, ASM), s, input_precision="ieee")
        s = tl.dot(p2, part(k, 2, "int4_kivi", KEYS, ASM), s, input_precision="ieee")
        s = tl.dot(p3, part(k, 3, "int4_kivi", KEYS, ASM), s, input_precision="ieee")
        s, by = scores(s + tl.sum(z0 + z1 + z2 + z3, 1)[:, None], scale, cap, SOFTCAP)
        own = ok[None, :] & (group[:, None] == (i // TOKENS)[None, :])
        if WINDOW:
            own = own & (t >= first)[None, :]
        p, shrink, m = step(tl.where(own, s, float("-inf")), by, m)
        sums = sums * shrink[:, None] + p
        v = tl.load(row_pointers(v_at, w, ids, t0, i, sv_n, sv_t, PAGE, BLOCK_N),
                    mask=ok[:, None] & channels[None, :], other=0)  # fmt: skip
        sz_at = row_pointers(vs_at, c * PAGE, ids, t0, i, svs_n, 1, PAGE, BLOCK_N)
        sz = tl.load(sz_at, mask=ok[:, None] & v_rows[None, :], other=0.0).to(DTYPE)
        zeros = tl.dot(p.to(DTYPE), sz, zeros * shrink[:, None], input_precision="ieee")
        x = (p * s0.to(tl.float32)[None, :]).to(DTYPE)
        acc0 = tl.dot(x, part(v, 0, "int4_kivi", DTYPE, ASM), acc0 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        x = (p * s1.to(tl.float32)[None, :]).to(DTYPE)
        acc1 = tl.dot(x, part(v, 1, "int4_kivi", DTYPE, ASM), acc1 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        x = (p * s2.to(tl.float32)[None, :]).to(DTYPE)
        acc2 = tl.dot(x, part(v, 2, "int4_kivi", DTYPE, ASM), acc2 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        x = (p * s3.to(tl.float32)[None, :]).to(DTYPE)
        acc3 = tl.dot(x, part(v, 3, "int4_kivi", DTYPE, ASM), acc3 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        s0 = _value_scale(vs_at, later, t0 + BLOCK_N, end, i, svs_n, 0, D, PAGE, BLOCK_N)
        s1 = _value_scale(vs_at, later, t0 + BLOCK_N, end, i, svs_n, 1, D, PAGE, BLOCK_N)
        s2 = _value_scale(vs_at, later, t0 + BLOCK_N, end, i, svs_n, 2, D, PAGE, BLOCK_N)
        s3 = _value_scale(vs_at, later, t0 + BLOCK_N, end, i, svs_n, 3, D, PAGE, BLOCK_N)
        ids, row_ids = later, later_rows
    inv, lse = finish(tl.sum(sums, 1), m, sinks_ptr + heads, rows, split + group, SINKS)
    state = split * (ROWS // HEADS) + group
    o_at = o_ptr + b.to(tl.int64) * so_b + (state * so_s + heads * so_h)[:, None] + w[None, :]
    kind: tl.constexpr = o_ptr.dtype.element_ty
    out = (acc0 + _zero(zeros, c, 0, D)) * inv[:, None]
    tl.store(o_at, out.to(kind), mask=inside)
    out = (acc1 + _zero(zeros, c, 1, D)) * inv[:, None]
    tl.store(o_at + Q, out.to(kind), mask=inside)
    out = (acc2 + _zero(zeros, c, 2, D)) * inv[:, None]
    tl.store(o_at + 2 * Q, out.to(kind), mask=inside)
    out = (acc3 + _zero(zeros, c, 3, D)) * inv[:, None]
    tl.store(o_at + 3 * Q, out.to(kind), mask=inside)
    tl.store(lse_ptr + b.to(tl.int64) * sl_b + state * sl_s + heads, lse, mask=rows)
