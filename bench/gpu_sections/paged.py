"""Pools of KV for attention: random, quantised, with what must not be read poisoned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.quantize import quantize_blocks
from kvstore.kernels.views import LayerViews, layer_views

POISON = 0xFF  # NaN in every format's rows or scales


@dataclass
class Paged:
    """Blocks of several sequences in permuted places; `views` a layer each."""

    layout: BlockLayout
    views: list[LayerViews]
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    def arguments(self, layer: int) -> dict[str, Any]:
        """Keyword arguments that every op takes of a pool."""
        view = self.views[layer]
        return {
            "k_pool": view.k, "v_pool": view.v, "k_scale": view.k_scale, "v_scale": view.v_scale,
            "kv_format": self.layout.kv_format, "block_table": self.block_table,
            "seq_lens": self.seq_lens,
        }  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Bytes of one layer that attention over all tokens must read."""
        blocks = sum(-(-n // self.layout.block_size) for n in self.seq_lens.tolist())
        used = sum(
            self.layout.scale_bytes(kv) + self.layout.payload_bytes
            for kv in range(self.layout.kv_factor)
        )
        return blocks * used


def paged(layout: BlockLayout, lens: list[int], spare: int = 3) -> Paged:
    """Sequences of these lengths; `spare` blocks are poisoned, and raw rows behind each end."""
    tokens = layout.block_size
    counts = [-(-n // tokens) for n in lens]
    total = sum(counts) + spare
    places = torch.randperm(total, device="cuda").to(torch.int32)
    table = torch.zeros(len(lens), max(1, *counts), dtype=torch.int32, device="cuda")
    table.fill_(places[-1])
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = places[first : first + count]
        first += count
    store = _random(layout, total)
    store[places[first:].long()] = POISON
    views = [layer_views(store, layout, layer) for layer in range(layout.num_layers)]
    if layout.kv_format == "raw":
        for row, (n, count) in enumerate(zip(lens, counts, strict=True)):
            if n % tokens:
                for view in views:
                    for rows in view[: layout.kv_factor]:
                        assert rows is not None, "the layout says which there are"
                        rows[table[row, count - 1].long(), n % tokens :] = float("nan")
    lengths = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return Paged(layout, views, table, lengths)


def _random(layout: BlockLayout, blocks: int) -> torch.Tensor:
    raw = torch.empty(blocks, layout.raw.block_bytes, dtype=torch.uint8, device="cuda")
    raw.view(_dtype(layout)).normal_()
    if layout.kv_format == "raw":
        return raw
    store = torch.empty(blocks, layout.block_bytes, dtype=torch.uint8, device="cuda")
    quantize_blocks(raw, store, layout)
    return store


def _dtype(layout: BlockLayout) -> torch.dtype:
    found = getattr(torch, layout.dtype)
    assert isinstance(found, torch.dtype)
    return found


def sham(layout: BlockLayout, batch: int, length: int, real: int = 1) -> Paged:
    """Tables as for sequences of `length` tokens that hold `real`, over two blocks of zeros.

    Launches over it take the very variants of the real thing, and next to no time.
    """
    store = torch.zeros(2, layout.block_bytes, dtype=torch.uint8, device="cuda")
    views = [layer_views(store, layout, layer) for layer in range(layout.num_layers)]
    width = -(-length // layout.block_size)
    table = torch.zeros(batch, width, dtype=torch.int32, device="cuda")
    lens = torch.full((batch,), real, dtype=torch.int32, device="cuda")
    return Paged(layout, views, table, lens)
