"""vLLM's KV caches as pages of bytes: one page a layer and block, copied as a whole.

What lies within a page is the backend's own business (some pack K within a block), so a page is
never cut by tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.core.errors import SpecError

LAYER_NUMBER = re.compile(r"\.(\d+)\.")


class Pages:
    """The pages of all layers of one KV-cache group, by vLLM's block ids.

    `caches` are tensors [num_blocks, …] in host memory, each block's bytes in one piece; raises
    SpecError for others. Layers that share a tensor have one page.
    """

    def __init__(self, caches: Mapping[str, Any], num_blocks: int) -> None:
        names = sorted(caches, key=layer_number)
        rows: dict[int, np.ndarray] = {}
        for name in names:
            rows.setdefault(caches[name].data_ptr(), _rows(name, caches[name], num_blocks))
        self.layers = tuple(dict.fromkeys(map(layer_number, names)))
        self._rows = list(rows.values())
        self._widths = [row.shape[1] for row in self._rows]
        self.block_bytes = sum(self._widths)
        self._even = _evenly_spaced(self._rows)

    def read(self, block_id: int, target: np.ndarray) -> None:
        """Copies a block's pages to `target`, `block_bytes` long, in the order of the layers."""
        if self._even is not None:
            np.copyto(target.reshape(len(self._rows), -1), self._even[:, block_id])
            return
        start = 0
        for rows, width in zip(self._rows, self._widths, strict=True):
            target[start : start + width] = rows[block_id]
            start += width

    def write(self, block_id: int, source: np.ndarray) -> None:
        """Copies pages that `read` gave back to a block."""
        if self._even is not None:
            np.copyto(self._even[:, block_id], source.reshape(len(self._rows), -1))
            return
        start = 0
        for rows, width in zip(self._rows, self._widths, strict=True):
            rows[block_id] = source[start : start + width]
            start += width


class Groups:
    """The pages of all KV-cache groups: a store block has each group's, one after the other.

    Groups of hybrid models keep their own block ids for the same tokens; where a group has dropped
    a block (a sliding window moved on) its id is `NULL_BLOCK`.
    """

    NULL_BLOCK = 0

    def __init__(self, groups: Sequence[Pages], blocks_each: int) -> None:
        self._groups, self._each = groups, blocks_each
        self.block_bytes = blocks_each * sum(group.block_bytes for group in groups)

    def _parts(self, buffer: np.ndarray) -> list[list[np.ndarray]]:
        """A store block's bytes by group and engine block."""
        parts, start = [], 0
        for group in self._groups:
            width = group.block_bytes
            stop = start + self._each * width
            parts.append(list(buffer[start:stop].reshape(self._each, width)))
            start = stop
        return parts

    def read(self, ids: Sequence[Sequence[int]], target: np.ndarray) -> bool:
        """Gathers a store block; False if a group has dropped one of its blocks."""
        if any(block == self.NULL_BLOCK for blocks in ids for block in blocks):
            return False
        for group, blocks, parts in zip(self._groups, ids, self._parts(target), strict=True):
            for block, part in zip(blocks, parts, strict=True):
                group.read(block, part)
        return True

    def write(self, ids: Sequence[Sequence[int]], source: np.ndarray) -> None:
        """Scatters a store block to where each group has a block for it."""
        for group, blocks, parts in zip(self._groups, ids, self._parts(source), strict=True):
            for block, part in zip(blocks, parts, strict=True):
                if block != self.NULL_BLOCK:
                    group.write(block, part)


def layer_number(name: str) -> int:
    """A layer's number in its name, such as 7 in `model.layers.7.self_attn.attn`."""
    found = LAYER_NUMBER.search(f".{name}.")
    return int(found.group(1)) if found else 0


def _rows(name: str, cache: Any, num_blocks: int) -> np.ndarray:
    """A layer's cache as bytes [num_blocks, page], sharing its memory."""
    import torch

    if cache.device.type != "cpu":
        raise SpecError(
            f"the KV cache of {name} is on {cache.device}, and kvstore's way to a GPU has never "
            'been run with vLLM on one: add "gpu": "untested" to kv_connector_extra_config to use '
            "it all the same, or start vLLM without kvstore"
        )
    if cache.shape[0] != num_blocks or not cache[0].is_contiguous() or cache.stride(0) < 0:
        raise SpecError(
            f"the KV cache of {name} has shape {tuple(cache.shape)} and strides {cache.stride()}; "
            f"kvstore needs {num_blocks} blocks of one piece each"
        )
    flat = cache.view(num_blocks, -1) if cache.is_contiguous() else cache.flatten(1)
    rows: np.ndarray = flat.view(torch.uint8).numpy()
    if rows.ctypes.data != cache.data_ptr():
        raise SpecError(f"the KV cache of {name} cannot be read in place; report its layout")
    return rows


def _evenly_spaced(rows: list[np.ndarray]) -> np.ndarray | None:
    """All layers as one array [layer, block, byte] if they lie at one distance from each other."""
    starts = [row.ctypes.data for row in rows]
    distances = {after - before for before, after in itertools.pairwise(starts)}
    if len({(row.shape, row.strides) for row in rows}) > 1 or len(distances) != 1:
        return None
    (distance,) = distances
    if distance <= 0:
        return None
    first = rows[0]
    return np.lib.stride_tricks.as_strided(
        first, (len(rows), *first.shape), (distance, *first.strides), writeable=True
    )
