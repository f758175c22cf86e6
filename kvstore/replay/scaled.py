"""A trace's prompts scaled down for a small model on a processor.

A trace's block becomes one of fewer tokens, the same for the same id, so what requests share they
share here.
"""

from __future__ import annotations

import random

import msgspec

from kvstore.core.errors import InvalidRequest
from kvstore.replay.formats import TraceRequest


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is scaled down: one token for `scale` of its own, prompts cut to a length."""

    scale: int = 32
    prompt_tokens_max: int = 2048
    output_tokens_max: int = 8
    seed: int = 0


class ScaledPrompts:
    """Prompts of a trace whose blocks have `trace_block_size` tokens, out of a vocabulary."""

    def __init__(self, options: EngineOptions, trace_block_size: int, vocabulary: int) -> None:
        self.options, self.block_size = options, trace_block_size // options.scale
        self.cut_prompts = 0
        self._vocabulary = vocabulary
        if not self.block_size:
            raise InvalidRequest(
                f"scale is {options.scale}; the trace's blocks have {trace_block_size} "
                "tokens, so pass at most that"
            )

    def prompt(self, request: TraceRequest) -> list[int]:
        """The tokens of a request, scaled down."""
        scale, most = self.options.scale, self.options.prompt_tokens_max
        ids: list[int] = []
        for position, block in enumerate(request.hash_ids):
            count = max(1, request.covered_tokens(position) // scale)
            ids += self._block(block)[:count]
            if len(ids) > most:
                self.cut_prompts += 1
                break
        return ids[:most] or self._block(0)[:1]

    def outputs(self, request: TraceRequest) -> int:
        """How many tokens are generated for a request."""
        most = self.options.output_tokens_max
        return max(1, min(request.output_length // self.options.scale, most))

    def _block(self, block: int) -> list[int]:
        rng = random.Random(f"{self.options.seed} {block}")
        return [rng.randrange(self._vocabulary) for _ in range(self.block_size)]
