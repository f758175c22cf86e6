"""`Calibration`: from which length on pieces are copied one by one rather than through the stage.

A GPU's copy engine takes some time for each range, so that short ones never reach the link's
speed; a large copy and a kernel behind it do. Where they meet differs from machine to machine.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from statistics import median

import numpy as np

from kvstore.client.gpu.memory import Copies, EngineMemory
from kvstore.cuda.device import Device, Stream
from kvstore.cuda.driver import CudaError

DEFAULT_RUN_BYTES = 64 << 10
SIZES = tuple(1 << shift for shift in range(12, 19))
SAMPLE_BYTES = 8 << 20
ROUNDS = 3


class Calibration:
    """The least length of pieces that are copied one by one, in each direction alike."""

    def __init__(self, run_bytes: int = DEFAULT_RUN_BYTES) -> None:
        self.run_bytes = run_bytes
        self.measured = False
        self.seconds_per_byte: dict[str, float] = {}

    def copies_pieces(self, run_bytes: float) -> bool:
        return run_bytes >= self.run_bytes

    def measure(self, device: Device, memory: EngineMemory, pages: np.ndarray) -> None:
        """Measures on `pages`, whose contents are lost: before the engine serves.

        Rows of pages for as many blocks as the stage has slots, or fewer. Without a stage nothing
        is to be chosen.
        """
        if memory.stage is None or not len(pages):
            return
        bench = _Bench(device, SAMPLE_BYTES)
        try:
            staged = bench.staged(memory, pages[: memory.stage.slots])
            found = {size: bench.pieces(size) for size in SIZES}
        finally:
            bench.close()
        self.seconds_per_byte = {"staged": staged} | {str(s): found[s] for s in SIZES}
        quick = [size for size in SIZES if found[size] <= staged]
        self.run_bytes = min(quick, default=2 * SIZES[-1])
        self.measured = True


class _Bench:
    """Host and device memory of its own, and a stream that is timed."""

    def __init__(self, device: Device, size: int) -> None:
        self._device, self._size = device, size
        self._host = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self._memory = device.allocate(size)
        try:
            device.register(self._host.ctypes.data, size)
        except CudaError:
            device.free(self._memory)
            raise
        self._stream = device.stream()

    def close(self) -> None:
        self._stream.synchronize()
        self._device.unregister(self._host.ctypes.data)
        self._device.free(self._memory)

    def pieces(self, size: int) -> float:
        """Seconds a byte of ranges of this size, every second one of both sides."""
        at = np.arange(0, self._size, 2 * size, dtype=np.uint64)
        lengths = np.full(len(at), size, np.uint64)
        host = at + np.uint64(self._host.ctypes.data)
        copies = Copies(at + np.uint64(self._memory), host, lengths)
        return self._timed(copies.byte_count, lambda s: s.copy_many(*copies, stable=True))

    def staged(self, memory: EngineMemory, pages: np.ndarray) -> float:
        """Seconds a byte of blocks through the stage."""
        stage = memory.stage
        assert stage is not None, "only a stage is measured"
        block = memory.layer_count * memory.layer_bytes
        count = max(1, min(len(pages), self._size // block))
        slots = np.arange(count, dtype=np.int32)
        # A block may be longer than what there is to copy from: its first bytes then do for all.
        length = min(block, self._size)
        sources = np.arange(count, dtype=np.uint64) * np.uint64(length)
        targets = np.uint64(stage.address) + slots.astype(np.uint64) * np.uint64(stage.stride)
        host = np.uint64(self._host.ctypes.data) + sources
        copies = Copies(targets, host, np.full(count, length, np.uint64)).merged()

        def work(stream: Stream) -> None:
            stream.copy_many(*copies, stable=True)
            memory.scatter(slots, pages[:count], range(memory.layer_count), stream)

        return self._timed(count * length, work)

    def _timed(self, byte_count: int, work: Callable[[Stream], None]) -> float:
        seconds = []
        for _ in range(ROUNDS + 1):  # the first one compiles, or finds its way into caches
            begin = self._stream.record(timing=True)
            work(self._stream)
            end = self._stream.record(timing=True)
            end.synchronize()
            seconds.append(end.seconds_since(begin))
        return median(seconds[1:]) / byte_count
