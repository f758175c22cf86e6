"""A client's side of a GPU, on a driver without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemons import DaemonProcess
from fake_cuda import fake_driver
from gpu_client import World

from kvstore.client import KVClient
from kvstore.client.gpu import Device


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with daemon.client(staging_bytes=2 << 20, call_timeout_seconds=5.0) as made:
        yield made


@pytest.fixture
def device() -> Device:
    return Device(driver=fake_driver())


@pytest.fixture
def world(client: KVClient, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """The driver copies only when waited for, and batches touch only what is registered."""
    monkeypatch.setenv("FAKE_CUDA_STRICT", "1")
    monkeypatch.setenv("FAKE_CUDA_LAZY", "1")
    made = World(client, device)
    yield made
    made.close()
