"""An engine on a driver without a GPU: paged KV in "device" memory, in the layouts engines have."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from kvstore.client import KVSpec
from kvstore.client.gpu import Device
from kvstore.engines.gpu_pages import TorchPages
from kvstore.kernels.block_copy import gather_blocks, scatter_blocks
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.views import DTYPES

LAYERS, HEADS, DIM, BLOCK = 4, 2, 64, 16
ORDERS = {"NHD": "LKNHD", "HND": "LKHND"}


def layout_of(order: str = "NHD", kv_format: str = "raw", block: int = BLOCK) -> BlockLayout:
    return BlockLayout(LAYERS, HEADS, DIM, block, "float16", order, kv_format)


def spec_of(layout: BlockLayout) -> KVSpec:
    named = layout.kv_format == "raw"
    return KVSpec(
        model="m", revision=layout.kv_format, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM,
        dtype="float16", block_size=layout.block_size, kv_format=layout.kv_format,
        layout=ORDERS[layout.order] if named else layout.kv_format, block_bytes=layout.block_bytes,
    )  # fmt: skip


class DeviceMemory:
    """Tensors in memory that the driver calls its own."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._addresses: list[int] = []

    def tensor(self, *shape: int, dtype: Any = torch.uint8) -> torch.Tensor:
        """A tensor of this shape, full of bytes that nobody stored."""
        count = int(np.prod(shape)) * dtype.itemsize
        address = self._device.allocate(count)
        self._addresses.append(address)
        buffer = (ctypes.c_uint8 * count).from_address(address)
        flat = torch.frombuffer(buffer, dtype=torch.uint8)
        flat.fill_(0xEE)
        return flat.view(dtype).view(*shape)

    def close(self) -> None:
        for address in self._addresses:
            self._device.free(address)


class CudaMemory:
    """Tensors on a real GPU."""

    def tensor(self, *shape: int, dtype: Any = torch.uint8) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device="cuda")
        made.view(torch.uint8).fill_(0xEE)
        return made

    def close(self) -> None:
        torch.cuda.synchronize()


class Engine:
    """Pages of one engine, `kind` a layout: vllm, vllm-small, sglang, hnd, hnd-small, packed.

    In memory of the driver's, which has no GPU, or in `memory`.
    """

    def __init__(
        self, device: Device, kind: str, kv_format: str = "raw", stage_slots: int = 6,
        num_blocks: int = 40, memory: DeviceMemory | CudaMemory | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory or DeviceMemory(device)
        self.layout = layout_of("HND" if "hnd" in kind else "NHD", kv_format)
        self.page_tokens = {"vllm-small": 4, "hnd-small": 4, "sglang": 1}.get(kind, BLOCK)
        self.per_block = BLOCK // self.page_tokens
        self.page_count = num_blocks * self.per_block
        self.pool = self._pool(kind)
        stage = self.memory.tensor(stage_slots, self.layout.block_bytes)
        self.pages = TorchPages(self.pool, self.layout, stage=stage)

    def _pool(self, kind: str) -> EnginePool:
        dtype, tensor = DTYPES["float16"], self.memory.tensor
        n, tokens = self.page_count, self.page_tokens
        if kind == "sglang":
            buffers = [tensor(n, HEADS, DIM, dtype=dtype) for _ in range(2 * LAYERS)]
            return EnginePool.sglang(buffers[:LAYERS], buffers[LAYERS:])
        if kind == "packed":
            caches = [tensor(n, 2, tokens, HEADS, DIM, dtype=dtype) for _ in range(LAYERS)]
            return EnginePool.vllm(caches, kv_dim=1)
        order = "HND" if "hnd" in kind else "NHD"
        shape = (HEADS, tokens) if order == "HND" else (tokens, HEADS)
        caches = [tensor(2, n, *shape, DIM, dtype=dtype) for _ in range(LAYERS)]
        return EnginePool.vllm(caches, order)

    def rows(self, blocks: list[int]) -> np.ndarray:
        """Pages of blocks, by the number of each: spread over the pool, each page in one block."""
        step = np.arange(self.per_block)[None, :]
        pages = np.array(blocks)[:, None] * self.per_block + step
        return ((pages * 7) % self.page_count).astype(np.int32)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Blocks of the pages, by the reference."""
        shape, there = (len(rows), self.layout.block_bytes), self.pool.device
        found = torch.zeros(shape, dtype=torch.uint8, device=there)
        pages = torch.from_numpy(rows).to(there)
        gather_blocks(self.pool, pages, found, self.layout, backend="reference")
        return np.asarray(found.cpu().numpy())

    def write(self, rows: np.ndarray, blocks: np.ndarray) -> None:
        """Pages from blocks, by the reference."""
        there = self.pool.device
        source = torch.from_numpy(np.ascontiguousarray(blocks)).to(there)
        pages = torch.from_numpy(rows).to(there)
        scatter_blocks(source, self.pool, pages, self.layout, backend="reference")

    def fill(self, seed: int) -> None:
        """Values that an engine may have computed, in every page."""
        random = np.random.default_rng(seed)
        for tensor in self.pool.tensors:
            values = random.normal(size=tuple(tensor.shape)).astype(np.float16)
            tensor.copy_(torch.from_numpy(values))
