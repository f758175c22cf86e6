"""Host blocks into an engine's pages: every way, by length of the contiguous runs; beside a GEMM.

Ways: `loop`, a call a run; `batch`, one batched copy of all runs; `staged`, whole blocks into a
ring of two device buffers and a scatter kernel each; `mapped`, a scatter kernel that reads host
memory itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_sections import pools
from gpu_sections.context import Context
from gpu_sections.memory import Registered, as_tensor
from kvstore.cuda.device import Device, Stream
from kvstore.kernels.block_copy import scatter_blocks
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import BlockLayout

LAYERS, HEADS, WIDTH = 32, 8, 128
STAGING_BYTES = 64 << 20
TOTAL_BYTES = 1 << 30
MATRIX = 8192
TOKENS, TOKENS_BESIDE = (2, 4, 8, 12, 16, 32, 64, 128, 512), (16, 64)
LOOP_RUNS_MAX = 8192


class World:
    """Registered host memory, and the streams that copies run on."""

    def __init__(self) -> None:
        self.device = Device(ordinal=torch.cuda.current_device())
        self.torch_stream = torch.cuda.Stream(priority=-1)
        self.stream = Stream(self.device, external=self.torch_stream.cuda_stream)
        self.scatter_stream = torch.cuda.Stream(priority=-1)
        self.ring = torch.empty(2, STAGING_BYTES, dtype=torch.uint8, device="cuda")


def warm(tokens: int) -> None:
    """Compiles the scatter of blocks of this many tokens."""
    layout = BlockLayout(LAYERS, HEADS, WIDTH, tokens)
    pool = pools.make("vllm_nhd", layout, 1)
    store = torch.zeros(1, layout.block_bytes, dtype=torch.uint8, device="cuda")
    scatter_blocks(store, pool, pools.some_pages(pool, layout, 1), layout)


class Restore:
    """One restore: `count` blocks of `tokens` tokens from host memory into permuted pages."""

    def __init__(self, world: World, host: Registered, tokens: int, total: int) -> None:
        self.world, self.host = world, host
        self.layout = BlockLayout(LAYERS, HEADS, WIDTH, tokens)
        self.run_bytes = self.layout.payload_bytes
        self.count = total // self.layout.block_bytes
        self.bytes = self.count * self.layout.block_bytes
        self.pool = pools.make("vllm_nhd", self.layout, self.count, "nan")
        self.pages = pools.some_pages(self.pool, self.layout, self.count)
        self.source = host.bytes[: self.bytes].reshape(self.count, -1)
        self.targets, self.sources, self.lengths = runs(
            self.pool, self.pages, host.address, self.layout
        )

    def loop(self) -> None:
        stream = self.world.stream
        for i in range(len(self.targets)):
            stream.copy(int(self.targets[i]), int(self.sources[i]), self.run_bytes)

    def batch(self) -> None:
        self.world.stream.copy_many(self.targets, self.sources, self.lengths, stable=True)

    def staged(self) -> None:
        world, size = self.world, self.layout.block_bytes
        fit = STAGING_BYTES // size
        free: list[torch.cuda.Event | None] = [None, None]
        for number, first in enumerate(range(0, self.count, fit)):
            count, half = min(fit, self.count - first), number % 2
            if free[half] is not None:
                world.torch_stream.wait_event(free[half])
            ring = world.ring[half, : count * size].view(count, size)
            world.stream.copy(ring.data_ptr(), self.host.address + first * size, count * size)
            arrived = world.torch_stream.record_event()
            world.scatter_stream.wait_event(arrived)
            with torch.cuda.stream(world.scatter_stream):
                scatter_blocks(ring, self.pool, self.pages[first : first + count], self.layout)
            free[half] = world.scatter_stream.record_event()
        world.torch_stream.wait_stream(world.scatter_stream)

    def mapped(self) -> None:
        store = as_tensor(self.host.address, self.count, self.layout.block_bytes)
        with torch.cuda.stream(self.world.torch_stream):
            scatter_blocks(store, self.pool, self.pages, self.layout)

    def right(self) -> bool:
        """Whether a few blocks came out as they lie in host memory."""
        for i in (0, self.count // 2, self.count - 1):
            page = int(self.pages[i, 0])
            found = [t[page].contiguous().view(torch.uint8).flatten() for t in self.pool.tensors]
            if not np.array_equal(torch.cat(found).cpu().numpy(), self.source[i]):
                return False
        return True


def runs(
    pool: EnginePool, pages: torch.Tensor, address: int, layout: BlockLayout
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets, sources and lengths of every contiguous run, block after block."""
    bases = np.array([tensor.data_ptr() for tensor in pool.tensors], np.uint64)
    step = pool.first.stride(0) * pool.first.element_size()
    numbers = pages[:, 0].cpu().numpy().astype(np.uint64)
    targets = (bases[None, :] + numbers[:, None] * np.uint64(step)).reshape(-1)
    sources = address + np.arange(len(targets), dtype=np.uint64) * np.uint64(layout.payload_bytes)
    return targets, sources, np.full(len(targets), layout.payload_bytes, np.uint64)


def timed(world: World, work: Callable[[], None], repeats: int = 5) -> tuple[float, float]:
    """Least seconds from the call to the last byte, and of the call alone."""
    best, call = float("inf"), float("inf")
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        called = time.perf_counter()
        world.torch_stream.synchronize()
        best = min(best, time.perf_counter() - begin)
        call = min(call, called - begin)
    return best, call


def run(context: Context, answer: dict[str, Any]) -> None:
    world = World()
    answer["rows"], answer["beside_gemm"], answer["wrong"] = [], [], []
    rng = np.random.default_rng(0)
    with Registered(world.device, TOTAL_BYTES) as host:
        host.bytes[:] = np.frombuffer(rng.bytes(TOTAL_BYTES >> 6), np.uint8).repeat(1 << 6)
        for tokens in TOKENS:
            if context.left < 12:
                break
            total = TOTAL_BYTES // 4 if tokens < 16 else TOTAL_BYTES
            _alone(context, answer, Restore(world, host, tokens, total))
        for tokens in TOKENS_BESIDE:
            if context.left > 6:
                _beside(context, answer, Restore(world, host, tokens, TOTAL_BYTES))


def _alone(context: Context, answer: dict[str, Any], restore: Restore) -> None:
    for way in ("loop", "batch", "staged", "mapped"):
        if way == "loop" and len(restore.targets) > LOOP_RUNS_MAX:
            continue
        for tensor in restore.pool.tensors:
            tensor.fill_(float("nan"))
        row: dict[str, Any] = {"way": way, "run_bytes": restore.run_bytes}
        try:
            took, call = timed(restore.world, getattr(restore, way), 2 if way == "loop" else 4)
            rate = restore.bytes / took
            row |= {"bytes_per_second": rate, "call_seconds": call, "bytes": restore.bytes}
            row["h2d_ceiling_ratio"] = rate / context.ceiling("h2d_bytes_per_second")
            if not restore.right():
                answer["wrong"].append(row)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        answer["rows"].append(row)


def _beside(context: Context, answer: dict[str, Any], restore: Restore) -> None:
    """How a restore and matrix products slow each other: products back to back on their stream."""
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(2))
    out, world, products = a @ b, restore.world, torch.cuda.Stream()
    alone = _products(products, a, b, out, 20, lambda: None)
    for way in ("batch", "staged", "mapped"):
        took, _ = timed(world, getattr(restore, way), 3)
        count = max(10, int(2.5 * took / alone))
        ends: list[torch.cuda.Event] = []

        def work(way: str = way, ends: list[torch.cuda.Event] = ends) -> None:
            start = world.torch_stream.record_event(torch.cuda.Event(enable_timing=True))
            getattr(restore, way)()
            ends[:] = [start, world.torch_stream.record_event(torch.cuda.Event(enable_timing=True))]

        beside = _products(products, a, b, out, count, work)
        torch.cuda.synchronize()
        with_gemm = ends[0].elapsed_time(ends[1]) / 1e3
        answer["beside_gemm"].append({
            "way": way, "run_bytes": restore.run_bytes, "restore_slowdown": with_gemm / took,
            # The products ran beside a copy for part of the time only.
            "product_seconds_alone": alone, "product_seconds_beside": beside,
            "products": count, "restore_seconds": with_gemm,
            "product_slowdown_while_copying": 1 + (beside - alone) * count / with_gemm,
        })  # fmt: skip


def _products(
    stream: torch.cuda.Stream, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, count: int,
    beside: Callable[[], None],
) -> float:  # fmt: skip
    """Seconds of a product, `count` of them in a row, while `beside` is under way."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.mm(a, b, out=out)
        start = stream.record_event(torch.cuda.Event(enable_timing=True))
        for _ in range(count):
            torch.mm(a, b, out=out)
        end = stream.record_event(torch.cuda.Event(enable_timing=True))
    beside()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count
