"""Saves out of an engine's GPU memory, formats, the stage, failures; without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from daemons import DaemonProcess, eventually
from gpu_client import KINDS, PIECES, STAGED, StreamMemory, World, prompt, stored
from gpu_world import spec_of

from kvstore.client import KVClient, StoreUnavailable
from kvstore.client.gpu import Calibration, Device
from kvstore.cuda.driver import CudaError
from kvstore.testing import InProcessStore

SUPPORT = Path(__file__).parents[2] / "support"


def test_the_stage_is_not_overwritten_before_it_is_read(world: World) -> None:
    """More blocks than the stage has room for go through it one half after the other."""
    engine, _ = world.engine("vllm", STAGED)
    space = world.client.attach(spec_of(engine.layout), overlap="layerwise")
    side = world.gpu.engine(space, StreamMemory(engine.pages), STAGED)
    assert world.registered(side)
    tokens, blocks = stored(space, 300, 30)
    rows = engine.rows(list(range(30)))
    with space.lookup(tokens) as match:
        side.load(match, rows).result()
    assert np.array_equal(engine.read(rows), blocks)
    engine.fill(9)
    tokens = prompt(301, 30)
    assert side.save(tokens, rows).result(20).stored == 30
    with space.lookup(tokens) as match:
        assert b"".join(map(bytes, space.restore(match))) == engine.read(rows).tobytes()


@pytest.mark.parametrize("kind", ["vllm", "packed"])
@pytest.mark.parametrize("calibration", [PIECES, STAGED], ids=["pieces", "staged"])
def test_no_copy_crosses_registrations(
    client: KVClient, device: Device, kind: str, calibration: Calibration,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Ranges that lie in two registered chunks are copied in parts, of loads and of saves."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    world = World(client, device, chunk_bytes=(1 << 20) + 4096)
    engine, side = world.engine(kind, calibration)
    assert world.registered(side)
    tokens, blocks = stored(side.space, 310 + len(kind), 40)
    rows = engine.rows(list(range(40)))
    with side.space.lookup(tokens) as match:
        side.load(match, rows).result()
    assert np.array_equal(engine.read(rows), blocks)
    engine.fill(8)
    tokens = prompt(330 + 2 * len(kind) + (calibration is STAGED), 40)
    for _ in range(2):  # staging is registered once the first save has asked for it
        assert side.save(tokens, rows).result(20).stored == 40
        assert eventually(lambda: side._staging().covered > 1 << 20)
        tokens = [token + 1 for token in tokens]
    with side.space.lookup([token - 1 for token in tokens]) as match:
        found = b"".join(map(bytes, side.space.restore(match)))
    assert found == engine.read(rows).tobytes()
    world.close()


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


@pytest.mark.long
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


def test_an_engine_is_calibrated_at_its_start(world: World) -> None:
    """With pages to try on, an engine measures before it serves; what it is told, it keeps."""
    engine, side = world.engine("vllm", Calibration())
    scratch = engine.rows(list(range(6)))
    started = world.gpu.engine(side.space, engine.pages, scratch=scratch)
    assert started.calibration.measured
    told = world.gpu.engine(side.space, engine.pages, Calibration(4096), scratch)
    assert (told.calibration.measured, told.calibration.run_bytes) == (False, 4096)
    assert not side.calibration.measured
    tokens, blocks = stored(side.space, 400)
    rows = engine.rows(list(range(12)))
    with side.space.lookup(tokens) as match:
        started.load(match, rows).result()
    assert np.array_equal(engine.read(rows), blocks)


def test_a_gpu_that_fails_at_the_start_is_said(
    client: KVClient, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration that the GPU does not carry out raises what every call to it does."""
    world = World(client, device)
    engine, side = world.engine("vllm", Calibration())

    def fail(*_: object) -> None:
        raise CudaError("cuMemAlloc", 2, "out of memory")

    monkeypatch.setattr(device, "allocate", fail)
    with pytest.raises(StoreUnavailable, match="out of memory"):
        world.gpu.engine(side.space, engine.pages, scratch=engine.rows([0, 1]))
    monkeypatch.undo()
    world.close()
