"""Plain transfers of a file past the page cache: what a disk tier is held to."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from kvstore.bench.subject import MIB
from kvstore.core.errors import ConfigError

GROUP_BLOCKS = 32
THREADS = (1, 2, 4)
REQUEST_BYTES = (MIB, 4 * MIB, 16 * MIB)


class DeviceFile:
    """A preallocated file of `block_count` MiB in the tier's own folder."""

    def __init__(self, path: Path, block_count: int) -> None:
        self._path, self._size = path, block_count * MIB
        self._target = _pages(self._size)
        self._source = _pages(GROUP_BLOCKS * MIB)
        # Bytes that no layer below could compress or share.
        self._source[:] = np.frombuffer(random.Random(1).randbytes(len(self._source)), np.uint8)
        self._pool = ThreadPoolExecutor(max(THREADS))
        self._fd = -1
        self.write_fresh()

    def __enter__(self) -> DeviceFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        self._remove()

    def _remove(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._path.unlink(missing_ok=True)
            self._fd = -1

    def prepare_fresh(self) -> None:
        """Removes the file, so that the next one is made of new space."""
        self._remove()

    def write_fresh(self) -> None:
        """Makes the file and writes it: space that was never written costs more."""
        self._remove()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{self._path.parent} takes no direct transfers ({error.strerror}); name a "
                "directory on another file system with --path"
            ) from error
        os.posix_fallocate(self._fd, 0, self._size)
        self.write()
        os.fsync(self._fd)

    def write(self) -> None:
        """Groups of 32 MiB, 1 MiB a call, each group followed by fdatasync, on one thread."""
        for at in range(0, self._size, GROUP_BLOCKS * MIB):
            for i in range(min(GROUP_BLOCKS, (self._size - at) // MIB)):
                os.pwritev(self._fd, [self._source[i * MIB : (i + 1) * MIB].data], at + i * MIB)
            os.fdatasync(self._fd)

    def read(self, threads: int, request_bytes: int) -> None:
        """All of it, once, into memory that is there."""
        starts = iter(range(0, self._size, request_bytes))

        def work() -> None:
            for at in iter(lambda: next(starts, None), None):
                os.preadv(self._fd, [self._target[at : at + request_bytes].data], at)

        for done in [self._pool.submit(work) for _ in range(threads)]:
            done.result()


def read_actions(device: DeviceFile) -> dict[str, Callable[[], None]]:
    """Every number of threads with every size of requests."""
    return {
        f"device_read_{threads}x{size // MIB}mib": partial(device.read, threads, size)
        for threads, size in itertools.product(THREADS, REQUEST_BYTES)
    }


def _pages(size: int) -> np.ndarray:
    """Memory that begins at a page and is all there."""
    pages = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    pages[:] = 1
    return pages
