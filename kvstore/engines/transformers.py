"""Hugging Face transformers: prefill a prompt with what the store has of it, and store the rest.

lookup -> the plan's steps in order: load into a DynamicCache, or compute -> store -> report

The store step may come first, as a promise that others can wait for: handover.py.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvstore.client import Match, PutResult, ReuseHints, Space
from kvstore.core.clock import perf_seconds
from kvstore.core.errors import InvalidRequest, KVStoreError, SpecError
from kvstore.core.plan import RECOMPUTE, PlanStep
from kvstore.engines.dynamic_cache import CacheBlocks, PromptMemory, block_reader
from kvstore.engines.handover import Announced
from kvstore.engines.identity import check_plain, spec_of

__all__ = ["Prefill", "block_reader", "cache_argument", "prefill_with_store", "spec_of"]

LINK = "host>hbm"  # the copy from the store's memory into the model's cache, wherever that lies


@dataclass
class Prefill:
    """A prompt's prefill: the cache to go on from, and where its tokens came from.

    `logits` are [1, vocabulary], of the last token; `cache` holds all `prompt_tokens`.
    `seconds` is the time to the first token, `store_seconds` all of it but the model's own calls;
    storing comes after and is not in it. `problem` says why the store was of no use, if it was not.
    """

    logits: Any
    cache: Any
    prompt_tokens: int
    restored_tokens: int = 0
    computed_tokens: int = 0
    seconds: float = 0.0
    store_seconds: float = 0.0
    reason: str = ""
    problem: str = ""
    sources: dict[str, int] = field(default_factory=dict)
    put: PutResult | None = None


def prefill_with_store(
    model: Any,
    ids: Any,
    space: Space,
    *,
    request_id: str | None = None,
    adapter: str = "",
    cache_salt: str = "",
    chunk_tokens: int = 0,
    deadline_seconds: float | None = None,
    hints: ReuseHints | None = None,
    store: bool = True,
    announce: bool = False,
) -> Prefill:
    """Prefills one prompt: restores what the plan loads, computes the rest, stores new full blocks.

    `ids` are the prompt's token ids, [1, n] or [n]; `space` is an attachment of `spec_of(model)`.
    With `chunk_tokens` it computes in calls of so many tokens. With `announce` it promises what it
    will store before it computes, and stores it while the next call computes, for another engine
    that waits for it. Whatever goes wrong with the store costs time, never the result. Raises
    SpecError where the model's cache is not plain attention or not what the space holds,
    InvalidRequest for an empty prompt or more than one.
    """
    return _Run(model, ids, space, chunk_tokens).prefill(
        {"adapter": adapter, "cache_salt": cache_salt, "request_id": request_id, "hints": hints},
        deadline_seconds,
        store,
        announce,
    )


class _Run:
    """One prefill under way."""

    def __init__(self, model: Any, ids: Any, space: Space, chunk_tokens: int) -> None:
        import torch
        from transformers import DynamicCache

        self.torch, self.model, self.space = torch, model, space
        self.ids = torch.as_tensor(ids, device=model.device)
        if self.ids.ndim == 1:
            self.ids = self.ids[None]
        if self.ids.ndim != 2 or self.ids.shape[0] != 1 or not self.ids.shape[1]:
            raise InvalidRequest(
                f"ids has shape {tuple(self.ids.shape)}; pass the ids of one prompt, [1, n] or [n]"
            )
        _check_space(model, space)
        self.tokens = self.ids[0].cpu().numpy()
        self.chunk = chunk_tokens or self.ids.shape[1]
        self.cache = DynamicCache(config=model.config)
        self.caching = {cache_argument(model): self.cache}
        self.done = Prefill(None, self.cache, self.ids.shape[1])
        self.call_seconds = 0.0
        self.announced: Announced | None = None
        self.memory: PromptMemory | None = None

    def prefill(
        self, prompt: dict[str, Any], deadline_seconds: float | None, store: bool, announce: bool
    ) -> Prefill:
        began = perf_seconds()
        match = self._lookup(prompt, deadline_seconds)
        known = 0 if match is None else match.matched_tokens // self.space.spec.block_size
        if store and announce and match is not None:
            self._announce(prompt, known)
        try:
            self._fill(match)
        except BaseException:
            if self.announced is not None:
                self.announced.give_up()
            raise
        self.done.seconds = perf_seconds() - began
        self.done.store_seconds = self.done.seconds - self.call_seconds
        if store:
            self._put(prompt, known)
        return self.done

    def _fill(self, match: Match | None) -> None:
        """The cache, from the store as far as the match goes, and computed."""
        try:
            self._restore(match)
        finally:
            if match is not None:
                match.release()
        self._compute(self.done.prompt_tokens)
        self._synchronize()
        if self.memory is not None:
            self.memory.settle()

    def _lookup(self, prompt: dict[str, Any], deadline_seconds: float | None) -> Match | None:
        # The last token is computed always: its logits are what is wanted.
        try:
            match = self.space.lookup(self.tokens[:-1], deadline_seconds=deadline_seconds, **prompt)
        except KVStoreError as error:
            self.done.problem = str(error)
            return None
        self.done.reason = match.reason
        return match

    def _restore(self, match: Match | None) -> None:
        """Carries the plan's steps out, in order; what cannot be loaded is computed."""
        if match is None or not match.block_count:
            return
        steps = match.plan.steps or (PlanStep(0, match.restore_tokens, "host"),)
        began = perf_seconds()
        try:
            memory = self._load(match)
        except KVStoreError as error:
            self.done.problem = str(error)
            return
        seconds = perf_seconds() - began
        for step in steps:
            stop = step.first_token + step.token_count
            if step.source != RECOMPUTE:
                memory.show(stop)
                self.done.restored_tokens += step.token_count
                sources = self.done.sources
                sources[step.source] = sources.get(step.source, 0) + step.token_count
            elif stop <= match.matched_tokens:
                self._compute(stop)
        self.memory = memory
        with suppress(KVStoreError):
            size = match.block_count * self.space.spec.block_bytes
            self.space.report_transfer(LINK, size, seconds, match=match)

    def _load(self, match: Match) -> PromptMemory:
        """The plan's blocks, each at its place."""
        views = self.space.restore(match)
        memory = PromptMemory(self.space.spec, self.done.prompt_tokens, self.model)
        memory.load(chain(*match.ranges), views)
        self._synchronize()
        match.check()
        memory.lend(self.cache)
        return memory

    def _compute(self, stop: int) -> None:
        """Computes the prompt's tokens up to `stop`, and reports each call."""
        while (start := self.cache.get_seq_length()) < stop:
            past = min(stop, start + self.chunk)
            began = perf_seconds()
            with self.torch.no_grad():
                output = self.model(
                    self.ids[:, start:past], use_cache=True, logits_to_keep=1, **self.caching
                )
            self._synchronize()
            seconds = perf_seconds() - began
            self.call_seconds += seconds
            self.done.logits = output.logits[:, -1]
            self.done.computed_tokens += past - start
            if self.announced is not None:
                self.announced.computed(past)
            with suppress(KVStoreError):
                clock = "device" if self.model.device.type == "cuda" else "wall"
                self.space.report_step(seconds, [(past - start, start)], clock=clock)

    def _announce(self, prompt: dict[str, Any], first_block: int) -> None:
        blocks = CacheBlocks(self.cache, self.space.spec, first_block)
        with suppress(KVStoreError):  # what is not announced is put afterwards
            self.announced = Announced(self.space, self.tokens, blocks, first_block, prompt)

    def _put(self, prompt: dict[str, Any], first_block: int) -> None:
        try:
            if self.announced is not None:
                with suppress(KVStoreError):
                    self.done.put = self.announced.result()
                if self.done.put is not None and not self.done.put.rejected:
                    return
            # Once more, after a promise that took too long: there may be room by now, too.
            self.done.put = self.space.put(
                self.tokens, CacheBlocks(self.cache, self.space.spec, first_block), first_block,
                **prompt,
            )  # fmt: skip
        except KVStoreError as error:
            self.done.problem = self.done.problem or str(error)

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            self.torch.cuda.synchronize(self.model.device)


def cache_argument(model: Any) -> str:
    """What a model calls its cache: newer releases of transformers warn of the older name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check_space(model: Any, space: Space) -> None:
    spec, layers = space.spec, check_plain(model)
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    ours = (layers, heads, str(model.dtype).removeprefix("torch."), "LKHND", "raw")
    theirs = (spec.num_layers, spec.num_kv_heads, spec.dtype, spec.layout, spec.kv_format)
    if ours != theirs:
        raise SpecError(
            f"the space holds (layers, KV heads, dtype, layout, format) {theirs}, the model has "
            f"{ours}; attach with spec_of(model)"
        )
