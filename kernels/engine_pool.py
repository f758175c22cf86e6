"""An engine's paged KV, whatever its layout: per layer one tensor of K and one of V pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.kernels.formats import WORD_BYTES, BlockLayout
from kvstore.kernels.views import DTYPES, layer_views


class EnginePool:
    """K and V pages of every layer: [pages, page_tokens, heads, head_dim] each, by strides.

    `keys` and `values` hold one tensor a layer, all of one shape, dtype, device and set of strides,
    values of a row contiguous; `values` is None for MLA latents (heads 1). A page is the engine's
    unit of allocation: vLLM's block, SGLang's page of 1 token or more. Rows begin at multiples of
    16 bytes. Raises ValueError naming what differs.
    """

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None = None
    ) -> None:
        if not keys or (values is not None and len(values) != len(keys)):
            raise ValueError("an engine's pool needs K of at least one layer, and V of none or all")
        self.keys = list(keys)
        self.values = None if values is None else list(values)
        self.first = self.keys[0]
        for tensor in self.tensors:
            _check_alike(tensor, self.first)
        self.offsets = self._offsets()
        _, self.page_tokens, self.num_kv_heads, self.head_dim = self.first.shape

    @property
    def tensors(self) -> list[torch.Tensor]:
        """K and V by turns: index layer * kv_factor + kv."""
        if self.values is None:
            return self.keys
        pairs = zip(self.keys, self.values, strict=True)
        return [tensor for pair in pairs for tensor in pair]

    @property
    def kv_factor(self) -> int:
        return 1 if self.values is None else 2

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    @property
    def device(self) -> torch.device:
        return self.first.device

    def check_layout(self, layout: BlockLayout) -> None:
        """Raises ValueError unless blocks of this layout can be made of this pool's pages."""
        for name in ("num_layers", "num_kv_heads", "head_dim", "kv_factor"):
            if getattr(self, name) != getattr(layout, name):
                raise ValueError(
                    f"{name} is {getattr(self, name)} in the engine's pool and "
                    f"{getattr(layout, name)} in the layout"
                )
        if self.first.dtype is not DTYPES[layout.dtype]:
            raise ValueError(f"the engine's pool is {self.first.dtype}, the layout {layout.dtype}")
        if layout.block_size % self.page_tokens:
            raise ValueError(
                f"a block of {layout.block_size} tokens is no whole number of pages of "
                f"{self.page_tokens}"
            )

    def pages_per_block(self, layout: BlockLayout) -> int:
        return layout.block_size // int(self.page_tokens)

    def _offsets(self) -> torch.Tensor:
        """Distance of each tensor from the first, in 16-byte words (int64, on the device)."""
        start = self.first.data_ptr()
        words = [(tensor.data_ptr() - start) // WORD_BYTES for tensor in self.tensors]
        return torch.tensor(words, dtype=torch.int64, device=self.first.device)

    @classmethod
    def vllm(
        cls, caches: Sequence[torch.Tensor], order: str = "NHD", kv_dim: int = 0
    ) -> EnginePool:
        """vLLM's KV caches, one tensor a layer: K and V along dimension `kv_dim` (0 or 1).

        `kv_dim` 0: [2, blocks, tokens, heads, head_dim]; 1: [blocks, 2, tokens, heads, head_dim];
        with `order` HND heads come before tokens.
        """
        keys, values = zip(*(cache.unbind(kv_dim) for cache in caches), strict=True)
        return cls(_logical(keys, order), _logical(values, order))

    @classmethod
    def vllm_packed(cls, caches: Sequence[torch.Tensor]) -> EnginePool:
        """vLLM's [blocks, heads, tokens, 2 head_dim]: a row of K, then its row of V."""
        halves = [cache.chunk(2, dim=3) for cache in caches]
        keys, values = zip(*halves, strict=True)
        return cls(_logical(keys, "HND"), _logical(values, "HND"))

    @classmethod
    def sglang(
        cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], page_tokens: int = 1
    ) -> EnginePool:
        """SGLang's k_buffer and v_buffer, [slots, heads, head_dim] a layer; pages in slot order."""
        return cls(_paged(keys, page_tokens), _paged(values, page_tokens))

    @classmethod
    def latents(cls, caches: Sequence[torch.Tensor]) -> EnginePool:
        """MLA latents, [pages, tokens, width] a layer."""
        return cls([cache.unsqueeze(2) for cache in caches])

    @classmethod
    def blocks(cls, pool: torch.Tensor, layout: BlockLayout) -> EnginePool:
        """The store's own raw blocks, uint8 [blocks, bytes], as if they were an engine's pages."""
        if layout.kv_format != "raw":
            raise ValueError(f"blocks in {layout.kv_format} are no engine's pages; pass raw ones")
        views = [layer_views(pool, layout, layer) for layer in range(layout.num_layers)]
        values = [view.v for view in views if view.v is not None]
        return cls([view.k for view in views], values or None)


def _logical(tensors: Sequence[torch.Tensor], order: str) -> list[torch.Tensor]:
    if order not in ("NHD", "HND"):
        raise ValueError(f"order is {order!r}; pass NHD or HND")
    return [t if order == "NHD" else t.transpose(1, 2) for t in tensors]


def _paged(tensors: Sequence[torch.Tensor], page_tokens: int) -> list[torch.Tensor]:
    whole = [t[: t.shape[0] // page_tokens * page_tokens] for t in tensors]
    return [t.unflatten(0, (-1, page_tokens)) for t in whole]


def _check_alike(tensor: torch.Tensor, first: torch.Tensor) -> None:
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise ValueError("pages must be [pages, tokens, heads, head_dim] with contiguous rows")
    for name in ("dtype", "device", "shape"):
        if getattr(tensor, name) != getattr(first, name):
            raise ValueError(
                f"{name} differs between layers: {getattr(tensor, name)} and {getattr(first, name)}"
            )
    if tensor.stride() != first.stride():
        raise ValueError(f"strides differ between layers: {tensor.stride()} and {first.stride()}")
    size = tensor.element_size()
    steps = (*tensor.stride()[:3], tensor.shape[3])
    if tensor.data_ptr() % WORD_BYTES or any(step * size % WORD_BYTES for step in steps):
        raise ValueError("rows of the engine's pool must begin at multiples of 16 bytes")
