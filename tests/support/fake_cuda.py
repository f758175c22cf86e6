"""`fake_driver`: a CUDA driver without a GPU, compiled when it is first asked for; needs gcc.

Device memory is this machine's, so that all of the HBM tier runs in tests as it does on a GPU. What
it does in other ways is said at the top of fake_cuda.c, with the variables that change it.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

from kvstore.cuda.driver import Driver

SOURCE = Path(__file__).parent / "fake_cuda.c"
_kept: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def library() -> Path:
    """The compiled driver, under the name that programs look for."""
    folder = tempfile.TemporaryDirectory(prefix="kvstore-fake-cuda-")
    _kept.append(folder)
    path = Path(folder.name) / "libcuda.so.1"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lpthread"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"gcc cannot compile {SOURCE}: {result.stderr}"
    return path


def fake_driver() -> Driver:
    return Driver(str(library()))
