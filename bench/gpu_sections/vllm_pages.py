"""What the vLLM connector moves blocks with on a GPU (`kvstore.engines.vllm.mover`), without vLLM.

Caches as vLLM lays them out, opaque bytes to the store. Loads go by pieces and, where those are
short, through the stage by torch's indexing; saves are taken aside on the GPU, whereupon the pages
are written over at once. Every block that was loaded or saved is compared, by another way than the
connector's, with what it should be. With a driver that has no GPU all of it runs, small, on host
memory, and no rate means anything.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch

from gpu_sections.context import Context
from kvstore.client import KVClient, KVSpec, Space
from kvstore.client.gpu import Device
from kvstore.cuda.driver import Driver
from kvstore.engines.vllm.device_pages import DeviceGroups, DevicePages
from kvstore.engines.vllm.messages import LoadJob, Prompt
from kvstore.engines.vllm.mover import Mover
from kvstore.testing import InProcessStore

KINDS = ("nhd", "kv-first", "cross-layer")
WAYS = {"pieces": 1, "staged": 1 << 40}  # the least length that is copied by pieces
LIMIT_SECONDS = 20.0


class Place:
    """A GPU, as the connector sees it, and the sizes that tell something there."""

    layers, heads, width, total, host = 32, 8, 128, 256 << 20, "2GiB"
    tokens = (16, 32)  # pages of 64 and of 128 KiB; of K or V apart, half of that
    staging = 64 << 20

    def __init__(self) -> None:
        self.device = Device(ordinal=torch.cuda.current_device())

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def memory(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=torch.uint8, device="cuda")

    def settle(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        torch.cuda.empty_cache()


class DryPlace(Place):
    """A driver without a GPU, whose device memory is this machine's; torch works on processors."""

    layers, heads, width, total, host = 4, 2, 64, 256 << 10, "64MiB"
    tokens = (16, 32)
    staging = 2 << 20

    def __init__(self, library: str) -> None:
        self.device = Device(driver=Driver(library))
        self._addresses: list[int] = []

    def stream(self) -> int:
        return 0

    def memory(self, rows: int, columns: int) -> torch.Tensor:
        address = self.device.allocate(rows * columns)
        self._addresses.append(address)
        memory = (ctypes.c_uint8 * (rows * columns)).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(rows, columns)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        for address in self._addresses:
            self.device.free(address)


class Caches:
    """A worker's caches: `base` holds all bytes, and says what a block's are in its own way."""

    def __init__(self, place: Place, kind: str, tokens: int) -> None:
        self.kind, self._layers = kind, place.layers
        page = 2 * tokens * place.heads * place.width * 2
        self.block_bytes = place.layers * page
        self.count = max(6, place.total // self.block_bytes)
        self.blocks = 2 * self.count + 1
        shape = {
            "nhd": (place.layers, self.blocks, tokens, place.heads, 2 * place.width),
            "kv-first": (place.layers, 2, self.blocks, tokens, place.heads, place.width),
            "cross-layer": (self.blocks, place.layers, place.heads, tokens, 2 * place.width),
        }[kind]
        self._flat = place.memory(self.blocks, self.block_bytes)
        self.base = self._flat.view(-1).view(torch.bfloat16).view(shape)
        self.piece_bytes = {"kv-first": page // 2, "cross-layer": self.block_bytes}.get(kind, page)

    def layers(self) -> dict[str, torch.Tensor]:
        base = self.base.transpose(0, 1) if self.kind == "cross-layer" else self.base
        each = [layer.transpose(1, 2) if self.kind == "nhd" else layer for layer in base]
        return {f"layers.{n}.attn": layer for n, layer in enumerate(each)}

    def bytes_of(self, numbers: np.ndarray) -> torch.Tensor:
        """Blocks [n, bytes] as they should be stored."""
        at = torch.from_numpy(numbers.astype(np.int64)).to(self.base.device)
        if self.kind == "cross-layer":
            found = self.base[at]
        elif self.kind == "nhd":
            found = self.base[:, at].transpose(0, 1)
        else:
            found = self.base[:, :, at].permute(2, 0, 1, 3, 4, 5)
        return found.contiguous().view(len(numbers), -1).view(torch.uint8).cpu()

    def write_over(self, value: int) -> None:
        self._flat.fill_(value)


class Worker:
    """The connector's mover over caches, and a prompt of as many blocks as are moved at once."""

    def __init__(self, place: Place, client: KVClient, kind: str, tokens: int) -> None:
        self.place, self.tokens = place, tokens
        self.caches = Caches(place, kind, tokens)
        groups = DeviceGroups([DevicePages(self.caches.layers(), self.caches.blocks)], 1)
        self.count = self.caches.count
        save_bytes = self.count * self.caches.block_bytes
        self.mover = Mover(place, groups, save_bytes)
        self.space: Space = client.attach(
            KVSpec(
                model="gpu_check", revision=f"{kind} {tokens}", num_layers=place.layers,
                num_kv_heads=place.heads, head_dim=place.width, dtype="bfloat16",
                block_size=tokens, layout=f"opaque/{kind}", block_bytes=self.caches.block_bytes,
            )
        )  # fmt: skip
        order = 1 + np.random.default_rng(tokens).permutation(2 * self.count)
        self.source, self.target = order[: self.count], order[self.count :]
        self.prompt = list(range(self.count * tokens))

    def fill(self) -> torch.Tensor:
        """Bytes in all pages, and those of the source's."""
        flat, random = self.caches._flat, np.random.default_rng(1)
        part = random.integers(0, 256, 1 << 16, np.uint8)
        repeats = -(-flat.numel() // len(part))
        flat.view(-1).copy_(torch.from_numpy(part).to(flat.device).repeat(repeats)[: flat.numel()])
        numbers = torch.arange(len(flat), device=flat.device).view(-1, 1)
        flat[:, :8] = (numbers % 251).to(torch.uint8)
        return self.caches.bytes_of(self.source)


def run(context: Context, answer: dict[str, Any]) -> None:
    place = DryPlace(context.driver) if context.driver else Place()
    answer.update(rows=[], wrong=[], is_dry=bool(context.driver))
    store = InProcessStore(place.host)
    client = store.client(staging_bytes=place.staging)
    try:
        for kind in KINDS:
            for tokens in place.tokens:
                if context.left < 5:
                    answer["left_out"] = answer.get("left_out", 0) + 1
                    continue
                _worker(context, answer, Worker(place, client, kind, tokens))
    finally:
        client.close()
        store.close()
        place.close()


def _worker(context: Context, answer: dict[str, Any], worker: Worker) -> None:
    """A save, and loads of what it stored, of one layout and page size."""
    try:
        stored = worker.fill()
        _row(answer, worker, "save", "taken", lambda: _save(context, worker, stored))
        for way in WAYS if worker.mover.has_load_stage else ("pieces",):
            _row(answer, worker, "load", way, lambda way=way: _load(context, worker, stored, way))
    finally:
        worker.mover.close()


def _row(answer: dict[str, Any], worker: Worker, work: str, way: str, do: Any) -> None:
    caches = worker.caches
    row = {"work": work, "way": way, "kind": caches.kind, "piece_bytes": caches.piece_bytes}
    try:
        row |= do()
        if not row.pop("is_right"):
            answer["wrong"].append(dict(row))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    answer["rows"].append(row)


def _save(context: Context, worker: Worker, wanted: torch.Tensor) -> dict[str, Any]:
    """Blocks are taken, their pages written over, and what was taken stored."""
    mover, place = worker.mover, worker.place
    assert mover.taker is not None, "there is memory for saves"
    rows = worker.source.astype(np.int32)[:, None]
    warm = mover.taker.take(rows, place.stream())
    place.settle()
    assert warm is not None, "there is room for all blocks"
    warm.release()
    begin = mover.mark()
    called = time.perf_counter()
    taken = mover.taker.take(rows, place.stream())
    call_seconds = time.perf_counter() - called
    end = mover.mark()
    worker.caches.write_over(0xAA)
    assert taken is not None, "there is room for all blocks"
    assert len(taken) == worker.count, "there is room for all blocks"
    started = time.perf_counter()
    result = worker.space.put(worker.prompt, mover.taker.source(taken, worker.space))
    put_seconds = time.perf_counter() - started
    taken.release()
    end.synchronize()
    with worker.space.lookup(worker.prompt) as match:
        found = [bytes(view) for view in worker.space.restore(match)]
    size = worker.count * worker.caches.block_bytes
    gather = max(end.seconds_since(begin), 1e-9)
    return {
        "bytes": size, "bytes_per_second": size / put_seconds, "call_seconds": call_seconds,
        "gather_bytes_per_second": size / gather, "stored": result.stored,
        "is_right": found == [row.numpy().tobytes() for row in wanted],
        "link_ratio": size / put_seconds / context.ceiling("d2h_bytes_per_second"),
    }  # fmt: skip


def _load(context: Context, worker: Worker, wanted: torch.Tensor, way: str) -> dict[str, Any]:
    """Loads into other pages than those that were saved; the others stay as they are."""
    mover, place = worker.mover, worker.place
    engine = mover.engine(worker.space)
    engine.calibration.run_bytes = WAYS[way]
    best = float("inf")
    for _ in range(3):
        worker.caches.write_over(0x55)
        with worker.space.lookup(worker.prompt) as match:
            job = LoadJob("r", Prompt(), 0, 0, worker.count, (tuple(worker.target.tolist()),))
            load = engine.load(match, mover.rows(job, match), after=mover.mark())
            until = time.perf_counter() + LIMIT_SECONDS
            while not load.done and time.perf_counter() < until:
                time.sleep(0.0002)
            load.result()
        best = min(best, max(load.seconds, 1e-9))
    place.settle()
    rate = worker.count * worker.caches.block_bytes / best
    untouched = worker.caches.bytes_of(np.append(worker.source, 0))
    is_right = torch.equal(worker.caches.bytes_of(worker.target), wanted)
    return {
        "bytes": worker.count * worker.caches.block_bytes, "bytes_per_second": rate,
        "is_right": is_right and bool((untouched == 0x55).all()),
        "link_ratio": rate / context.ceiling("h2d_bytes_per_second"),
    }  # fmt: skip
