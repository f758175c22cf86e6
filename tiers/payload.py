"""Copies of payloads that let other threads run, and their checksums."""

from __future__ import annotations

import numpy as np
import xxhash

from kvstore.core.errors import TierError
from kvstore.tiers.base import Source, Target

PIECE_BYTES = 256 << 10
"""Copied and then hashed while it is still in the processor's cache."""


def as_bytes(buffer: Source | Target | bytes | bytearray) -> np.ndarray:
    """A contiguous buffer as flat uint8, without a copy; raises TierError if it is not one."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise TierError(
                f"a payload of shape {buffer.shape} is not contiguous; pass contiguous bytes"
            )
        return buffer.reshape(-1).view(np.uint8)
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise TierError("a payload buffer is not contiguous; pass contiguous bytes")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def copy_hashed(slot: np.ndarray, source: Source) -> bytes:
    """Copies `source` to the start of `slot`, zeroes the rest; xxh3_128 of what was stored.

    Each piece is hashed from the slot, never from the source: a source that changes meanwhile
    spoils its own block, but the checksum still fits the bytes.
    """
    payload = as_bytes(source)
    length = len(payload)
    if length > len(slot):
        raise TierError(
            f"a payload of {length} bytes does not fit its slot of {len(slot)}; "
            "reserve slots for the largest payload"
        )
    digest = xxhash.xxh3_128()
    for start in range(0, length, PIECE_BYTES):
        piece = slot[start : min(start + PIECE_BYTES, length)]
        np.copyto(piece, payload[start : start + len(piece)])
        digest.update(piece.data)
    slot[length:] = 0
    return digest.digest()


def copy_out(stored: np.ndarray, target: Target) -> None:
    """Copies `stored` to the start of `target`; raises TierError if it does not fit."""
    room = as_bytes(target)
    if len(room) < len(stored):
        raise TierError(
            f"a target of {len(room)} bytes is too small for {len(stored)}; pass a larger one"
        )
    np.copyto(room[: len(stored)], stored)


def digest(stored: np.ndarray) -> bytes:
    """xxh3_128 of a payload."""
    return xxhash.xxh3_128_digest(stored.data)
