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
def _query(q, at, zero, ok, DTYPE: tl.constexpr):
    """Queries times a group's scales of some channels, and their products with its zeros."""
    s = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    z = tl.load(at + zero, mask=ok, other=0.0).to(tl.float32) + 8.0 * s
    return (q * s).to(DTYPE), tl.sum(q * z, 1)


@triton.jit
def decode_int4(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr, lens_ptr, sinks_ptr, o_ptr, lse_ptr,
    scale, cap, window,
    sq_b, sq_h, sk_n, sk_t, sk_h, sv_n, sv_t, sv_h,
    sks_n, sks_h, sks_g, sks_z, svs_n, svs_h, svs_g, svs_z, st_b, so_b, so_s, so_h, sl_b, sl_s,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, QUARTERS: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: KV heads, splits, sequences. Writes SPLITS * ROWS // HEADS states a sequence.

    `TOKENS` of a group; `QUARTERS` of the channels that share V's scale: 1 or 2.
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
    c = tl.arange(0, 16)
    table = table_ptr + b.to(tl.int64) * st_b
    m = tl.full([ROWS], float("-inf"), tl.float32)
    sums = tl.zeros([ROWS, BLOCK_N], tl.float32)
    acc0 = tl.zeros([ROWS, WIDTH], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    zeros = tl.zeros([ROWS, 16], tl.float32)
    ids = block_ids(table, start, end, i, PAGE, BLOCK_N)
    row_ids = block_ids(table, start, end, group * TOKENS, PAGE, BLOCK_N)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + i
        ok = t < end
        later = block_ids(table, t0 + BLOCK_N, end, i, PAGE, BLOCK_N)
        later_rows = block_ids(table, t0 + BLOCK_N, end, group * TOKENS, PAGE, BLOCK_N)
        some = (t0 + group * TOKENS < end)[:, None] & channels[None, :]
        s_at = row_pointers(ks_at, w, row_ids, t0 // TOKENS, group, sks_n, sks_g, PAGE // TOKENS,
                            BLOCK_N // TOKENS)  # fmt: skip
        p0, z0 = _query(q0, s_at, sks_z, some, KEYS)
        p1, z1 = _query(q1, s_at + Q, sks_z, some, KEYS)
        p2, z2 = _query(q2, s_at + 2 * Q, sks_z, some, KEYS)
        p3, z3 = _query(q3, s_at + 3 * Q, sks_z, some, KEYS)
        # Keys behind the end are whatever lies there: their scores are not looked at.
        k = tl.load(row_pointers(k_at, w, ids, t0, i, sk_n, sk_t, PAGE, BLOCK_N),
                    mask=channels[None, :], other=0)  # fmt: skip
        k = tl.trans(k)
        s = tl.dot(p0, part(k, 0, "int4_kivi", KEYS, ASM), input_precision="ieee")
        s = tl.dot(p1, part(k, 1, "int4_kivi", KEYS, ASM), s, input_precision="ieee")
        s = tl.dot(p2, part(k, 2, "int4_kivi", KEYS, ASM), s, input_precision="ieee")
        s = tl.dot(p3, part(k, 3, "int4_kivi", KEYS, ASM), s, input_precision="ieee")
        s, by = scores(s + (z0 + z1 + z2 + z3)[:, None], scale, cap, SOFTCAP)
        own = ok[None, :] & (group[:, None] == (i // TOKENS)[None, :])
        if WINDOW:
            own = own & (t >= first)[None, :]
        p, shrink, m = step(tl.where(own, s, float("-inf")), by, m)
        sums = sums * shrink[:, None] + p
        v = tl.load(row_pointers(v_at, w, ids, t0, i, sv_n, sv_t, PAGE, BLOCK_N),
                    mask=ok[:, None] & channels[None, :], other=0)  # fmt: skip
        vs_t = token_pointers(vs_at, ids, t0, i, svs_n, 1, PAGE, BLOCK_N)
        vz_t = vs_t[:, None] + (c // QUARTERS)[None, :] * svs_g
        four = ok[:, None] & (c < 4)[None, :]
        vz = tl.load(vz_t + svs_z, mask=four, other=0.0).to(tl.float32)
        vz += 8.0 * tl.load(vz_t, mask=four, other=0.0).to(tl.float32)
        zeros = tl.dot(p.to(DTYPE), vz.to(DTYPE), zeros * shrink[:, None], input_precision="ieee")
        s0 = p * tl.load(vs_t, mask=ok, other=0.0).to(tl.float32)[None, :]
        s1 = p * tl.load(vs_t + 1 // QUARTERS * svs_g, mask=ok, other=0.0).to(tl.float32)[None, :]
        s2 = p * tl.load(vs_t + 2 // QUARTERS * svs_g, mask=ok, other=0.0).to(tl.float32)[None, :]
        s3 = p * tl.load(vs_t + 3 // QUARTERS * svs_g, mask=ok, other=0.0).to(tl.float32)[None, :]
        acc0 = tl.dot(s0.to(DTYPE), part(v, 0, "int4_kivi", DTYPE, ASM), acc0 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        acc1 = tl.dot(s1.to(DTYPE), part(v, 1, "int4_kivi", DTYPE, ASM), acc1 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        acc2 = tl.dot(s2.to(DTYPE), part(v, 2, "int4_kivi", DTYPE, ASM), acc2 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        acc3 = tl.dot(s3.to(DTYPE), part(v, 3, "int4_kivi", DTYPE, ASM), acc3 * shrink[:, None],
                      input_precision="ieee")  # fmt: skip
        ids, row_ids = later, later_rows
    inv, lse = finish(tl.sum(sums, 1), m, sinks_ptr + heads, rows, split + group, SINKS)
    state = split * (ROWS // HEADS) + group
    o_at = o_ptr + b.to(tl.int64) * so_b + (state * so_s + heads * so_h)[:, None] + w[None, :]
    kind: tl.constexpr = o_ptr.dtype.element_ty
    z = tl.sum(tl.where(c[None, :] == 0, zeros, 0.0), 1)[:, None]
    tl.store(o_at, ((acc0 + z) * inv[:, None]).to(kind), mask=inside)
    z = tl.sum(tl.where(c[None, :] == 1, zeros, 0.0), 1)[:, None]
    tl.store(o_at + Q, ((acc1 + z) * inv[:, None]).to(kind), mask=inside)
    z = tl.sum(tl.where(c[None, :] == 2, zeros, 0.0), 1)[:, None]
    tl.store(o_at + 2 * Q, ((acc2 + z) * inv[:, None]).to(kind), mask=inside)
    z = tl.sum(tl.where(c[None, :] == 3, zeros, 0.0), 1)[:, None]
    tl.store(o_at + 3 * Q, ((acc3 + z) * inv[:, None]).to(kind), mask=inside)
    tl.store(lse_ptr + b.to(tl.int64) * sl_b + state * sl_s + heads, lse, mask=rows)
