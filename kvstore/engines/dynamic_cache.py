"""A DynamicCache and the store's blocks: bytes are copied from one to the other once.

restore: views of blocks -> memory for the whole prompt, layer by layer -> the cache shows it
put: the cache's tensors -> rows of the session's staging memory
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.core.spec import KVSpec


class PromptMemory:
    """Memory for all keys and values of a prompt, lent to a cache while the prompt is prefilled.

    Blocks lie at their places in it before the cache shows them; what the model computes goes to
    its place, without the copy of all before it that a DynamicLayer makes. Memory is taken by
    layer: the pages of one large piece would be fresh from the kernel every time.
    """

    def __init__(self, spec: KVSpec, prompt_tokens: int, like: Any) -> None:
        import torch

        shape = (2, spec.num_kv_heads, prompt_tokens, spec.head_dim)
        options = {"dtype": like.dtype, "device": like.device}
        self._torch, self._spec, self._dtype = torch, spec, like.dtype
        self._lent: list[_Lent] = []
        if like.device.type == "cpu":
            self._layers = [torch.empty(shape, **options) for _ in range(spec.num_layers)]
            self._rows = list(map(_byte_rows, self._layers))
        else:
            self._whole = torch.empty((spec.num_layers, *shape), **options)
            self._layers, self._rows = list(self._whole), []

    def load(self, positions: Iterable[int], views: Sequence[memoryview]) -> None:
        """Copies blocks to their places."""
        size = self._spec.block_size
        copy = self._copy_rows if self._rows else self._copy_whole
        for position, view in zip(positions, views, strict=True):
            copy(view, position * size, (position + 1) * size)

    def _copy_rows(self, view: memoryview, start: int, stop: int) -> None:
        # Bytes, as numpy has no bfloat16; for small pieces it takes half of torch's time.
        shape = (len(self._rows), *self._rows[0][:, :, start:stop].shape)
        block = np.frombuffer(view, np.uint8).reshape(shape)
        for rows, source in zip(self._rows, block, strict=True):
            np.copyto(rows[:, :, start:stop], source)

    def _copy_whole(self, view: memoryview, start: int, stop: int) -> None:
        with warnings.catch_warnings():
            # The store's memory is read-only, and it is only read here.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            block = self._torch.frombuffer(view, dtype=self._dtype)
        target = self._whole[..., start:stop, :]
        target.copy_(block.view(target.shape))

    def lend(self, cache: Any) -> None:
        """An empty cache grows into this memory until `settle`."""
        self._lent = [
            _Lent(layer, memory) for layer, memory in zip(cache.layers, self._layers, strict=True)
        ]

    def show(self, tokens: int) -> None:
        """The cache holds the first `tokens` of the prompt from now on."""
        for layer in self._lent:
            layer.show(tokens)

    def settle(self) -> None:
        """The prompt is prefilled: the cache is one like any other."""
        for layer in self._lent:
            layer.settle()


class _Lent:
    """One layer of a cache, and the memory that it grows into."""

    def __init__(self, layer: Any, memory: Any) -> None:
        self._layer, self._memory = layer, memory
        layer.lazy_initialization(memory, memory)
        layer.update = self._update  # of this one layer; `settle` has it forget that
        self.show(0)

    def show(self, tokens: int) -> None:
        self._layer.keys = self._memory[:1, :, :tokens]
        self._layer.values = self._memory[1:, :, :tokens]

    def _update(self, keys: Any, values: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
        start = self._layer.get_seq_length()
        stop = start + keys.shape[-2]
        self._memory[:1, :, start:stop] = keys
        self._memory[1:, :, start:stop] = values
        self.show(stop)
        return self._layer.keys, self._layer.values

    def settle(self) -> None:
        del self._layer.update


class CacheBlocks:
    """The blocks of a cache from `first_block` on, as a put takes them (a `BlockSource`)."""

    def __init__(self, cache: Any, spec: KVSpec, first_block: int = 0) -> None:
        self._cache, self._spec, self._first = cache, spec, first_block
        self._seen: list[Any] = []
        self._rows: list[np.ndarray] = []

    def block(self, i: int) -> np.ndarray:
        """Bytes of the i-th block."""
        block = np.empty(self._spec.block_bytes, np.uint8)
        self.read(i, block[None])
        return block

    def read(self, i: int, target: np.ndarray) -> None:
        """Copies the i-th block and the next ones into the rows of `target`."""
        spec, count, tensors = self._spec, len(target), self._tensors()
        size, heads = spec.block_size, spec.num_kv_heads
        start = (self._first + i) * size
        stop = start + count * size
        blocks = target.reshape((count, len(tensors), heads, size, -1))
        assert np.may_share_memory(blocks, target), "rows of staging are not contiguous"
        for n, source in enumerate(self._host_rows(tensors, start, stop)):
            np.copyto(blocks[:, n], source.reshape((heads, count, size, -1)).swapaxes(0, 1))

    def _tensors(self) -> list[Any]:
        return [tensor for layer in self._cache.layers for tensor in (layer.keys, layer.values)]

    def _host_rows(self, tensors: list[Any], start: int, stop: int) -> Iterator[np.ndarray]:
        """Tokens of each tensor as bytes, [head, token, byte]."""
        if tensors[0].device.type != "cpu":
            yield from (_byte_rows(tensor[0, :, start:stop].cpu()) for tensor in tensors)
            return
        # A put comes again and again, and turning a tensor over takes as long as copying a block.
        if list(map(id, tensors)) != list(map(id, self._seen)):
            self._seen, self._rows = tensors, [_byte_rows(tensor[0]) for tensor in tensors]
        for rows in self._rows:
            yield rows[:, start:stop]


def block_reader(cache: Any, spec: KVSpec) -> Callable[[int], memoryview]:
    """A function that gives the bytes of a cache's block by its position."""
    blocks = CacheBlocks(cache, spec)
    return lambda position: blocks.block(position).data


def _byte_rows(tensor: Any) -> np.ndarray:
    """A tensor in host memory, each token's numbers as bytes; shares its memory."""
    import torch

    rows: np.ndarray = tensor.detach().view(torch.uint8).numpy()
    return rows
