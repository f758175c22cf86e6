"""Registration of host memory, mapped to write and to read only, in chunks, and its speed."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import numpy as np
import torch

from gpu_sections.context import Context
from kvstore.cuda.device import Device

LENGTH = 1 << 30
CHUNK = 256 << 20


def run(context: Context, answer: dict[str, Any]) -> None:
    device = Device(ordinal=torch.cuda.current_device())
    answer["registers_read_only"] = device.registers_read_only
    fd = os.memfd_create("kvstore-check")
    os.ftruncate(fd, LENGTH)
    writable = np.frombuffer(mmap.mmap(fd, LENGTH), np.uint8)
    writable[:: mmap.PAGESIZE] = 3
    only = mmap.mmap(fd, LENGTH, prot=mmap.PROT_READ)
    readable = np.frombuffer(only, np.uint8)
    for name, memory, read_only in (
        ("writable", writable, False), ("read_only_with_flag", readable, True),
        ("read_only_without_flag", readable, False), ("unregistered", writable, None),
    ):  # fmt: skip
        if context.left > 3:
            answer[name] = _one(device, memory, read_only)


def _one(device: Device, memory: np.ndarray, read_only: bool | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    done: list[int] = []
    begin = time.monotonic()
    try:
        for at in range(0, LENGTH, CHUNK) if read_only is not None else ():
            device.register(memory.ctypes.data + at, CHUNK, read_only)
            done.append(at)
        result["register_seconds"] = time.monotonic() - begin
        result["h2d_bytes_per_second"] = _speed(device, memory)
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:300]
    begin = time.monotonic()
    for at in done:
        device.unregister(memory.ctypes.data + at)
    result["unregister_seconds"] = time.monotonic() - begin
    return result


def _speed(device: Device, memory: np.ndarray) -> float:
    """Copies chunk by chunk, as no copy may straddle two registrations."""
    target, stream, best = device.allocate(LENGTH), device.stream(), float("inf")
    try:
        for _ in range(3):
            begin = time.monotonic()
            for at in range(0, LENGTH, CHUNK):
                stream.copy(target + at, memory.ctypes.data + at, CHUNK)
            stream.synchronize()
            best = min(best, time.monotonic() - begin)
    finally:
        device.free(target)
    return LENGTH / best
