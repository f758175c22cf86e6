"""Lookups of the scheduler side: on threads, so that a slow daemon holds up one request only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.client import Match
from kvstore.core.clock import perf_seconds
from kvstore.core.errors import KVStoreError
from kvstore.core.plan import RECOMPUTE

logger = logging.getLogger(__name__)

QUICK_SECONDS = 0.002  # most answers are there by then, and a step may wait that long
LOOKUP_THREADS = 2


@dataclass
class Answer:
    """Matches of every pipeline stage; what all of them have is what counts."""

    matches: list[Match] = field(default_factory=list)
    local_tokens: int = 0
    problem: str = ""

    @property
    def matched_tokens(self) -> int:
        return min((match.matched_tokens for match in self.matches), default=0)

    @property
    def end(self) -> int:
        """Where the tokens end that every stage's plan loads; `local_tokens` if there are none."""
        ends = (self.local_tokens + match.restore_tokens for match in self.matches)
        return min(ends, default=self.local_tokens)

    def sources(self, start: int, stop: int) -> dict[str, int]:
        """How many of the tokens from `start` to `stop` each tier supplies."""
        counts: dict[str, int] = {}
        for step in self.matches[0].plan.steps if self.matches else ():
            last = min(stop, step.first_token + step.token_count)
            count = last - max(start, step.first_token)
            if step.source != RECOMPUTE and count > 0:
                counts[step.source] = counts.get(step.source, 0) + count
        return counts

    def release(self) -> None:
        for match in self.matches:
            match.release()


class Asked:
    """A lookup under way, or answered."""

    def __init__(self, key: tuple[int, int], future: Future[Answer]) -> None:
        self.key = key  # what was asked: (tokens, local tokens)
        self.began = perf_seconds()
        self._future = future

    def answer(self, limit_seconds: float) -> Answer | None:
        """The answer; None while there is time to wait for it, one without matches after that."""
        try:
            return self._future.result(0 if self._future.done() else QUICK_SECONDS)
        except NotYet:
            pass
        if perf_seconds() - self.began < limit_seconds:
            return None
        self.drop()
        return Answer(local_tokens=self.key[1], problem="the daemon did not answer in time")

    def drop(self) -> None:
        """Its leases end, now or as soon as they are known."""
        self._future.cancel()
        self._future.add_done_callback(_release)


def _release(future: Future[Answer]) -> None:
    if not future.cancelled():
        with suppress(KVStoreError):
            future.result().release()


class Asker:
    """Asks for a prompt in the spaces of all stages, on threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, thread_name_prefix="kvstore-lookup")

    def ask(self, key: tuple[int, int], lookups: Sequence[Callable[[], Match]]) -> Asked:
        """Starts a lookup; `lookups` asks each stage."""
        return Asked(key, self._threads.submit(_ask_all, key[1], lookups))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _ask_all(local_tokens: int, lookups: Sequence[Callable[[], Match]]) -> Answer:
    answer = Answer(local_tokens=local_tokens)
    try:
        for lookup in lookups:
            answer.matches.append(lookup())
    except KVStoreError as error:
        answer.release()
        return Answer(local_tokens=local_tokens, problem=str(error))
    except Exception as error:
        logger.exception("a lookup failed; the prompt is computed")
        answer.release()
        return Answer(local_tokens=local_tokens, problem=str(error))
    return answer
