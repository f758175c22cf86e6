"""Epochs file: what makes a space's older blocks void, kept so that no crash brings them back.

For each space: its current epoch, and a clear mark, the generation below which its blocks are
void. The table is written twice, each copy checksummed, replaced whole and synced before a call
returns; either copy alone is enough.

    magic, sequence, flags, count, then (space, epoch, clear mark) each, then xxh3_128 of all that
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvstore.core.errors import TierError

NAMES = ("epochs", "epochs.copy")

_MAGIC = b"KVEPOCH\x01"
_HEAD = struct.Struct("<8sQII")
_ENTRY = struct.Struct("<32sQQ")
_VOID = 1
_SUM_BYTES = 16


class Mark(NamedTuple):
    """What a block of a space must not be older than."""

    epoch: int = 0
    clear_mark: int = 0


class _Table(NamedTuple):
    sequence: int
    all_void: bool
    marks: dict[bytes, Mark]


class EpochsFile:
    """Epochs and clear marks of all spaces, in `directory`.

    `all_void` is True when no sound copy was found, and stays so through crashes until
    `confirm_void`: which blocks are void is not known then, so the caller drops all of them.
    `created` tells a first start, where no file was there, from damage. Raises
    TierError when the directory cannot be written; the change then counts neither here nor, unless
    one copy got through, after a restart.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self.notes: list[str] = []
        raws = [self._read(name) for name in NAMES]
        tables = [None if raw is None else _parse(raw) for raw in raws]
        sound = [table for table in tables if table is not None]
        self.created = all(raw is None for raw in raws)
        for name, raw, table in zip(NAMES, raws, tables, strict=True):
            if raw is not None and table is None:
                self._set_aside(name)
        best = max(sound, key=lambda table: table.sequence, default=_Table(0, True, {}))
        self._sequence, self.all_void, self._marks = best
        if any(table != best for table in tables):
            self._write(self._marks, self.all_void)

    def mark(self, space: bytes) -> Mark:
        return self._marks.get(space, Mark())

    def epoch(self, space: bytes) -> int:
        return self.mark(space).epoch

    def clear_mark(self, space: bytes) -> int:
        return self.mark(space).clear_mark

    @property
    def generation_floor(self) -> int:
        """Generations of new blocks start here, so that no clear mark of old covers them."""
        return max((mark.clear_mark for mark in self._marks.values()), default=0)

    def is_void(self, space: bytes, epoch: int, generation: int) -> bool:
        """Whether a stored block must not come back."""
        mark = self.mark(space)
        return self.all_void or epoch != mark.epoch or generation < mark.clear_mark

    def bump(self, space: bytes) -> int:
        """Starts a new epoch of a space, durably; returns it."""
        mark = self.mark(space)
        self._set({space: mark._replace(epoch=mark.epoch + 1)})
        return mark.epoch + 1

    def clear(self, spaces: list[bytes], below_generation: int) -> None:
        """Voids, durably, the blocks of these spaces with lower generations."""
        changes = {}
        for space in spaces:
            mark = self.mark(space)
            changes[space] = mark._replace(clear_mark=max(mark.clear_mark, below_generation))
        self._set(changes)

    def confirm_void(self) -> None:
        """The caller has dropped every block: ends `all_void`, durably."""
        if self.all_void:
            self._write(self._marks, False)
            self.all_void = False

    def _set(self, changes: dict[bytes, Mark]) -> None:
        marks = {**self._marks, **changes}
        self._write(marks, self.all_void)
        self._marks = marks

    def _write(self, marks: dict[bytes, Mark], all_void: bool) -> None:
        # A write that fails half-way has used up its number: the next one must win over it.
        self._sequence += 1
        raw = _pack(_Table(self._sequence, all_void, marks))
        try:
            for name in NAMES:
                self._replace(name, raw)
        except OSError as error:
            raise TierError(
                f"{self._directory / NAMES[0]} cannot be written ({error.strerror}); "
                "make the directory writable and free some space"
            ) from error

    def _replace(self, name: str, raw: bytes) -> None:
        """One copy, old or new at every moment, on the medium before this returns."""
        temporary = self._directory / f"{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            view = memoryview(raw)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, self._directory / name)
        self._sync_directory()

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read(self, name: str) -> bytes | None:
        try:
            fd = os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TierError(
                f"{self._directory / name} cannot be read ({error.strerror}); "
                "correct its permissions or remove it"
            ) from error
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def _set_aside(self, name: str) -> None:
        """Keeps a damaged copy for a person to look at; the last one of each name."""
        aside = self._directory / f"{name}.damaged"
        os.replace(self._directory / name, aside)
        self.notes.append(f"{self._directory / name} was damaged and moved to {aside}")


def _pack(table: _Table) -> bytes:
    flags = _VOID if table.all_void else 0
    parts = [_HEAD.pack(_MAGIC, table.sequence, flags, len(table.marks))]
    parts += [_ENTRY.pack(space, *mark) for space, mark in sorted(table.marks.items())]
    raw = b"".join(parts)
    return raw + xxhash.xxh3_128_digest(raw)


def _parse(raw: bytes) -> _Table | None:
    body = raw[:-_SUM_BYTES]
    if len(body) < _HEAD.size or xxhash.xxh3_128_digest(body) != raw[-_SUM_BYTES:]:
        return None
    magic, sequence, flags, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or len(body) != _HEAD.size + count * _ENTRY.size:
        return None
    marks = {
        space: Mark(epoch, clear_mark)
        for space, epoch, clear_mark in _ENTRY.iter_unpack(body[_HEAD.size :])
    }
    return _Table(sequence, bool(flags & _VOID), marks)
