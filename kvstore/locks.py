"""Locks that say who holds them: one daemon for each data directory and each socket."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from kvstore.core.errors import AlreadyRunning, ConfigError


class FileLock:
    """An exclusive flock on `path`, held until `release` or the process ends."""

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{what} cannot be locked: {path} ({error.strerror}); make its directory writable"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise AlreadyRunning(
                f"{what} is in use by the daemon with process id {holder}; stop that one or choose "
                "another"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def private_directory(path: Path, key: str, group: int | None = None) -> Path:
    """A directory of our own, made if missing: mode 0700, or 0750 for `group` if one is given.

    One that is there already keeps its mode where that is no wider. Raises ConfigError.
    """
    mode = 0o700 if group is None else 0o750
    try:
        made = not path.exists()
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        if path.is_symlink() or path.stat().st_uid != os.geteuid():
            raise ConfigError(f"{key}: {path} belongs to somebody else; choose another directory")
        if made:
            os.chmod(path, mode)
        if group is not None:
            os.chown(path, -1, group)
            os.chmod(path, mode)
    except OSError as error:
        raise ConfigError(
            f"{key}: {path} cannot be made ({error.strerror}); create it or choose another"
        ) from error
    return path
