"""Reads the whole index at a start, warily: a damaged one may be wrong, or kill who reads it.

A marker file stands while it is read, and until a first transaction has shown that it can be
written, too. Where a start finds one, an earlier life died in between, so the index is read in a
process of its own first. A damaged index is moved aside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import lmdb

from kvstore.core.errors import TierError
from kvstore.tiers.disk import directory, found
from kvstore.tiers.disk.entries import key_id_of, open_record
from kvstore.tiers.disk.found import Found
from kvstore.tiers.disk.index import CHECK_BYTES, DiskIndex, Meta, ends_too_early
from kvstore.tiers.disk.layout import Geometry

CHECK_SECONDS = 600


class Loaded(NamedTuple):
    """All that a sound index says."""

    meta: Meta
    segments: dict[int, Geometry]
    blocks: Found
    locked: list[bytes]
    """Keys of encrypted blocks that cannot be opened."""
    missing: Counter[int]
    """Which keys these need, and for how many; 0 where none helps: in clear, or not genuine."""


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
        sealed = index.sealed_blocks()
    except (lmdb.Error, TierError, OSError):
        return None
    if meta is None or segments is None or blocks is None or sealed is None:
        return None
    if sealed[0] and not set(sealed[0]).isdisjoint(blocks[0]):
        return None
    opened, locked, missing = _unlock(index, *sealed)
    if index.vault is None:
        return Loaded(meta, segments, found.of_entries(*blocks), locked, missing)
    # Anybody who can write the file can write entries in clear.
    missing[0] += len(blocks[0])
    return Loaded(meta, segments, opened, [*locked, *blocks[0]], +missing)


def _unlock(
    index: DiskIndex, keys: list[bytes], values: list[bytes]
) -> tuple[Found, list[bytes], Counter[int]]:
    """Opens encrypted entries; those that do not open by themselves, and what they need."""
    vault, opened, bodies = index.vault, [], []
    locked: list[bytes] = []
    missing: Counter[int] = Counter()
    for key, value in zip(keys, values, strict=True):
        body, needed = None, key_id_of(value)
        if vault is not None and vault.has(needed):
            place = index.place(int.from_bytes(key[:4], "big"), int.from_bytes(key[4:], "big"))
            body = open_record(value[:-CHECK_BYTES], vault, place)
            needed = key_id_of(body) if body is not None else 0
        if vault is not None and body is not None and vault.has(needed):
            opened.append(key)
            bodies.append(body)
        else:
            locked.append(key)
            missing[needed] += 1
    return found.of_sealed(opened, bodies), locked, missing


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
