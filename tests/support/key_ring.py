"""`KeyRing`: a file of keys that changes all the time, and never so that a block loses its key."""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

SPARE_MAX = 3
KEYS_MAX = 40


class KeyRing:
    """What an operator does to `tiers.disk.key_file` between a daemon's lives, and within them.

    Every key that was ever the first stays in the file: a daemon may have written with it.
    """

    def __init__(self, path: Path, random: Random) -> None:
        self.path, self._random = path, random
        self.changes: Counter[str] = Counter()
        self._made = 0
        self._keys: list[tuple[str, bytes]] = []
        self._written: list[bytes] = []
        """Secrets that were the first of the file at some time, in order."""
        self._new_first()
        self._write()

    @property
    def written_count(self) -> int:
        """Keys that blocks may be written with by now."""
        return len(self._written)

    def change(self) -> str:
        """One change by which no block is lost; answers with what it was."""
        possible = {
            "another first": self._another_first,
            "behind the first": self._shuffle,
            "other names": self._rename,
        }
        if len(self._keys) < KEYS_MAX:
            possible["a new first"] = self._new_first
        spare = [key for key in self._keys if key[1] not in self._written]
        if len(spare) < SPARE_MAX:
            possible["one to read with"] = lambda: self._keys.append(self._make())
        if spare:
            possible["an unused one out"] = lambda: self._keys.remove(self._random.choice(spare))
        done = self._random.choice(sorted(possible))
        if self.written_count == 1:
            done = "a new first"  # before anything else: there is to be something to lose
        possible[done]()
        self._write()
        self.changes[done] += 1
        return done

    def rotate(self) -> None:
        """A new key to write with, the old ones behind it."""
        self._new_first()
        self._write()

    def keep_only(self, names: Iterable[str]) -> None:
        """Takes out all keys but that to write with and these: no block may need the others."""
        kept = set(names)
        assert kept < {name for name, _ in self._keys}, "there is none to take out"
        self._keys = [key for key in self._keys if key == self._keys[0] or key[0] in kept]
        self._write()

    def forget(self) -> None:
        """Takes out the key that was written with first of all: its blocks are lost."""
        secret = self._written[0]
        self._keys = [key for key in self._keys if key[1] != secret]
        if not self._keys:
            self._new_first()
        self._write()

    def _make(self) -> tuple[str, bytes]:
        self._made += 1
        return f"key-{self._made}", self._random.randbytes(32)

    def _new_first(self) -> None:
        self._keys.insert(0, self._make())

    def _another_first(self) -> None:
        self._keys.insert(0, self._keys.pop(self._random.randrange(len(self._keys))))

    def _shuffle(self) -> None:
        rest = self._keys[1:]
        self._random.shuffle(rest)
        self._keys[1:] = rest

    def _rename(self) -> None:
        place = self._random.randrange(len(self._keys))
        self._keys[place] = (self._make()[0], self._keys[place][1])

    def _write(self) -> None:
        """In one step, as an editor does: a daemon that reads at this moment sees the one or the
        other file."""
        first = self._keys[0][1]
        if first not in self._written:
            self._written.append(first)
        lines = [f"{name} {self._spelled(secret)}" for name, secret in self._keys]
        beside = self.path.with_suffix(".new")
        beside.touch(0o600)
        beside.write_text("\n".join(["# keys of a test", *lines, ""]))
        os.replace(beside, self.path)

    def _spelled(self, secret: bytes) -> str:
        if self._random.random() < 0.5:
            return secret.hex()
        return base64.b64encode(secret).decode()
