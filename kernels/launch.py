"""Launches of the attention kernels: strides, grids, splits and scratch memory."""

from __future__ import annotations

import torch
import triton

from kvstore.kernels.dispatch import processors, target_of
from kvstore.kernels.options import Options, Pools
from kvstore.kernels.plans import (
    Plan,
    Shape,
    Tuning,
    decode_plan,
    extend_plan,
    merge_plan,
    mla_plan,
    splits_for,
    states_per_split,
)

PROGRAMS_PER_PROCESSOR = 2
"""Programs of small tiles that share a multiprocessor; one of 128 rows has it alone."""


def paged_decode(
    q: torch.Tensor, pools: Pools, block_table: torch.Tensor, seq_lens: torch.Tensor,
    options: Options, num_splits: int | None, out: torch.Tensor, tuning: Tuning | None = None,
) -> torch.Tensor:  # fmt: skip
    """Writes `out` [B, H, D]; returns the log-sum-exps [B, H]."""
    heads = pools.num_kv_heads
    splits = num_splits or _splits(heads * len(q), block_table, pools.block_size, options.window, q)
    plan = decode_plan(target_of(q.device), _shape(q, pools, options), splits, tuning)
    parts, lses = _states(splits * states_per_split(plan), out)
    _run(plan, (heads, splits, len(q)), [
        q, *_words(pools), *_scales(pools, q), block_table, seq_lens, _sinks(options, lses),
        parts, lses, options.sm_scale, options.softcap, options.window,
        *q.stride()[:2], *_strides(pools), *_scale_strides(pools), block_table.stride(0),
        parts.stride(1), parts.stride(0), parts.stride(2), lses.stride(1), lses.stride(0),
    ])  # fmt: skip
    return lses[0] if len(parts) == 1 else merge_states(parts, lses, out)


def paged_extend(
    q: torch.Tensor, pools: Pools, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_q: torch.Tensor, max_q: int, causal: bool, options: Options, num_splits: int | None,
    out: torch.Tensor, tuning: Tuning | None = None,
) -> torch.Tensor:  # fmt: skip
    """Writes `out` [T, H, D]; returns the log-sum-exps [T, H]."""
    shape, count = _shape(q, pools, options), len(seq_lens)
    rows = max_q * shape.group
    target = target_of(q.device)
    tile = int(extend_plan(target, shape, rows, 1, causal, tuning).constants["BLOCK_M"])
    tiles = triton.cdiv(rows, tile)
    programs = tiles * pools.num_kv_heads * count
    splits = num_splits or _splits(
        programs, block_table, pools.block_size, options.window, q, alone=tile >= 128
    )
    plan = extend_plan(target, shape, rows, splits, causal, tuning)
    parts, lses = _states(splits, out)
    _run(plan, (tiles, pools.num_kv_heads, count * splits), [
        q, *_words(pools), *_scales(pools, q), block_table, seq_lens, cu_q,
        _sinks(options, lses), parts, lses, options.sm_scale, options.softcap, options.window,
        *q.stride()[:2], *_strides(pools), *_scale_strides(pools), block_table.stride(0),
        *parts.stride()[:3], *lses.stride()[:2],
    ])  # fmt: skip
    return lses[0] if splits == 1 else merge_states(parts, lses, out)


def merge_states(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes the merged outputs to `out` [T, H, D]; returns the log-sum-exps [T, H]."""
    states, tokens, heads, head_dim = parts.shape
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=parts.device)
    _run(merge_plan(head_dim, states), (tokens, heads), [
        parts, lses, out, lse, states, *parts.stride()[:3], *lses.stride(), *out.stride()[:2],
        *lse.stride(),
    ])  # fmt: skip
    return lse


def mla_decode(
    q_nope: torch.Tensor, q_rope: torch.Tensor, latents: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, options: Options, num_splits: int | None, out: torch.Tensor,
    tuning: Tuning | None = None,
) -> torch.Tensor:  # fmt: skip
    """Writes `out` [B, H, 512]; returns the log-sum-exps [B, H]."""
    count, heads, width = q_nope.shape
    shape = Shape(1, width, latents.shape[1], "raw", q_nope.element_size(),
                  softcap=options.softcap > 0)  # fmt: skip
    target, rope = target_of(q_nope.device), q_rope.shape[2]
    rows = int(mla_plan(target, shape, heads, rope, 1, tuning).constants["ROWS"])
    tiles = triton.cdiv(heads, rows)
    splits = num_splits or _splits(tiles * count, block_table, latents.shape[1], 0, q_nope)
    plan = mla_plan(target, shape, heads, rope, splits, tuning)
    parts, lses = _states(splits, out)
    _run(plan, (tiles, splits, count), [
        q_nope, q_rope, latents, block_table, seq_lens, parts, lses,
        options.sm_scale, options.softcap, *q_nope.stride()[:2], *q_rope.stride()[:2],
        *latents.stride()[:2], block_table.stride(0),
        parts.stride(1), parts.stride(0), parts.stride(2), lses.stride(1), lses.stride(0),
    ])  # fmt: skip
    return lses[0] if splits == 1 else merge_states(parts, lses, out)


def _run(plan: Plan, grid: tuple[int, int, int] | tuple[int, int], arguments: list[object]) -> None:
    if 0 in grid:
        return
    plan.kernel[grid](
        *arguments, **plan.constants, num_warps=plan.num_warps, num_stages=plan.num_stages
    )


def _shape(q: torch.Tensor, pools: Pools, options: Options) -> Shape:
    return Shape(
        group=q.shape[1] // pools.num_kv_heads,
        head_dim=pools.head_dim,
        block_size=pools.block_size,
        kv_format=pools.kv_format,
        value_bytes=q.element_size(),
        window=options.window > 0,
        softcap=options.softcap > 0,
        sinks=options.sinks is not None,
    )


def _splits(
    programs: int, block_table: torch.Tensor, block_size: int, window: int, q: torch.Tensor,
    alone: bool = False,
) -> int:  # fmt: skip
    """Splits for the longest context that the block table has room for: lengths stay unread."""
    tokens = block_table.shape[1] * block_size
    slots = processors(q.device) * (1 if alone else PROGRAMS_PER_PROCESSOR)
    return splits_for(max(1, programs), slots, min(tokens, window or tokens))


def _states(states: int, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for `states` partial results; a single one goes to `out` itself."""
    lses = torch.empty(states, *out.shape[:2], dtype=torch.float32, device=out.device)
    if states == 1:
        return out[None], lses
    return torch.empty(states, *out.shape, dtype=torch.float32, device=out.device), lses


def _words(pools: Pools) -> list[torch.Tensor]:
    """Codes as the 16-bit words that kernels read."""
    if pools.kv_format == "raw":
        return [pools.k, pools.v]
    return [pools.k.view(torch.int16), pools.v.view(torch.int16)]


def _strides(pools: Pools) -> list[int]:
    return [step for words in _words(pools) for step in words.stride()[:3]]


def _scales(pools: Pools, q: torch.Tensor) -> list[torch.Tensor]:
    """Scales of K and V; where there are none, tensors that kernels do not look at."""
    return [q if pools.k_scale is None else pools.k_scale,
            q if pools.v_scale is None else pools.v_scale]  # fmt: skip


def _scale_strides(pools: Pools) -> list[int]:
    """From block to block and from head to head, of K's scales and V's; zeros where none are."""
    both = (pools.k_scale, pools.v_scale)
    return [step for scale in both for step in ((0, 0) if scale is None else scale.stride()[:2])]


def _sinks(options: Options, unused: torch.Tensor) -> torch.Tensor:
    return unused if options.sinks is None else options.sinks
