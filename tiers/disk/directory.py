"""The directory of a disk tier: its format file, its folders, who may enter, how much it holds.

format.json          store identity and unit, fixed at creation
segments/            <serial>.seg
index/               data.mdb
index.damaged/       an index that was given up, for a person to look at
index.loading        there while the index is read at a start
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

from kvstore.core.entropy import random_token
from kvstore.core.errors import TierError
from kvstore.tiers.disk.layout import STORE_ID_BYTES, VERSION, VERSIONS_READ

FORMAT, SEGMENTS, INDEX = "format.json", "segments", "index"
ASIDE, LOADING = "index.damaged", "index.loading"
OURS = {FORMAT, FORMAT + ".new", SEGMENTS, INDEX, ASIDE, LOADING}
NEIGHBOURS = {
    "LOCK", "spaces.json", "spaces.new", "spaces.copy.json", "spaces.copy.new", "epochs",
    "epochs.copy",
    "epochs.new", "epochs.copy.new", "epochs.damaged", "epochs.copy.damaged", "lost+found",
}  # fmt: skip

UNIT_SHIFT_MIN, UNIT_SHIFT_MAX = 16, 30
UNITS_WANTED = 256


class Format(NamedTuple):
    """What never changes about a directory."""

    store_id: bytes
    unit_shift: int


def unit_shift(capacity_bytes: int) -> int:
    """log2 of the smallest segment's size: about 1/256 of all."""
    wanted = max(1, capacity_bytes // UNITS_WANTED).bit_length() - 1
    return min(max(wanted, UNIT_SHIFT_MIN), UNIT_SHIFT_MAX)


def check_private(path: Path) -> None:
    """Raises TierError unless `path` is a directory of this user that others cannot enter."""
    try:
        status = path.lstat()
    except OSError as error:
        raise TierError(
            f"tiers.disk.path {path} cannot be opened ({error.strerror}); create it with: "
            f"mkdir -m 700 {path}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise TierError(f"tiers.disk.path {path} is not a directory itself; name a directory")
    if status.st_uid != os.geteuid():
        raise TierError(
            f"tiers.disk.path {path} belongs to uid {status.st_uid}, the daemon runs as "
            f"{os.geteuid()}; use a directory of the daemon's own user"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TierError(
            f"tiers.disk.path {path} has mode {stat.S_IMODE(status.st_mode):04o}, others can enter "
            f"it; make it private with: chmod 700 {path}"
        )


def check_empty(path: Path) -> None:
    """Raises TierError if a directory without format file holds what is not a tier's."""
    others = sorted(set(os.listdir(path)) - OURS - NEIGHBOURS)
    if others:
        raise TierError(
            f"tiers.disk.path {path} holds other files ({others[0]}); name an empty directory"
        )


def make_folders(path: Path) -> None:
    for name in (SEGMENTS, INDEX):
        folder = path / name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise TierError(f"{folder} is not a folder of the disk tier; remove it")
        folder.mkdir(mode=0o700, exist_ok=True)


def close_modes(path: Path) -> list[str]:
    """Takes others' access to files and folders away; says which. Raises TierError for links."""
    changed = []
    for place in [path / FORMAT, *(path / SEGMENTS, path / INDEX), *_below(path)]:
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.geteuid():
            raise TierError(f"{place} is a link or another user's; remove it")
        if status.st_mode & 0o077:
            os.chmod(place, 0o700 if stat.S_ISDIR(status.st_mode) else 0o600)
            changed.append(f"{place} could be read by others; its mode was corrected")
    return changed


def _below(path: Path) -> list[Path]:
    folders = [path / SEGMENTS, path / INDEX]
    return [folder / name for folder in folders if folder.is_dir() for name in os.listdir(folder)]


def read_format(path: Path) -> Format | None:
    """None if there is none, or none that makes sense; raises TierError for a later version."""
    try:
        fd = os.open(path / FORMAT, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TierError(f"{path / FORMAT} cannot be read ({error.strerror}); remove it") from error
    with os.fdopen(fd, "rb") as file:
        raw = file.read(4096)
    try:
        known = json.loads(raw)
        version, shift = known["version"], int(known["unit_bytes"]).bit_length() - 1
        store_id = bytes.fromhex(known["store_id"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    check_version(path, version)
    if len(store_id) != STORE_ID_BYTES or not UNIT_SHIFT_MIN <= shift <= UNIT_SHIFT_MAX:
        return None
    return Format(store_id, shift)


def check_version(path: Path, version: object) -> None:
    """Raises TierError for a format that this program cannot take over."""
    if version not in VERSIONS_READ:
        known = " and ".join(map(str, VERSIONS_READ))
        raise TierError(
            f"{path} has format {version}, this daemon knows {known}; use the daemon that made "
            "it or an empty directory"
        )


def write_format(path: Path, made: Format) -> None:
    """On the medium when it returns."""
    text = json.dumps(
        {"version": VERSION, "store_id": made.store_id.hex(), "unit_bytes": 1 << made.unit_shift}
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path / f"{FORMAT}.new", flags, 0o600)
    try:
        os.write(fd, text.encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(path / f"{FORMAT}.new", path / FORMAT)
    sync_folder(path)


def new_format(capacity_bytes: int) -> Format:
    return Format(random_token(STORE_ID_BYTES), unit_shift(capacity_bytes))


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def directory_bytes(path: Path) -> tuple[int, int]:
    """Bytes on the medium: of the index, and of everything else."""
    index = rest = 0
    for folder, _, files in os.walk(path):
        here = sum(_bytes_of(Path(folder, name)) for name in [".", *files])
        if Path(folder) == path / INDEX:
            index += here
        else:
            rest += here
    return index, rest


def index_bytes(path: Path) -> int:
    """Bytes of the index on the medium; 0 if there is none."""
    return _bytes_of(path / INDEX / "data.mdb")


def _bytes_of(place: Path) -> int:
    try:
        status = place.lstat()
    except FileNotFoundError:
        return 0
    return max(status.st_size, status.st_blocks * 512)


def move_aside(path: Path) -> None:
    """Puts a damaged index out of the way; the last one is kept."""
    remove_aside(path)
    os.replace(path / INDEX, path / ASIDE)
    make_folders(path)


def empty_index(path: Path) -> None:
    shutil.rmtree(path / INDEX)
    make_folders(path)


def remove_aside(path: Path) -> None:
    shutil.rmtree(path / ASIDE, ignore_errors=True)
