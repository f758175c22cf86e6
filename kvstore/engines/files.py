"""Digests of files, kept for the next start: weights are large and change seldom."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

CHUNK_BYTES = 8 << 20
KEPT = 256


def digest_of_files(paths: Sequence[str]) -> str:
    """32 hex digits that stand for the names and every byte of these files.

    A file is read again when its size, its times or its place on the disk have changed.
    """
    known = _Known()
    digest = xxhash.xxh3_128()
    for path in sorted(paths, key=os.path.basename):
        digest.update(f"{os.path.basename(path)}\n{known.digest(path)}\n".encode())
    known.save()
    return digest.hexdigest()


class _Known:
    """Digests of earlier calls, in the user's cache."""

    def __init__(self) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._file = Path(base) / "kvstore" / "digests.json"
        self._entries: dict[str, Any] = {}
        self._is_changed = False
        with suppress(OSError, ValueError):
            loaded = json.loads(self._file.read_text())
            self._entries = loaded if isinstance(loaded, dict) else {}

    def digest(self, path: str) -> str:
        stat = os.stat(path)
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]
        key = os.path.realpath(path)
        entry = self._entries.get(key)
        if isinstance(entry, list) and entry[:-1] == mark:
            return str(entry[-1])
        digest = _read(path)
        self._entries.pop(key, None)
        self._entries[key] = [*mark, digest]
        self._is_changed = True
        return digest

    def save(self) -> None:
        """Keeps the newest entries; without a place to keep them the files are read again."""
        if not self._is_changed:
            return
        kept = dict(list(self._entries.items())[-KEPT:])
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._file.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(kept, file)
            os.replace(name, self._file)


def _read(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
