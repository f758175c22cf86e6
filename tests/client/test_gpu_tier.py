"""The daemon's memory on a GPU, from an engine in another process; on a driver without a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np
import pytest
from daemons import DaemonProcess, Tagged, eventually
from fake_cuda import fake_driver, library
from gpu_world import BLOCK, Engine, layout_of, spec_of

from kvstore.client import KVClient, LeaseLost, Match
from kvstore.client.gpu import Calibration, Device, EngineSide, GpuSide, Load
from kvstore.client.gpu.share import DeviceShare
from kvstore.core.config import load as load_config
from kvstore.core.errors import ConfigError
from kvstore.core.generations import Generations
from kvstore.cuda import driver
from kvstore.daemon.gpu import open_gpus

BLOCKS = 12
LONG = 400
"""Slow enough loads from host, as told: milliseconds for a MiB."""


def daemon_with(share: str, extra: str = "") -> DaemonProcess:
    made = DaemonProcess(
        config=f'tiers.hbm.size = "4MiB"\ntiers.hbm.share = "{share}"\n'
        f'tiers.hbm.staging_bytes_per_session = "4MiB"\n{extra}'
    )
    made.environ["LD_LIBRARY_PATH"] = str(library().parent)
    return made


class World:
    """A daemon with a GPU, and an engine of another process on the same one."""

    def __init__(self, share: str, extra: str = "", daemon: DaemonProcess | None = None) -> None:
        self.owns = daemon is None
        self.daemon = daemon or daemon_with(share, extra).start()
        self.client: KVClient = self.daemon.client(call_timeout_seconds=5.0)
        self.device = Device(driver=fake_driver())
        self.gpu = GpuSide(self.device)
        self.engine = Engine(self.device, "vllm-small")
        self.space = self.client.attach(spec_of(self.engine.layout))
        self.side: EngineSide = self.gpu.engine(self.space, self.engine.pages, Calibration(1))
        self.rows = self.engine.rows(list(range(BLOCKS)))
        for size_mib in (1, 2, 3, 4, 5) * 2:
            self.space.report_transfer("host>hbm", size_mib << 20, size_mib * LONG / 1000)

    def put(self, seed: int) -> tuple[list[int], np.ndarray]:
        tokens = [seed * 1000 + i for i in range(BLOCKS * BLOCK)]
        blocks = [np.frombuffer(b, np.uint8) for b in Tagged(self.space.spec).blocks(tokens)]
        assert self.space.put(tokens, blocks).rejected == 0
        return tokens, np.array(blocks)

    def load(self, tokens: list[int]) -> int:
        """Loads a prompt; how many of its blocks came from the daemon's device memory."""
        self.engine.pool.first.fill_(7.0)
        with self.space.lookup(tokens) as match:
            load = self.side.load(match, self.rows, after=0)
            load.result()
            if load.device_blocks:  # others would tell how quick loads from host are here
                self.side.report(load)
        return load.device_blocks

    def heat(self, tokens: list[int]) -> None:
        """Loads a prompt until all of it comes from the GPU."""
        assert eventually(lambda: self.load(tokens) == BLOCKS), self.daemon.log

    def close(self) -> None:
        self.gpu.close()
        self.client.close()
        self.engine.memory.close()
        if self.owns:
            self.daemon.close()


@pytest.fixture(scope="module")
def daemons() -> Iterator[dict[str, DaemonProcess]]:
    """A daemon that copies and one that shows its arena, for all tests that leave them alive."""
    with daemon_with("copy") as copying, daemon_with("in_place") as showing:
        yield {"copy": copying, "in_place": showing}


@pytest.fixture
def make_world(daemons: dict[str, DaemonProcess]) -> Iterator[Callable[[str], World]]:
    made: list[World] = []

    def make(share: str) -> World:
        made.append(World(share, daemon=daemons[share]))
        made[-1].client.admin.clear(space_id=made[-1].space.space_id)
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(params=["copy", "in_place"])
def world(request: pytest.FixtureRequest, make_world: Callable[[str], World]) -> World:
    return make_world(request.param)


def test_hot_blocks_come_from_the_gpu_whole(world: World) -> None:
    """A prompt that is loaded again comes from device memory, and is what was stored."""
    tokens, blocks = world.put(1)
    assert world.load(tokens) == 0
    assert np.array_equal(world.engine.read(world.rows), blocks)
    world.heat(tokens)
    assert np.array_equal(world.engine.read(world.rows), blocks)
    status = world.client.status()
    tier = status.tiers["hbm"]
    assert (tier.capacity_bytes, tier.block_count, tier.state) == (4 << 20, BLOCKS, "serving")
    assert status.counters["kvstore_hbm_promoted_blocks_total"] >= BLOCKS
    assert status.counters["kvstore_hbm_loaded_blocks_total"] >= BLOCKS
    links = {cost.subject for cost in status.costs}
    assert {"host>hbm", "hbm>hbm", "host>arena"} <= links
    world.client.admin.clear(space_id=world.space.space_id)
    assert world.client.status().tiers["hbm"].block_count == 0
    assert world.space.lookup(tokens).matched_tokens == 0


def test_many_prompts_through_little_memory(world: World) -> None:
    """More prompts than the arena holds, loaded at random by turns: every byte is right."""
    prompts = [world.put(seed) for seed in range(12)]
    random, found = np.random.default_rng(1), 0
    for _ in range(25):
        tokens, blocks = prompts[min(int(random.exponential(3)), 11)]
        found += world.load(tokens)
        assert np.array_equal(world.engine.read(world.rows), blocks)
    assert found > 0
    assert world.client.status().tiers["hbm"].used_bytes <= 4 << 20


def test_loads_under_way_keep_what_they_were_given(make_world: Callable[[str], World]) -> None:
    """Staging is filled anew only when the load that was given it last has read it."""
    world = make_world("copy")
    prompts = [world.put(seed) for seed in range(3)]
    for tokens, _ in prompts:
        world.heat(tokens)
    flag, busy = world.device.allocate(4096), world.device.stream()
    busy.fill(flag, 0, 8)
    busy.synchronize()
    busy.wait_value(flag, 1)  # until then the engine's stream, and what waits for it, stands still
    rows = [world.engine.rows(list(range(i, i + BLOCKS))) for i in range(0, 3 * BLOCKS, BLOCKS)]
    matches = [world.space.lookup(tokens) for tokens, _ in prompts]
    loads: list[Load] = []

    def load_all() -> None:
        for match, pages in zip(matches, rows, strict=True):
            loads.append(world.side.load(match, pages, after=busy.handle.value))

    loading = threading.Thread(target=load_all)
    loading.start()
    assert eventually(lambda: len(loads) == 2)
    loading.join(0.3)
    assert len(loads) == 2  # the third needs the first one's half
    world.device.stream().write_value(flag, 1)
    loading.join()
    for load, match, pages, (_, blocks) in zip(loads, matches, rows, prompts, strict=True):
        load.result()
        assert load.device_blocks == BLOCKS
        assert np.array_equal(world.engine.read(pages), blocks)
        match.release()
    world.device.free(flag)


@pytest.mark.long
@pytest.mark.parametrize("share", ["copy", "in_place"])
def test_the_death_of_the_daemon_fails_the_lease(share: str) -> None:
    """What was shown of a dead daemon's memory is not trusted; the next daemon's is opened anew."""
    world = World(share)
    tokens, blocks = world.put(1)
    world.heat(tokens)
    match = world.space.lookup(tokens)
    load = world.side.load(match, world.rows)
    assert load.device_blocks == BLOCKS
    world.daemon.kill()
    wait_for_loss(match)
    with pytest.raises(LeaseLost):
        load.result()
    world.daemon.start()
    assert eventually(lambda: world.client.available)
    for size_mib in (1, 2, 3, 4, 5) * 2:
        world.space.report_transfer("host>hbm", size_mib << 20, size_mib * LONG / 1000)
    assert world.load(tokens) == 0
    world.heat(tokens)
    assert np.array_equal(world.engine.read(world.rows), blocks)
    world.close()


def wait_for_loss(match: Match) -> None:
    """Until the client has seen that its daemon is gone."""

    def is_lost() -> bool:
        try:
            match.check()
        except LeaseLost:
            return True
        return False

    assert eventually(is_lost)


def test_an_engine_attends_in_place(make_world: Callable[[str], World]) -> None:
    """in_place: blocks are read in the arena at their offsets, for as long as the lease lives."""
    world = make_world("in_place")
    tokens, blocks = world.put(1)
    world.heat(tokens)
    with world.space.lookup(tokens) as match:
        shown = world.side.in_place(match)
        assert shown is not None
        for offset, block in zip(shown.offsets.tolist(), blocks, strict=True):
            found = ctypes.string_at(shown.address + offset, len(block))
            assert found == block.tobytes()
        match.check()


def test_staging_shows_no_more_than_was_leased(make_world: Callable[[str], World]) -> None:
    """copy: what an engine can open holds zeros and its own loads, and there is no arena for it."""
    world = make_world("copy")
    secret, _ = world.put(1)
    world.heat(secret)
    with world.daemon.client(call_timeout_seconds=5.0) as client:
        gpu = GpuSide(world.device)
        space = client.attach(world.space.spec)
        side = gpu.engine(space, world.engine.pages)
        tokens, _ = world.put(2)
        with space.lookup(tokens) as match:
            side.load(match, world.rows).result()
            assert side.in_place(match) is None
        share = side._device_share
        assert share is not None
        assert not any(ctypes.string_at(share.address, share.length))
        gpu.close()


ENGINE = """
import sys
from fake_cuda import fake_driver
from gpu_world import spec_of, layout_of
from kvstore.client import KVClient
from kvstore.client.gpu import Device
from kvstore.client.gpu.share import DeviceShare
from kvstore.core.config import load as load_config
from kvstore.core.errors import ConfigError
from kvstore.core.generations import Generations
from kvstore.cuda import driver
from kvstore.daemon.gpu import open_gpus
client = KVClient.connect(sys.argv[1], call_timeout_seconds=5.0)
client.attach(spec_of(layout_of()))
share = DeviceShare(Device(driver=fake_driver()), client._link.session(), 5.0)
print(share.length, flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_device_staging_of_a_killed_engine_is_free() -> None:
    """I15: after kill -9 of an engine its device staging is another one's."""
    made = daemon_with("copy", extra='tiers.hbm.staging_bytes = "4MiB"\n')
    environment = {**os.environ, "PYTHONPATH": str(Path(fake_cuda.__file__).parent)}
    with made, made.client(call_timeout_seconds=5.0) as client:
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, made.address], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        client.attach(spec_of(layout_of()))  # from now on the session is kept
        assert engine.stdout is not None
        assert int(engine.stdout.readline()) == 4 << 20
        device, session = Device(driver=fake_driver()), client._link.session()
        assert "tiers.hbm.staging_bytes" in DeviceShare(device, session, 5.0).why
        engine.kill()
        engine.communicate()

        def is_free() -> bool:
            share = DeviceShare(device, session, 5.0)
            share.close()
            return not share.why

        assert eventually(is_free, 2.0)


@pytest.mark.long
def test_blocks_on_disk_come_through_host(tmp_path: Path) -> None:
    """What lies on disk only is brought to host, and loaded from there."""
    extra = f'tiers.disk.path = "{tmp_path / "disk"}"\ntiers.disk.size = "64MiB"\n'
    world = World("copy", extra=extra)
    tokens, blocks = world.put(1)
    world.client.admin.flush()
    world.daemon.kill()
    world.daemon.lose_memory()
    world.daemon.start()
    assert eventually(lambda: world.client.available)
    assert world.load(tokens) == 0
    assert np.array_equal(world.engine.read(world.rows), blocks)
    world.close()


def test_without_the_tier_loads_come_from_host() -> None:
    """A daemon that has no hbm tier, or one on another GPU, costs a load nothing but a question."""
    with DaemonProcess() as running, running.client(call_timeout_seconds=5.0) as client:
        device = Device(driver=fake_driver())
        gpu, engine = GpuSide(device), Engine(device, "vllm")
        side = gpu.engine(client.attach(spec_of(engine.layout)), engine.pages)
        tokens = list(range(4 * BLOCK))
        blocks = [np.frombuffer(b, np.uint8) for b in Tagged(side.space.spec).blocks(tokens)]
        side.space.put(tokens, blocks)
        with side.space.lookup(tokens) as match:
            load = side.load(match, engine.rows([0, 1, 2, 3]))
            load.result()
            assert load.device_blocks == 0
            assert side.in_place(match) is None
        assert side._device_share is not None
        assert "tiers.hbm" in side._device_share.why
        assert "libcuda" not in Path(f"/proc/{running.pid}/maps").read_text()
        gpu.close()
        engine.memory.close()


GPU_A0 = "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0"
GPU_0 = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("hbm", "message"),
    [
        ({"size": "0"}, "tiers.hbm.size"),
        ({"size": "1KiB"}, "pass 1MiB or more"),
        ({"size": "100GiB"}, "lower the size of tier hbm"),
        ({"device": "0"}, "nvidia-smi -L"),
        ({"size": "1MiB", "device": GPU_0}, "this machine has GPU-a0a0"),
        ({"staging_bytes": "1MiB"}, "below tiers.hbm.staging_bytes_per_session"),
        ({"size": "4MiB", "share": "in_place"}, "isolated"),
        ({"size": "4MiB", "share": "all"}, "tiers.hbm.share"),
        ({"size": "4MiB", "device": GPU_A0, "devices": [GPU_A0]}, "both device and devices"),
        ({"size": "4MiB", "devices": [GPU_A0, GPU_A0]}, "names a GPU twice"),
        ({"size": "4MiB", "devices": [GPU_A0, ""]}, "tiers.hbm.devices is ''"),
        ({"size": "4MiB", "devices": [GPU_A0, GPU_0]}, "correct tiers.hbm.devices"),
        ({"size": "1MiB", "devices": [GPU_A0, GPU_0]}, "1MiB or more for each"),
    ],
)
def test_wrong_settings_are_refused_with_a_sentence(
    hbm: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that is not there or too small, and settings that exclude each other."""
    monkeypatch.setattr(driver.Driver.__init__, "__defaults__", (str(library()),))
    tenants = (
        [{"name": "a", "isolated": True, "host_size": "8MiB"}] if message == "isolated" else []
    )
    tables = {"tiers": {"host": {"size": "64MiB"}, "hbm": hbm}, "tenants": tenants}
    with pytest.raises(ConfigError, match=message):
        open_gpus(load_config(overrides=tables), [], Generations())


def test_a_machine_without_a_gpu_names_the_key() -> None:
    """A size without any CUDA driver is a configuration error."""
    made = DaemonProcess(config='tiers.hbm.size = "4MiB"\n')
    try:
        made.launch()
        assert made.wait() == 2
        assert (
            "tiers.hbm.size is set, but the CUDA driver libcuda.so.1 cannot be loaded" in made.log
        )
    finally:
        made.close()
