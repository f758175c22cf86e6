"""What the CUDA driver does for us on a real GPU: copies, order, memory, names."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvstore.cuda.device import Device
from kvstore.cuda.driver import CudaError, CudaUnavailable

pytestmark = pytest.mark.gpu


def registered(device: Device, length: int) -> np.ndarray:
    memory = np.frombuffer(mmap.mmap(-1, length), np.uint8)
    memory[:] = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    device.register(memory.ctypes.data, length)
    return memory


@pytest.mark.parametrize("stable", [True, False])
def test_batched_copies_land_where_they_should(device: Device, stable: bool) -> None:
    """Ranges of any length and alignment arrive, in both directions."""
    source, target = registered(device, 1 << 20), registered(device, 1 << 20)
    target[:] = 0
    address, stream = device.allocate(1 << 20), device.stream()
    lengths = np.array([1, 4096, 33, 70_000, 65_536], np.uint64)
    at = np.array([3, 5000, 10_001, 20_480, 200_000], np.uint64)
    base = np.uint64(source.ctypes.data)
    stream.copy_many(at + np.uint64(address), at + base, lengths, stable)
    back = at + np.uint64(target.ctypes.data)
    stream.copy_many(back, at + np.uint64(address), lengths)
    stream.synchronize()
    for start, length in zip(at.tolist(), lengths.tolist(), strict=True):
        assert np.array_equal(target[start : start + length], source[start : start + length])
    for memory in (source, target):
        device.unregister(memory.ctypes.data)
    device.free(address)


def test_events_order_streams(device: Device) -> None:
    """What waits for an event sees what came before it."""
    address = device.allocate(64 << 20)
    first, second, target = device.stream(), device.stream(), np.zeros(1 << 20, np.uint8)
    for value in range(1, 6):
        first.fill(address, value, 64 << 20)
        second.wait(first.record())
        second.copy(target.ctypes.data, address + (63 << 20), 1 << 20)
        end = second.record()
        end.synchronize()
        assert end.done()
        assert set(target.tolist()) == {value}
    device.free(address)


def test_values_in_memory_order_streams(device: Device) -> None:
    """A stream that waits for a value goes on once another wrote it, and not before."""
    address = device.allocate(8192)
    first, second = device.stream(), device.stream()
    first.fill(address, 0, 8192)
    first.synchronize()
    second.wait_value(address, 5)
    second.fill(address + 4096, 9, 16)
    end = second.record()
    first.write_value(address, 4)
    first.synchronize()
    assert not end.done()
    first.write_value(address, 5)
    end.synchronize()
    device.free(address)


def test_the_device_is_found_by_its_name(device: Device) -> None:
    """A GPU is addressed by UUID; one that is not there is an error that lists those that are."""
    assert Device(uuid=device.uuid).ordinal == device.ordinal
    with pytest.raises(CudaUnavailable, match=device.uuid):
        Device(uuid="GPU-00000000-0000-0000-0000-000000000000")


def test_too_much_memory_is_an_error(device: Device) -> None:
    """More memory than the GPU has is refused with the driver's name for it."""
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        device.allocate(1 << 45)
