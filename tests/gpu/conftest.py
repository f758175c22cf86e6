"""The HBM tier on a real GPU, behind the face that the tiers' contract knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.cuda.device import Device
from kvstore.cuda.driver import CudaUnavailable
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.hbm import HbmTier

POOL_BYTES = 4 << 20


@pytest.fixture(scope="session")
def device() -> Device:
    """The first GPU."""
    try:
        return Device()
    except CudaUnavailable as error:
        pytest.skip(str(error))


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
    """A tier under test, as the contract's tests take it."""

    persistent, name = False, "hbm"

    def __init__(self, device: Device, kind: str) -> None:
        self.kind, self._device = kind, device
        self.pools = ["", "acme"] if kind.endswith("two") else [""]
        self.tier = self._make()

    def _make(self) -> HbmTier:
        sizes = dict.fromkeys(self.pools, POOL_BYTES)
        return HbmTier(self._device, sizes, buffer_bytes=1 << 20)

    def settle(self) -> None:
        """Nothing here is durable."""

    def stored(self, place: int, length: int) -> bytes:
        target = np.empty(length, np.uint8)
        self.tier.read(place, target, length)
        return target.tobytes()

    def reopen(self) -> HbmTier:
        self.tier.close()
        self.tier = self._make()
        return self.tier


@pytest.fixture(params=["hbm", "hbm-two"])
def subject(request: pytest.FixtureRequest, device: Device) -> Iterator[Subject]:
    made = Subject(device, request.param)
    yield made
    made.tier.close(keep=False)


@pytest.fixture
def addressable(subject: Subject) -> Subject:
    pytest.skip("device memory is no memory of this machine")
