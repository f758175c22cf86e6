"""Paged extend: new tokens of a sequence attend to its KV blocks in place, causally or to all.

FlashAttention-2's tiling (Dao, 2023) with all query heads of a KV head as rows: row r of a sequence
is head r % GROUP of new token r // GROUP, so a tile of K and V serves the whole group, and a tile
of rows spans few tokens. Tiles that every row sees whole run without masks. Keys of codes become
float16, as in decode.
"""

import triton
import triton.language as tl

from kvstore.kernels.jit.places import block_ids, row_pointers, scales, token_pointers
from kvstore.kernels.jit.softmax import finish, scores, step
from kvstore.kernels.jit.unpack import factor, part


@triton.jit
def _int4(
    words, ptr, ids, t0, end, i, channels, s_n,
    PART: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Part `PART` of a tile's rows of 4-bit codes, dequantised; K's scales are per channel."""
    codes = part(words, PART, "int4_kivi", DTYPE, ASM).to(tl.float32)
    ok = t0 + i < end
    if VALUES:
        row: tl.constexpr = 2 * (PART if D >= 128 else PART // 2)
        at = token_pointers(ptr + row * PAGE, ids, t0, i, s_n, 1, PAGE, BLOCK_N)
        step = tl.load(at, mask=ok, other=0.0).to(tl.float32)[:, None]
        zero = tl.load(at + PAGE, mask=ok, other=0.0).to(tl.float32)[:, None]
    else:
        w = PART * (D // 4) + tl.arange(0, words.shape[1])
        group = (t0 % PAGE + i % PAGE) // TOKENS if PAGE >= BLOCK_N else (i % PAGE) // TOKENS
        at = token_pointers(ptr, ids, 0, 0 * i, s_n, 0, PAGE, BLOCK_N) + group * (2 * D)
        at = at[:, None] + w[None, :]
        some = ok[:, None] & channels[None, :]
        step = tl.load(at, mask=some, other=0.0).to(tl.float32)
        zero = tl.load(at + D, mask=some, other=0.0).to(tl.float32)
    return ((codes + 8.0) * step + zero).to(DTYPE)


@triton.jit
def _attend(
    q0, q1, q2, q3, m, total, acc0, acc1, acc2, acc3, begin, end, last, low, high,
    k_at, v_at, ks_at, vs_at, table, scale, cap, w, channels,
    sk_n, sk_t, sv_n, sv_t, sks_n, svs_n,
    D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr,
    PARTS: tl.constexpr, DTYPE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Tiles [begin, end) of tokens; row r counts tokens [low[r], high[r]), `last` is the end."""
    i = tl.arange(0, BLOCK_N)
    ids = block_ids(table, begin, last, i, PAGE, BLOCK_N)
    for t0 in range(begin, end, BLOCK_N):
        t = t0 + i
        later = block_ids(table, t0 + BLOCK_N, last, i, PAGE, BLOCK_N)
        # Keys behind the end are whatever lies there: their scores are not looked at.
        k = tl.load(row_pointers(k_at, w, ids, t0, i, sk_n, sk_t, PAGE, BLOCK_N),
                    mask=channels[None, :], other=0)  # fmt: skip
        if PARTS == 1:
            s = tl.dot(q0, tl.trans(k), input_precision="ieee")
        elif PARTS == 2:
            s = tl.dot(q0, tl.trans(part(k, 0, FORMAT, KEYS, ASM)), input_precision="ieee")
            s = tl.dot(q1, tl.trans(part(k, 1, FORMAT, KEYS, ASM)), s, input_precision="ieee")
            ks = scales(ks_at, ids, t0, last, i, sks_n, PAGE, BLOCK_N, FORMAT)
            s *= (ks.to(tl.float32) * factor(FORMAT, KEYS))[None, :]
        else:
            x = _int4(k, ks_at, ids, t0, last, i, channels, sks_n, 0, False, D, PAGE,
                      TOKENS, BLOCK_N, KEYS, ASM)  # fmt: skip
            s = tl.dot(q0, tl.trans(x), input_precision="ieee")
            x = _int4(k, ks_at, ids, t0, last, i, channels, sks_n, 1, False, D, PAGE,
                      TOKENS, BLOCK_N, KEYS, ASM)  # fmt: skip
            s = tl.dot(q1, tl.trans(x), s, input_precision="ieee")
            x = _int4(k, ks_at, ids, t0, last, i, channels, sks_n, 2, False, D, PAGE,
                      TOKENS, BLOCK_N, KEYS, ASM)  # fmt: skip
            s = tl.dot(q2, tl.trans(x), s, input_precision="ieee")
            x = _int4(k, ks_at, ids, t0, last, i, channels, sks_n, 3, False, D, PAGE,
                      TOKENS, BLOCK_N, KEYS, ASM)  # fmt: skip
            s = tl.dot(q3, tl.trans(x), s, input_precision="ieee")
        s, by = scores(s, scale, cap, SOFTCAP)
        if MASKED:
            s = tl.where((t[None, :] >= low[:, None]) & (t[None, :] < high[:, None]), s,
                         float("-inf"))  # fmt: skip
        p, shrink, m = step(s, by, m)
        total = total * shrink + tl.sum(p, 1)
        v_rows = row_pointers(v_at, w, ids, t0, i, sv_n, sv_t, PAGE, BLOCK_N)
        if MASKED:
            v = tl.load(v_rows, mask=(t < last)[:, None] & channels[None, :], other=0)
        else:
            v = tl.load(v_rows, mask=channels[None, :], other=0)
        acc0 = acc0 * shrink[:, None]
        if PARTS == 1:
            acc0 = tl.dot(p.to(DTYPE), v, acc0, input_precision="ieee")
        elif PARTS == 2:
            vs = scales(vs_at, ids, t0, last, i, svs_n, PAGE, BLOCK_N, FORMAT)
            p = (p * (vs.to(tl.float32) * factor(FORMAT, DTYPE))[None, :]).to(DTYPE)
            acc0 = tl.dot(p, part(v, 0, FORMAT, DTYPE, ASM), acc0, input_precision="ieee")
            acc1 = tl.dot(p, part(v, 1, FORMAT, DTYPE, ASM), acc1 * shrink[:, None],
                          input_precision="ieee")  # fmt: skip
        else:
            x = _int4(v, vs_at, ids, t0, last, i, channels, svs_n, 0, True, D, PAGE,
                      TOKENS, BLOCK_N, DTYPE, ASM)  # fmt: skip
            acc0 = tl.dot(p.to(DTYPE), x, acc0, input_precision="ieee")
            x = _int4(v, vs_at, ids, t0, last, i, channels, svs_n, 1, True, D, PAGE,
                      TOKENS, BLOCK_N, DTYPE, ASM)  # fmt: skip
            acc1 = tl.dot(p.to(DTYPE), x, acc1 * shrink[:, None], input_precision="ieee")
            x = _int4(v, vs_at, ids, t0, last, i, channels, svs_n, 2, True, D, PAGE,
                      TOKENS, BLOCK_N, DTYPE, ASM)  # fmt: skip
            acc2 = tl.dot(p.to(DTYPE), x, acc2 * shrink[:, None], input_precision="ieee")
            x = _int4(v, vs_at, ids, t0, last, i, channels, svs_n, 3, True, D, PAGE,
                      TOKENS, BLOCK_N, DTYPE, ASM)  # fmt: skip
            acc3 = tl.dot(p.to(DTYPE), x, acc3 * shrink[:, None], input_precision="ieee")
        ids = later
    return m, total, acc0, acc1, acc2, acc3


@triton.jit
def extend(
    q_ptr, k_ptr, v_ptr, ks_ptr, vs_ptr, table_ptr, lens_ptr, cu_ptr, sinks_ptr, o_ptr, lse_ptr,
    scale, cap, window,
    sq_t, sq_h, sk_n, sk_t, sk_h, sv_n, sv_t, sv_h,
    sks_n, sks_h, svs_n, svs_h, st_b, so_s, so_t, so_h, sl_s, sl_t,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    FORMAT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of rows, KV heads, sequences * splits; later rows, which see most, go first."""
    PARTS: tl.constexpr = 1 if FORMAT == "raw" else (4 if FORMAT == "int4_kivi" else 2)
    APART: tl.constexpr = D // 4 if FORMAT == "int4_kivi" else 1
    STRIDE: tl.constexpr = 2 if PARTS == 2 else 1
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    # Dequantised 4-bit keys are rounded to float16, whose error is the least.
    KEYS: tl.constexpr = tl.float16 if PARTS == 4 and tl.bfloat16 == DTYPE else DTYPE
    head, b, split = tl.program_id(1), tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    q_begin = tl.load(cu_ptr + b)
    count = tl.load(cu_ptr + b + 1) - q_begin
    if tile * BLOCK_M >= count * GROUP:
        return
    n = tl.load(lens_ptr + b)
    r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = r < count * GROUP
    heads, token = head * GROUP + r % GROUP, r // GROUP
    w = tl.arange(0, WIDTH)
    channels = w < D // PARTS
    inside = rows[:, None] & channels[None, :]
    q_at = q_ptr + (q_begin + token).to(tl.int64)[:, None] * sq_t + heads[:, None] * sq_h
    q_at += w[None, :] * STRIDE
    q0 = tl.load(q_at, mask=inside, other=0.0).to(KEYS)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc0 = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    q1, q2, q3, acc1, acc2, acc3 = m, m, m, m, m, m
    if PARTS > 1:
        q1 = tl.load(q_at + APART, mask=inside, other=0.0).to(KEYS)
        acc1 = acc0
    if PARTS > 2:
        q2 = tl.load(q_at + 2 * APART, mask=inside, other=0.0).to(KEYS)
        q3 = tl.load(q_at + 3 * APART, mask=inside, other=0.0).to(KEYS)
        acc2, acc3 = acc0, acc0
    # What the rows of this tile see: row r the tokens [low[r], high[r]), all of them [base, last),
    # every one of them at least up to `whole`.
    high = tl.where(rows, n, 0)
    whole, last, base = n, n, 0
    if CAUSAL:
        high = tl.where(rows, n - count + token + 1, 0)
        whole = n - count + tile * BLOCK_M // GROUP + 1
        last = tl.minimum(n, n - count + (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    low = tl.zeros([BLOCK_M], tl.int32)
    if WINDOW:
        low = tl.maximum(high - window, 0)
        base = tl.maximum(whole - window, 0) // BLOCK_N
    tiles = tl.cdiv(tl.cdiv(last, BLOCK_N) - base, SPLITS)
    begin = (base + split * tiles) * BLOCK_N
    end = tl.minimum(begin + tiles * BLOCK_N, last)
    middle = begin
    table = table_ptr + b.to(tl.int64) * st_b
    k_at, v_at = k_ptr + head.to(tl.int64) * sk_h, v_ptr + head.to(tl.int64) * sv_h
    ks_at, vs_at = ks_ptr + head * sks_h, vs_ptr + head * svs_h
    if not WINDOW:
        middle = tl.maximum(begin, tl.minimum(end, whole) // BLOCK_N * BLOCK_N)
        m, total, acc0, acc1, acc2, acc3 = _attend(
            q0, q1, q2, q3, m, total, acc0, acc1, acc2, acc3, begin, middle, end, low, high,
            k_at, v_at, ks_at, vs_at, table, scale, cap, w, channels,
            sk_n, sk_t, sv_n, sv_t, sks_n, svs_n,
            D, PAGE, TOKENS, BLOCK_N, FORMAT, SOFTCAP, False, ASM, PARTS, DTYPE, KEYS,
        )  # fmt: skip
    m, total, acc0, acc1, acc2, acc3 = _attend(
        q0, q1, q2, q3, m, total, acc0, acc1, acc2, acc3, middle, end, end, low, high,
        k_at, v_at, ks_at, vs_at, table, scale, cap, w, channels,
        sk_n, sk_t, sv_n, sv_t, sks_n, svs_n,
        D, PAGE, TOKENS, BLOCK_N, FORMAT, SOFTCAP, True, ASM, PARTS, DTYPE, KEYS,
    )  # fmt: skip
    inv, lse = finish(total, m, sinks_ptr + heads, rows, split, SINKS)
    o_at = o_ptr + split.to(tl.int64) * so_s + (q_begin + token).to(tl.int64)[:, None] * so_t
    o_at += heads[:, None] * so_h + w[None, :] * STRIDE
    kind: tl.constexpr = o_ptr.dtype.element_ty
    tl.store(o_at, (acc0 * inv[:, None]).to(kind), mask=inside)
    if PARTS > 1:
        tl.store(o_at + APART, (acc1 * inv[:, None]).to(kind), mask=inside)
    if PARTS > 2:
        tl.store(o_at + 2 * APART, (acc2 * inv[:, None]).to(kind), mask=inside)
        tl.store(o_at + 3 * APART, (acc3 * inv[:, None]).to(kind), mask=inside)
    tl.store(lse_ptr + split.to(tl.int64) * sl_s + (q_begin + token) * sl_t + heads, lse, mask=rows)
