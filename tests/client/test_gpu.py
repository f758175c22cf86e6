"""Loads into an engine's GPU memory and saves out of it, on a driver without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from daemons import DaemonProcess, Tagged, eventually
from fake_cuda import fake_driver
from gpu_world import BLOCK, LAYERS, Engine, spec_of

from kvstore.client import InvalidRequest, KVClient, LeaseLost, Space
from kvstore.client.gpu import Calibration, Device, EngineSide, GpuSide
from kvstore.testing import InProcessStore

SUPPORT = Path(__file__).parent.parent / "support"
PIECES, STAGED = Calibration(1), Calibration(1 << 40)
KINDS = ["vllm", "vllm-small", "sglang", "hnd", "hnd-small", "packed"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with daemon.client(staging_bytes=2 << 20, call_timeout_seconds=5.0) as made:
        yield made


@pytest.fixture
def device() -> Device:
    return Device(driver=fake_driver())


@pytest.fixture
def world(client: KVClient, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The driver copies only when waited for, and batches touch only what is registered."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    monkeypatch.setenv("FAKE_CUDA_LAZY", "1")
    made = World(client, device)
    yield made
    made.close()


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


@pytest.mark.parametrize("way", ["pieces", "staged", "ring"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_puts_every_byte_where_it_belongs(world: World, kind: str, way: str) -> None:
    """Whatever the engine's layout, and whichever way bytes take, pages hold what was stored."""
    engine, side = world.engine(kind, STAGED if way == "staged" else PIECES)
    if way != "ring":
        assert world.registered(side)
    tokens, blocks = stored(side.space, KINDS.index(kind))
    rows = engine.rows(list(range(3, 15)))
    before = engine.read(engine.rows([20, 30]))
    with side.space.lookup(tokens) as match:
        load = side.load(match, rows, after=0)
        load.result()
        side.report(load)
    assert np.array_equal(engine.read(rows), blocks)
    assert np.array_equal(engine.read(engine.rows([20, 30])), before)
    assert load.byte_count == blocks.size


@pytest.mark.parametrize("way", ["pieces", "staged"])
def test_layers_are_there_one_group_after_the_other(
    world: World, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that waits for layer 0 begins before the last layer is there, and sees its bytes."""
    monkeypatch.setattr("kvstore.client.gpu.memory.GROUP_BYTES", 1)
    monkeypatch.setattr("kvstore.client.gpu.memory.GROUP_RUN_BYTES", 1)
    calibration = PIECES if way == "pieces" else STAGED
    engine, side = world.engine("vllm", calibration, overlap="layerwise")
    assert world.registered(side)
    tokens, blocks = stored(side.space, 50)
    rows = engine.rows(list(range(12)))
    layer = engine.layout.layer_bytes
    with side.space.lookup(tokens) as match:
        load = side.load(match, rows)
        assert len(load._groups) == LAYERS
        stream = world.device.stream()
        for number in range(LAYERS):
            assert stream.handle.value is not None
            load.wait_layer(number, stream.handle.value)
            stream.synchronize()
            part = slice(number * layer, (number + 1) * layer)
            assert np.array_equal(engine.read(rows)[:, part], blocks[:, part])
        load.wait_all(stream.handle.value)
        load.result()


def test_a_load_waits_for_what_the_engine_does_to_the_pages(world: World) -> None:
    """Pages are not written before the engine's work on them, asked for earlier, is over."""
    engine, side = world.engine("vllm", PIECES)
    assert world.registered(side)
    tokens, blocks = stored(side.space, 60)
    rows = engine.rows(list(range(12)))
    flag = world.device.allocate(4096)
    busy = world.device.stream()
    busy.fill(flag, 0, 8)
    busy.synchronize()
    busy.wait_value(flag, 1)
    first = engine.pool.first
    busy.fill(first.data_ptr(), 0, first.numel() * 2)
    with side.space.lookup(tokens) as match:
        assert busy.handle.value is not None
        load = side.load(match, rows, after=busy.handle.value)
        assert not load.done
        assert not np.array_equal(engine.read(rows), blocks)
        other = world.device.stream()
        other.write_value(flag, 1)
        other.synchronize()
        load.result()
    assert np.array_equal(engine.read(rows), blocks)
    world.device.free(flag)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["pieces", "staged"])
def test_a_save_stores_what_the_engine_computed(world: World, kind: str, way: str) -> None:
    """Blocks go from pages to the store bit for bit, after the work that makes them."""
    engine, side = world.engine(kind, STAGED if way == "staged" else PIECES)
    seed = 200 + 10 * KINDS.index(kind) + (way == "staged")  # nobody has stored these blocks
    engine.fill(seed)
    tokens, rows = prompt(seed, 14), engine.rows(list(range(14)))
    late = engine.pool.first
    flag, busy = world.device.allocate(4096), world.device.stream()
    busy.fill(flag, 0, 8)
    busy.synchronize()
    busy.wait_value(flag, 1)
    busy.fill(late.data_ptr(), 0x11, 4096)  # the end of what the engine computes
    assert busy.handle.value is not None
    handle = side.save(tokens, rows, after=busy.handle.value)
    other = world.device.stream()
    other.write_value(flag, 1)
    other.synchronize()
    result = handle.result(20)
    assert result.stored == 14
    expected = engine.read(rows)
    assert late[0].flatten().view(torch.uint8)[0] == 0x11
    with side.space.lookup(tokens) as match:
        found = np.empty((match.block_count, engine.layout.block_bytes), np.uint8)
        side.space.restore_into(match, found)
    assert np.array_equal(found, expected)
    assert side.save(tokens, rows).result(20).present == 14
    world.device.free(flag)


@pytest.mark.parametrize("kv_format", ["int8_th", "fp8_bh", "int4_kivi"])
def test_formats_are_made_and_undone_on_the_way(world: World, kv_format: str) -> None:
    """Quantised spaces store codes of the pages, and a load gives back what they stand for."""
    engine, side = world.engine("vllm-small", PIECES, kv_format)
    engine.fill(5)
    source, target = engine.rows(list(range(10))), engine.rows(list(range(20, 30)))
    codes = engine.read(source)
    tokens = prompt(90, 10)
    assert side.save(tokens, source).result(20).stored == 10
    with side.space.lookup(tokens) as match:
        assert b"".join(map(bytes, side.space.restore(match))) == codes.tobytes()
        side.load(match, target).result()
    loaded = [tensor.clone() for tensor in engine.pool.tensors]
    engine.write(target, codes)
    for once, again in zip(loaded, engine.pool.tensors, strict=True):
        assert torch.equal(once.view(torch.int16), again.view(torch.int16))


def test_loads_go_on_while_memory_is_being_registered(
    client: KVClient, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registration takes its time; what is not registered yet goes through the ring meanwhile."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    monkeypatch.setenv("FAKE_CUDA_SLOW", "30")
    world = World(client, device, chunk_bytes=4 << 20)
    engine, side = world.engine("vllm", PIECES)
    tokens, blocks = stored(side.space, 100)
    rows, loads = engine.rows(list(range(12))), 0
    while not (side.space.attached and all_covered(side)):
        with side.space.lookup(tokens) as match:
            side.load(match, rows).result()
        assert np.array_equal(engine.read(rows), blocks)
        loads += 1
        assert loads < 5000
    assert loads > 1
    with side.space.lookup(tokens) as match:
        side.load(match, rows).result()
    assert np.array_equal(engine.read(rows), blocks)
    world.close()


def all_covered(side: EngineSide) -> bool:
    entries = side._register(side.space.attached)
    for entry in entries.values():
        side._gpu.registrar.let_go(entry)
    return all(entry.covered == entry.size for entry in entries.values())


def test_a_gpu_that_cannot_read_read_only_memory_uses_the_ring(
    client: KVClient, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools are mapped read-only; where a GPU takes no such memory, loads still work."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    monkeypatch.setenv("FAKE_CUDA_WRITABLE", "1")
    world = World(client, device)
    engine, side = world.engine("packed", STAGED)
    assert not world.registered(side)
    tokens, blocks = stored(side.space, 110)
    rows = engine.rows(list(range(12)))
    with side.space.lookup(tokens) as match:
        side.load(match, rows).result()
    assert np.array_equal(engine.read(rows), blocks)
    world.close()


def test_a_new_daemon_is_registered_anew(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """After kill -9 pools are mapped again: loads use these, and the old ones are let go."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    with DaemonProcess() as running, running.client(call_timeout_seconds=5.0) as client:
        world = World(client, device)
        engine, side = world.engine("vllm", PIECES)
        assert world.registered(side)
        tokens, blocks = stored(side.space, 150)
        first = set(world.gpu.registrar._known)
        running.kill()
        running.start()
        assert eventually(lambda: client.available)
        assert world.registered(side)
        rows = engine.rows(list(range(12)))
        with side.space.lookup(tokens) as match:
            side.load(match, rows).result()
        assert np.array_equal(engine.read(rows), blocks)
        assert eventually(lambda: not first & set(world.gpu.registrar._known))
        world.close()


def test_blocks_that_are_cleared_during_a_load_are_lost_not_wrong(world: World) -> None:
    """A load whose lease or blocks went meanwhile ends in LeaseLost."""
    engine, side = world.engine("vllm", PIECES)
    tokens, _ = stored(side.space, 120)
    rows = engine.rows(list(range(12)))
    match = side.space.lookup(tokens)
    load = side.load(match, rows)
    world.client.admin.clear(space_id=side.space.space_id)
    assert eventually(lambda: match.lease is None or match.lease.lost != "")
    with pytest.raises(LeaseLost):
        load.result()
    tokens, _ = stored(side.space, 121)
    match = side.space.lookup(tokens)
    load = side.load(match, rows)
    match.release()
    with pytest.raises(LeaseLost):
        load.result()


def test_wrong_arguments_are_refused(world: World) -> None:
    """Pages for other blocks than the match's, and memory of another block size, are errors."""
    engine, side = world.engine("vllm", PIECES)
    tokens, _ = stored(side.space, 130)
    with side.space.lookup(tokens) as match, pytest.raises(InvalidRequest, match="12 blocks"):
        side.load(match, engine.rows([1, 2]))
    with side.space.lookup(prompt(131, 1)) as match:
        load = side.load(match, engine.rows([]))
        load.result()
        assert (load.byte_count, load.done) == (0, True)
    other = world.client.attach(Tagged().spec)
    with pytest.raises(InvalidRequest, match="same layout and format"):
        world.gpu.engine(other, engine.pages)


def test_clients_without_shared_memory_load_and_save(device: Device) -> None:
    """Where bytes travel in messages, loads go through the ring, and saves out of it."""
    with InProcessStore("64MiB") as store, store.client(shared_memory=False) as client:
        world = World(client, device)
        engine, side = world.engine("sglang", PIECES)
        engine.fill(3)
        tokens, rows = prompt(140, 6), engine.rows(list(range(6)))
        assert side.save(tokens, rows).result(20).stored == 6
        other = engine.rows(list(range(10, 16)))
        with side.space.lookup(tokens) as match:
            side.load(match, other).result()
        assert np.array_equal(engine.read(other), engine.read(rows))
        world.close()


def test_calibration_measures_both_ways(world: World) -> None:
    """The threshold comes from measuring; it decides by the length of pieces."""
    engine, side = world.engine("vllm", Calibration())
    assert side.calibration.run_bytes == 64 << 10
    assert not side.calibration.copies_pieces(4096)
    side.calibrate(engine.rows(list(range(6))))
    found = side.calibration
    assert found.measured
    assert set(found.seconds_per_byte) == {"staged", *(str(4096 << i) for i in range(7))}
    assert all(seconds > 0 for seconds in found.seconds_per_byte.values())
    staged = found.seconds_per_byte["staged"]
    quick = [int(k) for k, s in found.seconds_per_byte.items() if k != "staged" and s <= staged]
    assert found.run_bytes == min(quick, default=512 << 10)


def test_a_failing_gpu_is_an_unavailable_store(daemon: DaemonProcess) -> None:
    """With the GPU's context lost, loads and saves raise StoreUnavailable: it recomputes."""
    result = subprocess.run(
        [sys.executable, "-c", FAILS, daemon.address], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["load", "save", "end"]


FAILS = """
import os, sys
import numpy as np
from fake_cuda import fake_driver
from gpu_world import BLOCK, Engine, spec_of
from kvstore.client import KVClient, StoreUnavailable
from kvstore.client.gpu import Device, GpuSide
device = Device(driver=fake_driver())
engine = Engine(device, "vllm")
client = KVClient.connect(sys.argv[1], call_timeout_seconds=5.0)
gpu = GpuSide(device, ring_bytes=1 << 18)
side = gpu.engine(client.attach(spec_of(engine.layout)), engine.pages)
tokens, rows = list(range(8 * BLOCK)), engine.rows(list(range(8)))
assert side.save(tokens, rows).result(20).rejected == 0
os.environ["FAKE_CUDA_FAIL"] = "1"
try:
    side.load(side.space.lookup(tokens), rows).result()
except StoreUnavailable as error:
    assert "ILLEGAL_ADDRESS" in str(error), error
    print("load")
try:
    side.save([9] * len(tokens), rows).result(20)
except StoreUnavailable as error:
    assert "ILLEGAL_ADDRESS" in str(error), error
    print("save")
gpu.close()
client.close()
print("end")
"""
