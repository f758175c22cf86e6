"""Paged decode on MLA latents: all heads of a sequence attend to one latent a token, in place.

The absorbed form (DeepSeek-V2, 2024): q is already multiplied into latent space, K is the whole
latent (values and rotary part), V its first channels; each latent is read once for K and V both.
"""

import triton
import triton.language as tl

from kvstore.kernels.jit.decode import split_range
from kvstore.kernels.jit.places import block_ids, row_pointers
from kvstore.kernels.jit.softmax import finish, scores, step


@triton.jit
def mla_decode(
    q_ptr, r_ptr, c_ptr, table_ptr, lens_ptr, o_ptr, lse_ptr, scale, cap,
    sq_b, sq_h, sr_b, sr_h, sc_n, sc_t, st_b, so_b, so_s, so_h, sl_b, sl_s,
    HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of heads, splits, sequences."""
    tile, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    n = tl.load(lens_ptr + b)
    start, end, _ = split_range(n, split, 0, SPLITS, BLOCK_N, False)
    heads = tile * ROWS + tl.arange(0, ROWS)
    rows = heads < HEADS
    d, x, i = tl.arange(0, D), tl.arange(0, ROPE), tl.arange(0, BLOCK_N)
    big = b.to(tl.int64)
    q_at = q_ptr + big * sq_b + heads[:, None] * sq_h + d[None, :]
    r_at = r_ptr + big * sr_b + heads[:, None] * sr_h + x[None, :]
    q = tl.load(q_at, mask=rows[:, None], other=0.0)
    rope = tl.load(r_at, mask=rows[:, None], other=0.0)
    table = table_ptr + big * st_b
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    ids = block_ids(table, start, end, i, PAGE, BLOCK_N)
    for t0 in range(start, end, BLOCK_N):
        t = t0 + i
        ok = t < end
        later = block_ids(table, t0 + BLOCK_N, end, i, PAGE, BLOCK_N)
        c = tl.load(row_pointers(c_ptr, d, ids, t0, i, sc_n, sc_t, PAGE, BLOCK_N),
                    mask=ok[:, None], other=0.0)  # fmt: skip
        # Rotary keys behind the end are whatever lies there: their scores are not looked at.
        k_rope = tl.load(row_pointers(c_ptr + D, x, ids, t0, i, sc_n, sc_t, PAGE, BLOCK_N))
        s = tl.dot(q, tl.trans(c), input_precision="ieee")
        s = tl.dot(rope, tl.trans(k_rope), s, input_precision="ieee")
        s, by = scores(s, scale, cap, SOFTCAP)
        s = tl.where(ok[None, :], s, float("-inf"))
        p, shrink, m = step(s, by, m)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(DTYPE), c, acc * shrink[:, None], input_precision="ieee")
        ids = later
    inv, lse = finish(total, m, lse_ptr, rows, split, False)
    o_at = o_ptr + big * so_b + split * so_s + heads[:, None] * so_h + d[None, :]
    tl.store(o_at, (acc * inv[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None])
    tl.store(lse_ptr + big * sl_b + split * sl_s + heads, lse, mask=rows)
