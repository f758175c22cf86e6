"""What the scheduler side tells the worker side with each step, and the other way at the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.plan import NO_HINTS, ReuseHints

BlockIds = tuple[tuple[int, ...], ...]  # vLLM's block ids, one tuple a KV-cache group


@dataclass(frozen=True)
class Prompt:
    """A prompt as the store sees it: its tokens or hashes, root, and what else blocks depend on."""

    tokens: tuple[int, ...] | None = None
    hashes: tuple[bytes, ...] | None = None
    adapter: str = ""
    cache_salt: str = ""
    extra_digests: tuple[tuple[int, bytes], ...] = ()

    def arguments(self) -> dict[str, object]:
        """Keyword arguments of `Space.lookup` and `Space.put`."""
        return {
            "token_ids": self.tokens, "hashes": self.hashes, "adapter": self.adapter,
            "cache_salt": self.cache_salt, "extra_digests": dict(self.extra_digests) or None,
        }  # fmt: skip

    def cut(self, block_count: int, block_size: int) -> Prompt:
        """The prompt's first full blocks."""
        tokens, hashes = self.tokens, self.hashes
        return Prompt(
            None if tokens is None else tokens[: block_count * block_size],
            None if hashes is None else hashes[:block_count],
            self.adapter,
            self.cache_salt,
            tuple(item for item in self.extra_digests if item[0] < block_count),
        )


@dataclass(frozen=True)
class LoadJob:
    """Store blocks [first, first + count) of a request, into `block_ids` from `first` on.

    Where `block_ids` name the null block nothing is written: the engine has those tokens, or a
    sliding window has left them. `looked_up` and `local_tokens` are those of the scheduler side's
    lookup, so that both sides share one lease.
    """

    request_id: str
    looked_up: Prompt
    local_tokens: int
    first: int
    count: int
    block_ids: BlockIds


@dataclass(frozen=True)
class SaveJob:
    """Full store blocks of a request from `first` on; `block_ids` are theirs."""

    request_id: str
    prompt: Prompt
    first: int
    count: int
    block_ids: BlockIds
    hints: ReuseHints = NO_HINTS


@dataclass
class StepMessage:
    """One step: loads to begin, saves once it is computed, and what it computes.

    `prefill` holds (new tokens, cached tokens, request id) of each sequence.
    """

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    prefill: list[tuple[int, int, str]] = field(default_factory=list)
    decode_tokens: int = 0
    decode_context_tokens: int = 0
    weights: str = ""
    is_idle: bool = False


@dataclass
class SpecMessage:
    """A rank's spec as JSON."""

    spec: bytes
