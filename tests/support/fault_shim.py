"""`FaultShim`: file calls of a daemon that fail, wait or do nothing, switched while it runs.

Works on everything in the process, LMDB's own calls in C too: a library that is preloaded stands
before libc. It is compiled when it is first asked for, so a test with it needs gcc.
"""

from __future__ import annotations

import errno
import functools
import mmap
import struct
import subprocess
import tempfile
import time
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).parent / "fault_shim.c"
HANG, PRETEND = -1, -2
EIO, ENOSPC = errno.EIO, errno.ENOSPC


class Call(IntEnum):
    READ = 0
    WRITE = 1
    SYNC = 2
    ALLOCATE = 3


class File(IntEnum):
    SEGMENT = 0
    INDEX = 1
    META = 2
    """The index's two first pages, which say what counts; of writes only."""
    OTHER = 3


CELL = struct.Struct("<iiii")  # as in the source: action, left, hits, inside


@functools.cache
def library() -> Path:
    """The compiled shim."""
    folder = tempfile.TemporaryDirectory(prefix="kvstore-shim-")
    _kept.append(folder)
    path = Path(folder.name) / "fault_shim.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"gcc cannot compile {SOURCE}: {result.stderr}"
    return path


_kept: list[tempfile.TemporaryDirectory[str]] = []


class FaultShim:
    """Faults of one daemon's files below `under`; `environ` is what its process needs."""

    def __init__(self, under: Path, control: Path) -> None:
        control.parent.mkdir(parents=True, exist_ok=True)
        control.write_bytes(bytes(CELL.size * len(Call) * len(File)))
        with open(control, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.environ = {
            "LD_PRELOAD": str(library()),
            "FAULT_SHIM_CONTROL": str(control),
            "FAULT_SHIM_UNDER": f"{under}/",
        }

    def set(self, call: Call, file: File, action: int, calls: int = -1) -> None:
        """From now on such calls fail with the errno `action`, hang or pretend, `calls` of them."""
        at = self._at(call, file)
        struct.pack_into("<i", self._map, at, 0)
        struct.pack_into("<ii", self._map, at + 4, calls, 0)
        struct.pack_into("<i", self._map, at, action)

    def clear(self) -> None:
        """All calls are as they should be again; those that hang go on."""
        for call in Call:
            for file in File:
                struct.pack_into("<i", self._map, self._at(call, file), 0)

    def hits(self, call: Call, file: File) -> int:
        """Calls that were hit since the fault was set."""
        return self._cell(call, file)[2]

    def hanging(self, call: Call, file: File) -> int:
        """Calls that hang at present."""
        return self._cell(call, file)[3]

    def wait(self, call: Call, file: File, hits: int = 1, seconds: float = 20.0) -> None:
        """Waits until so many calls were hit: a fault that nothing ran into tests nothing."""
        end = time.monotonic() + seconds
        while self.hits(call, file) < hits:
            assert time.monotonic() < end, f"no {call.name} of a {file.name} came in time"
            time.sleep(0.005)

    def _cell(self, call: Call, file: File) -> tuple[int, ...]:
        return CELL.unpack_from(self._map, self._at(call, file))

    def _at(self, call: Call, file: File) -> int:
        return CELL.size * (call * len(File) + file)
