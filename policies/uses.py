"""Uses: what a request is known by when the blocks it went through are ranked later.

A use is shared by all runs that a request came through; where runs end, the newest use counts, as
what is used below is used above. Blocks are named by *prefix digests*, 64 bits that stand for a
block and everything before it. They only serve statistics: a collision costs a wrong guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore.core.keys import Chain, prefix_words
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

    Its first `known` blocks were known before it. Its first `shared` digests name a beginning that
    many conversations have in common. `rows` are the rows of a reuse table for blocks that were (0)
    and were not (1). `weight` is what its priority makes of their worth. `leaf` is the run that its
    blocks ended in, which need not live any more.
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
        "shared",
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
        self.known = self.shared = 0
        self.rows: Any = (0, 0)
        self.weight = 1.0
        self.leaf: Any = None

    def row(self, position: int) -> int:
        """Row of the block at `position` of the request's chain."""
        rows: tuple[int, int] = self.rows
        return rows[position >= self.known]

    def follow(self, other: Use) -> None:
        """Is worth what `other` is, which is this request with several blocks to a digest."""
        self.known = other.known // other.grain
        self.rows, self.weight = other.rows, other.weight


def digest_words(packed: bytes) -> list[int]:
    """Packed digests as integers."""
    return memoryview(packed).cast("Q").tolist()


def newest(mine: Use | None, other: Use | None) -> Use | None:
    """The later of two uses; None is none."""
    if other is None or (mine is not None and mine.number >= other.number):
        return mine
    return other


def grain_blocks(space: Space) -> int:
    """How many blocks of a space have one digest together."""
    return max(1, GRAIN_TOKENS // space.block_size)


def prefix_digests(space: Space, root: bytes, chain: Chain, grain: int = 1) -> bytes:
    """Packed digests of a chain's prefixes, of those that end with each so many blocks."""
    return prefix_words(space.id + root, chain, grain).tobytes()
