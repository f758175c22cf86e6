"""Record: which spaces exist, and their epochs and clears, in small files that survive a crash.

They lie in the disk tier's directory where there is one, else in the host pools'. Spaces are
written twice, like epochs: a bit that flips in one copy costs no block.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstore.core.errors import FailedPrecondition
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.tiers.epochs import EpochsFile, begin_with

SPACES_NAME, SPACES_COPY, COSTS_NAME = "spaces.json", "spaces.copy.json", "costs.json"


class KnownSpace(msgspec.Struct, frozen=True):
    """A space as it is written down."""

    spec: KVSpec
    tenant: str


class MemoryRecord:
    """Remembers for as long as the process lives: for stores that nothing outlives."""

    durable_slow = False

    def __init__(self) -> None:
        self._epochs: dict[bytes, int] = {}

    def remember(self, space: Space) -> None:
        pass

    def epoch_of(self, space_id: bytes) -> int:
        return self._epochs.get(space_id, 0)

    def bump(self, space: Space) -> int:
        self._epochs[space.id] = space.epoch + 1
        return space.epoch + 1

    def mark_cleared(self, spaces: list[Space]) -> None:
        pass

    def save_costs(self, raw: bytes) -> None:
        pass

    def saved_costs(self) -> bytes | None:
        return None


class FileRecord:
    """Keeps `spaces.json` and the epochs file in `directory`; synced before a call returns.

    `generation_now` names the next generation: a clear covers all that came before it, in every
    tier. `durable_slow`: a call may take as long as a disk does, so the owner has one worker make
    them, in order, and itself only reads (`epoch_of`, `known`).
    """

    def __init__(
        self,
        directory: Path,
        epochs: EpochsFile,
        generation_now: Callable[[], int],
        durable_slow: bool = False,
    ) -> None:
        self.durable_slow = durable_slow
        self._path = directory / SPACES_NAME
        self._epochs = epochs
        self._generation_now = generation_now
        self.known = read_spaces(self._path)

    def remember(self, space: Space) -> None:
        entry = KnownSpace(space.spec, space.tenant)
        if entry not in self.known:
            self._write([*self.known, entry])

    def forget_all_but(self, kept: list[KnownSpace]) -> None:
        """Drops spaces that have no block left at start."""
        if len(kept) != len(self.known):
            self._write(kept)

    def epoch_of(self, space_id: bytes) -> int:
        return self._epochs.epoch(space_id)

    def bump(self, space: Space) -> int:
        return self._epochs.bump(space.id)

    def mark_cleared(self, spaces: list[Space]) -> None:
        self._epochs.clear([space.id for space in spaces], self._generation_now())

    def save_costs(self, raw: bytes) -> None:
        _replace(self._path.with_name(COSTS_NAME), raw)

    def saved_costs(self) -> bytes | None:
        try:
            return self._path.with_name(COSTS_NAME).read_bytes()
        except OSError:
            return None  # nothing was measured yet, or it is measured anew

    def _write(self, known: list[KnownSpace]) -> None:
        _write_spaces(self._path, known)
        self.known = known


def move_record(disk: Path, host: Path | None, first: bool) -> EpochsFile:
    """Takes what `host` has of spaces and epochs over to `disk`, and removes it there.

    `first`: the disk tier has kept no block yet, so nothing of it can be void. Whatever moment a
    crash comes at, calling it again is right. Raises TierError or FailedPrecondition.
    """
    if host is None:
        return EpochsFile(disk)
    epochs = begin_with(disk, host) if first else EpochsFile(disk)
    # Spaces go last: until theirs is known, blocks of a space are dropped, never wrongly kept.
    epochs.take_over(host)
    old = host / SPACES_NAME
    if any(copy.exists() for copy in _copies(old)):
        known = read_spaces(disk / SPACES_NAME)
        more = [space for space in read_spaces(old) if space not in known]
        if more:
            _write_spaces(disk / SPACES_NAME, [*known, *more])
        for copy in _copies(old):
            copy.unlink(missing_ok=True)
    costs = host / COSTS_NAME
    if costs.exists():
        if not (disk / COSTS_NAME).exists():
            _replace(disk / COSTS_NAME, costs.read_bytes())
        costs.unlink(missing_ok=True)
    return epochs


def _copies(path: Path) -> tuple[Path, Path]:
    """`path` is that of the first."""
    return path, path.with_name(SPACES_COPY)


def _write_spaces(path: Path, known: list[KnownSpace]) -> None:
    for copy in _copies(path):
        _replace(copy, msgspec.json.encode(known))


def _replace(path: Path, content: bytes) -> None:
    """Replaces the file whole: a reader sees the old one or the new one."""
    temporary = path.with_suffix(".new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise FailedPrecondition(
            f"{path} cannot be written ({error.strerror}); make its directory writable and free "
            "some space"
        ) from error


def read_spaces(path: Path) -> list[KnownSpace]:
    """Spaces written down before, in either copy; none if both are missing or damaged.

    Blocks of a space that is not known any more are dropped: a miss, never a wrong answer. One that
    no block belongs to, as a flipped bit may make of another, is forgotten at the next start.
    """
    known: list[KnownSpace] = []
    for copy in _copies(path):
        known += [space for space in _read(copy) or [] if space not in known]
    return known


def _read(path: Path) -> list[KnownSpace] | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[KnownSpace])
    except (FileNotFoundError, msgspec.DecodeError, ValueError):
        return None


def spaces_problem(directory: Path) -> str:
    """What is wrong with the copies, in a sentence; empty if nothing is, or none was written."""
    first, second = _copies(directory / SPACES_NAME)
    if not first.exists() and not second.exists():
        return ""
    one, two = _read(first), _read(second)
    if one is None and two is None:
        return f"{first} and its copy are damaged"
    if one is None or two is None:
        return f"{first if one is None else second} is missing or damaged"
    return "" if one == two else f"{first} and {second.name} differ"


def mend_spaces(directory: Path) -> None:
    """Writes both copies anew, with all that either of them knows."""
    _write_spaces(directory / SPACES_NAME, read_spaces(directory / SPACES_NAME))
