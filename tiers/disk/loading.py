"""Reads the whole index at a start, warily: a damaged one may be wrong, or kill who reads it.

A marker file stands while it is read, and until a first transaction has shown that it can be
written, too. Where a start finds one, an earlier life died in between, so the index is read in a
process of its own first. A damaged index is moved aside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import lmdb

from kvstore.core.errors import TierError
from kvstore.tiers.disk import directory, found
from kvstore.tiers.disk.found import Found
from kvstore.tiers.disk.index import DiskIndex, Meta, ends_too_early
from kvstore.tiers.disk.layout import Geometry

CHECK_SECONDS = 600


class Loaded(NamedTuple):
    """All that a sound index says."""

    meta: Meta
    segments: dict[int, Geometry]
    blocks: Found


def load(path: Path, index: DiskIndex, notes: list[str]) -> Loaded | None:
    """What the index says, left open; None if there is none or it was damaged and moved aside."""
    if not (path / directory.INDEX / "data.mdb").exists():
        return None
    marker = path / directory.LOADING
    is_risky = marker.exists() or ends_too_early(path / directory.INDEX)
    loaded = None
    if not is_risky or is_sound(path, index):
        _touch(marker)
        loaded = read(index)
    if loaded is None:
        index.close()
        directory.move_aside(path)
        end_probation(path)
        notes.append(
            f"the index in {path / directory.INDEX} was damaged and moved to "
            f"{path / directory.ASIDE}; it was made anew from the segments"
        )
    return loaded


def end_probation(path: Path) -> None:
    """The index works: the next start may read it without ado."""
    with suppress(OSError):  # it only costs the next start some time
        (path / directory.LOADING).unlink(missing_ok=True)


def read(index: DiskIndex) -> Loaded | None:
    """None if anything is wrong with it."""
    try:
        index.open()
        meta, segments, blocks = index.meta(), index.segments(), index.blocks()
    except (lmdb.Error, TierError, OSError):
        return None
    if meta is None or segments is None or blocks is None:
        return None
    return Loaded(meta, segments, found.of_entries(*blocks))


def is_sound(path: Path, index: DiskIndex) -> bool:
    """Whether another process can read all of the index and finds nothing wrong."""
    command = [sys.executable, "-I", "-m", "kvstore.tiers.disk.index_check", str(path)]
    command += [str(index.map_bytes), index.store_id.hex()]
    try:
        result = subprocess.run(command, capture_output=True, timeout=CHECK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return result.returncode == 0


def _touch(marker: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(marker, flags, 0o600))
