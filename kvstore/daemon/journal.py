"""`JournalFile`: a daemon's journal on disk, written by a thread of its own."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from kvstore.core.errors import ConfigError
from kvstore.core.sizes import format_bytes
from kvstore.store.journal import Journal

QUEUE_BYTES = 64 << 20
WRITE_SECONDS = 0.02
CLOSE_SECONDS = 10.0

_log = logging.getLogger("kvstore.daemon")


class JournalFile:
    """A new file that takes lines up to `limit_bytes`; `journal` is what the store writes with.

    A journal with a gap is worth nothing, so it ends where a line does not fit: at the limit, when
    the disk fails, or when it is too slow. The daemon goes on.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self.journal = Journal(self._take)
        self._path = path
        self._left = self._limit = limit_bytes
        self._problem = ""
        self._is_told = self._is_closing = False
        self._lines: list[bytes] = []
        self._queued = 0
        self._changed = threading.Condition()
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the journal {path} cannot be made ({error.strerror}); name a new file in a "
                "directory that can be written"
            ) from error
        self._thread = threading.Thread(target=self._run, name="kvstore journal", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Tells the log once that the journal has ended."""
        if self.journal.ended and not self._is_told:
            self._is_told = True
            reason = self._problem or self.journal.ended
            _log.warning("the journal %s ends here: %s", self._path, reason)

    def close(self) -> None:
        """Writes what is left; a disk that does not answer is left to itself."""
        self.journal.close()
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(CLOSE_SECONDS)
        self.check()

    def _take(self, line: bytes) -> bool:
        size = len(line) + 1
        with self._changed:
            if not self._problem:
                self._problem = self._refusal(size)
            if self._problem:
                return False
            self._lines.append(line)
            self._queued += size
            self._left -= size
        return True

    def _refusal(self, size: int) -> str:
        if size > self._left:
            return f"it has limits.journal_bytes, {format_bytes(self._limit)}"
        if self._queued + size > QUEUE_BYTES:
            return f"{format_bytes(self._queued)} of it wait for the disk"
        return ""

    def _run(self) -> None:
        try:
            while lines := self._next():
                left = memoryview(b"\n".join([*lines, b""]))
                while left:
                    left = left[os.write(self._fd, left) :]
        except OSError as error:
            with self._changed:
                self._problem = f"it cannot be written ({error.strerror})"
        os.close(self._fd)

    def _next(self) -> list[bytes]:
        """The lines that came since it was last asked; none once it is closed."""
        with self._changed:
            while not self._is_closing:
                # Not woken by each line: the owner would wait for this thread to let it go on.
                self._changed.wait(WRITE_SECONDS)
                if self._lines:
                    break
            lines, self._lines, self._queued = self._lines, [], 0
        return lines
