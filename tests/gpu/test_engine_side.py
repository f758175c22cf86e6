"""Loads, saves and the tier above host on a real GPU, against a real daemon."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from daemons import DaemonProcess, Tagged, eventually
from gpu_world import BLOCK, LAYERS, CudaMemory, Engine, spec_of

from kvstore.client import KVClient, Space
from kvstore.client.gpu import Calibration, Device, EngineSide, GpuSide

pytestmark = pytest.mark.gpu

BLOCKS = 12
KINDS = ["vllm", "vllm-small", "sglang", "hnd", "hnd-small", "packed"]


@pytest.fixture(scope="module", params=["host", "copy", "in_place"])
def daemon(request: pytest.FixtureRequest, device: Device) -> Iterator[DaemonProcess]:
    """A daemon without a tier on the GPU, and one with each kind."""
    config = ""
    if request.param != "host":
        config = (
            f'tiers.hbm.size = "64MiB"\ntiers.hbm.share = "{request.param}"\n'
            f'tiers.hbm.device = "{device.uuid}"\n'
        )
    with DaemonProcess(config=config) as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with daemon.client(call_timeout_seconds=5.0) as made:
        yield made


@pytest.fixture
def gpu(device: Device, client: KVClient) -> Iterator[GpuSide]:
    made = GpuSide(device, chunk_bytes=24 << 20)
    yield made
    made.close()


def engine_of(
    gpu: GpuSide, client: KVClient, kind: str, calibration: Calibration, kv_format: str = "raw",
    overlap: str = "none",
) -> tuple[Engine, EngineSide]:  # fmt: skip
    engine = Engine(gpu.device, kind, kv_format, memory=CudaMemory())
    space = client.attach(spec_of(engine.layout), overlap=overlap)
    return engine, gpu.engine(space, engine.pages, calibration)


def stored(space: Space, seed: int) -> tuple[list[int], np.ndarray]:
    tokens = [seed * 1000 + i for i in range(BLOCKS * BLOCK)]
    blocks = [np.frombuffer(block, np.uint8) for block in Tagged(space.spec).blocks(tokens)]
    assert space.put(tokens, blocks).rejected == 0
    return tokens, np.array(blocks)


def stream_of() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("way", ["pieces", "staged"])
@pytest.mark.parametrize("kind", KINDS)
def test_loads_are_right(gpu: GpuSide, client: KVClient, kind: str, way: str) -> None:
    """Every layout, by pieces and through the stage, from host and from the tier above it."""
    engine, side = engine_of(gpu, client, kind, Calibration(1 if way == "pieces" else 1 << 40))
    tokens, blocks = stored(side.space, KINDS.index(kind))
    rows = engine.rows(list(range(BLOCKS)))
    for _ in range(4):
        engine.pool.first.fill_(7.0)
        with side.space.lookup(tokens) as match:
            load = side.load(match, rows, after=stream_of())
            load.wait_all(stream_of())
            load.result()
            side.report(load)
        assert np.array_equal(engine.read(rows), blocks)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("kv_format", ["raw", "int8_th", "fp8_bh", "int4_kivi"])
def test_saves_are_right(gpu: GpuSide, client: KVClient, kind: str, kv_format: str) -> None:
    """What the engine's stream computes last is stored, in every format."""
    engine, side = engine_of(gpu, client, kind, Calibration(), kv_format)
    engine.fill(3)
    tokens = [7_000_000 + 1000 * len(kv_format) + i for i in range(BLOCKS * BLOCK)]
    rows = engine.rows(list(range(BLOCKS)))
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    engine.pool.first.mul_(0.5)
    result = side.save(tokens, rows, after=stream_of()).result(20)
    assert result.rejected == 0
    with side.space.lookup(tokens) as match:
        found = b"".join(map(bytes, side.space.restore(match)))
    if kv_format == "raw":
        assert found == engine.read(rows).tobytes()
    else:
        other = engine.rows(list(range(20, 20 + BLOCKS)))
        with side.space.lookup(tokens) as match:
            side.load(match, other).result()
        engine.write(rows, np.frombuffer(found, np.uint8).reshape(BLOCKS, -1))
        for tensor in engine.pool.tensors:
            flat = tensor.view(torch.int16)
            assert torch.equal(
                flat[torch.from_numpy(rows).cuda().flatten().long()],
                flat[torch.from_numpy(other).cuda().flatten().long()],
            )


def test_layers_arrive_in_order(
    gpu: GpuSide, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that waits for a layer sees its bytes."""
    monkeypatch.setattr("kvstore.client.gpu.memory.GROUP_BYTES", 1)
    monkeypatch.setattr("kvstore.client.gpu.memory.GROUP_RUN_BYTES", 1)
    engine, side = engine_of(gpu, client, "vllm", Calibration(1), overlap="layerwise")
    tokens, blocks = stored(side.space, 60)
    rows, layer = engine.rows(list(range(BLOCKS))), engine.layout.layer_bytes
    with side.space.lookup(tokens) as match:
        load = side.load(match, rows, after=stream_of())
        for number in range(LAYERS):
            load.wait_layer(number, stream_of())
            part = slice(number * layer, (number + 1) * layer)
            assert np.array_equal(engine.read(rows)[:, part], blocks[:, part])
        load.result()


def test_calibration_chooses(gpu: GpuSide, client: KVClient) -> None:
    """Both ways are measured, in seconds a byte that a bus can have."""
    engine, side = engine_of(gpu, client, "vllm", Calibration())
    side.calibrate(engine.rows(list(range(6))))
    assert side.calibration.measured
    assert all(1e-13 < each < 1e-6 for each in side.calibration.seconds_per_byte.values())


def test_hot_blocks_come_from_the_daemons_memory(
    gpu: GpuSide, client: KVClient, daemon: DaemonProcess
) -> None:
    """With a tier hbm, loads come from it once it has copies; the daemon's death fails them."""
    engine, side = engine_of(gpu, client, "vllm", Calibration(1))
    for size in (1, 2, 3, 4, 5) * 2:
        side.space.report_transfer("host>hbm", size << 20, size * 0.4)
    tokens, blocks = stored(side.space, 70)
    rows = engine.rows(list(range(BLOCKS)))

    def loaded() -> int:
        with side.space.lookup(tokens) as match:
            load = side.load(match, rows, after=stream_of())
            load.result()
        assert np.array_equal(engine.read(rows), blocks)
        return load.device_blocks

    if "tiers.hbm" not in daemon.config_path.read_text():
        assert [loaded() for _ in range(3)] == [0, 0, 0]
    else:
        assert eventually(lambda: loaded() == BLOCKS), daemon.log
