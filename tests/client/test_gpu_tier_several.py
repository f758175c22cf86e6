"""A daemon's memory on two GPUs, and engines of one process on both; on a driver without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from daemons import DaemonProcess, Tagged, eventually
from fake_cuda import fake_driver, library
from gpu_world import BLOCK, Engine, spec_of

from kvstore.client import KVClient
from kvstore.client.gpu import Calibration, Device, EngineSide, GpuSide

BLOCKS = 12
GPUS = ["GPU-" + "-".join(b * n for n in (4, 2, 2, 2, 6)) for b in ("a0", "a1")]


@pytest.fixture(params=["copy", "in_place"])
def daemon(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DaemonProcess]:
    """One with two GPUs, as this process has them, too."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    made = DaemonProcess(
        config=f'tiers.hbm.size = "8MiB"\ntiers.hbm.devices = {GPUS}\n'
        f'tiers.hbm.share = "{request.param}"\n'
        'tiers.hbm.staging_bytes_per_session = "4MiB"\n'
    )
    made.environ |= {"LD_LIBRARY_PATH": str(library().parent), "FAKE_CUDA_DEVICES": "2"}
    with made as running:
        yield running


class Side:
    """An engine on one of the GPUs."""

    def __init__(self, client: KVClient, ordinal: int) -> None:
        self.device = Device(ordinal=ordinal, driver=fake_driver())
        self.gpu = GpuSide(self.device)
        self.engine = Engine(self.device, "vllm-small")
        self.space = client.attach(spec_of(self.engine.layout))
        self.side: EngineSide = self.gpu.engine(self.space, self.engine.pages, Calibration(1))
        self.rows = self.engine.rows(list(range(BLOCKS)))

    def load(self, tokens: list[int]) -> int:
        """How many of a prompt's blocks came from the daemon's memory on this GPU."""
        self.engine.pool.first.fill_(7.0)
        with self.space.lookup(tokens) as match:
            load = self.side.load(match, self.rows)
            load.result()
        return load.device_blocks

    def close(self) -> None:
        self.gpu.close()
        self.engine.memory.close()


def test_engines_on_two_gpus_load_what_is_right(daemon: DaemonProcess) -> None:
    """Each GPU has copies of its engine's prompt; of the other's it gives copies, or none."""
    with daemon.client(call_timeout_seconds=5.0) as client:
        sides = [Side(client, ordinal) for ordinal in range(2)]
        assert [side.device.uuid for side in sides] == GPUS
        space = sides[0].space
        for size_mib in (1, 2, 3, 4, 5) * 2:
            space.report_transfer("host>hbm", size_mib << 20, size_mib * 0.4)
        prompts = []
        for seed, side in enumerate(sides):
            tokens = [seed * 1000 + i for i in range(BLOCKS * BLOCK)]
            blocks = [np.frombuffer(b, np.uint8) for b in Tagged(space.spec).blocks(tokens)]
            space.put(tokens, blocks)
            prompts.append((tokens, np.array(blocks)))
            assert eventually(lambda: side.load(tokens) == BLOCKS), daemon.log  # noqa: B023
            assert np.array_equal(side.engine.read(side.rows), prompts[-1][1])
        devices = client.status().tiers["hbm"].devices
        assert {uuid: devices[uuid].block_count for uuid in GPUS} == dict.fromkeys(GPUS, BLOCKS)
        here, (tokens, blocks) = sides[0], prompts[1]
        found = here.load(tokens)
        assert np.array_equal(here.engine.read(here.rows), blocks)
        with space.lookup(tokens) as match:
            shown = here.side.in_place(match)
        if shown is None:
            assert found == BLOCKS  # from the other GPU, into this one's staging
        else:
            assert found == 0
            assert (shown.offsets == -1).all()
        for side in sides:
            side.close()
