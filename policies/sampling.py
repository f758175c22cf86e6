"""Sampling: which conversations the shadows follow, as a share of all that can be lowered.

Whole trees of conversations are in or out, by a hash of what names them, as single blocks are in
SHARDS (Waldspurger et al., FAST 2015): what is in finds what it would find in a cache of all.
Ghosts are then as much smaller as the share is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.policies.uses import Request, Use, digest_words, grain_blocks

DIGEST_BYTES = 8
SAMPLE_MIN = 2.0**-12
# Blocks of the host tier that a ghost as large as the live one should have at most, and those of
# all tiers of all ghosts together: enough to be true to a point of hits, small enough to keep.
HOST_BLOCKS, ALL_BLOCKS = 8192, 262_144
# A common beginning that none of so many followed requests came through is taken to be gone.
SHARED_KEPT = 1024
SHARED_BLOCKS_MAX = 65_536

# The step of splitmix64: a product's high bits depend on all bits of a digest.
_STEP, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1


def is_followed(request: Request, use: Use, share: float, salt: int = 0) -> bool:
    """Whether the conversation that a request belongs to is one of this share of all.

    It is named by the first block that it does not share with many others, or else by its last.
    """
    digests = request.digests
    if not digests:
        return False
    at = min(DIGEST_BYTES * use.shared, len(digests) - DIGEST_BYTES)
    word = int.from_bytes(digests[at : at + DIGEST_BYTES], "little") ^ salt
    return (word * _STEP & _WORD) < share * (1 << 64)


def fitting_share(
    host_bytes: Mapping[str, int], all_bytes: float, block_bytes: int, most: float = 1.0
) -> float:
    """The largest power of 1/2 up to `most` that makes ghosts of few enough blocks.

    `all_bytes` is what the tiers of all ghosts would have together.
    """
    share = most
    host = sum(host_bytes.values()) / block_bytes
    while share > SAMPLE_MIN and (
        share * host > HOST_BLOCKS or share * all_bytes / block_bytes > ALL_BLOCKS
    ):
        share /= 2
    return share


class GhostSpace(Space):
    """A space of ghosts: a block is what has one digest in the live one, all its shards together.

    It goes by the id of the live space, which is `live`.
    """

    __slots__ = ("live",)

    def __init__(self, live: Space) -> None:
        grain = grain_blocks(live)
        spec = KVSpec(
            model="ghost", revision="0", num_layers=1, num_kv_heads=1, head_dim=1, kv_factor=1,
            dtype="int8", block_size=grain * live.block_size,
        )  # fmt: skip
        super().__init__(live.number, spec, live.tenant, live.pool)
        self.id = live.id
        self.live = live
        self.block_bytes = self.slot_bytes = grain * live.slot_bytes * live.shard_count


def live_blocks(space: Space) -> int:
    """How many blocks of the live store a block of this space stands for, of each shard."""
    return grain_blocks(space.live) if isinstance(space, GhostSpace) else 1


class Shared(NamedTuple):
    """A block of a common beginning: who came through it last, and what it takes of which pool."""

    number: int
    pool: str
    byte_count: int


class SharedBlocks:
    """Blocks that many conversations begin with, followed or not.

    A sample has them whole, however small it is: ghosts get the room for what is too much.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Shared] = {}
        self._bytes: dict[str, int] = {}
        self._requests = 0

    def saw(self, space: Space, digests: bytes) -> None:
        """A followed request begins with these."""
        self._requests += 1
        for word in digest_words(digests):
            self._drop(word)
            self._blocks[word] = Shared(self._requests, space.pool, space.slot_bytes)
            self._bytes[space.pool] = self.byte_count(space.pool) + space.slot_bytes
        while self._blocks:
            oldest = next(iter(self._blocks))
            kept = self._requests - self._blocks[oldest].number < SHARED_KEPT
            if kept and len(self._blocks) <= SHARED_BLOCKS_MAX:
                break
            self._drop(oldest)

    def _drop(self, word: int) -> None:
        gone = self._blocks.pop(word, None)
        if gone is not None:
            self._bytes[gone.pool] -= gone.byte_count

    def byte_count(self, pool: str) -> int:
        """Bytes of those in a pool."""
        return self._bytes.get(pool, 0)

    @property
    def all_bytes(self) -> int:
        """Bytes of those in all pools."""
        return sum(self._bytes.values())
