"""Hiding: words replaced by others that nobody without the key can lead back to them."""

from __future__ import annotations

import numpy as np

KEY_BYTES = 16
# The words that SipHash mixes its key with ("somepseudorandomlygeneratedbytes").
_START = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_LENGTH = 8 << 56  # of a message of one word, in its last block


def hidden_words(key: bytes, words: np.ndarray) -> np.ndarray:
    """SipHash-2-4 of each 64-bit word (Aumasson, Bernstein, INDOCRYPT 2012): equal for equal ones.

    It is a pseudorandom function: whoever knows words and what became of them learns nothing of
    others.
    """
    k0, k1 = (np.uint64(int.from_bytes(key[i : i + 8], "little")) for i in (0, 8))
    message = np.ascontiguousarray(words, np.uint64)
    mixed = (np.uint64(s) ^ k for s, k in zip(_START, (k0, k1, k0, k1), strict=True))
    state = [np.full(len(message), start, np.uint64) for start in mixed]
    for block in (message, np.uint64(_LENGTH)):
        state[3] ^= block
        _rounds(state, 2)
        state[0] ^= block
    state[2] ^= np.uint64(0xFF)
    _rounds(state, 4)
    hidden: np.ndarray = state[0] ^ state[1] ^ state[2] ^ state[3]
    return hidden


def _rounds(state: list[np.ndarray], count: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 += v1
        v2 += v3
        v1 = _turned(v1, 13) ^ v0
        v3 = _turned(v3, 16) ^ v2
        v0 = _turned(v0, 32)
        v2 += v1
        v0 += v3
        v1 = _turned(v1, 17) ^ v2
        v3 = _turned(v3, 21) ^ v0
        v2 = _turned(v2, 32)
    state[:] = v0, v1, v2, v3


def _turned(words: np.ndarray, bits: int) -> np.ndarray:
    """Rotated to the left."""
    turned: np.ndarray = (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
    return turned
