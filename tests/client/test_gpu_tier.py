"""The daemon's memory on a GPU, from an engine in another process; on a driver without a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fake_cuda
import numpy as np
import pytest
from daemons import DaemonProcess, Tagged, eventually
from fake_cuda import fake_driver, library
from gpu_world import BLOCK, Engine, layout_of, spec_of

from kvstore.client import KVClient, LeaseLost, Match
from kvstore.client.gpu import Calibration, Device, EngineSide, GpuSide, Load
from kvstore.client.gpu.share import DeviceShare

BLOCKS = 12
LONG = 400
"""Slow enough loads from host, as told: milliseconds for a MiB."""


def daemon_with(share: str, size: str = "4MiB", extra: str = "") -> DaemonProcess:
    made = DaemonProcess(
        config=f'tiers.hbm.size = "{size}"\ntiers.hbm.share = "{share}"\n'
        f'tiers.hbm.staging_bytes_per_session = "4MiB"\n{extra}'
    )
    made.environ["LD_LIBRARY_PATH"] = str(library().parent)
    return made


class World:
    """A daemon with a GPU, and an engine of another process on the same one."""

    def __init__(self, share: str, size: str = "4MiB", extra: str = "") -> None:
        self.daemon = daemon_with(share, size, extra).start()
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
            self.side.report(load)
        return load.device_blocks

    def heat(self, tokens: list[int]) -> None:
        """Loads a prompt until all of it comes from the GPU."""
        assert eventually(lambda: self.load(tokens) == BLOCKS), self.daemon.log

    def close(self) -> None:
        self.gpu.close()
        self.client.close()
        self.engine.memory.close()
        self.daemon.close()


@pytest.fixture(params=["copy", "in_place"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


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
    assert status.counters["kvstore_hbm_promoted_blocks_total"] == BLOCKS
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
    for _ in range(40):
        tokens, blocks = prompts[min(int(random.exponential(3)), 11)]
        found += world.load(tokens)
        assert np.array_equal(world.engine.read(world.rows), blocks)
    assert found > 0
    assert world.client.status().tiers["hbm"].used_bytes <= 4 << 20


def test_loads_under_way_keep_what_they_were_given() -> None:
    """Staging is filled anew only when the load that was given it last has read it."""
    world = World("copy")
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
    world.close()


def test_the_death_of_the_daemon_fails_the_lease(world: World) -> None:
    """What was shown of a dead daemon's memory is not trusted; the next daemon's is opened anew."""
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


def wait_for_loss(match: Match) -> None:
    """Until the client has seen that its daemon is gone."""

    def is_lost() -> bool:
        try:
            match.check()
        except LeaseLost:
            return True
        return False

    assert eventually(is_lost)


def test_an_engine_attends_in_place() -> None:
    """in_place: blocks are read in the arena at their offsets, for as long as the lease lives."""
    world = World("in_place")
    tokens, blocks = world.put(1)
    world.heat(tokens)
    with world.space.lookup(tokens) as match:
        shown = world.side.in_place(match)
        assert shown is not None
        for offset, block in zip(shown.offsets.tolist(), blocks, strict=True):
            found = ctypes.string_at(shown.address + offset, len(block))
            assert found == block.tobytes()
        match.check()
    world.close()


def test_staging_shows_no_more_than_was_leased() -> None:
    """copy: what an engine can open holds zeros and its own loads, and there is no arena for it."""
    world = World("copy")
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
    world.close()


ENGINE = """
import sys
from fake_cuda import fake_driver
from gpu_world import spec_of, layout_of
from kvstore.client import KVClient
from kvstore.client.gpu import Device
from kvstore.client.gpu.share import DeviceShare
client = KVClient.connect(sys.argv[1], call_timeout_seconds=5.0)
client.attach(spec_of(layout_of()))
share = DeviceShare(Device(driver=fake_driver()), client._link.session(), 5.0)
print(share.length, flush=True)
sys.stdin.read()
"""


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


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('tiers.hbm.size = "8EiB"\n', "tiers.hbm.size"),
        ('tiers.hbm.size = "100GiB"\n', "lower the size of tier hbm"),
        ('tiers.hbm.size = "0"\n', "tiers.hbm.size"),
        ('tiers.hbm.device = "0"\n', "nvidia-smi -L"),
        (
            'tiers.hbm.size = "1MiB"\n'
            'tiers.hbm.device = "GPU-00000000-0000-0000-0000-000000000000"\n',
            "this machine has GPU-a0a0",
        ),
        ('tiers.hbm.staging_bytes = "1MiB"\n', "below tiers.hbm.staging_bytes_per_session"),
        (
            'tiers.hbm.size = "4MiB"\ntiers.hbm.share = "in_place"\n'
            '[[tenants]]\nname = "a"\nisolated = true\nhost_size = "8MiB"\n',
            "isolated",
        ),
    ],
)
def test_wrong_settings_end_the_daemon_with_a_sentence(extra: str, message: str) -> None:
    """A GPU that is not there or too small, and settings that exclude each other: exit 2."""
    made = DaemonProcess(config=extra)
    made.environ["LD_LIBRARY_PATH"] = str(library().parent)
    try:
        made.launch()
        assert made.wait() == 2
        assert message in made.log
    finally:
        made.close()


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
