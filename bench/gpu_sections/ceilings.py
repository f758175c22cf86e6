"""What this GPU and its link can do at most: copy, read, both directions of the link, matmul."""

from __future__ import annotations

import mmap
import time
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from gpu_sections.context import Context, seconds
from kvstore.cuda.device import Device

GIB = 1 << 30
MATRIX = 8192


@triton.jit
def add_up(source, target, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Sums of BLOCK x ROUNDS int64 words: reads all, writes next to nothing."""
    start = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for i in range(ROUNDS):
        total += tl.load(source + start + i * BLOCK + at)
    tl.store(target + tl.program_id(0), tl.sum(total, 0))


def run(context: Context, answer: dict[str, Any]) -> None:
    answer["device"] = torch.cuda.get_device_name()
    answer["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    _memory(answer)
    _matmul(answer)
    _link(answer)


def _memory(answer: dict[str, Any]) -> None:
    words = 4 * GIB // 8
    source = torch.randint(0, 1 << 40, (words,), device="cuda")
    target = torch.empty_like(source)
    took = seconds(lambda: target.copy_(source))
    answer["copy_bytes_per_second"] = 2 * words * 8 / took
    best = 0.0
    for block, rounds, warps in ((2048, 8, 8), (4096, 8, 8), (1024, 32, 4), (4096, 16, 16)):
        programs = words // (block * rounds)
        sums = torch.empty(programs, dtype=torch.int64, device="cuda")

        def work(programs=programs, sums=sums, block=block, rounds=rounds, warps=warps):
            add_up[(programs,)](source, sums, block, rounds, num_warps=warps)

        best = max(best, words * 8 / seconds(work))
    answer["read_bytes_per_second"] = best
    took = seconds(lambda: target.fill_(7))
    answer["write_bytes_per_second"] = words * 8 / took


def _matmul(answer: dict[str, Any]) -> None:
    a, b = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(2))
    took = seconds(lambda: a @ b, most=0.5)
    answer["matmul_flops_per_second"] = 2 * MATRIX**3 / took


def _link(answer: dict[str, Any]) -> None:
    device = Device(ordinal=torch.cuda.current_device())
    length = GIB
    hosts = [np.frombuffer(mmap.mmap(-1, length), np.uint8) for _ in range(2)]
    for host in hosts:
        host.fill(1)
    begin = time.monotonic()
    for host in hosts:
        device.register(host.ctypes.data, length)
    answer["register_seconds_per_gib"] = (time.monotonic() - begin) / 2
    memory = [device.allocate(length) for _ in range(2)]
    up, down = device.stream(), device.stream()

    def timed(works: list[tuple[Any, int, int]]) -> float:
        best = float("inf")
        for _ in range(4):
            begin = time.monotonic()
            for stream, target, source in works:
                stream.copy(target, source, length)
            for stream, _, _ in works:
                stream.synchronize()
            best = min(best, time.monotonic() - begin)
        return best

    to_gpu = (up, memory[0], hosts[0].ctypes.data)
    to_host = (down, hosts[1].ctypes.data, memory[1])
    answer["h2d_bytes_per_second"] = length / timed([to_gpu])
    answer["d2h_bytes_per_second"] = length / timed([to_host])
    answer["both_bytes_per_second"] = 2 * length / timed([to_gpu, to_host])
    answer["has_batched_copies"] = device.driver.has_batch
    for host in hosts:
        device.unregister(host.ctypes.data)
    for address in memory:
        device.free(address)
