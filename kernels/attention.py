"""Attention on KV blocks in place: no copy lies between a restore and its use.

Shapes: B sequences, T new tokens of all of them, H query heads on H_kv KV heads (H / H_kv from 1 to
16), D channels of a head (64, 80, 96, 128, 256). Pools are one layer of every block, K and V each
[blocks, block_size, H_kv, D] by strides (`views.layer_views` of the store's blocks, NHD or HND, or
an engine's own pages), block_size 16, 32, 64 or 128 tokens. `block_table` int32 [B, blocks a
sequence] names blocks, `seq_lens` int32 [B] counts tokens; neither is read on the CPU, so calls can
be captured in a CUDA graph and replayed with other contents.

`q` is bfloat16, float16 or float32, raw pools are of the same dtype. Quantised pools (`kv_format`
int8_th, fp8_bh, int4_kivi with `k_scale` and `v_scale`, see `formats.py`) are dequantised in
registers to q's dtype; sums are float32. `sm_scale` multiplies q . k; `softcap` > 0 makes it
softcap * tanh(. / softcap); `window` > 0 keeps a token's last `window` tokens, itself included;
`sinks` float32 [H] are logits of no token, which only take weight away.

Outputs are of q's dtype, written to `out` if given, and with them the natural log of each softmax's
sum, float32, -inf where a query saw nothing (its output is 0): what `merge_states` needs.
`backend`: "triton", "reference" (plain torch) or None: Triton on GPUs. Arguments that do not fit
raise ValueError.
"""

from __future__ import annotations

from typing import Any

import torch

from kvstore.kernels import launch, reference
from kvstore.kernels.dispatch import uses_triton
from kvstore.kernels.options import Options, Pools, check_table


def paged_decode(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, sm_scale: float, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, kv_format: str = "raw", window: int = 0,
    softcap: float = 0.0, sinks: torch.Tensor | None = None, num_splits: int | None = None,
    out: torch.Tensor | None = None, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One query a sequence, q [B, H, D], at the sequence's last token.

    Returns (out [B, H, D], lse [B, H]). `num_splits` parts of each context run apart and are
    merged; None chooses from the length of `block_table`'s rows. Flash-Decoding (Dao et al., 2023).
    """
    pools, options = (
        Pools(k_pool, v_pool, k_scale, v_scale, kv_format),
        Options(sm_scale, window, softcap, sinks),
    )
    _check(q, pools, options, block_table, seq_lens, len(q), num_splits)
    out = _room(q, out)
    if not uses_triton(backend, q.device):
        return _fill(out, reference.paged_decode(q, pools, block_table, seq_lens, options))
    return out, launch.paged_decode(q, pools, block_table, seq_lens, options, num_splits, out)


def paged_extend(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, cu_q: torch.Tensor, *, max_q: int, sm_scale: float, causal: bool = True,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    kv_format: str = "raw", window: int = 0, softcap: float = 0.0,
    sinks: torch.Tensor | None = None, num_splits: int | None = None,
    out: torch.Tensor | None = None, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """New tokens, q [T, H, D], whose K and V are in the blocks already.

    Sequence b has the queries cu_q[b] to cu_q[b+1] (int32 [B + 1]), at most `max_q` of them; they
    are the last of its seq_lens[b] tokens. Each sees the tokens up to its own, or all if not
    `causal` (then without window). Returns (out [T, H, D], lse [T, H]). FlashAttention-2 (Dao,
    2023).
    """
    pools, options = (
        Pools(k_pool, v_pool, k_scale, v_scale, kv_format),
        Options(sm_scale, window, softcap, sinks),
    )
    _check(q, pools, options, block_table, seq_lens, len(cu_q) - 1, num_splits)
    if cu_q.dtype is not torch.int32 or max_q < 0:
        raise ValueError(f"cu_q is {cu_q.dtype} and max_q {max_q}; pass int32 and a count")
    if window and not causal:
        raise ValueError("a window needs causal queries; pass window=0 or causal=True")
    out = _room(q, out)
    if not uses_triton(backend, q.device):
        result = reference.paged_extend(q, pools, block_table, seq_lens, cu_q, causal, options)
        return _fill(out, result)
    return out, launch.paged_extend(
        q, pools, block_table, seq_lens, cu_q, max_q, causal, options, num_splits, out
    )


def merge_states(
    out: torch.Tensor, lse: torch.Tensor, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over disjoint tokens, out [S, T, H, D] and lse [S, T, H], as over all of them.

    Returns (out [T, H, D] of the same dtype, lse [T, H] in float32). Associative and commutative up
    to rounding; outputs with lse = -inf are not looked at. Online softmax (Milakov and Gimelshein,
    2018).
    """
    if out.dim() != 4 or lse.shape != out.shape[:3] or len(out) == 0 or out.stride(3) != 1:
        raise ValueError(
            f"out and lse have shapes {tuple(out.shape)} and {tuple(lse.shape)}; pass "
            "[S, T, H, D] and [S, T, H] with S from 1"
        )
    merged = torch.empty(out.shape[1:], dtype=out.dtype, device=out.device)
    if not uses_triton(backend, out.device):
        return _fill(merged, reference.merge_states(out, lse))
    return merged, launch.merge_states(out, lse, merged)


def cascade_decode(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, prefix_table: torch.Tensor,
    prefix_lens: torch.Tensor, cu_group: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, max_group: int, sm_scale: float,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    kv_format: str = "raw", softcap: float = 0.0, sinks: torch.Tensor | None = None,
    num_splits: int | None = None, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Decode where neighbours share a prefix, whose KV is read once for all of a group.

    Requests cu_group[g] to cu_group[g+1] (int32 [groups + 1], at most `max_group` of them) share
    the prefix that prefix_table[g] and prefix_lens[g] name; `block_table` and `seq_lens` are of
    what follows it, each request's own. Returns (out [B, H, D], lse [B, H]). Cascade attention
    (Ye et al., FlashInfer, 2024); a window would hide the prefix, so there is none.
    """
    shared: dict[str, Any] = {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale,
              "kv_format": kv_format, "softcap": softcap, "backend": backend}  # fmt: skip
    outs = torch.empty((2, *q.shape), dtype=q.dtype, device=q.device)
    _, prefix = paged_extend(
        q, k_pool, v_pool, prefix_table, prefix_lens, cu_group, max_q=max_group, causal=False,
        num_splits=num_splits, out=outs[0], **shared,
    )  # fmt: skip
    _, own = paged_decode(
        q, k_pool, v_pool, block_table, seq_lens, sinks=sinks, out=outs[1], **shared
    )
    return merge_states(outs, torch.stack([prefix, own]), backend=backend)


def mla_decode(
    q_nope: torch.Tensor, q_rope: torch.Tensor, latents: torch.Tensor, block_table: torch.Tensor,
    seq_lens: torch.Tensor, *, sm_scale: float, softcap: float = 0.0,
    num_splits: int | None = None, out: torch.Tensor | None = None, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Decode on MLA latents, [blocks, block_size, 512 + 64]: one for all heads, K and V at once.

    `q_nope` [B, H, 512] is already multiplied into latent space, `q_rope` [B, H, 64] goes with a
    latent's last channels. Returns (out [B, H, 512] in latent space, lse [B, H]). DeepSeek-V2
    (2024), the absorbed form.
    """
    options = Options(sm_scale, softcap=softcap)
    options.check(q_nope.shape[1])
    check_table(block_table, seq_lens, len(q_nope))
    _check_splits(num_splits)
    widths = (q_nope.shape[2], q_rope.shape[2], latents.shape[2])
    if widths[0] & (widths[0] - 1) or widths[1] & (widths[1] - 1) or widths[0] < 16:
        raise ValueError(f"q_nope and q_rope have {widths[:2]} channels; pass powers of two")
    if widths[0] + widths[1] != widths[2] or latents.stride(2) != 1:
        raise ValueError(f"q_nope, q_rope and latents have {widths} channels; the first two add up")
    out = _room(q_nope, out)
    if not uses_triton(backend, q_nope.device):
        result = reference.mla_decode(q_nope, q_rope, latents, block_table, seq_lens, options)
        return _fill(out, result)
    return out, launch.mla_decode(
        q_nope, q_rope, latents, block_table, seq_lens, options, num_splits, out
    )


def _check(
    q: torch.Tensor, pools: Pools, options: Options, block_table: torch.Tensor,
    seq_lens: torch.Tensor, count: int, num_splits: int | None,
) -> None:  # fmt: skip
    if q.dim() != 3 or q.stride(2) != 1:
        raise ValueError(f"q has shape {tuple(q.shape)}; pass [tokens, H, D] with contiguous rows")
    pools.check(q)
    options.check(q.shape[1])
    check_table(block_table, seq_lens, count)
    _check_splits(num_splits)


def _room(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype is not q.dtype or out.stride(2) != 1:
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}; pass {q.dtype} {tuple(q.shape)}")
    return out


def _fill(
    out: torch.Tensor, result: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    out.copy_(result[0])
    return out, result[1] if out.dtype is torch.float64 else result[1].float()


def _check_splits(num_splits: int | None) -> None:
    if num_splits is not None and not 1 <= num_splits <= 1024:
        raise ValueError(f"num_splits is {num_splits}; pass 1 to 1024, or None to have it chosen")
