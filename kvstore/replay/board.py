"""`Board`: the numbers that the processes of one replay share, in a small mapped file.

It hands requests out in order, says how far every client is, and remembers in which phase (which
life of the daemon) a block was last stored, so that hits on blocks of an earlier life show.
"""

from __future__ import annotations

import fcntl
import mmap
from pathlib import Path

import numpy as np

HEADER_WORDS = 8
NEXT, PHASE, STOP = 0, 1, 2
NEVER = 255


class Progress:
    """What a client writes as it goes, by position in its row."""

    FIELDS = ("requests", "input_tokens", "hit_tokens", "restored_bytes", "wrong_bytes")


class Board:
    """Shared numbers; each client writes its own row, the parent phase and stop."""

    def __init__(self, path: str | Path, clients: int, id_count: int, create: bool = False):
        words = HEADER_WORDS + clients * len(Progress.FIELDS)
        size = words * 8 + id_count
        self._file = open(path, "w+b" if create else "r+b")  # noqa: SIM115 (see close)
        if create:
            self._file.truncate(size)
        self._map = mmap.mmap(self._file.fileno(), size)
        numbers = np.frombuffer(self._map, dtype=np.int64, count=words)
        self._header = numbers[:HEADER_WORDS]
        self._rows = numbers[HEADER_WORDS:].reshape(clients, len(Progress.FIELDS))
        self.stored_phase = np.frombuffer(self._map, dtype=np.uint8, offset=words * 8)
        if create:
            self.stored_phase[:] = NEVER

    def take(self) -> int:
        """Number of the next request to serve; each number is given out once."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            number = int(self._header[NEXT])
            self._header[NEXT] = number + 1
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return number

    @property
    def phase(self) -> int:
        """Which life of the daemon it is, from 0; odd moments in between count as the next."""
        return int(self._header[PHASE])

    def next_phase(self) -> None:
        """Only while no daemon runs, or hits could be counted for the wrong life."""
        self._header[PHASE] += 1

    @property
    def stopped(self) -> bool:
        return bool(self._header[STOP])

    def stop(self) -> None:
        """Asks the clients to leave after the request they are at."""
        self._header[STOP] = 1

    def note(self, client: int, values: tuple[int, ...]) -> None:
        self._rows[client] = values

    def totals(self) -> dict[str, int]:
        """Progress of all clients together."""
        return {n: int(v) for n, v in zip(Progress.FIELDS, self._rows.sum(axis=0), strict=True)}

    def close(self) -> None:
        del self._header, self._rows, self.stored_phase
        self._map.close()
        self._file.close()
