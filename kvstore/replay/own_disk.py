"""A temporary directory on a disk, for the disk tiers of demo, replay and benchmarks.

Never in memory: a tier there would measure nothing and take twice the memory. Directories left by
a process that was itself killed are swept away by the next.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.core.config import MIB
from kvstore.core.config_disk import DISK_BYTES_MIN, is_network_file_system
from kvstore.core.errors import ConfigError
from kvstore.core.machine import LocalMachine, Machine
from kvstore.core.sizes import Size, format_bytes
from kvstore.replay.own_daemon import PREFIX, sweep

MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@contextmanager
def own_disk(path: Path | None = None, machine: Machine | None = None) -> Iterator[Path]:
    """A directory of our own in `path`, or in the first place that suits; removed at the end."""
    machine = machine or LocalMachine()
    where = _checked(path, machine) if path else default_place(machine)
    sweep(where)
    directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def default_place(machine: Machine | None = None) -> Path:
    """The user's cache or /var/tmp, whichever is there and no memory."""
    machine = machine or LocalMachine()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for candidate in (cache, Path("/var/tmp")):
        if _fault(candidate, machine) is None:
            return candidate.absolute()
    raise ConfigError(f"neither {cache} nor /var/tmp is on a local disk; name a directory that is")


def _checked(path: Path, machine: Machine) -> Path:
    if fault := _fault(path, machine):
        raise ConfigError(f"{path} {fault}; name a directory on a local disk")
    return path.absolute()


def _fault(path: Path, machine: Machine) -> str | None:
    """Why a disk tier would be wrong there."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return "is no directory that this user may write to"
    kind = machine.file_system_kind(str(path))
    if kind in MEMORY_KINDS:
        return "is memory"
    return "is on a network file system" if is_network_file_system(kind) else None


def fitting_disk_bytes(directory: Path, wanted: int, least: int = DISK_BYTES_MIN) -> int:
    """`wanted`, or what half of the free space allows; raises ConfigError if less than `least`."""
    free = LocalMachine().file_system_free_bytes(str(directory))
    fits = min(wanted, free // 2)
    if fits < least:
        raise ConfigError(
            f"{directory} has {format_bytes(free)} free, and half of that is less than the "
            f"{format_bytes(least)} needed; free some or name another directory"
        )
    return fits // MIB * MIB


def disk_section(directory: Path, size_bytes: int, **more: Any) -> dict[str, Any]:
    """`[tiers.disk]` of a daemon of our own: it lives too short for a budget, or to learn."""
    return {
        "path": str(directory / "tier"), "size": str(Size(size_bytes)), "reserve": "1MiB",
        "endurance_dwpd": 0.0, "admission": "all", **more,
    }  # fmt: skip
