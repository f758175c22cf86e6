"""A vLLM engine whose worker has a GPU, on a driver without one, and the layouts of its caches.

What the model computes is work of a stream, which the driver does when somebody waits for it.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
from daemons import DaemonProcess, eventually
from gpu_world import DeviceMemory
from vllm_desk import BLOCK, BLOCKS, LAYERS, Desk, Request, spec

from kvstore.client.gpu import Device, Stream
from kvstore.client.gpu.memory import Copies, block_copies
from kvstore.engines.vllm.device_pages import DeviceGroups, DevicePages, OpaqueMemory
from kvstore.engines.vllm.engine import Rank
from kvstore.engines.vllm.gpu_worker import GpuWorkerSide
from kvstore.engines.vllm.loads import Results
from kvstore.engines.vllm.messages import StepMessage

HEADS, WIDTH = 2, 16
PAGE = HEADS * BLOCK * WIDTH * 2  # float16
KINDS = (
    "packed", "nhd", "kv-first", "cross-layer", "cross-nhd", "cross-heads", "heads-outer", "split",
    "padded",
)  # fmt: skip
OWN, PLACES = list(range(1, 9)), list(range(20, 28))  # blocks that are computed, and loaded into


class FakeGround:
    """A GPU of the driver's, and the stream that the model computes on."""

    def __init__(self, device: Device) -> None:
        self.device, self.compute = device, device.stream()
        self.memories = DeviceMemory(device)

    def stream(self) -> int:
        return int(self.compute.handle.value or 0)

    def memory(self, rows: int, columns: int) -> torch.Tensor:
        return self.memories.tensor(rows, columns)

    def caches(self, kind: str, first_layer: int = 0) -> dict[str, torch.Tensor]:
        """Every layer's KV cache, as vLLM's backends lay them out."""
        layers = self._layers(kind)
        return {f"layers.{first_layer + n}.attn": layer for n, layer in enumerate(layers)}

    def _layers(self, kind: str) -> list[torch.Tensor]:
        def made(*shape: int) -> torch.Tensor:
            return self.memories.tensor(*shape, dtype=torch.float16)

        n, h, t, c = BLOCKS, HEADS, BLOCK, WIDTH
        if kind == "packed":  # apart from each other
            return [made(n, h, t, c) for _ in range(LAYERS)]
        if kind == "nhd":
            return list(made(LAYERS, n, t, h, c).transpose(2, 3))
        if kind == "kv-first":
            return [made(2, n, t, h, c // 2) for _ in range(LAYERS)]
        if kind == "cross-layer":
            return list(made(n, LAYERS, h, t, c).transpose(0, 1))
        if kind == "cross-nhd":
            return list(made(n, LAYERS, t, h, c).permute(1, 0, 3, 2, 4))
        if kind == "cross-heads":
            return list(made(n, h, LAYERS, t, c).permute(2, 0, 1, 3, 4))
        if kind == "heads-outer":
            return list(made(LAYERS, h, n, t, c).transpose(1, 2))
        if kind == "split":  # kernels see halves of blocks
            return list(made(LAYERS, 2 * n, h, t // 2, c))
        assert kind == "padded", kind
        return [
            layer[..., : h * t * c].view(n, h, t, c) for layer in made(LAYERS, n, h * t * c + 8)
        ]

    def close(self) -> None:
        self.compute.synchronize()
        self.memories.close()


def block_bytes(cache: torch.Tensor, block: int) -> np.ndarray:
    """A page's bytes in the order in which they lie in memory, element by element."""
    return _memory(_addresses(cache, block), cache.element_size())


def set_block_bytes(cache: torch.Tensor, block: int, data: np.ndarray) -> None:
    size = cache.element_size()
    for n, address in enumerate(_addresses(cache, block)):
        ctypes.memmove(address, data[n * size : (n + 1) * size].ctypes.data, size)


def _addresses(cache: torch.Tensor, block: int) -> list[int]:
    if len(cache) == 2 * BLOCKS:
        pages = [cache[2 * block], cache[2 * block + 1]]
    else:
        pages = [cache[:, block] if len(cache) == 2 else cache[block]]
    found = []
    for page in pages:
        at = np.zeros(tuple(page.shape), np.int64)
        for axis, step in enumerate(page.stride()):
            index = np.arange(page.shape[axis]).reshape(
                [-1 if a == axis else 1 for a in range(at.ndim)]
            )
            at = at + index * step
        found += (page.data_ptr() + at.ravel() * page.element_size()).tolist()
    return sorted(found)


def _memory(addresses: list[int], size: int) -> np.ndarray:
    return np.frombuffer(b"".join(ctypes.string_at(a, size) for a in addresses), np.uint8)


class StreamMemory(OpaqueMemory):
    """The same, with its scatter and gather as work of a stream, as a GPU's kernels are."""

    def _copies(self, slots: np.ndarray, pages: np.ndarray) -> Copies:
        assert self.stage is not None
        begins = self.stage.address + slots.astype(np.uint64) * np.uint64(self.stage.stride)
        return block_copies(self.parts(pages, range(1)), begins.astype(np.uint64))

    def scatter(self, slots: np.ndarray, pages: np.ndarray, layers: range, stream: Stream) -> None:
        stream.copy_many(*self._copies(slots, pages))

    def gather(self, pages: np.ndarray, slots: np.ndarray, stream: Stream) -> None:
        stream.copy_many(*self._copies(slots, pages).turned())


class GpuDesk(Desk):
    """One engine whose caches lie on a GPU, `group_count` groups of them."""

    def __init__(
        self, daemon: DaemonProcess, device: Device, name: str, kind: str = "packed",
        group_count: int = 1, blocks_each: int = 1, **settings: Any,
    ) -> None:  # fmt: skip
        self.ground, self._kind, self._each = FakeGround(device), kind, blocks_each
        self._kept: list[np.ndarray] = []
        self.caches = [self.ground.caches(kind, LAYERS * n) for n in range(group_count)]
        size = blocks_each * group_count * LAYERS * PAGE
        described = spec(
            name, block_size=blocks_each * BLOCK, block_bytes=size, layout=f"vllm/0/{kind}",
            num_layers=LAYERS * group_count,
        )  # fmt: skip
        # To ask how far a step is would have the driver do its work.
        quiet = {"save_queue_bytes": 32 * size, "report_steps": False}
        super().__init__(daemon, described, **quiet | settings)
        self.side: GpuWorkerSide = self.workers[0]

    def worker(self, stage: int, config: Any, caches: Any) -> GpuWorkerSide:
        worker = GpuWorkerSide(config, self.settings, caches)
        groups = DeviceGroups([DevicePages(group, BLOCKS) for group in self.caches], self._each)
        worker.use_on(Rank(self.specs[stage], groups, 0, 1, True, BLOCK), lambda: self.ground)
        return worker

    @property
    def compute(self) -> Stream:
        return self.ground.compute

    def read(self, block: int, group: int = 0) -> np.ndarray:
        """The pages of a block of vLLM's, all layers'."""
        return np.concatenate([block_bytes(c, block) for c in self.caches[group].values()])

    def write(self, block: int, data: np.ndarray, group: int = 0) -> None:
        """Has the model compute these pages: its stream does, in its order."""
        for nth, cache in enumerate(self.caches[group].values()):
            page = np.ascontiguousarray(data[nth * PAGE : (nth + 1) * PAGE])
            self._kept.append(page)
            size = cache.element_size()
            targets = np.array(_addresses(cache, block), np.uint64)
            sources = page.ctypes.data + np.arange(len(targets), dtype=np.uint64) * np.uint64(size)
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                self.compute.copy(target, source, size)

    def close(self) -> None:
        super().close()
        self.ground.close()


def random_page(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, LAYERS * PAGE, np.uint8)


def computed(
    desk: GpuDesk, request: Request, count: int, blocks: Any = None
) -> dict[int, np.ndarray]:
    """One step that computes a request's first tokens; answers with what its pages hold then."""
    blocks = OWN if blocks is None else blocks
    desk.scheduler.new_request(request)
    desk.ask(request)
    groups = blocks if isinstance(blocks, tuple) else (blocks,)
    desk.scheduler.allocated(request, groups, 0)
    pages = {}
    for n, group in enumerate(groups):
        for block in filter(None, group):
            pages[block] = random_page(block + request.all_token_ids[0])
            desk.write(block, pages[block], n)
    desk.step([(request, 0, count)], {request.request_id: blocks})
    desk.scheduler.finished(request)
    return pages


def found(desk: GpuDesk, name: str, text: list[int], count: int, computed: int = 0) -> Request:
    """A new request, once so many of its tokens are found in the store."""
    request = Request(name, text)

    def is_found() -> bool:
        desk.scheduler.new_request(request)
        if desk.ask(request, computed) == (count, True):
            return True
        desk.scheduler.finished(request)
        return False

    assert eventually(is_found, 20.0)
    return request


class Held:
    """The model's stream stands still until `go`: work that was asked for earlier is not over."""

    def __init__(self, desk: GpuDesk) -> None:
        self._device = desk.ground.device
        self.flag = self._device.allocate(4096)
        first = self._device.stream()
        first.fill(self.flag, 0, 8)
        first.synchronize()
        desk.compute.wait_value(self.flag, 1)

    def go(self) -> None:
        other = self._device.stream()
        other.write_value(self.flag, 1)
        other.synchronize()


def begun(desk: GpuDesk, request: Request, count: int, places: list[int]) -> None:
    """A load of these tokens is under way: the GPU was asked for its copies."""
    desk.scheduler.allocated(request, (places,), count)
    desk.step()

    def is_asked() -> bool:
        desk.side.results(None, set())
        return bool(desk.side._running) and desk.side._running[-1].begun is not None

    assert eventually(is_asked)


def polled(desk: GpuDesk, seconds: float = 20.0, finished: frozenset[str] = frozenset()) -> Results:
    """The results of the first step in which loads end."""
    end, results = time.monotonic() + seconds, Results()
    while not results.ended and time.monotonic() < end:
        results = desk.side.results(StepMessage(is_idle=True), set(finished))
    return results
