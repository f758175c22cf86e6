"""Every call of the disk tier that touches the medium, in one place, so that tests can break it.

Buffers are whole pages in aligned memory, offsets multiples of a page: what O_DIRECT asks for.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PAGE = 4096
Pages = Sequence[Any]
"""Arrays (uint8) of whole pages in aligned memory."""
BOUNCE_BYTES = 1 << 20
VECTOR_MAX = 512
"""Buffers in one call; the kernel takes 1,024."""

OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class FileIO:
    """The calls themselves; a test hands in a subclass that fails, lies or waits."""

    def open(self, name: str, flags: int, directory_fd: int) -> int:
        return os.open(name, flags | OPEN_FLAGS, 0o600, dir_fd=directory_fd)

    def make_direct(self, fd: int) -> None:
        """Transfers past the page cache from now on; raises OSError where that is refused."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)

    def allocate(self, fd: int, length: int) -> None:
        os.posix_fallocate(fd, 0, length)

    def pwritev(self, fd: int, buffers: Pages, offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Pages, offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def unlink(self, name: str, directory_fd: int) -> None:
        os.unlink(name, dir_fd=directory_fd)

    def rename(self, old: str, new: str, directory_fd: int) -> None:
        os.rename(old, new, src_dir_fd=directory_fd, dst_dir_fd=directory_fd)

    def free_bytes(self, fd: int) -> int:
        """Free space of the file system that others than root may use."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def commit(self, transaction: Any) -> None:
        """Makes a transaction of the index durable."""
        transaction.commit()

    def write_all(self, fd: int, buffers: Pages, offset: int) -> None:
        _all(self.pwritev, fd, buffers, offset)

    def read_all(self, fd: int, buffers: Pages, offset: int) -> None:
        """Fills the buffers; raises OSError where the file ends before."""
        _all(self.preadv, fd, buffers, offset)


def _all(
    call: Callable[[int, Pages, int], int],
    fd: int,
    buffers: Pages,
    offset: int,
) -> None:
    """Repeats a transfer that was cut short until all is moved."""
    for start in range(0, len(buffers), VECTOR_MAX):
        left = list(buffers[start : start + VECTOR_MAX])
        while left:
            moved = call(fd, left, offset)
            if moved <= 0:
                raise OSError(errno.EIO, "the file ends too early")
            offset += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if moved:
                left[0] = left[0][moved:]


def aligned(length: int) -> np.ndarray:
    """Zeroed memory (uint8) that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)


def is_aligned(buffer: np.ndarray) -> bool:
    return buffer.ctypes.data % PAGE == 0


def whole_pages(length: int) -> int:
    return -(-length // PAGE) * PAGE


class _Bounce(threading.local):
    def __init__(self) -> None:
        self.buffer = aligned(BOUNCE_BYTES)


_bounce = _Bounce()


def bounce() -> np.ndarray:
    """Aligned memory of this thread, to be used before the next call of anything here."""
    return _bounce.buffer
