"""Chains of page keys: what comes before a page, for a store whose blocks follow their prefix.

An engine that keeps pages under single keys says for some calls which pages come before, for
others it does not. What was said is remembered; where nothing is known, a chain begins with the
first page at hand, which is exact all the same: a page's key stands for all tokens before it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

KEYS_KEPT = 1 << 16
KEY_BYTES = 32
START = b""


class Chain(NamedTuple):
    """Pages in their order; those asked for begin at `offset`."""

    hashes: tuple[bytes, ...]
    offset: int


class PageChains:
    """What is known of the pages before a page; the longest unused keys are forgotten."""

    def __init__(self, keys_kept: int = KEYS_KEPT) -> None:
        self._kept = keys_kept
        self._before: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._before)

    def candidates(self, keys: Sequence[bytes], before: Sequence[bytes]) -> list[Chain]:
        """Chains that `keys` may lie in, the likeliest first, each of them exact.

        `before` are the pages that the engine says come before, none if it does not say. First is
        the chain they were last found or stored in, last the one that begins with them.
        """
        self._note(keys, before)
        found = [self._remembered(before[-1] if before else keys[0], not before), tuple(before)]
        unique = dict.fromkeys(lead for lead in (*found, ()) if lead is not None)
        return [Chain((*lead, *keys), len(lead)) for lead in unique]

    def settle(self, hashes: Sequence[bytes]) -> None:
        """Remembers that the store has this chain, from its start on."""
        with self._lock:
            previous = START
            for key in hashes:
                self._set(key, previous)
                previous = key

    def _note(self, keys: Sequence[bytes], before: Sequence[bytes]) -> None:
        """Remembers what was not known; what the store was seen to have counts for more."""
        with self._lock:
            previous = before[-1] if before else None
            for key in keys:
                if previous is not None and key not in self._before:
                    self._set(key, previous)
                previous = key

    def _set(self, key: bytes, previous: bytes) -> None:
        self._before.pop(key, None)
        self._before[key] = previous
        while len(self._before) > self._kept:
            del self._before[next(iter(self._before))]

    def _remembered(self, key: bytes, leave_out: bool) -> tuple[bytes, ...] | None:
        """The pages up to `key`, without itself if it is to be left out; None if one is unknown."""
        with self._lock:
            lead = [] if leave_out else [key]
            seen = {key}
            while (key := self._before.get(key, key)) not in seen:
                if key == START:
                    return tuple(reversed(lead))
                seen.add(key)
                lead.append(key)
            return None


def key_bytes(key: str) -> bytes:
    """32 bytes for a page's key: the digest that it is, or one of it."""
    if len(key) == 2 * KEY_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return hashlib.sha256(key.encode()).digest()
