"""Blocks of the store from raw to a quantised format and back, where they lie.

For demotion on the GPU (half the bytes down the link, or fewer) and for restoring a quantised copy
into a raw slot. Formats, errors and rounding: `kvstore.kernels.formats`.
"""

from __future__ import annotations

import torch

from kvstore.kernels.block_copy import gather_blocks, scatter_blocks
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import BlockLayout


def quantize_blocks(
    raw: torch.Tensor,
    store: torch.Tensor,
    layout: BlockLayout,
    *,
    raw_slots: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    layers: range | None = None,
    backend: str | None = None,
) -> None:
    """Writes blocks of `store` in the layout's format from raw blocks of `raw`.

    `raw`: uint8 [blocks, layout.raw.block_bytes or more], `store`: uint8 [blocks,
    layout.block_bytes or more], of one device. `raw_slots` and `slots`: int32 [n], which blocks are
    read and written; `slots` is 0..n-1 by default, `raw_slots` all of `raw`. Values must be finite.
    A format `raw` copies. Raises ValueError as `gather_blocks` does.
    """
    pool = EnginePool.blocks(raw, layout.raw)
    pages = _all_of(raw) if raw_slots is None else raw_slots
    gather_blocks(pool, pages, store, layout, slots=slots, layers=layers, backend=backend)


def dequantize_blocks(
    store: torch.Tensor,
    raw: torch.Tensor,
    layout: BlockLayout,
    *,
    slots: torch.Tensor | None = None,
    raw_slots: torch.Tensor | None = None,
    layers: range | None = None,
    backend: str | None = None,
) -> None:
    """Writes raw blocks of `raw` from blocks of `store`; arguments as in `quantize_blocks`."""
    pool = EnginePool.blocks(raw, layout.raw)
    pages = _all_of(raw) if raw_slots is None else raw_slots
    scatter_blocks(store, pool, pages, layout, slots=slots, layers=layers, backend=backend)


def _all_of(pool: torch.Tensor) -> torch.Tensor:
    return torch.arange(pool.shape[0], dtype=torch.int32, device=pool.device)
