"""The engine's side (`kvstore.client.gpu`) as it serves: registration, calibration, loads, saves.

A store in this process, without sockets, and an engine whose paged KV lies on the GPU. Loads go by
pieces and through the stage, with runs of 64 KiB and more and below, whole and by groups of layers;
every block that was loaded or saved is compared with what it should be. With a driver that has no
GPU (`gpu_check.py --dry-run`) all of it runs, small, on host memory, and no rate means anything.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpu_sections import pools
from gpu_sections.context import Context
from kvstore.client import KVClient, KVSpec, Space
from kvstore.client.gpu import Device, EngineSide, GpuSide
from kvstore.cuda.driver import Driver
from kvstore.engines.gpu_pages import TorchPages
from kvstore.kernels.block_copy import gather_blocks
from kvstore.kernels.engine_pool import EnginePool
from kvstore.kernels.formats import BlockLayout
from kvstore.kernels.views import DTYPES
from kvstore.testing import InProcessStore

WAYS = {"pieces": 1, "staged": 1 << 40}  # the least length that is copied by pieces
OVERLAPS = ("none", "layerwise")
REPEATS = 4


class Ground:
    """A GPU: engines' tensors on it, and the sizes that tell something there."""

    layers, heads, width, total, host = 32, 8, 128, 512 << 20, "2GiB"
    tokens = (64, 16)  # runs of 128 and of 32 KiB
    staging = 64 << 20

    def __init__(self) -> None:
        self.device = Device(ordinal=torch.cuda.current_device())

    def pool(self, layout: BlockLayout, blocks: int) -> EnginePool:
        return pools.make("vllm_nhd", layout, blocks, "nan")

    def pages(self, layout: BlockLayout, blocks: int) -> Any:
        """The engine's memory: a pool of so many blocks."""
        return TorchPages(self.pool(layout, blocks), layout)

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def settle(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.empty_cache()


class DryGround(Ground):
    """A driver without a GPU, whose device memory is this machine's; torch works on processors."""

    layers, heads, width, total, host = 4, 2, 64, 1 << 20, "64MiB"
    tokens = (64, 16)
    staging = 2 << 20

    def __init__(self, library: str) -> None:
        self.device = Device(driver=Driver(library))
        self._addresses: list[int] = []

    def _tensor(self, *shape: int) -> torch.Tensor:
        size = int(np.prod(shape))
        address = self.device.allocate(size)
        self._addresses.append(address)
        memory = (ctypes.c_uint8 * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).fill_(0xEE).view(*shape)

    def pool(self, layout: BlockLayout, blocks: int) -> EnginePool:
        shape = (2, blocks, layout.block_size, self.heads, self.width)
        flat = [self._tensor(2 * int(np.prod(shape))) for _ in range(self.layers)]
        return EnginePool.vllm([one.view(DTYPES[layout.dtype]).view(*shape) for one in flat])

    def pages(self, layout: BlockLayout, blocks: int) -> Any:
        return TorchPages(
            self.pool(layout, blocks), layout, stage=self._tensor(6, layout.block_bytes)
        )

    stream = 0

    def settle(self) -> None:
        pass

    def close(self) -> None:
        for address in self._addresses:
            self.device.free(address)


class Engine:
    """One engine: its memory, a stored prompt, and rows of pages for it, in any order."""

    def __init__(self, ground: Ground, client: KVClient, tokens: int, overlap: str) -> None:
        self.ground = ground
        self.layout = BlockLayout(ground.layers, ground.heads, ground.width, tokens)
        self.count = max(4, ground.total // self.layout.block_bytes)
        self.byte_count = self.count * self.layout.block_bytes
        self.run_bytes = self.layout.payload_bytes
        self.memory = ground.pages(self.layout, self.count)
        self.space: Space = client.attach(
            KVSpec(
                model="gpu_check", revision=str(tokens), num_layers=ground.layers,
                num_kv_heads=ground.heads, head_dim=ground.width, dtype=self.layout.dtype,
                block_size=tokens, layout="LKNHD", block_bytes=self.layout.block_bytes,
            ),
            overlap=overlap,
        )  # fmt: skip
        order = np.random.default_rng(tokens).permutation(self.count)
        self.rows = order.astype(np.int32)[:, None]
        self.prompt = list(range(self.count * tokens))
        raw = np.random.default_rng(0).integers(0, 256, (self.count, 4096), np.uint8)
        # Exponents that are no NaN: what a kernel moves as numbers stays the same bytes.
        raw[:, 1::2] &= 0x3B
        repeats = -(-self.layout.block_bytes // 4096)
        self.blocks = np.tile(raw, (1, repeats))[:, : self.layout.block_bytes]

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Blocks that lie in these pages now."""
        pool = self.memory._pool
        found = torch.zeros(
            (len(rows), self.layout.block_bytes), dtype=torch.uint8, device=pool.device
        )
        gather_blocks(pool, torch.from_numpy(rows).to(pool.device), found, self.layout)
        self.ground.settle()
        return np.asarray(found.cpu().numpy())

    def forget(self) -> None:
        for tensor in self.memory._pool.tensors:
            tensor.fill_(float("nan"))


def run(context: Context, answer: dict[str, Any]) -> None:
    ground = DryGround(context.driver) if context.driver else Ground()
    answer.update(rows=[], wrong=[], is_dry=bool(context.driver))
    store = InProcessStore(ground.host)
    client = store.client(staging_bytes=ground.staging)
    gpu = GpuSide(ground.device)
    try:
        for tokens in ground.tokens:
            for overlap in OVERLAPS:
                if context.left < 5:
                    answer["left_out"] = answer.get("left_out", 0) + 1
                    continue
                engine = Engine(ground, client, tokens, overlap)
                _engine(context, answer, gpu, engine, overlap)
    finally:
        gpu.close()
        client.close()
        store.close()
        ground.close()


def _engine(
    context: Context, answer: dict[str, Any], gpu: GpuSide, engine: Engine, overlap: str
) -> None:
    """All that is measured of one block size, for engines that overlap layers or do not."""
    engine.space.put(engine.prompt, list(engine.blocks))
    side = gpu.engine(engine.space, engine.memory, scratch=engine.rows[:6])
    calibration = side.calibration
    if "registration" not in answer:
        answer["registration"] = _registration(gpu, side)
    if overlap == "none":
        answer.setdefault("calibrations", []).append({
            "run_bytes": engine.run_bytes, "measured": calibration.measured,
            "chosen_run_bytes": calibration.run_bytes,
            "seconds_per_byte": calibration.seconds_per_byte,
        })  # fmt: skip
    for way, least in WAYS.items():
        calibration.run_bytes = least
        for work in (_load, _save) if overlap == "none" else (_load,):
            row = {"work": work.__name__[1:], "way": way, "overlap": overlap}
            row["run_bytes"] = engine.run_bytes
            try:
                row |= work(context, side, engine)
                if not row.pop("is_right"):
                    answer["wrong"].append(dict(row))
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            answer["rows"].append(row)


def _registration(gpu: GpuSide, side: EngineSide) -> dict[str, Any]:
    """How long the daemon's pools, mapped read-only, take to be known to the GPU."""
    attachment = side.space.attached
    assert attachment is not None, "the engine's blocks were stored"
    begin, total, problems = time.perf_counter(), 0, []
    for pool in attachment.pools.values():
        entry = gpu.registrar.use(pool.data, True, lambda: False)
        gpu.registrar.wait(entry, 20.0)
        gpu.registrar.let_go(entry)
        total += entry.covered
        problems += [entry.problem] if entry.problem else []
    return {
        "bytes": total, "seconds_left_to_wait": time.perf_counter() - begin, "problems": problems,
        "reads_read_only_memory": gpu.device.registers_read_only,
    }  # fmt: skip


def _best(work: Callable[[], float]) -> float:
    return min(work() for _ in range(REPEATS))


def _load(context: Context, side: EngineSide, engine: Engine) -> dict[str, Any]:
    """Loads of the whole prompt; the last one's bytes are looked at."""
    calls: list[float] = []
    groups: list[int] = []
    firsts: list[float] = []

    def once() -> float:
        engine.forget()
        engine.ground.settle()
        with side.space.lookup(engine.prompt) as match:
            begin = time.perf_counter()
            load = side.load(match, engine.rows, after=engine.ground.stream)
            calls.append(time.perf_counter() - begin)
            groups.append(len(load._groups))
            load.wait_layer(0, engine.ground.stream)
            load.result()
        firsts.append(load._events[0].seconds_since(load._begin))
        return load.seconds

    took = _best(once)
    rate = engine.byte_count / max(took, 1e-9)
    return {
        "bytes": engine.byte_count, "bytes_per_second": rate, "call_seconds": min(calls),
        "layer_groups": groups[-1], "first_layer_seconds": min(firsts),
        "is_right": bool((engine.read(engine.rows) == engine.blocks).all()),
        "h2d_ceiling_ratio": rate / context.ceiling("h2d_bytes_per_second"),
    }  # fmt: skip


def _save(context: Context, side: EngineSide, engine: Engine) -> dict[str, Any]:
    """Saves of the engine's pages under new prompts, until the store has them."""
    first = [engine.prompt[-1] + 1]
    count = max(2, engine.count // 4)
    rows = engine.rows[:count]
    wanted = engine.read(rows)
    prompts: list[list[int]] = []

    def once() -> float:
        start = first[0]
        first[0] += count * engine.layout.block_size
        prompts.append(list(range(start, first[0])))
        begin = time.perf_counter()
        result = side.save(prompts[-1], rows, after=engine.ground.stream).result(20)
        assert result.stored + result.present == count, f"the store took {result}"
        return time.perf_counter() - begin

    took = _best(once)
    with side.space.lookup(prompts[-1]) as match:
        found = [bytes(view) for view in side.space.restore(match)]
    size = count * engine.layout.block_bytes
    return {
        "bytes": size, "bytes_per_second": size / took,
        "is_right": found == [block.tobytes() for block in wanted],
        "d2h_ceiling_ratio": size / took / context.ceiling("d2h_bytes_per_second"),
    }  # fmt: skip
