"""Two ways to read: straight into the target, or through memory of huge pages and a copy.

Targets are pools of 4 KiB pages, scattered over memory. Some devices and hypervisors take these
so slowly that one more copy is the quicker way (measured: 1.0 against 1.3 GB/s on a virtual disk);
others don't. So both are measured, and the slower one is tried again now and then.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np

from kvstore.tiers.disk.io import PAGE

STRAIGHT, COPIED = 0, 1
TRY_EVERY = 16
KEPT_SHARE = 0.8
"""Of what was known about a way when it is measured again."""
HUGE_PAGE = 2 << 20


class Quickest:
    """Which way is the quicker one at present; any thread may ask and tell."""

    def __init__(self) -> None:
        self._byte_seconds = [0.0, 0.0]
        self._count = 0

    def choose(self) -> int:
        """The quicker way, or the other one's turn to be measured. One not measured is next."""
        self._count += 1
        straight, copied = self._byte_seconds
        best = STRAIGHT if straight <= copied else COPIED
        return 1 - best if self._count % TRY_EVERY == 0 else best

    def took(self, way: int, byte_count: int, seconds: float) -> None:
        latest = seconds / byte_count
        known = self._byte_seconds[way] or latest
        self._byte_seconds[way] = KEPT_SHARE * known + (1 - KEPT_SHARE) * latest


class _Huge(threading.local):
    def __init__(self) -> None:
        memory = mmap.mmap(-1, 2 * HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        self.buffer = whole[start : start + HUGE_PAGE]
        self.buffer[::PAGE] = 0


_huge = _Huge()


def huge_buffer() -> np.ndarray:
    """HUGE_PAGE bytes of this thread in one huge page, if the machine has any."""
    return _huge.buffer
