"""Merge of attention states over disjoint tokens into the state over all of them."""

import triton
import triton.language as tl


@triton.jit
def merge(
    o_ptr, lse_ptr, out_ptr, out_lse_ptr,
    states, so_s, so_t, so_h, sl_s, sl_t, sl_h, st_t, st_h, sm_t, sm_h,
    STATES: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: rows, heads. `STATES` is `states` rounded up to a power of two.

    Weights are exp(lse_i - max), as in Milakov and Gimelshein's online softmax (2018); a state with
    lse = -inf has seen no token, and its output is not read.
    """
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, d = tl.arange(0, STATES), tl.arange(0, WIDTH)
    inside = d < D
    lse_at = lse_ptr + t * sl_t + h * sl_h
    lse = tl.load(lse_at + i.to(tl.int64) * sl_s, mask=i < states, other=float("-inf"))
    lse = lse.to(tl.float32) * 1.4426950408889634
    top = tl.max(lse, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - safe), 0)
    some = tl.where(total == 0.0, 1.0, total)
    acc = tl.zeros([WIDTH], tl.float32)
    for s0 in range(0, states, CHUNK):
        s = s0 + tl.arange(0, CHUNK)
        part = tl.load(lse_at + s.to(tl.int64) * sl_s, mask=s < states, other=float("-inf"))
        weight = tl.exp2(part.to(tl.float32) * 1.4426950408889634 - safe)
        at = o_ptr + s.to(tl.int64)[:, None] * so_s + t * so_t + h * so_h + d[None, :]
        o = tl.load(at, mask=(weight > 0.0)[:, None] & inside[None, :], other=0.0)
        acc += tl.sum(o.to(tl.float32) * weight[:, None], 0)
    out = (acc / some).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + t * st_t + h * st_h + d, out, mask=inside)
    lse = tl.where(total == 0.0, float("-inf"), (safe + tl.log2(some)) * 0.6931471805599453)
    tl.store(out_lse_ptr + t * sm_t + h * sm_h, lse)
