"""Epochs file: what makes a space's older blocks void, kept so that no crash brings them back.

For each space: its current epoch, and a clear mark, the generation below which its blocks are
void. The table is written twice, each copy checksummed, replaced whole and synced before a call
returns; either copy alone is enough.

    magic, sequence, flags, count, origin, taken over: origin and sequence,
    then (space, epoch, clear mark) each, then xxh3_128 of all that

The file of a directory that is no longer used is taken over by that of another one. `origin`, drawn
when a file is first made, and the sequence tell whether that was done already: no other file, and
no other state of the same, has both.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvstore.core.entropy import random_token
from kvstore.core.errors import TierError

NAMES = ("epochs", "epochs.copy")

_MAGIC = b"KVEPOCH\x02"
_HEAD = struct.Struct("<8sQII16s16sQ")
_MAGIC_BEFORE = b"KVEPOCH\x01"  # had no origin
_MAGIC_ANY = _MAGIC[:-1]
_HEAD_BEFORE = struct.Struct("<8sQII")
_ENTRY = struct.Struct("<32sQQ")
_VOID = 1
_SUM_BYTES = 16
_NO_ORIGIN = bytes(16)


class Mark(NamedTuple):
    """What a block of a space must not be older than."""

    epoch: int = 0
    clear_mark: int = 0


class _State(NamedTuple):
    """Which file, and which of its states."""

    origin: bytes = _NO_ORIGIN
    sequence: int = 0


class _Table(NamedTuple):
    sequence: int
    all_void: bool
    marks: dict[bytes, Mark]
    origin: bytes
    taken_over: _State = _State()

    @property
    def state(self) -> _State:
        return _State(self.origin, self.sequence)


class _Copy(NamedTuple):
    """A copy as found; `table` is None if it is damaged."""

    path: Path
    table: _Table | None


class EpochsFile:
    """Epochs and clear marks of all spaces, in `directory`.

    `all_void` is True when no sound copy was found, and stays so through crashes until
    `confirm_void`: which blocks are void is not known then, so the caller drops all of them.
    `created` tells a first start, where no file was there, from damage. One thread at a time
    changes marks; any other may read them meanwhile. Raises TierError when the directory cannot be
    written; the change then counts neither here nor, unless one copy got through, after a restart.
    """

    def __init__(self, directory: str | Path, first: _Table | None = None) -> None:
        """`first` is what a file that is not there yet begins with."""
        self._directory = Path(directory)
        self.notes: list[str] = []
        copies = _read_copies(self._directory)
        self.created = not copies and first is None
        for copy in copies:
            if copy.table is None:
                self._set_aside(copy.path)
        best = _best(copies) if copies else first
        if best is None or best.origin == _NO_ORIGIN:
            unknown = best or _Table(0, True, {}, _NO_ORIGIN)
            best = unknown._replace(origin=random_token(len(_NO_ORIGIN)))
        self._table = best
        if [copy.table for copy in copies] != [best] * len(NAMES):
            self._write(best)

    @property
    def all_void(self) -> bool:
        return self._table.all_void

    def mark(self, space: bytes) -> Mark:
        return self._table.marks.get(space, Mark())

    def epoch(self, space: bytes) -> int:
        return self.mark(space).epoch

    def clear_mark(self, space: bytes) -> int:
        return self.mark(space).clear_mark

    @property
    def generation_floor(self) -> int:
        """Generations of new blocks start here, so that no clear mark of old covers them."""
        return max((mark.clear_mark for mark in self._table.marks.values()), default=0)

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
            self._write(self._table._replace(all_void=False))

    def take_over(self, source: str | Path) -> None:
        """Joins in what the file of `source` holds, and removes that one.

        Both have counted for blocks of the same spaces, one after the other. What either made void
        stays so. Whatever moment a crash comes at, calling it again is right.
        """
        copies = _read_copies(Path(source))
        old = _best(copies)
        if copies and old is None:
            self._write(self._table._replace(all_void=True))
        elif old is not None and old.state != self._table.taken_over:
            self._write(_joined(self._table, old))
        for copy in copies:
            if copy.table is None:
                self._set_aside(copy.path)
        _remove([copy for copy in copies if copy.table is not None])

    def _set(self, changes: dict[bytes, Mark]) -> None:
        self._write(self._table._replace(marks={**self._table.marks, **changes}))

    def _write(self, table: _Table) -> None:
        # A write that fails half-way has used up its number: the next one must win over it.
        self._table = self._table._replace(sequence=self._table.sequence + 1)
        table = table._replace(sequence=self._table.sequence)
        raw = _pack(table)
        try:
            for name in NAMES:
                self._replace(name, raw)
        except OSError as error:
            raise TierError(
                f"{self._directory / NAMES[0]} cannot be written ({error.strerror}); "
                "make the directory writable and free some space"
            ) from error
        self._table = table

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
        _sync(self._directory)

    def _set_aside(self, path: Path) -> None:
        """Keeps a damaged copy for a person to look at; the last one of each name."""
        aside = path.with_name(f"{path.name}.damaged")
        os.replace(path, aside)
        self.notes.append(f"{path} was damaged and moved to {aside}")


def begin_with(directory: str | Path, source: str | Path) -> EpochsFile:
    """The epochs file of a directory that has kept no block yet, with what `source` holds."""
    old = _best(_read_copies(Path(source)))
    first = None if old is None else old._replace(taken_over=old.state)
    return EpochsFile(directory, first)


def _joined(table: _Table, old: _Table) -> _Table:
    """`table` with what `old`, the last to count, made void.

    Epochs that both counted from the same number on mean different things: where `old` has a mark
    that does not void all that `table` knows of, the space begins anew.
    """
    marks = dict(table.marks)
    for space, late in old.marks.items():
        here = marks.get(space, Mark())
        if late != Mark():
            epoch = late.epoch if late.epoch > here.epoch else here.epoch + 1
            marks[space] = Mark(epoch, max(here.clear_mark, late.clear_mark))
    all_void = table.all_void or old.all_void
    return table._replace(all_void=all_void, marks=marks, taken_over=old.state)


def _remove(copies: list[_Copy]) -> None:
    """Removes an epochs file, its newest copy last: what a crash leaves is never an older state."""
    copies = sorted(copies, key=lambda copy: copy.table.sequence if copy.table else 0)
    try:
        for copy in copies:
            copy.path.unlink()
        for directory in {copy.path.parent for copy in copies}:
            _sync(directory)
    except OSError as error:
        raise TierError(
            f"{error.filename or copies[0].path} cannot be removed ({error.strerror}); make its "
            "directory writable"
        ) from error


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_copies(directory: Path) -> list[_Copy]:
    """The copies that are there, changing nothing."""
    copies = []
    for path in (directory / name for name in NAMES):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TierError(
                f"{path} cannot be read ({error.strerror}); correct its permissions or remove it"
            ) from error
        with os.fdopen(fd, "rb") as file:
            raw = file.read()
        _refuse_unknown(path, raw)
        copies.append(_Copy(path, _parse(raw)))
    return copies


def _refuse_unknown(path: Path, raw: bytes) -> None:
    """A sound file of a later version is no damage: it says which blocks are void, to others."""
    is_sound = xxhash.xxh3_128_digest(raw[:-_SUM_BYTES]) == raw[-_SUM_BYTES:]
    magic = raw[: len(_MAGIC)]
    known = (_MAGIC, _MAGIC_BEFORE)
    if is_sound and magic.startswith(_MAGIC_ANY) and magic not in known:
        raise TierError(
            f"{path} has format {magic[-1]}, this daemon knows {_MAGIC_BEFORE[-1]} and "
            f"{_MAGIC[-1]}; use the daemon that made it or another directory"
        )


def _best(copies: list[_Copy]) -> _Table | None:
    sound = [copy.table for copy in copies if copy.table is not None]
    return max(sound, key=lambda table: table.sequence, default=None)


def _pack(table: _Table) -> bytes:
    flags = _VOID if table.all_void else 0
    head = (_MAGIC, table.sequence, flags, len(table.marks), table.origin, *table.taken_over)
    parts = [_HEAD.pack(*head)]
    parts += [_ENTRY.pack(space, *mark) for space, mark in sorted(table.marks.items())]
    raw = b"".join(parts)
    return raw + xxhash.xxh3_128_digest(raw)


def _parse(raw: bytes) -> _Table | None:
    body = raw[:-_SUM_BYTES]
    head = _HEAD_BEFORE if body.startswith(_MAGIC_BEFORE) else _HEAD
    if len(body) < head.size or xxhash.xxh3_128_digest(body) != raw[-_SUM_BYTES:]:
        return None
    magic, sequence, flags, count, *rest = head.unpack_from(body)
    if magic not in (_MAGIC, _MAGIC_BEFORE) or len(body) != head.size + count * _ENTRY.size:
        return None
    marks = {
        space: Mark(epoch, clear_mark)
        for space, epoch, clear_mark in _ENTRY.iter_unpack(body[head.size :])
    }
    origin, *taken_over = rest or (_NO_ORIGIN, *_State())
    return _Table(sequence, bool(flags & _VOID), marks, origin, _State(*taken_over))


def copy_states(directory: str | Path) -> dict[str, str]:
    """What a look finds each copy to be: sound, behind (the other), damaged or missing."""
    copies = _read_copies(Path(directory))
    best = _best(copies)
    states = dict.fromkeys(NAMES, "missing")
    for path, table in copies:
        states[path.name] = "damaged" if table is None else "sound" if table == best else "behind"
    return states
