"""Checks the directory of a disk tier that no daemon uses, explains what is wrong, and mends it.

What is damaged for good is dropped, so that what is left is right: a miss instead of an error.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.core.errors import TierError
from kvstore.tiers.disk import directory
from kvstore.tiers.disk.index import Changes, pack_key
from kvstore.tiers.disk.inspection import (
    ANY_SIZE,
    BadBlock,
    Finding,
    Inspection,
    Progress,
)
from kvstore.tiers.disk.io import PAGE, FileIO, aligned
from kvstore.tiers.disk.layout import CELLS, pack_cell, pack_header
from kvstore.tiers.disk.loading import end_probation
from kvstore.tiers.disk.opening import Opening
from kvstore.tiers.epochs import EpochsFile

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

__all__ = ["Checked", "Finding", "fsck", "inspect"]


class Checked(NamedTuple):
    """What a look at a directory found, and what it could not look into."""

    findings: list[Finding]
    unchecked: dict[str, int]
    """Encrypted blocks without a key, by the id of the key they need."""


def fsck(
    path: Path, repair: bool = False, progress: Progress = lambda done, total: None
) -> list[Finding]:
    """The findings of `inspect`, without keys."""
    return inspect(path, repair, progress).findings


def inspect(
    path: Path,
    repair: bool = False,
    progress: Progress = lambda done, total: None,
    vault: Vault | None = None,
) -> Checked:
    """Everything that is wrong; with `repair`, mended where that can be, and checked again.

    The caller holds the lock of the directory. Raises TierError if it cannot be looked at, or
    where a repair would lose encrypted blocks because their key is not given.
    """
    if not path.is_dir():
        raise TierError(f"{path} is no directory; name the directory of a disk tier")
    seen = Inspection(path, progress, vault)
    unchecked = {f"{key:08x}": count for key, count in seen.missing.items() if key}
    if not repair or not seen.findings:
        return Checked(seen.findings, unchecked)
    if unchecked:
        raise TierError(
            f"{path} holds blocks that need keys which are not given ({', '.join(unchecked)}), and "
            "a repair would drop them; pass --key-file with these keys"
        )
    _mend(seen)
    left = {(f.kind, f.where) for f in Inspection(path, progress, vault).findings}
    mended = [f._replace(repaired=(f.kind, f.where) not in left) for f in seen.findings]
    return Checked(mended, unchecked)


def _mend(seen: Inspection) -> None:
    for place in seen.open_modes:
        os.chmod(place, 0o700 if stat.S_ISDIR(place.lstat().st_mode) else 0o600)
    if any(finding.kind == "epochs" for finding in seen.findings):
        EpochsFile(seen.path)
    if seen.index_is_lost and (seen.path / directory.INDEX / "data.mdb").exists():
        directory.move_aside(seen.path)
    _mend_pages(seen)
    with suppress(TierError):  # then a start would not get further either: the damage remains
        _start(seen)


def _start(seen: Inspection) -> None:
    """Everything that a start puts right; and the entries of blocks that are lost."""
    opened = Opening(seen.path, ANY_SIZE, 0, False, FileIO(), seen.vault).run()
    try:
        lost = [pack_key(b.segment.serial, b.slot) for b in seen.bad_blocks if not _can_mend(b)]
        if lost and not opened.problem:
            opened.index.commit(Changes(deletes=lost), None)
    finally:
        opened.books.close()
        opened.index.close()
        opened.files.close()
    end_probation(seen.path)


def _can_mend(block: BadBlock) -> bool:
    return block.payload_is_right


def _mend_pages(seen: Inspection) -> None:
    """Headers and cells, in place."""
    assert seen.format is not None or not seen.bad_blocks, "blocks were found without a format"
    io, store_id = FileIO(), seen.format.store_id if seen.format is not None else b""
    for block in seen.bad_blocks:
        geometry = block.segment.geometry
        assert geometry is not None, "the segment is understood"
        page = aligned(geometry.header_bytes)
        if _can_mend(block):
            packed = pack_header(
                block.record, store_id, block.segment.serial, block.slot, len(page), seen.vault
            )
            page[:] = np.frombuffer(packed, np.uint8)
        _write(io, seen.path / directory.SEGMENTS / block.segment.name, page,
               geometry.header_at(block.slot))  # fmt: skip
    for segment, sequence in seen.bad_cells:
        page = aligned(PAGE)
        page[:] = np.frombuffer(pack_cell(store_id, segment.serial, sequence), np.uint8)
        for number in CELLS:
            _write(io, seen.path / directory.SEGMENTS / segment.name, page, number * PAGE)


def _write(io: FileIO, path: Path, page: np.ndarray, at: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        io.write_all(fd, [page], at)
        io.fdatasync(fd)
    finally:
        os.close(fd)
