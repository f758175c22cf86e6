"""Encrypts and authenticates what an encrypted disk tier writes: AES-256-GCM, keys from a file.

Each start draws a salt for itself, and derives a key from it and the first key of the file
(HKDF-SHA256). Under that key the nonces are a counter: every message takes the next number, and
no number or salt is used again, whatever happens to the directory. A record names key, salt and
number, so it can be read for as long as its key is in the file.
"""

from __future__ import annotations

import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvstore.core.entropy import random_token
from kvstore.core.key_file import DiskKey
from kvstore.tiers.disk.entries import SEAL, SEALED_HEAD

SALT_BYTES = 16
STREAM_MESSAGES_MAX = 1 << 24
"""Messages under one derived key: far below what GCM bears, at any size of blocks."""
_NONCE = struct.Struct("<4xQ")
_PURPOSE = b"kvstore disk tier"


class Stream(NamedTuple):
    """A derived key: all that was written between two salts."""

    key_id: int
    salt: bytes
    secret: bytes
    aead: AESGCM


class Sealer:
    """Encrypts one payload piece by piece."""

    def __init__(self, stream: Stream, counter: int, place: bytes) -> None:
        self._stream, self._counter = stream, counter
        mode = modes.GCM(_NONCE.pack(counter))
        self._context = Cipher(algorithms.AES256(stream.secret), mode).encryptor()
        self._context.authenticate_additional_data(place)

    def update(self, plain: np.ndarray, out: np.ndarray) -> None:
        self._context.update_into(plain.data, out.data)

    def finish(self) -> bytes:
        """The seal that the payload opens with."""
        self._context.finalize()
        return SEAL.pack(self._stream.key_id, self._stream.salt, self._counter, self._context.tag)


class Opener:
    """Decrypts one payload piece by piece; nothing of it counts before `is_genuine` said so."""

    def __init__(self, stream: Stream, counter: int, tag: bytes, place: bytes) -> None:
        mode = modes.GCM(_NONCE.pack(counter), tag)
        self._context = Cipher(algorithms.AES256(stream.secret), mode).decryptor()
        self._context.authenticate_additional_data(place)

    def update(self, sealed: np.ndarray, out: np.ndarray) -> None:
        self._context.update_into(sealed.data, out.data)

    def update_bytes(self, sealed: bytes) -> bytes:
        return self._context.update(sealed)

    def is_genuine(self) -> bool:
        """Whether all of it is what was sealed for this place; asked once, at the end."""
        try:
            self._context.finalize()
        except InvalidTag:
            return False
        return True


class Vault:
    """Seals with the first key, opens with any; for all threads."""

    def __init__(
        self, keys: Sequence[DiskKey], stream_messages_max: int = STREAM_MESSAGES_MAX
    ) -> None:
        self._lock = threading.Lock()
        self._messages_max = stream_messages_max
        self._keys: dict[int, DiskKey] = {}
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._streams: list[Stream] = []
        self._writing = keys[0]
        self.take(keys)

    def take(self, keys: Sequence[DiskKey]) -> bool:
        """Writes with the first of these from now on; whether it did not before.

        Keys that are not among them stay for reading: this life still has their blocks.
        """
        with self._lock:
            changed = not self._keys or keys[0].key_id != self._writing.key_id
            self._keys.update({key.key_id: key for key in keys})
            if changed:
                self._writing = keys[0]
                self._begin_stream()
            return changed

    def has(self, key_id: int) -> bool:
        return key_id in self._keys

    def name_of(self, key_id: int) -> str:
        """How the file calls a key; its id if it is not there."""
        key = self._keys.get(key_id)
        return key.name if key is not None else f"{key_id:08x}"

    @property
    def writing(self) -> str:
        """Name of the key that is written with."""
        return self._writing.name

    # ---- Records ----

    def seal(self, plain: bytes, place: bytes) -> bytes:
        stream, counter = self._next()
        head = SEALED_HEAD.pack(stream.key_id, stream.salt, counter)
        return head + stream.aead.encrypt(_NONCE.pack(counter), plain, head + place)

    def open(self, raw: bytes, place: bytes) -> bytes | None:
        """None if it is not what was sealed for this place, or its key is not there."""
        if len(raw) < SEALED_HEAD.size:
            return None
        key_id, salt, counter = SEALED_HEAD.unpack_from(raw)
        number = self._number(key_id, salt)
        if not number:
            return None
        head, aead = raw[: SEALED_HEAD.size], self._streams[number - 1].aead
        try:
            return aead.decrypt(_NONCE.pack(counter), raw[SEALED_HEAD.size :], head + place)
        except InvalidTag:
            return None

    # ---- Payloads ----

    def sealer(self, place: bytes) -> Sealer:
        return Sealer(*self._next(), place)

    def unwritten(self) -> bytes:
        """The seal of a slot that nothing was written to: no payload opens with it."""
        stream, counter = self._next()
        return SEAL.pack(stream.key_id, stream.salt, counter, bytes(16))

    def opener(self, seal: bytes, place: bytes) -> Opener | None:
        """None if its key is not there."""
        key_id, salt, counter, tag = SEAL.unpack(seal)
        number = self._number(key_id, salt)
        return Opener(self._streams[number - 1], counter, tag, place) if number else None

    def compact(self, seal: bytes) -> tuple[int, int, bytes]:
        """A seal as memory keeps it (SLOT_SEAL)."""
        key_id, salt, counter, tag = SEAL.unpack(seal)
        return self._number(key_id, salt) if key_id else 0, counter, tag

    def expand(self, kept: np.void) -> bytes:
        """The seal again; empty for a payload in clear."""
        number, counter, tag = kept.item()
        if not number:
            return b""
        stream = self._streams[number - 1]
        return SEAL.pack(stream.key_id, stream.salt, counter, tag)

    def count_by_key(self, streams: np.ndarray) -> dict[str, int]:
        """How many slots each key has of these (SLOT_SEAL's streams), by name."""
        counts: Counter[str] = Counter()
        for number, count in enumerate(np.bincount(streams).tolist()):
            if count:
                counts[self.name_of(self._streams[number - 1].key_id)] += count
        return dict(counts)

    # ---- Streams ----

    def _next(self) -> tuple[Stream, int]:
        """A derived key, and a number that nothing else gets under it."""
        with self._lock:
            if self._counter >= self._messages_max:
                self._begin_stream()
            self._counter += 1
            return self._stream, self._counter

    def _begin_stream(self) -> None:
        number = self._add(self._writing, random_token(SALT_BYTES))
        self._stream, self._counter = self._streams[number - 1], 0

    def _number(self, key_id: int, salt: bytes) -> int:
        """Of a stream; 0 if its key is not there."""
        known = self._numbers.get((key_id, salt))
        if known is not None:
            return known
        key = self._keys.get(key_id)
        if key is None:
            return 0
        with self._lock:
            return self._numbers.get((key_id, salt)) or self._add(key, salt)

    def _add(self, key: DiskKey, salt: bytes) -> int:
        secret = HKDF(SHA256(), 32, salt, _PURPOSE).derive(key.secret)
        self._streams.append(Stream(key.key_id, salt, secret, AESGCM(secret)))
        number = self._numbers[key.key_id, salt] = len(self._streams)
        return number
