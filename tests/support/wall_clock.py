"""`WallClock`: the wall clock of a daemon, set forward and back while it runs. Needs gcc."""

from __future__ import annotations

import functools
import mmap
import struct
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "clock_shim.c"
_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def library() -> Path:
    """The compiled shim."""
    folder = tempfile.TemporaryDirectory(prefix="kvstore-shim-")
    _kept.append(folder)
    path = Path(folder.name) / "clock_shim.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"gcc cannot compile {SOURCE}: {result.stderr}"
    return path


class WallClock:
    """`environ` is what the daemon's process needs."""

    def __init__(self, control: Path) -> None:
        control.write_bytes(bytes(8))
        with control.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.environ = {"LD_PRELOAD": str(library()), "CLOCK_SHIM_CONTROL": str(control)}

    def set(self, seconds: int) -> None:
        """So far from the right time from now on."""
        struct.pack_into("<q", self._map, 0, seconds)
