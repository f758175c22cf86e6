"""Copies between an engine's paged KV and the store's contiguous blocks, quantised on the way.

`gather_blocks` makes blocks of pages (saving), `scatter_blocks` pages of blocks (restoring). The
layout's `kv_format` says whether bytes move as they are or through int8, fp8 or int4 codes; the
formats are those of `kvstore.kernels.formats`. Raw copies are exact to the bit; codes equal those
of the reference.
"""

from __future__ import annotations

import torch

from kvstore.kernels import block_launch, block_reference
from kvstore.kernels.dispatch import uses_triton
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.views import check_pool


def gather_blocks(
    pool: EnginePool,
    pages: torch.Tensor,
    store: torch.Tensor,
    layout: BlockLayout,
    *,
    slots: torch.Tensor | None = None,
    layers: range | None = None,
    backend: str | None = None,
) -> None:
    """Writes blocks of `store` from pages of an engine's pool.

    `pages`: int32 [n, pages a block] (or [n] where a page is a block), numbers of the engine's
    pages in token order. `store`: uint8 [blocks, block_bytes or more] on the same device, blocks
    at multiples of 16 bytes. `slots`: int32 [n], which blocks are written; 0..n-1 by default; no
    slot twice. `layers`: consecutive layers to move, all by default; the rest of a block stays as
    it is. `backend`: "triton", "reference" or None for the device's. Runs on the current stream.
    Raises ValueError for shapes, dtypes or devices that do not fit; page and slot numbers are the
    caller's to check, since they lie on the device.
    """
    pages, slots, layers = _checked(pool, pages, store, slots, layout, layers)
    if len(slots) == 0 or len(layers) == 0:
        return
    if uses_triton(backend, store.device):
        block_launch.launch(pool, pages, store, slots, layout, layers, to_store=True)
    else:
        block_reference.gather(pool, pages, store, slots, layout, layers)


def scatter_blocks(
    store: torch.Tensor,
    pool: EnginePool,
    pages: torch.Tensor,
    layout: BlockLayout,
    *,
    slots: torch.Tensor | None = None,
    layers: range | None = None,
    backend: str | None = None,
) -> None:
    """Writes pages of an engine's pool from blocks of `store`; arguments as in `gather_blocks`.

    No page twice. Quantised blocks come back in the pool's dtype, rounded once from code x scale.
    """
    pages, slots, layers = _checked(pool, pages, store, slots, layout, layers)
    if len(slots) == 0 or len(layers) == 0:
        return
    if uses_triton(backend, store.device):
        block_launch.launch(pool, pages, store, slots, layout, layers, to_store=False)
    else:
        block_reference.scatter(store, slots, pool, pages, layout, layers)


def _checked(
    pool: EnginePool,
    pages: torch.Tensor,
    store: torch.Tensor,
    slots: torch.Tensor | None,
    layout: BlockLayout,
    layers: range | None,
) -> tuple[torch.Tensor, torch.Tensor, range]:
    check_pool(store, layout)
    pool.check_layout(layout)
    per_block = pool.pages_per_block(layout)
    if pages.dim() == 1:
        pages = pages[:, None]
    if pages.dtype is not torch.int32 or pages.dim() != 2 or pages.shape[1] != per_block:
        raise ValueError(
            f"pages must be int32 [n, {per_block}], and are {pages.dtype} {list(pages.shape)}"
        )
    if slots is None:
        slots = torch.arange(len(pages), dtype=torch.int32, device=store.device)
    if slots.dtype is not torch.int32 or slots.shape != pages.shape[:1]:
        raise ValueError(f"slots must be int32 [{len(pages)}], one for each row of pages")
    for name, tensor in (("pages", pages), ("slots", slots), ("the engine's pool", pool.first)):
        if tensor.device != store.device:
            raise ValueError(f"{name}: on {tensor.device}, but the store is on {store.device}")
    layers = range(layout.num_layers) if layers is None else layers
    if layers.step != 1 or layers.start < 0 or layers.stop > layout.num_layers:
        raise ValueError(f"layers {layers} are not consecutive ones of {layout.num_layers}")
    return pages.contiguous(), slots.contiguous(), layers
