"""Attention in plain torch: what the kernels must equal, and what runs where there is no GPU.

Everything is computed in float64 where queries are float64, else in float32, sequence by sequence,
on keys and values gathered and dequantised; slow and meant to be obviously right. Arguments are
those of the functions in `attention.py`, checked there.
"""

from __future__ import annotations

import torch

from kvstore.kernels.options import Options, Pools

NEVER = float("-inf")


def rows_of(
    pool: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, kv_format: str, kv: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Tokens of `blocks` [n] in order, [n * block_size, heads, head_dim], dequantised to `dtype`.

    `kv` 0 for K, 1 for V: int4_kivi has other scales for each.
    """
    codes = _bytes(pool)[blocks.long()]
    if kv_format == "raw":
        return codes.to(dtype).flatten(0, 1)
    assert scale is not None, "arguments are checked before"
    scales = scale[blocks.long()].to(dtype)
    if kv_format == "int8_th":
        return (codes.to(dtype) * scales.transpose(1, 2)[..., None]).flatten(0, 1)
    if kv_format == "fp8_bh":
        values = codes.view(torch.float8_e4m3fn).to(torch.float32).to(dtype)
        return (values * scales[:, None, :, None]).flatten(0, 1)
    return _int4(codes, scales, kv).flatten(0, 1)


def _int4(codes: torch.Tensor, scales: torch.Tensor, kv: int) -> torch.Tensor:
    """Codes [n, tokens, heads, head_dim/2] and scales, as `formats.py` lays them out."""
    pairs = codes.unflatten(3, (-1, 2))
    quarters = [pairs[..., 0] & 15, pairs[..., 0] >> 4, pairs[..., 1] & 15, pairs[..., 1] >> 4]
    values = torch.cat(quarters, 3).to(scales.dtype)
    tokens = values.shape[1]
    if kv == 0:  # [n, heads, token groups, 2, channels] -> one a token
        each = scales.repeat_interleave(tokens // scales.shape[2], 2).permute(3, 0, 2, 1, 4)
    else:  # [n, heads, channel groups, 2, tokens] -> one a channel
        each = scales.repeat_interleave(values.shape[3] // scales.shape[2], 2)
        each = each.permute(3, 0, 4, 1, 2)
    step, zero = each
    return values * step + zero


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    """float8 as bytes, since torch indexes few of its kinds; all else as it is."""
    return pool.view(torch.uint8) if pool.dtype is torch.float8_e4m3fn else pool


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [n, H, D] over tokens [t, H_kv, D] where `seen` [n, t]: outputs and log-sum-exps."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->nht", q, k) * options.sm_scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~seen[:, None], NEVER)
    if options.sinks is not None:
        sink = options.sinks.to(q.dtype)[None, :, None].expand(q.shape[0], -1, 1)
        scores = torch.cat([scores, sink], 2)
    lse = torch.logsumexp(scores, 2)
    weights = torch.exp(scores - lse.masked_fill(lse == NEVER, 0.0)[..., None])
    return torch.einsum("nht,thd->nhd", weights[:, :, : k.shape[0]], v), lse


def compute_dtype(q: torch.Tensor) -> torch.dtype:
    """float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def paged_extend(
    q: torch.Tensor, pools: Pools, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_q: torch.Tensor, causal: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dtype = compute_dtype(q)
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], NEVER, dtype=dtype, device=q.device)
    edges = cu_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        new = slice(edges[b], edges[b + 1])
        count = new.stop - new.start
        if count == 0:
            continue
        blocks = block_table[b, : -(-length // pools.block_size)]
        k, v = (rows[:length] for rows in _gather(pools, blocks, dtype))
        last = length - count + torch.arange(count, device=q.device) if causal else None
        seen = _seen(length, count, last, options.window, q.device)
        out[new], lse[new] = attend(q[new].to(dtype), k, v, seen, options)
    return out, lse


def _gather(
    pools: Pools, blocks: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    k = rows_of(pools.k, pools.k_scale, blocks, pools.kv_format, 0, dtype)
    return k, rows_of(pools.v, pools.v_scale, blocks, pools.kv_format, 1, dtype)


def _seen(
    length: int, count: int, last: torch.Tensor | None, window: int, device: torch.device
) -> torch.Tensor:
    """Which of `length` tokens each query sees: up to token `last`, `window` of them (0: all)."""
    t = torch.arange(length, device=device)
    if last is None:
        return torch.ones(count, length, dtype=torch.bool, device=device)
    seen = t[None, :] <= last[:, None]
    return seen & (t[None, :] > last[:, None] - window) if window else seen


def paged_decode(
    q: torch.Tensor, pools: Pools, block_table: torch.Tensor, seq_lens: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    one_each = torch.arange(len(seq_lens) + 1)
    return paged_extend(q, pools, block_table, seq_lens, one_each, True, options)


def merge_states(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = compute_dtype(out)
    merged = torch.logsumexp(lse.to(dtype), 0)
    weights = torch.exp(lse.to(dtype) - merged.masked_fill(merged == NEVER, 0.0))
    # What a state without tokens holds is not read: it may be anything, NaN too.
    parts = out.to(dtype).masked_fill((weights == 0)[..., None], 0.0) * weights[..., None]
    return parts.sum(0), merged


def mla_decode(
    q_nope: torch.Tensor, q_rope: torch.Tensor, latents: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dtype, width = compute_dtype(q_nope), q_nope.shape[2]
    q = torch.cat([q_nope, q_rope], 2).to(dtype)
    out = torch.zeros(q_nope.shape, dtype=dtype, device=q.device)
    lse = torch.full(q_nope.shape[:2], NEVER, dtype=dtype, device=q.device)
    for b, length in enumerate(seq_lens.tolist()):
        blocks = block_table[b, : -(-length // latents.shape[1])]
        k = latents[blocks.long()].to(dtype).flatten(0, 1)[:length, None]
        seen = torch.ones(1, length, dtype=torch.bool, device=q.device)
        out[b : b + 1], lse[b : b + 1] = attend(q[b : b + 1], k, k[..., :width], seen, options)
    return out, lse
