"""Payloads that can be told from any other: bytes derived from (space, epoch, block key).

Word i of a payload is `table[i] ^ seed`: the table, equal for all, depends on the position alone,
the seed on space, epoch and key. A block of another key, space or epoch differs in every word; a
piece that is missing, stale or in the wrong place differs there. One pass over memory writes or
checks a block, so that a replay measures the store and not its own arithmetic.
"""

from __future__ import annotations

import numpy as np
import xxhash

from kvstore.core.keys import chain_keys
from kvstore.core.spec import root_digest

WORD = 8
PIECE_WORDS = 1 << 14  # 128 KiB: a piece stays in the core's cache between its two uses


def payload_seed(space_id: bytes, epoch: int, key: bytes) -> int:
    """64-bit seed of a block's payload."""
    return xxhash.xxh3_64_intdigest(space_id + epoch.to_bytes(8, "little") + key)


def prompt_keys(
    space_id: bytes, tokens: np.ndarray, block_size: int, adapter: str = "", cache_salt: str = ""
) -> list[bytes]:
    """Block keys of the full blocks of a prompt (uint32 token ids)."""
    root = root_digest(space_id, adapter, cache_salt)[:16]
    raw, width = tokens.astype("<u4", copy=False).tobytes(), 4 * block_size
    return chain_keys(root, (raw[i : i + width] for i in range(0, len(raw) - width + 1, width)))


class PayloadMaker:
    """Writes and checks the payloads of one space's epoch; one thread at a time."""

    def __init__(self, space_id: bytes, epoch: int, block_bytes: int) -> None:
        self._space_id, self._epoch = space_id, epoch
        self.block_bytes = block_bytes
        words = -(-block_bytes // WORD)
        self._table = _position_words(words)
        self._scratch = np.empty(min(words, PIECE_WORDS), dtype=np.uint64)

    def write(self, key: bytes, target: np.ndarray) -> None:
        """Fills `target` (uint8, `block_bytes` long) with the payload of block `key`."""
        whole = self.block_bytes // WORD
        seed = np.uint64(payload_seed(self._space_id, self._epoch, key))
        body = target[: whole * WORD].view(np.uint64)
        np.bitwise_xor(self._table[:whole], seed, out=body)
        if tail := self.block_bytes % WORD:
            last = np.bitwise_xor(self._table[whole:], seed)
            target[whole * WORD :] = last.view(np.uint8)[:tail]

    def make(self, key: bytes) -> bytes:
        """The payload of block `key`."""
        target = np.empty(self.block_bytes, dtype=np.uint8)
        self.write(key, target)
        return target.tobytes()

    def wrong_bytes(self, key: bytes, data: memoryview | np.ndarray | bytes) -> int:
        """How many bytes of `data` differ from the payload of `key`; 0 if it is right."""
        found = np.frombuffer(data, dtype=np.uint8)
        wrong = abs(len(found) - self.block_bytes)
        found = found[: self.block_bytes]
        whole = len(found) // WORD
        seed = np.uint64(payload_seed(self._space_id, self._epoch, key))
        body = found[: whole * WORD].view(np.uint64)
        for start in range(0, whole, PIECE_WORDS):
            stop = min(start + PIECE_WORDS, whole)
            right = self._scratch[: stop - start]
            np.bitwise_xor(self._table[start:stop], seed, out=right)
            if not np.array_equal(right, body[start:stop]):
                piece = found[start * WORD : stop * WORD]
                wrong += int(np.count_nonzero(right.view(np.uint8) != piece))
        if tail := len(found) % WORD:
            last = np.bitwise_xor(self._table[whole : whole + 1], seed).view(np.uint8)[:tail]
            wrong += int(np.count_nonzero(last != found[whole * WORD :]))
        return wrong


def _position_words(count: int) -> np.ndarray:
    """Well-mixed words that depend on their position alone (splitmix64)."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class PromptMaker:
    """Token ids of a trace's requests: equal ids give equal blocks, other ids other blocks."""

    def __init__(self, block_size: int, seed: int = 0) -> None:
        self._block_size = block_size
        self._fill = np.arange(block_size, dtype=np.uint32) * np.uint32(2_654_435_761)
        self._seed = seed

    def tokens(self, hash_ids: list[int], input_length: int) -> np.ndarray:
        """`input_length` uint32 token ids."""
        ids = np.array(hash_ids, dtype=np.uint64) + np.uint64(self._seed << 40)
        blocks = np.empty((len(hash_ids), self._block_size), dtype=np.uint32)
        blocks[:] = self._fill
        blocks ^= (ids & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None]
        blocks[:, -1] ^= (ids >> np.uint64(32)).astype(np.uint32)
        return blocks.reshape(-1)[:input_length]
