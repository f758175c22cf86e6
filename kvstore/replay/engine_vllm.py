"""`kvstore replay --engine vllm`: a trace's prefixes through vLLM, with the store and without.

Two vLLM engines, each in a process of its own, one request after the other, each to both engines
in turns. Their own prefix caches hold a few prompts only, as those of a busy engine do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvstore.engines import smollm2
from kvstore.engines.vllm.process import EngineProcess
from kvstore.replay.engine_live import ratio, times
from kvstore.replay.formats import TraceRequest
from kvstore.replay.scaled import EngineOptions, ScaledPrompts

VOCABULARY = 49_152  # of SmolLM2
BLOCK_TOKENS = 128
OWN_BLOCKS = 40  # of vLLM's prefix cache: two of the longest prompts
CALL_TIMEOUT_SECONDS = 0.5


class Served(msgspec.Struct):
    """What became of the requests, with the store and without."""

    ttft: list[float] = []
    ttft_alone: list[float] = []
    steps: list[float] = []
    steps_alone: list[float] = []
    input_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_alone: int = 0
    different_answers: int = 0


class VLLMReplay:
    """The requests of a trace, driven through two engines of `model`."""

    def __init__(
        self, requests: Sequence[TraceRequest], options: EngineOptions, model: str = ""
    ) -> None:
        self._requests, self._model = requests, model or str(smollm2.folder())
        self._prompts = ScaledPrompts(options, requests[0].block_size, VOCABULARY)
        self._served = Served()

    def run(
        self, target: str, on_progress: Callable[[dict[str, int]], None] | None = None
    ) -> dict[str, Any]:
        """All requests; the engine with the store uses the daemon at `target`."""
        most = self._prompts.options
        engine: dict[str, Any] = {
            "max_model_len": most.prompt_tokens_max + most.output_tokens_max + BLOCK_TOKENS,
            "max_num_batched_tokens": most.prompt_tokens_max,
            "num_gpu_blocks_override": OWN_BLOCKS,
        }
        settings = {"address": target, "call_timeout_seconds": CALL_TIMEOUT_SECONDS}
        with (
            EngineProcess(self._model, None, **engine) as alone,
            EngineProcess(self._model, settings, **engine) as stored,
        ):
            for each in (alone, stored):
                each.run({"tokens": [1] * (BLOCK_TOKENS // 2), "max_tokens": 2})
            for number, request in enumerate(self._requests):
                self._one(stored, alone, number, request)
                if on_progress is not None:
                    on_progress(self._totals(number + 1))
        return self._result()

    def _one(
        self, stored: EngineProcess, alone: EngineProcess, number: int, request: TraceRequest
    ) -> None:
        ids = self._prompts.prompt(request)
        ask = {"tokens": ids, "max_tokens": self._prompts.outputs(request)}
        outcomes = {}
        for engine in (stored, alone) if number % 2 else (alone, stored):
            (outcomes[engine],) = engine.run(ask)
        served, own, other = self._served, outcomes[stored], outcomes[alone]
        served.input_tokens += len(ids)
        served.ttft.append(own["ttft_seconds"])
        served.ttft_alone.append(other["ttft_seconds"])
        served.steps += own["gaps_seconds"]
        served.steps_alone += other["gaps_seconds"]
        served.cached_tokens += own["cached_tokens"]
        served.cached_tokens_alone += other["cached_tokens"]
        served.different_answers += own["tokens"] != other["tokens"]

    def _totals(self, requests: int) -> dict[str, int]:
        served = self._served
        return {
            "requests": requests, "hit_tokens": served.cached_tokens,
            "input_tokens": served.input_tokens, "restored_bytes": 0, "wrong_bytes": 0,
        }  # fmt: skip

    def _result(self) -> dict[str, Any]:
        served, tokens = self._served, max(self._served.input_tokens, 1)
        return {
            "model": self._model.rstrip("/").rsplit("/", 1)[-1],
            "requests": len(served.ttft),
            "input_tokens": served.input_tokens,
            "cut_prompts": self._prompts.cut_prompts,
            "own_cache_tokens": OWN_BLOCKS * BLOCK_TOKENS,
            "cached_token_ratio": served.cached_tokens / tokens,
            "cached_token_ratio_alone": served.cached_tokens_alone / tokens,
            **times("ttft", served.ttft),
            **times("ttft_alone", served.ttft_alone),
            "ttft_ratio": sum(served.ttft) / max(sum(served.ttft_alone), 1e-9),
            "ttft_ratio_median": statistics.median(
                ours / max(theirs, 1e-9)
                for ours, theirs in zip(served.ttft, served.ttft_alone, strict=True)
            ),
            **times("itl", served.steps),
            **times("itl_alone", served.steps_alone),
            "itl_ratio": ratio(served.steps, served.steps_alone),
            "different_answers": served.different_answers,
        }
