"""`kvstore replay --engine`: a trace's prefixes through a real engine, with the store and without.

Requests go one after the other, each with the store and without, in turns who is first.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvstore.client import KVClient, Space
from kvstore.engines.generating import Answer, decode, prefill_alone
from kvstore.engines.transformers import Prefill, prefill_with_store, spec_of
from kvstore.replay.formats import TraceRequest
from kvstore.replay.scaled import EngineOptions, ScaledPrompts
from kvstore.replay.witness import Witness

CALL_TIMEOUT_SECONDS, PUT_TIMEOUT_SECONDS = 2.0, 30.0


class Served(msgspec.Struct):
    """What became of the requests, with the store and without."""

    ttft: list[float] = []
    ttft_alone: list[float] = []
    steps: list[float] = []
    steps_alone: list[float] = []
    misses: list[tuple[float, float, float]] = []
    hits: Counter[str] = msgspec.field(default_factory=Counter)
    input_tokens: int = 0
    different_answers: int = 0
    problems: int = 0
    wrong_bytes: int = 0


class EngineReplay:
    """The requests of a trace, driven through one model."""

    def __init__(
        self, requests: Sequence[TraceRequest], model: Any, name: str, options: EngineOptions
    ) -> None:
        self._requests, self._model = requests, model
        vocabulary = model.config.vocab_size
        self._prompts = ScaledPrompts(options, requests[0].block_size, vocabulary)
        size = self._prompts.block_size
        self._spec = spec_of(model, name=name, block_size=size)
        self._witness = Witness(self._spec)
        self._served = Served()
        # A process pays once for its first call; no request shall.
        prefill_alone(model, [0] * size)

    def run(
        self, target: str, on_progress: Callable[[dict[str, int]], None] | None = None
    ) -> dict[str, Any]:
        """All requests against the daemon at `target`."""
        with KVClient.connect(
            target, call_timeout_seconds=CALL_TIMEOUT_SECONDS,
            put_timeout_seconds=PUT_TIMEOUT_SECONDS, client_name="replay",
        ) as client:  # fmt: skip
            space = client.attach(self._spec, plan_shapes=("prefix", "split"), device="replay")
            for number, request in enumerate(self._requests):
                self._one(space, number, request)
                if on_progress is not None:
                    on_progress(self._totals(number + 1))
        return self._result()

    def _one(self, space: Space, number: int, request: TraceRequest) -> None:
        served, ids = self._served, self._prompts.prompt(request)
        outputs = self._prompts.outputs(request)
        request_id = f"replay-{number}"

        def with_store() -> tuple[Prefill, Answer]:
            done = prefill_with_store(self._model, ids, space, request_id=request_id)
            return done, decode(self._model, done, outputs)

        def without() -> tuple[Prefill, Answer]:
            done = prefill_alone(self._model, ids)
            return done, decode(self._model, done, outputs)

        if number % 2:
            other, own = without(), with_store()
        else:
            own, other = with_store(), without()
        done, answer = own
        served.ttft.append(done.seconds)
        served.ttft_alone.append(other[0].seconds)
        if not done.restored_tokens:
            served.misses.append((done.seconds, other[0].seconds, done.store_seconds))
        served.steps += answer.step_seconds
        served.steps_alone += other[1].step_seconds
        served.different_answers += answer.tokens != other[1].tokens
        served.hits.update(done.sources)
        served.input_tokens += len(ids)
        served.problems += bool(done.problem)
        served.wrong_bytes += self._witness.wrong_bytes(ids[: done.restored_tokens], done.cache)
        if done.put is not None and not done.put.rejected:
            self._witness.stored(ids, done.cache)

    def _totals(self, requests: int) -> dict[str, int]:
        served = self._served
        hits = sum(served.hits.values())
        return {
            "requests": requests, "hit_tokens": hits, "input_tokens": served.input_tokens,
            "restored_bytes": int(hits * self._spec.bytes_per_token),
            "wrong_bytes": served.wrong_bytes,
        }  # fmt: skip

    def _result(self) -> dict[str, Any]:
        served, tokens = self._served, max(self._served.input_tokens, 1)
        return {
            "model": self._spec.model,
            "requests": len(served.ttft),
            "input_tokens": served.input_tokens,
            "cut_prompts": self._prompts.cut_prompts,
            "bytes_per_token": self._spec.bytes_per_token,
            "token_hit_ratio": sum(served.hits.values()) / tokens,
            "token_hit_ratio_by_tier": {
                tier: served.hits[tier] / tokens for tier in ("host", *served.hits)
            },
            **times("ttft", served.ttft),
            **times("ttft_alone", served.ttft_alone),
            "ttft_ratio": sum(served.ttft) / max(sum(served.ttft_alone), 1e-9),
            **_misses(served.misses),
            **times("itl", served.steps),
            **times("itl_alone", served.steps_alone),
            "itl_ratio": ratio(served.steps, served.steps_alone),
            "different_answers": served.different_answers,
            "requests_with_problems": served.problems,
            "wrong_bytes": served.wrong_bytes,
        }


def _misses(seconds: list[tuple[float, float, float]]) -> dict[str, Any]:
    """What the store costs requests of which it has nothing, by (with it, without, its calls)."""
    with_store, without, calls = map(sum, zip(*seconds, strict=True)) if seconds else (0, 0, 0)
    return {
        "requests_without_hits": len(seconds),
        "ttft_ratio_without_hits": with_store / without if seconds else None,
        "store_share_without_hits": calls / without if seconds else None,
    }


def times(name: str, values: list[float]) -> dict[str, float | None]:
    """Median and the value that all but one in a hundred stay below."""
    if not values:
        return {f"{name}_p50_seconds": None, f"{name}_p99_seconds": None}
    ordered = sorted(values)
    late = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {f"{name}_p50_seconds": statistics.median(ordered), f"{name}_p99_seconds": late}


def ratio(values: list[float], others: list[float]) -> float | None:
    return statistics.median(values) / statistics.median(others) if values and others else None
