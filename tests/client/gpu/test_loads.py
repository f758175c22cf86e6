"""Loads into an engine's GPU memory, on a driver without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from daemons import DaemonProcess, Tagged, eventually
from gpu_client import KINDS, PIECES, STAGED, World, prompt, stored
from gpu_world import LAYERS

from kvstore.client import InvalidRequest, KVClient, LeaseLost
from kvstore.client.gpu import Device, EngineSide


@pytest.mark.parametrize("way", ["pieces", "staged", "ring"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_puts_every_byte_where_it_belongs(
    world: World, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the engine's layout, and whichever way bytes take, pages hold what was stored."""
    if way == "ring":
        monkeypatch.setenv("FAKE_CUDA_WRITABLE", "1")  # pools cannot be registered
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


@pytest.mark.long
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
