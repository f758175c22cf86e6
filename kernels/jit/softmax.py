"""One step of attention's running softmax, and what changes scores on the way to it."""

import triton
import triton.language as tl


@triton.jit
def capped(s, cap):
    """cap * tanh(s / cap), with s and the answer in natural units."""
    # tanh(x) = 1 - 2 / (e**2x + 1); e**2x may overflow to infinity, which gives 1.
    e = tl.exp2(s * (2.0 * 1.4426950408889634 / cap))
    return cap * (1.0 - 2.0 / (e + 1.0))


@triton.jit
def scores(s, scale, cap, SOFTCAP: tl.constexpr):
    """Products q . k -> (scores, factor): score * factor is what exp2 needs of a logit.

    Without a cap the scale stays a factor, which joins the subtraction in `step` as one FMA.
    """
    factor = scale * 1.4426950408889634
    if SOFTCAP:
        s = capped(s * scale, cap)
        factor = tl.full([], 1.4426950408889634, tl.float32)
    return s, factor


@triton.jit
def step(s, factor, m):
    """Scores and the maximum so far -> (probabilities, what sums so far shrink by, maximum)."""
    top = tl.maximum(m, tl.max(s, 1) * factor)
    # A row that has seen no token yet: -inf - -inf would be NaN.
    safe = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp2(s * factor - safe[:, None]), tl.exp2(m - safe), top


@triton.jit
def finish(total, m, sinks, rows, split, SINKS: tl.constexpr):
    """What sums are multiplied by to give outputs, and the natural log of the softmax's sum.

    A sink is a logit without a value; it counts once, in split 0.
    """
    factor = tl.full(m.shape, 1.0, tl.float32)
    if SINKS:
        sink = tl.load(sinks, mask=rows, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        sink = tl.where(split == 0, sink, float("-inf"))
        top = tl.maximum(m, sink)
        safe = tl.where(top == float("-inf"), 0.0, top)
        factor = tl.exp2(m - safe)
        total = total * factor + tl.exp2(sink - safe)
        m = top
    some = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (m + tl.log2(some)) * 0.6931471805599453)
    return factor / some, lse
