"""The scheduler side: what of a prompt is worth loading, and what to load and save with each step.

request -> lookup (on a thread) -> the plan's tokens -> blocks allocated -> LoadJob -> loaded
step -> tokens that are computed for certain by its end -> SaveJob of full store blocks
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvstore.core.clock import perf_seconds
from kvstore.core.entropy import random_token
from kvstore.core.errors import KVStoreError
from kvstore.core.plan import ReuseHints
from kvstore.core.spec import KVSpec
from kvstore.engines.background import Background
from kvstore.engines.reach import Reach
from kvstore.engines.vllm.asking import Answer, Asked, Asker
from kvstore.engines.vllm.engine import engine_block_size, reach_of, with_weights
from kvstore.engines.vllm.events import Cleared, Follower, Removed, Stored
from kvstore.engines.vllm.hints import (
    Wishes,
    finish_words,
    hand_over_params,
    is_handed_over,
    wishes_of,
)
from kvstore.engines.vllm.messages import LoadJob, SaveJob, SpecMessage, StepMessage
from kvstore.engines.vllm.pages import Groups
from kvstore.engines.vllm.prompts import Prompts
from kvstore.engines.vllm.settings import Settings

logger = logging.getLogger(__name__)

CALLS_QUEUED = 4096
LOOKUP_MARGIN_SECONDS = 0.05  # of a lookup's own limit: its thread may have had to wait
ASK_AGAIN_SECONDS = 0.01  # while another engine stores what is waited for


@dataclass
class Tracked:
    """What is known of a request until it ends."""

    request: Any
    wishes: Wishes
    hints: ReuseHints
    wait_until: float = 0.0  # for a prefix that another engine is about to store
    asked: Asked | None = None
    answer: Answer | None = None
    ask_again_at: float = 0.0
    job: LoadJob | None = None
    saved_blocks: int = 0  # leading store blocks that are stored, or on their way
    is_scheduled: bool = False

    def forget(self) -> None:
        """Ends its lookup and the leases of it."""
        asked, self.asked, self.answer = self.asked, None, None
        if asked is not None:
            asked.drop()


class SchedulerSide:
    """What the connector does in the scheduler's process; one thread calls it."""

    def __init__(self, config: Any, settings: Settings, kv_cache_config: Any) -> None:
        self._config, self._settings = config, settings
        self._engine_block = engine_block_size(kv_cache_config)
        self._specs: list[KVSpec] = []  # one a pipeline stage
        self._reaches: list[Reach] = []
        self._prompts: Prompts | None = None
        self._weights = ""
        self._asker = Asker()
        self._teller = Background("kvstore-tell", CALLS_QUEUED)
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._is_troubled = False
        self._follower: Follower | None = None

    def learn_specs(self, messages: Mapping[tuple[int, int], SpecMessage]) -> None:
        """Takes every rank's spec by (stage, tensor-parallel rank), and attaches each stage's."""
        stages = {stage: message for (stage, _), message in sorted(messages.items(), reverse=True)}
        self._specs = [
            msgspec.json.decode(stages[stage].spec, type=KVSpec) for stage in sorted(stages)
        ]
        size = self._specs[0].block_size
        hash_size = self._config.cache_config.hash_block_size or self._engine_block
        self._prompts = Prompts(self._specs[0].key_mode, size, hash_size)
        self._attach()

    def _attach(self, in_background: bool = False) -> None:
        self._reaches = [
            reach_of(self._config, self._settings, with_weights(spec, self._weights), 0)
            for spec in self._specs
        ]
        for reach in self._reaches:
            reach.start(in_background)
        if self._wants_events():
            if self._follower is not None:
                self._follower.close()
            self._follower = Follower(self._reaches[0])

    def _wants_events(self) -> bool:
        """Whether vLLM publishes KV events, and blocks are named as they are there."""
        events = getattr(self._config, "kv_events_config", None)
        if events is None or not events.enable_kv_cache_events:
            return False
        is_external: bool = self._specs[0].key_mode == "external"
        return is_external

    def take_events(self) -> list[Stored | Removed | Cleared]:
        """What came to or left the store's tiers since the last call."""
        return [] if self._follower is None else self._follower.take()

    @property
    def _block_size(self) -> int:
        return self._specs[0].block_size

    # ---- Requests ----

    def new_request(self, request: Any) -> None:
        wishes = wishes_of(request)
        tracked = Tracked(request, wishes, wishes.hints(request.session_id))
        if is_handed_over(request):
            tracked.wait_until = perf_seconds() + self._settings.hand_over_seconds
        self._tracked[request.request_id] = tracked

    def matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Tokens beyond `computed` that are worth loading, or None while that is not known."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache or not self._reaches:
            return 0, False
        answer = self._answer(tracked, computed)
        if answer is None:
            return None, False
        self._tell_trouble(answer)
        tracked.saved_blocks = max(tracked.saved_blocks, answer.matched_tokens // self._block_size)
        count = answer.end - computed
        if count <= 0:
            answer.release()
            return 0, False
        return count, True

    def _answer(self, tracked: Tracked, computed: int) -> Answer | None:
        """The answer to a lookup of this very prompt, asked for if need be; None if it is not in.

        The last token is computed always: its logits are what is wanted.
        """
        size, request = self._block_size, tracked.request
        key = (request.num_tokens - 1, computed // size * size)
        if tracked.asked is None or tracked.asked.key != key:
            if perf_seconds() < tracked.ask_again_at:
                return None
            tracked.forget()
            if not (key[0] - key[1]) // size or not self._is_attached():
                return Answer(local_tokens=key[1])
            tracked.asked = self._ask(tracked, key)
        if tracked.answer is None:
            limit = self._settings.call_timeout_seconds + LOOKUP_MARGIN_SECONDS
            tracked.answer = tracked.asked.answer(limit)
        answer = tracked.answer
        if answer is not None and self._is_worth_waiting(tracked, answer):
            tracked.forget()
            tracked.ask_again_at = perf_seconds() + ASK_AGAIN_SECONDS
            return None
        return answer

    def _is_worth_waiting(self, tracked: Tracked, answer: Answer) -> bool:
        """Whether another engine is still storing what this request was handed over with."""
        if answer.problem or perf_seconds() >= tracked.wait_until:
            return False
        known: int = tracked.request.num_tokens - 1
        wanted = min(tracked.wishes.prompt_tokens or known, known)
        return answer.matched_tokens < wanted // self._block_size * self._block_size

    def _is_attached(self) -> bool:
        return all(reach.attached is not None for reach in self._reaches)

    def _ask(self, tracked: Tracked, key: tuple[int, int]) -> Asked:
        assert self._prompts is not None
        request, queued = tracked.request, self._queued_tokens() - tracked.request.num_tokens
        prompt = self._prompts.of(request, key[0])
        lookups = [
            partial(
                reach.space().lookup,
                request_id=request.request_id,
                local_tokens=key[1],
                deadline_seconds=tracked.wishes.deadline_seconds,
                hints=tracked.hints,
                queued_prefill_tokens=max(0, queued),
                **prompt.arguments(),  # type: ignore[arg-type]
            )
            for reach in self._reaches
        ]
        return self._asker.ask(key, lookups)

    def _queued_tokens(self) -> int:
        return sum(t.request.num_tokens for t in self._tracked.values() if not t.is_scheduled)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], count: int) -> None:
        """vLLM has blocks for a request, of which `count` tokens are to be loaded."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.is_scheduled = True
        answer, asked = tracked.answer, tracked.asked
        if count <= 0 or answer is None or asked is None:
            if tracked.job is None:
                tracked.forget()
            return
        tracked.job = self._load_job(tracked, asked.key, answer, count, block_ids)
        self._loads.append(tracked.job)

    def _load_job(
        self, tracked: Tracked, key: tuple[int, int], answer: Answer, count: int,
        block_ids: tuple[list[int], ...],
    ) -> LoadJob:  # fmt: skip
        assert self._prompts is not None
        size, each = self._block_size, self._block_size // self._engine_block
        first, stop = key[1] // size, answer.end // size
        own = (answer.end - count - key[1]) // self._engine_block
        ids = tuple(
            (*(Groups.NULL_BLOCK,) * own, *group[first * each + own : stop * each])
            for group in block_ids
        )
        prompt = self._prompts.of(tracked.request, key[0])
        request_id = tracked.request.request_id
        return LoadJob(request_id, prompt, key[1], first, stop - first, ids)

    def hit_sources(self, request: Any, count: int) -> dict[str, int]:
        """Tokens of the last load by the tier that has them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.answer is None:
            return {}
        end = tracked.answer.end
        return tracked.answer.sources(end - count, end)

    def loads_ended(self, ended: set[str], failed_blocks: set[int], failed: set[str]) -> None:
        """These requests' loads are over; of those with failed blocks all is stored anew."""
        for request_id in ended:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.job is None:
                continue
            ids = {block for group in tracked.job.block_ids for block in group}
            if request_id in failed or failed_blocks & ids:
                tracked.saved_blocks = 0
            tracked.job = None
            tracked.forget()

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request is over; answers with what the engine that decodes it is to be told."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is not None:
            tracked.forget()
            words = finish_words(request, self._settings.tool_call_token_ids)
            for reach in self._reaches:
                self._teller.submit(partial(_finish, reach, request.request_id, words))
        return hand_over_params(request)

    # ---- Steps ----

    def message(self, output: Any) -> StepMessage:
        """What the workers are to do with a step."""
        message = StepMessage(weights=self._weights)
        message.loads, self._loads = self._loads, []
        message.is_idle = not output.total_num_scheduled_tokens
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, done in computed.items():
            count = output.num_scheduled_tokens.get(request_id, 0)
            tracked = self._tracked.get(request_id)
            if not count or tracked is None:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            self._compose(message, tracked, done, count)
            job = self._save_job(
                output, tracked, certain_tokens(tracked.request, done + count, drafts)
            )
            if job is not None:
                message.saves.append(job)
        return message

    def _compose(self, message: StepMessage, tracked: Tracked, done: int, count: int) -> None:
        request = tracked.request
        if count > 1 and done < request.num_tokens - 1:
            message.prefill.append((count, done, request.request_id))
        else:
            message.decode_tokens += count
            message.decode_context_tokens += done

    def _save_job(self, output: Any, tracked: Tracked, tokens: int) -> SaveJob | None:
        """Store blocks that are full with the step and not stored yet."""
        prompts, request = self._prompts, tracked.request
        if prompts is None or tracked.hints.no_store or not self._is_attached():
            return None
        first, stop = tracked.saved_blocks, prompts.full_blocks(request, tokens)
        if stop <= first:
            return None
        tracked.saved_blocks = stop
        each = self._block_size // self._engine_block
        table = output.kv_connector_block_state.resolve_block_ids(request.request_id)
        ids = tuple(tuple(group[first * each : stop * each]) for group in table)
        prompt = prompts.of(request, stop * self._block_size)
        return SaveJob(request.request_id, prompt, first, stop - first, ids, tracked.hints)

    def reset(self) -> None:
        """Weights have changed: what is stored from now on is of a version of its own."""
        self._weights = f"+{random_token(8).hex()}"
        for tracked in self._tracked.values():
            tracked.saved_blocks = 0
            if tracked.job is None:
                tracked.forget()
        for reach in self._reaches:
            self._teller.submit(reach.close)
        if self._specs:
            self._attach(in_background=True)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()
        for tracked in self._tracked.values():
            tracked.forget()
        self._asker.close()
        self._teller.close(1.0)
        for reach in self._reaches:
            reach.close()

    def _tell_trouble(self, answer: Answer) -> None:
        """Says it once when lookups begin to fail, and again only after one that did not."""
        if answer.problem and not self._is_troubled:
            logger.warning("prompts are computed without kvstore for now: %s", answer.problem)
        if answer.problem or answer.matches:
            self._is_troubled = bool(answer.problem)


def certain_tokens(request: Any, reached: int, drafts: int) -> int:
    """How many of a request's tokens have their final KV once a step reached `reached` tokens.

    Drafted tokens may be rejected, and with steps in flight `reached` counts some that were; what
    was sampled is known, and all but the last of that has been computed.
    """
    known: int = request.num_tokens
    is_exact = not drafts and not request.num_in_flight_tokens
    if not is_exact and known > request.num_prompt_tokens:
        known -= 1
    return min(reached - drafts, known)


def _finish(reach: Reach, request_id: str, words: dict[str, Any]) -> None:
    space = reach.attached
    if space is not None:
        with suppress(KVStoreError):
            space.finish_request(request_id, **words)
