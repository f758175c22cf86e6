"""Uses: what a request is known by when the blocks it went through are ranked later.

A use is shared by all runs that a request came through; where runs end, the newest use counts, as
what is used below is used above. Blocks are named by *prefix digests*, 64 bits that stand for a
block and everything before it. They only serve statistics: a collision costs a wrong guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space

UNKNOWN_TOKENS = -1
REUSE_HINTS = ("", "none", "likely", "certain")
PRIORITY_MAX = 3
# Statistics of smaller blocks are kept for several at once.
GRAIN_TOKENS = 128
ALL_BLOCKS = 1 << 62


class Hint(NamedTuple):
    """A client's word on its prompt: one of REUSE_HINTS, when it is back, and its priority."""

    expect_reuse: str = ""
    expect_reuse_seconds: float = 0.0
    priority: int = 0


NO_HINT = Hint()


class Request(NamedTuple):
    """What residency is told of a request: plain values, so that it can be told again.

    `digests` has the prefix digests of its full blocks, packed; with `grain_blocks` above 1, of
    each so many of them. `output_tokens` is UNKNOWN_TOKENS until the request ends. `expect_reuse`
    (one of REUSE_HINTS) and its seconds are the client's word that the conversation goes on;
    `priority` ranks a tenant's requests among each other; `turn` counts from 1, 0 is for who does
    not know. `next_uses` is known offline only: for each block the number of the next request for
    it.
    """

    tenant: str
    seconds: float
    digests: bytes
    input_tokens: int
    output_tokens: int = UNKNOWN_TOKENS
    expect_reuse: str = ""
    expect_reuse_seconds: float = 0.0
    priority: int = 0
    turn: int = 0
    next_uses: tuple[int, ...] = ()
    grain_blocks: int = 1

    @property
    def hint(self) -> Hint:
        return Hint(self.expect_reuse, self.expect_reuse_seconds, self.priority)


class Use:
    """A request as blocks remember it.

    Its first `known` blocks were known before it. `rows` are the rows of a reuse table for blocks
    that were (0) and were not (1). `weight` is what its priority makes of their worth. `leaf` is
    the run that its blocks ended in, which need not live any more.
    """

    __slots__ = (
        "counts",
        "grain",
        "known",
        "leaf",
        "next_uses",
        "number",
        "rows",
        "seconds",
        "tenant",
        "weight",
    )  # fmt: skip

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.seconds = request.seconds
        self.tenant = request.tenant
        self.next_uses: Sequence[int] = request.next_uses
        self.counts: Sequence[int] = ()
        self.grain = request.grain_blocks
        self.known = 0
        self.rows: Any = (0, 0)
        self.weight = 1.0
        self.leaf: Any = None

    def row(self, position: int) -> int:
        """Row of the block at `position` of the request's chain."""
        rows: tuple[int, int] = self.rows
        return rows[position >= self.known]


def digest_words(packed: bytes) -> list[int]:
    """Packed digests as integers."""
    return memoryview(packed).cast("Q").tolist()


def newest(mine: Use | None, other: Use | None) -> Use | None:
    """The later of two uses; None is none."""
    if other is None or (mine is not None and mine.number >= other.number):
        return mine
    return other


# Odd multipliers, so that no symbol is lost: the step and the mixers of splitmix64 (Steele, Lea
# and Flood, OOPSLA 2014).
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def grain_blocks(space: Space) -> int:
    """How many blocks of a space have one digest together."""
    return max(1, GRAIN_TOKENS // space.block_size)


def prefix_digests(space: Space, root: bytes, chain: Chain, grain: int = 1) -> bytes:
    """Packed digests of a chain's prefixes: a polynomial over its symbols, modulo 2^64.

    With a `grain`, of those that end with each so many blocks.
    """
    parts = [_symbol_words(segment) for segment in chain.segments]
    if not parts:
        return b""
    words = parts[0] if len(parts) == 1 else np.concatenate(parts)
    seed = int.from_bytes(space.id[:8], "little") ^ int.from_bytes(root[:8], "little")
    sums = np.cumsum(words * _powers(_size_class(len(words)))[: len(words)])
    return (sums[grain - 1 :: grain] + np.uint64(_mix(seed))).tobytes()


def _symbol_words(segment: Segment) -> np.ndarray:
    """One word for each symbol."""
    symbols, width = segment
    unit = 8 if width % 8 == 0 else 4 if width % 4 == 0 else 1
    table = np.frombuffer(symbols, f"<u{unit}").reshape(-1, width // unit)
    if table.shape[1] == 1:
        words = table[:, 0].astype(np.uint64)
    else:
        words = table.astype(np.uint64) @ _odd_words(table.shape[1])
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed: np.ndarray = words ^ (words >> np.uint64(31))
    return mixed


def _mix(word: int) -> int:
    word = (word + _STEP) & _WORD
    word = (word ^ (word >> 30)) * _MIX_1 & _WORD
    word = (word ^ (word >> 27)) * _MIX_2 & _WORD
    return word ^ (word >> 31)


def _size_class(count: int) -> int:
    return 1 << max(8, (count - 1).bit_length())


@lru_cache(maxsize=64)
def _powers(count: int) -> np.ndarray:
    """The first `count` powers of an odd number."""
    factors = np.full(count, _STEP, np.uint64)
    factors[0] = 1
    return np.asarray(np.cumprod(factors))


@lru_cache(maxsize=64)
def _odd_words(count: int) -> np.ndarray:
    return np.array([_mix(n) | 1 for n in range(count)], np.uint64)
