"""The daemon's GPUs follow a host pool that grows: each part of it is registered, and once."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from fake_cuda import fake_driver

from kvstore.cuda.device import Device
from kvstore.daemon import gpu
from kvstore.tiers.hbm import HbmTier

MIB = 1 << 20


def test_what_a_pool_has_more_is_registered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges meet without a gap, nothing is registered twice, and a second GPU knows all of it."""
    monkeypatch.setattr(gpu, "REGISTER_BYTES", 3 * MIB)
    pools = [np.frombuffer(mmap.mmap(-1, size * MIB), np.uint8) for size in (40, 4)]
    tiers = [HbmTier(Device(driver=fake_driver()), {"": MIB}) for _ in range(2)]
    gpus = gpu.Gpus(tiers, [pools[0][: 8 * MIB], pools[1]])
    gpus.follow([pools[0][: 8 * MIB], pools[1]])
    gpus.follow([pools[0][: 20 * MIB], pools[1]])
    gpus.follow([pools[0], pools[1]])
    thread = gpus._thread
    assert thread is not None
    thread.join(10)
    for tier in tiers:
        ranges = sorted(tier._stable)
        assert sum(end - start for start, end in ranges) == 44 * MIB
        for pool in pools:
            start = pool.ctypes.data
            mine = [r for r in ranges if start <= r[0] < start + len(pool)]
            for low, high in mine:
                assert low == start
                start = high
            assert start == pool.ctypes.data + len(pool)
    assert len(set(tiers[0]._registered)) == len(tiers[0]._registered) == len(tiers[0]._stable)
    assert not tiers[1]._registered
    gpus.close()
