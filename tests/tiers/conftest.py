"""Pools for tests: private directories in memory, and tiers of every kind behind one face."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fake_cuda import fake_driver
from growing import World
from sealed_world import OLD, filled

from kvstore.core.clock import ManualClock
from kvstore.core.key_file import DiskKey
from kvstore.cuda.device import Device
from kvstore.tiers.base import AddressableTier, BlockHeader, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.vault import Vault
from kvstore.tiers.faulty import FaultyTier
from kvstore.tiers.hbm import HbmTier
from kvstore.tiers.host import HostTier, PoolConfig
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.throttle import ThrottledTier

POOL_BYTES = 4 << 20
DISK_BYTES = 5 << 20


@pytest.fixture
def shm_directory() -> Iterator[Path]:
    """A 0700 directory on a memory file system, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def world(shm_directory: Path) -> Iterator[Callable[..., World]]:
    """Makes a pool of a size and a largest size, in MiB; all are closed afterwards."""
    made: list[World] = []

    def make(size: int, size_max: int, **options: Any) -> World:
        made.append(World(shm_directory, size, size_max, **options))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()


@pytest.fixture(scope="session")
def sealed_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encrypted directory with blocks 0 to 39, to be copied and not changed."""
    path = tmp_path_factory.mktemp("sealed") / "disk"
    path.mkdir(mode=0o700)
    filled(path, OLD)
    return path


@pytest.fixture
def disk_directory(tmp_path: Path) -> Path:
    """A 0700 directory on a disk."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def make_header() -> Callable[..., BlockHeader]:
    """Makes the header of block number i: every field follows from i."""

    def make(i: int, length: int, symbol_bytes: int = 16) -> BlockHeader:
        return BlockHeader(
            space=bytes([i % 7]) * 32,
            root=bytes([i % 11]) * 32,
            key=i.to_bytes(16, "little"),
            parent_key=(i + 1).to_bytes(16, "big"),
            position=i,
            shard=i % 3,
            epoch=i % 5,
            length=length,
            symbol=(i.to_bytes(4, "little") * symbol_bytes)[:symbol_bytes],
        )

    return make


class Subject:
    """A tier under test, and what a daemon finds of it after a crash."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self._directory = directory
        self.pools = ["", "acme"] if kind.endswith("two") else [""]
        self.persistent = not kind.startswith(("sealed", "hbm"))
        self.name = "disk" if kind.startswith("disk") else kind[:3] if "hbm" in kind else "host"
        self.tier = self._make()

    def _make(self) -> Tier:
        if self.kind.startswith("disk"):
            vault = Vault([DiskKey("k", bytes(32))]) if self.kind == "disk-encrypted" else None
            direct = self.kind != "disk-buffered"
            return DiskTier(self._directory, DISK_BYTES, direct=direct, vault=vault)
        sizes = dict.fromkeys(self.pools, POOL_BYTES)
        if self.kind.startswith("hbm"):
            return HbmTier(Device(driver=fake_driver()), sizes, buffer_bytes=100_000)
        if self.kind.startswith(("shm", "sealed")):
            kind = "shm" if self.kind.startswith("shm") else "sealed"
            pools = [PoolConfig(*item) for item in sizes.items()]
            huge = "advise" if self.kind == "shm-advise" else "off"
            return HostTier(pools, kind=kind, directory=self._directory, hugepages=huge)
        return self._wrap(MemoryTier(sizes))

    def _wrap(self, inner: MemoryTier) -> AddressableTier:
        if self.kind == "throttled":
            clock = ManualClock()
            return ThrottledTier(inner, 1e9, 1e-4, clock, clock.advance)
        return FaultyTier(inner, Random(0)) if self.kind == "faulty" else inner

    def settle(self) -> None:
        """Makes removals durable: until then a durable tier keeps freed slots."""
        if self.tier.durable:
            assert self.tier.commit([]) == []

    def stored(self, place: int, length: int) -> bytes:
        """The bytes a tier has in a slot."""
        target = np.empty(length, np.uint8)
        self.tier.read(place, target, length)
        return target.tobytes()

    def reopen(self) -> Tier:
        """The tier as the next daemon sees it."""
        if self.kind.startswith(("shm", "sealed", "disk", "hbm")):
            self.tier.close()
            self.tier = self._make()
        else:
            inner = self.tier if isinstance(self.tier, MemoryTier) else self.tier.inner
            self.tier = self._wrap(inner.reopened())
        return self.tier


ADDRESSABLE = [
    "memory", "memory-two", "throttled", "faulty", "shm", "shm-two", "shm-advise", "sealed",
    "sealed-two",
]  # fmt: skip


OTHERS = ["disk", "disk-buffered", "disk-encrypted", "hbm", "hbm-lazy-two"]


@pytest.fixture(params=[*ADDRESSABLE, *OTHERS])
def subject(
    request: pytest.FixtureRequest, shm_directory: Path, disk_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Subject]:  # fmt: skip
    """A tier of every kind in turn; hbm on a driver without a GPU, lazy: it copies when waited for.

    On a GPU it is held to the same contract by tests/gpu.
    """
    if "lazy" in request.param:
        monkeypatch.setenv("FAKE_CUDA_LAZY", "1")
    on_disk = request.param.startswith("disk")
    made = Subject(request.param, disk_directory if on_disk else shm_directory)
    yield made
    made.tier.close(keep=False)


@pytest.fixture
def addressable(subject: Subject) -> Subject:
    """Only tiers whose slots are memory."""
    if not isinstance(subject.tier, AddressableTier):
        pytest.skip("its slots are no memory")
    return subject
