"""An engine on a GPU beside a pool that grows, gives memory back and grows again."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from daemons import DaemonProcess, wait_until
from gpu_client import PIECES, World, stored

from kvstore.client.gpu import Device, EngineSide

MIB = 1 << 20


def sized(daemon: DaemonProcess, mebibytes: int, word: str = "") -> None:
    """Has a pool of this size; waits for it."""
    said = len(daemon.log)
    daemon.size = f"{mebibytes}MiB"
    daemon.configure(CONFIG)
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: (word or f"tiers.host.size is {mebibytes}MiB now") in daemon.log[said:])


CONFIG = """
tiers.host.size_max = "128MiB"
tiers.host.mlock = false
limits.max_lease_ttl_seconds = 2.0
limits.lease_ttl_seconds = 1.0
"""


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("16MiB", CONFIG) as running:
        yield running


def covered(side: EngineSide) -> int:
    """Bytes of the pool that copies go straight from."""
    (entry,) = side._register(side.space.attached).values()
    side._gpu.registrar.let_go(entry)
    return entry.covered


@pytest.mark.long
def test_loads_from_a_pool_that_grows(
    daemon: DaemonProcess, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has memory is registered and nothing else, a growth after it; what was given back and
    has other memory is not read through the old registration. Each load has the right bytes."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    with daemon.client(staging_bytes=2 << 20, call_timeout_seconds=5.0) as client:
        world = World(client, device, chunk_bytes=8 << 20)
        engine, side = world.engine("vllm", PIECES)
        rows = engine.rows(list(range(12)))
        data = next(daemon.pool.glob("pool-*.data"))

        def load(seeds: range) -> int:
            whole = 0
            for seed in seeds:
                tokens, blocks = prompts[seed]
                with side.space.lookup(tokens) as match:
                    if match.block_count == 12:
                        side.load(match, rows).result()
                        assert np.array_equal(engine.read(rows), blocks)
                        whole += 1
            return whole

        prompts = {seed: stored(side.space, seed) for seed in range(10)}
        wait_until(lambda: covered(side) == 16 * MIB)
        assert load(range(10)) == 10
        assert data.stat().st_blocks * 512 == 16 * MIB
        sized(daemon, 48)
        prompts |= {seed: stored(side.space, seed) for seed in range(10, 70)}
        wait_until(lambda: covered(side) == 48 * MIB)
        assert load(range(70)) == 70
        sized(daemon, 8, "are reloaded (tiers.host.size)")
        wait_until(lambda: covered(side) < 16 * MIB)
        prompts |= {seed: stored(side.space, seed) for seed in range(300, 320)}
        assert load(range(300, 320)) > 0
        sized(daemon, 48)
        prompts |= {seed: stored(side.space, seed) for seed in range(400, 450)}
        wait_until(lambda: covered(side) == 48 * MIB)
        assert load(range(400, 450)) == 50
        world.close()
