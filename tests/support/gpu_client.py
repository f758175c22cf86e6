"""Engines with a GPU as clients of a daemon, on a driver without a GPU."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from daemons import Tagged
from gpu_world import BLOCK, Engine, spec_of

from kvstore.client import KVClient, Space
from kvstore.client.gpu import Calibration, Device, EngineSide, GpuSide, Stream
from kvstore.client.gpu.memory import Copies, block_copies
from kvstore.engines.gpu_pages import TorchPages

PIECES, STAGED = Calibration(1), Calibration(1 << 40)
KINDS = ["vllm", "vllm-small", "sglang", "hnd", "hnd-small", "packed"]


class World:
    """A client with a GPU, and engines on it."""

    def __init__(self, client: KVClient, device: Device, **options: Any) -> None:
        self.client, self.device = client, device
        self.gpu = GpuSide(device, **{"ring_bytes": 1 << 18, "chunk_bytes": 24 << 20} | options)
        self.engines: list[Engine] = []

    def engine(
        self, kind: str, calibration: Calibration, kv_format: str = "raw", overlap: str = "none"
    ) -> tuple[Engine, EngineSide]:
        engine = Engine(self.device, kind, kv_format)
        self.engines.append(engine)
        space = self.client.attach(spec_of(engine.layout), overlap=overlap)
        return engine, self.gpu.engine(space, engine.pages, calibration)

    def registered(self, side: EngineSide) -> bool:
        """Whether all pools are registered, after some waiting."""
        attachment = side.space.attached
        assert attachment is not None
        entries = [
            self.gpu.registrar.use(pool.data, True, lambda: False)
            for pool in attachment.pools.values()
        ]
        done = [self.gpu.registrar.wait(entry) for entry in entries]
        for entry in entries:
            self.gpu.registrar.let_go(entry)
        return bool(done) and all(done)

    def close(self) -> None:
        self.gpu.close()
        for engine in self.engines:
            engine.memory.close()


def prompt(seed: int, blocks: int) -> list[int]:
    return [Random(seed * 1000 + i).randrange(50_000) for i in range(blocks * BLOCK)]


def stored(space: Space, seed: int, blocks: int = 12) -> tuple[list[int], np.ndarray]:
    """A prompt and its blocks, stored from host memory."""
    tokens = prompt(seed, blocks)
    made = [np.frombuffer(block, np.uint8) for block in Tagged(space.spec).blocks(tokens)]
    result = space.put(tokens, made)
    assert result.stored + result.present == blocks, result
    return tokens, np.array(made)


class StreamMemory:
    """An engine's memory whose scatter and gather are work of a stream, as a GPU's kernels are."""

    def __init__(self, pages: TorchPages) -> None:
        self.layer_count, self.layer_bytes = pages.layer_count, pages.layer_bytes
        self.stage, self.parts = pages.stage, pages.parts

    def _copies(self, slots: np.ndarray, pages: np.ndarray, layers: range) -> Copies:
        parts = self.parts(pages, layers)
        assert parts is not None
        assert self.stage is not None
        begins = np.uint64(self.stage.address) + slots.astype(np.uint64) * np.uint64(
            self.stage.stride
        )
        return block_copies(parts, begins)

    def scatter(self, slots: np.ndarray, pages: np.ndarray, layers: range, stream: Stream) -> None:
        stream.copy_many(*self._copies(slots, pages, layers))

    def gather(self, pages: np.ndarray, slots: np.ndarray, stream: Stream) -> None:
        stream.copy_many(*self._copies(slots, pages, range(self.layer_count)).turned())
