"""Host memory that a GPU copies at full speed, and device memory as torch sees it."""

from __future__ import annotations

import mmap
from types import TracebackType

import numpy as np
import torch

from kvstore.cuda.device import Device


class Registered:
    """Anonymous host memory, written once and registered; `address`, `bytes` (numpy uint8)."""

    def __init__(self, device: Device, length: int) -> None:
        self._device, self.length = device, length
        self.bytes = np.frombuffer(mmap.mmap(-1, length), np.uint8)
        self.bytes[:: mmap.PAGESIZE] = 1
        self.address = self.bytes.ctypes.data
        device.register(self.address, length)

    def __enter__(self) -> Registered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._device.unregister(self.address)


class _Interface:
    """What torch asks of foreign memory."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def as_tensor(address: int, *shape: int) -> torch.Tensor:
    """uint8 tensor on the GPU over memory that a kernel can reach: the device's, or registered."""
    return torch.as_tensor(_Interface(address, shape), device="cuda")
