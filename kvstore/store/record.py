"""Record: which spaces exist, and their epochs and clears, in small files that survive a crash."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvstore.core.errors import FailedPrecondition
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.tiers.epochs import EpochsFile

SPACES_NAME = "spaces.json"


class KnownSpace(msgspec.Struct, frozen=True):
    """A space as it is written down."""

    spec: KVSpec
    tenant: str


class MemoryRecord:
    """Remembers for as long as the process lives: for stores that nothing outlives."""

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


class FileRecord:
    """Keeps `spaces.json` and the epochs file in `directory`; synced before a call returns.

    `generation_now` names the next generation: a clear covers all that came before it.
    """

    def __init__(
        self, directory: Path, epochs: EpochsFile, generation_now: Callable[[], int]
    ) -> None:
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

    def _write(self, known: list[KnownSpace]) -> None:
        """Replaces the file whole: a reader sees the old list or the new one."""
        temporary = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(known))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            raise FailedPrecondition(
                f"{self._path} cannot be written ({error.strerror}); make its directory writable "
                "and free some space"
            ) from error
        self.known = known


def read_spaces(path: Path) -> list[KnownSpace]:
    """Spaces written down before; none if the file is missing or damaged.

    Blocks of a space that is not known any more are dropped: a miss, never a wrong answer.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[KnownSpace])
    except (FileNotFoundError, msgspec.DecodeError, ValueError):
        return []
