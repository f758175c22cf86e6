"""A real daemon for engines that run in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from daemons import DaemonProcess

LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
"""


@pytest.fixture
def served() -> Iterator[DaemonProcess]:
    made = DaemonProcess("16MiB", LIMITS)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[DaemonProcess]:
    with DaemonProcess("16MiB", LIMITS) as daemon:
        yield daemon


@pytest.fixture
def world(shared: DaemonProcess) -> Iterator[Any]:
    """Engines of SGLang's in spaces of their own, on a daemon that outlives the test."""
    from sglang_world import World

    made = World(shared)
    yield made
    made.close()


@pytest.fixture
def lonely(served: DaemonProcess) -> Iterator[Any]:
    """Engines of SGLang's on a daemon that may be killed."""
    from sglang_world import World

    made = World(served)
    yield made
    made.close()


@pytest.fixture
def desks(shared: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Engines of vLLM's with a GPU, on a driver that works only when waited for."""
    yield from _gpu_desks(shared, monkeypatch)


@pytest.fixture
def lonely_desks(
    served: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """The same on a daemon that may be killed."""
    yield from _gpu_desks(served, monkeypatch)


def _gpu_desks(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    from fake_cuda import fake_driver
    from vllm_gpu_desk import GpuDesk, StreamMemory

    from kvstore.client.gpu import Device

    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    monkeypatch.setenv("FAKE_CUDA_LAZY", "1")
    monkeypatch.setattr("kvstore.engines.vllm.mover.OpaqueMemory", StreamMemory)
    monkeypatch.setattr("kvstore.engines.vllm.mover.LOAD_STAGE_BYTES", 1)  # three slots
    device, made = Device(driver=fake_driver()), []

    def make(name: str, kind: str = "packed", **options: Any) -> GpuDesk:
        made.append(GpuDesk(daemon, device, name, kind, **options))
        return made[-1]

    yield make
    for desk in made:
        desk.close()
