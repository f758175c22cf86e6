"""What attention is over and what changes its scores, checked once for reference and kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK_SIZES = (16, 32, 64, 128)
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUP_MAX = 16
CODES = {
    "int8_th": (torch.int8,),
    "fp8_bh": (torch.float8_e4m3fn, torch.uint8),
    "int4_kivi": (torch.uint8,),
}
VALUES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Options:
    """Of scores: softmax(cap(q . k * sm_scale)), over the last `window` tokens (0: all).

    `softcap` 0 leaves scores as they are; `sinks` float32 [H] are logits without values.
    """

    sm_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    def check(self, heads: int) -> None:
        """Raises ValueError naming the option that is out of range."""
        if not 0 < self.sm_scale < float("inf"):
            raise ValueError(f"sm_scale is {self.sm_scale}; pass a positive number")
        if self.window < 0:
            raise ValueError(f"window is {self.window}; pass tokens, or 0 for no window")
        if not 0 <= self.softcap < float("inf"):
            raise ValueError(f"softcap is {self.softcap}; pass a positive number, or 0 for none")
        if self.sinks is not None and self.sinks.shape != (heads,):
            raise ValueError(
                f"sinks have shape {tuple(self.sinks.shape)}; pass one a head, {heads}"
            )


@dataclass(frozen=True)
class Pools:
    """One layer's K and V of every block, [blocks, block_size, H_kv, D], and their scales.

    Any strides but the last, scales in one piece a block and head: what `views.layer_views` gives
    of a pool of the store's blocks, or an engine's own pages. Scales are those of `formats.py`:
    int8_th [blocks, H_kv, tokens], fp8_bh [blocks, H_kv], int4_kivi K [blocks, H_kv, token groups,
    2, D] and V [blocks, H_kv, channel groups, 2, tokens]. int4_kivi rows are D/2 bytes.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    kv_format: str

    @property
    def block_size(self) -> int:
        return int(self.k.shape[1])

    @property
    def num_kv_heads(self) -> int:
        return int(self.k.shape[2])

    @property
    def head_dim(self) -> int:
        return int(self.k.shape[3]) * (2 if self.kv_format == "int4_kivi" else 1)

    def check(self, q: torch.Tensor) -> None:
        """Raises ValueError naming what does not fit queries [tokens, H, D]."""
        if self.kv_format not in ("raw", *CODES):
            raise ValueError(f"kv_format is {self.kv_format!r}; pass raw, {', '.join(CODES)}")
        if self.k.dim() != 4 or self.k.shape != self.v.shape:
            raise ValueError(
                f"k_pool and v_pool have shapes {tuple(self.k.shape)} and {tuple(self.v.shape)}; "
                "pass both as [blocks, block_size, H_kv, D]"
            )
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}; pass one of {BLOCK_SIZES}")
        if self.head_dim not in HEAD_DIMS or q.shape[-1] != self.head_dim:
            raise ValueError(
                f"head_dim is {self.head_dim} in the pools and {q.shape[-1]} in q; pass one of "
                f"{HEAD_DIMS}"
            )
        group, rest = divmod(q.shape[1], self.num_kv_heads)
        if rest or not 1 <= group <= GROUP_MAX:
            raise ValueError(
                f"{q.shape[1]} heads on {self.num_kv_heads} KV heads; pass 1 to {GROUP_MAX} times "
                "as many"
            )
        self._check_memory(q)

    def _check_memory(self, q: torch.Tensor) -> None:
        right = CODES.get(self.kv_format) or (
            q.dtype,
            *(VALUES if q.dtype is torch.float64 else ()),
        )
        for name, pool, scale in (
            ("k_pool", self.k, self.k_scale),
            ("v_pool", self.v, self.v_scale),
        ):
            if pool.dtype not in right:
                raise ValueError(f"{name} is {pool.dtype}; {self.kv_format} needs {right[0]}")
            if pool.stride(3) != 1 or pool.stride(1) * (self.block_size - 1) >= 2**31:
                raise ValueError(f"{name} has strides {pool.stride()}; make rows contiguous")
            if (scale is None) != (self.kv_format == "raw"):
                raise ValueError(f"{name} in {self.kv_format} goes with scales unless it is raw")
            if scale is not None and scale.shape != self._scale_shape(name):
                raise ValueError(
                    f"scales of {name} have shape {tuple(scale.shape)}; {self.kv_format} needs "
                    f"{self._scale_shape(name)}"
                )
            if scale is not None and not scale[0, 0].is_contiguous():
                raise ValueError(f"scales of {name} do not lie in one piece a block and head")

    def _scale_shape(self, name: str) -> tuple[int, ...]:
        blocks, tokens, heads = self.k.shape[0], self.block_size, self.num_kv_heads
        if self.kv_format == "int8_th":
            return (blocks, heads, tokens)
        if self.kv_format == "fp8_bh":
            return (blocks, heads)
        if name == "k_pool":
            return (blocks, heads, max(1, tokens // 32), 2, self.head_dim)
        return (blocks, heads, 4 if self.head_dim >= 128 else 2, 2, tokens)


def check_table(block_table: torch.Tensor, seq_lens: torch.Tensor, count: int) -> None:
    """Raises ValueError unless both are int32 and for `count` sequences."""
    for name, tensor, dims in (("block_table", block_table, 2), ("seq_lens", seq_lens, 1)):
        if tensor.dtype is not torch.int32 or tensor.dim() != dims or len(tensor) != count:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; pass int32 for "
                f"{count} sequences"
            )
    if block_table.stride(1) != 1:
        raise ValueError("rows of block_table must be contiguous")
