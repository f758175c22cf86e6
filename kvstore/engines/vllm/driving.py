"""A vLLM engine driven step by step in this process, with the store or without.

For benchmarks, replays and tests: they need the time of each token, and to abort in the middle.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.core.clock import perf_seconds

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's steps are this process's calls
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Ask:
    """One prompt; `params` are its `kv_transfer_params`, `lora` is (name, number, path).

    It is added once `after_steps` steps are done, and aborted `abort_after_steps` steps later.
    """

    tokens: Sequence[int]
    max_tokens: int = 8
    salt: str = ""
    params: dict[str, Any] | None = None
    lora: tuple[str, int, str] | None = None
    after_steps: int = 0
    abort_after_steps: int = 0


@dataclass
class Outcome:
    """What came of a prompt; seconds from when it was added to its first token, and between."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    ttft_seconds: float = 0.0
    gaps_seconds: list[float] = field(default_factory=list)
    params: dict[str, Any] | None = None
    is_aborted: bool = False
    finish_reason: str = ""


def transfer_config(role: str = "kv_both", **settings: Any) -> Any:
    """The `KVTransferConfig` that attaches to the store."""
    from vllm.config import KVTransferConfig  # type: ignore[import-not-found]

    return KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore.engines.vllm",
        kv_role=role,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=settings,
    )


class _Run:
    """Prompts that are answered together, and where they are."""

    def __init__(self, asks: dict[str, Ask]) -> None:
        self.asks = asks
        self.outcomes = {name: Outcome() for name in asks}
        self.waiting = list(asks)
        self._steps = 0
        self._added: dict[str, tuple[int, float]] = {}
        self._last: dict[str, float] = {}

    def due(self, is_idle: bool) -> list[str]:
        """Prompts whose step has come; the next one, too, if there is nothing else to do."""
        due = [n for n in self.waiting if self.asks[n].after_steps <= self._steps]
        due = due or (self.waiting[:1] if is_idle else [])
        for name in due:
            self.waiting.remove(name)
            self._added[name] = (self._steps, perf_seconds())
        return due

    def take(self, output: Any) -> None:
        """Notes what a step gave for a prompt."""
        name, now = output.request_id, perf_seconds()
        outcome, tokens = self.outcomes[name], list(output.outputs[0].token_ids)
        if len(tokens) > len(outcome.tokens):
            if outcome.tokens:
                outcome.gaps_seconds.append(now - self._last[name])
            else:
                outcome.ttft_seconds = now - self._added[name][1]
            self._last[name] = now
        outcome.tokens = tokens
        outcome.cached_tokens = output.num_cached_tokens or 0
        outcome.params = output.kv_transfer_params
        outcome.finish_reason = output.outputs[0].finish_reason or ""

    def aborted(self) -> list[str]:
        """One more step is done; prompts that are to be aborted after it."""
        self._steps += 1
        names = []
        for name, (step, _) in self._added.items():
            after = self.asks[name].abort_after_steps
            if after and step + after == self._steps:
                names.append(name)
                self.outcomes[name].is_aborted = True
        return names


class Drive:
    """An engine of `model`; `transfer` is a `KVTransferConfig`, None for plain vLLM."""

    def __init__(self, model: str, transfer: Any = None, **options: Any) -> None:
        from vllm import LLM  # type: ignore[import-not-found]

        self._numbers = itertools.count()
        defaults = {
            "max_model_len": 2048, "enforce_eager": True, "seed": 0, "dtype": "float32",
            "enable_prefix_caching": True, "disable_log_stats": True,
        }  # fmt: skip
        self.llm = LLM(model=model, kv_transfer_config=transfer, **{**defaults, **options})
        self.engine = self.llm.llm_engine

    def run(self, asks: Sequence[Ask]) -> list[Outcome]:
        """Answers these prompts together."""
        names = [f"r{next(self._numbers)}" for _ in asks]
        run = _Run(dict(zip(names, asks, strict=True)))
        while self._is_busy() or run.waiting:
            for name in run.due(not self._is_busy()):
                self._add(name, run.asks[name])
            for output in self.engine.step():
                run.take(output)
            aborted = run.aborted()
            if aborted:
                self.engine.abort_request(aborted)
        return [run.outcomes[name] for name in names]

    def _is_busy(self) -> bool:
        """Whether steps have something to do; blocks of what was aborted while it loads, too."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        return bool(self.engine.has_unfinished_requests() or scheduler.has_finished_requests())

    def _add(self, name: str, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

        extra = {"kv_transfer_params": ask.params} if ask.params else None
        params = SamplingParams(
            temperature=0, max_tokens=ask.max_tokens, ignore_eos=True, extra_args=extra
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.tokens)}
        if ask.salt:
            prompt["cache_salt"] = ask.salt
        lora = LoRARequest(*ask.lora) if ask.lora else None
        self.engine.add_request(name, prompt, params, lora_request=lora)

    def forget_local(self) -> bool:
        """Drops vLLM's own prefix cache, so that the next prompt has to come from the store."""
        return bool(self.llm.reset_prefix_cache())

    def new_weights(self) -> bool:
        """What vLLM does once its weights were changed."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def close(self) -> None:
        self.engine.engine_core.shutdown()


def set_environment() -> None:
    """Variables that vLLM reads when it is imported; those that are set stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
