"""What a lookup and a put answer: matches, plans, slots, outcomes."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import numpy as np

from kvstore.core.keys import EMPTY_CHAIN, Chain

RECOMPUTE = "recompute"
# Kinds of plans that are not splits: everything that the engine does not have, what is in front
# of the rest, nothing.
LOAD_ALL, PREFIX, RECOMPUTE_ALL = "load_all", "prefix", "recompute_all"


class BlockOutcome(IntEnum):
    """Answer for one block of a put; the numbers are the wire's."""

    REJECTED = 0
    WANTED = 1
    PRESENT = 2
    PENDING = 3
    STORED = 4


class ReuseHints(msgspec.Struct, frozen=True):
    """What the engine knows about a prefix coming back."""

    session: str = ""
    turn: int = 0
    expect_reuse: int = 0
    expect_reuse_seconds: float = 0.0
    priority: int = 0
    no_store: bool = False


NO_HINTS = ReuseHints()


class Query(msgspec.Struct, frozen=True):
    """A prompt as the store sees it: a root within a space, and the chain of its full blocks."""

    chain: Chain = EMPTY_CHAIN
    adapter: str = ""
    cache_salt: str = ""
    request_id: str = ""
    reuse: ReuseHints = NO_HINTS


class Ask(msgspec.Struct, frozen=True):
    """What a lookup tells of its request: the whole prompt, its deadline, how busy the engine is.

    `prompt_tokens` has the partial last block, too; 0 where only full blocks are known of.
    """

    prompt_tokens: int = 0
    deadline_seconds: float | None = None
    queued_prefill_tokens: int = 0
    gpu_busy_ratio: float = 0.0


NO_ASK = Ask()


class PlanStep(msgspec.Struct, frozen=True):
    """Tokens [first_token, first_token + token_count) come from `source`, a tier or recompute."""

    first_token: int
    token_count: int
    source: str


class RestorePlan(msgspec.Struct, frozen=True):
    """What to load and what to compute; predictions are None until costs are measured."""

    kind: str
    steps: tuple[PlanStep, ...] = ()
    predicted_p50_seconds: float | None = None
    predicted_p99_seconds: float | None = None


class Slots(msgspec.Struct, frozen=True):
    """Where consecutive blocks lie: int64 places and uint64 generations, one a block."""

    first_block: int
    places: np.ndarray
    generations: np.ndarray


class FailedBlocks(msgspec.Struct, frozen=True):
    """Blocks of a restore that are in no pool; with `inline` they can still be had in messages."""

    first_block: int
    block_count: int
    reason: str
    inline: bool = False


class LookupResult(msgspec.Struct, frozen=True):
    """Answer to a lookup; `lease_id` 0 when nothing is leased."""

    matched_tokens: int
    restore_tokens: int
    pending_tokens: int
    plan: RestorePlan
    reason: str
    lease_id: int = 0
    lease_ttl_seconds: float = 0.0
    slots: Slots | None = None


class ReserveResult(msgspec.Struct, frozen=True):
    """Answer to the first half of a put: an outcome byte a block, from `first_block` on."""

    reservation_id: int
    first_block: int
    outcomes: bytes
    staging_ttl_seconds: float
    reason: str = ""


class CommitRun(msgspec.Struct, frozen=True):
    """Consecutive blocks and where their bytes are: `source` holds them `stride` bytes apart."""

    first_block: int
    block_count: int
    source: memoryview
    stride: int


class CommitResult(msgspec.Struct, frozen=True):
    """Outcomes of one committed run."""

    first_block: int
    outcomes: bytes
    reason: str = ""


class PinResult(msgspec.Struct, frozen=True):
    pin_id: str
    block_count: int
    pinned_bytes: int


class FlushResult(msgspec.Struct, frozen=True):
    """Blocks of the host tier that are on disk, with all before them, and those that are not."""

    durable_blocks: int
    left_out_blocks: int


class VerifyResult(msgspec.Struct):
    """Blocks whose bytes were hashed again, and those that no longer matched."""

    verified_blocks: int = 0
    corrupt_blocks: int = 0
    verified_bytes: int = 0
    findings: list[str] = []
