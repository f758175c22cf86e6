"""Chains of symbols: the exact identity of each block of a prompt, and `BlockKey` digests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.core.errors import InvalidRequest
from kvstore.core.spec import HASH_BYTES_MAX, HASH_BYTES_MIN

BLOCK_KEY_BYTES = 16
EXTRA_DIGEST_BYTES = 32


class Segment(NamedTuple):
    """Consecutive symbols of one width, `width` bytes each, back to back."""

    symbols: bytes
    width: int

    @property
    def block_count(self) -> int:
        return len(self.symbols) // self.width


class Chain(NamedTuple):
    """The symbols of a prompt's full blocks, in order; most chains have one segment."""

    segments: tuple[Segment, ...]

    @property
    def block_count(self) -> int:
        return sum(len(s.symbols) // s.width for s in self.segments)

    def cut(self, block_count: int) -> Chain:
        """The first `block_count` blocks."""
        kept, left = [], block_count
        for segment in self.segments:
            take = min(left, segment.block_count)
            if take:
                kept.append(Segment(segment.symbols[: take * segment.width], segment.width))
            left -= take
        return Chain(tuple(kept))


EMPTY_CHAIN = Chain(())


def pack_tokens(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as little-endian uint32; raises InvalidRequest for ids outside [0, 2^32)."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(
            f"token_ids has shape {ids.shape} of {ids.dtype}; pass one flat sequence of integers"
        )
    if ids.dtype != np.uint32:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= 2**32:
            raise InvalidRequest(
                f"token_ids holds {low if low < 0 else high}; ids are 0 to 4294967295"
            )
    return ids.astype("<u4", copy=False).tobytes()


def token_chain(
    tokens: bytes, block_size: int, extra_digests: Mapping[int, bytes] | None = None
) -> Chain:
    """Chain of the full blocks in packed `tokens`; a partial last block is left out.

    `extra_digests` maps a block's position to the 32-byte digest of what else its KV depends on
    (multimodal content, prompt embeddings).
    """
    width = 4 * block_size
    if len(tokens) % 4:
        raise InvalidRequest(f"tokens is {len(tokens)} bytes; pack 4 bytes a token")
    count = len(tokens) // width
    if not count:
        return EMPTY_CHAIN
    if not extra_digests:
        cut = tokens if len(tokens) == count * width else tokens[: count * width]
        return Chain((Segment(cut, width),))
    return _mixed_chain(tokens, width, count, extra_digests)


def _mixed_chain(
    tokens: bytes, width: int, count: int, extra_digests: Mapping[int, bytes]
) -> Chain:
    for position, digest in extra_digests.items():
        if len(digest) != EXTRA_DIGEST_BYTES:
            raise InvalidRequest(
                f"extra_digests[{position}] is {len(digest)} bytes; pass a 32-byte digest"
            )
    pieces: list[tuple[int, list[bytes]]] = []
    for i in range(count):
        symbol = tokens[i * width : (i + 1) * width] + extra_digests.get(i, b"")
        if not pieces or pieces[-1][0] != len(symbol):
            pieces.append((len(symbol), []))
        pieces[-1][1].append(symbol)
    return Chain(tuple(Segment(b"".join(symbols), w) for w, symbols in pieces))


def hash_chain(hashes: bytes, hash_bytes: int) -> Chain:
    """Chain of an engine's own packed block hashes, `hash_bytes` (16 to 32) each."""
    if not HASH_BYTES_MIN <= hash_bytes <= HASH_BYTES_MAX:
        raise InvalidRequest(f"hash_bytes is {hash_bytes}; pass 16 to 32")
    if len(hashes) % hash_bytes:
        raise InvalidRequest(f"hashes is {len(hashes)} bytes, no multiple of {hash_bytes}")
    return Chain((Segment(hashes, hash_bytes),)) if hashes else EMPTY_CHAIN


def block_key(parent_key: bytes, symbol: bytes) -> bytes:
    """16-byte `BlockKey`: xxh3_128(parent key || symbol || length of the symbol, uint32 LE)."""
    return xxhash.xxh3_128_digest(parent_key + symbol + len(symbol).to_bytes(4, "little"))


def are_block_keys(
    keys: Iterable[bytes], parent_keys: Iterable[bytes], symbols: Sequence[bytes]
) -> list[bool]:
    """Which keys are `block_key` of their parent's key and symbol: a million in a third second."""
    digest = xxhash.xxh3_128_digest
    ends = {width: width.to_bytes(4, "little") for width in set(map(len, symbols))}
    if len(ends) == 1:
        (end,) = ends.values()
        triples = zip(keys, parent_keys, symbols, strict=True)
        return [digest(parent + symbol + end) == key for key, parent, symbol in triples]
    return [
        digest(parent + symbol + ends[len(symbol)]) == key
        for key, parent, symbol in zip(keys, parent_keys, symbols, strict=True)
    ]


def chain_keys(parent_key: bytes, symbols: Iterable[bytes]) -> list[bytes]:
    """Keys of consecutive blocks under `parent_key`, one for each symbol."""
    keys, key = [], parent_key
    for symbol in symbols:
        key = xxhash.xxh3_128_digest(key + symbol + len(symbol).to_bytes(4, "little"))
        keys.append(key)
    return keys


def prefix_words(root: bytes, chain: Chain, grain: int = 1) -> array[int]:
    """64 bits for each prefix of a chain that ends with `grain` more blocks: for statistics only.

    Each is the xxh3_64 of its blocks, seeded by the one before; the first by that of `root`.
    """
    digest, word = xxhash.xxh3_64_intdigest, xxhash.xxh3_64_intdigest(root)
    words = array("Q")
    for piece in _grains(chain, grain):
        word = digest(piece, word)
        words.append(word)
    return words


def _grains(chain: Chain, grain: int) -> Iterator[bytes]:
    """The symbols of each `grain` blocks, back to back; what is left at the end is left out."""
    if len(chain.segments) == 1:
        symbols, width = chain.segments[0]
        step = width * grain
        for start in range(0, len(symbols) - step + 1, step):
            yield symbols[start : start + step]
        return
    blocks = [
        symbols[start : start + width]
        for symbols, width in chain.segments
        for start in range(0, len(symbols), width)
    ]
    for start in range(0, len(blocks) - grain + 1, grain):
        yield b"".join(blocks[start : start + grain])
