"""`kvstore bench overhead`: vLLM with the store against vLLM without it, in turns.

Two engines of one model, each in a process of its own, are given the same prompts:

cold    prompts that nobody asked before, several at once: what storing costs where nothing hits
decode  one long answer while prompts arrive whose prefix one engine restores from the daemon and
        the other has in its own cache: what restoring costs the others; and the same in one engine,
        once from the daemon and once from its own cache
warm    a prompt whose prefix the daemon has against the same prompt computed

Two processes of one plain engine differ by up to a tenth for as long as they live (where their
memory came to lie), so this is done with several pairs, and samples of all pairs count as one set.
"""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.bench.measure import alternate, document, medians
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError
from kvstore.engines import smollm2
from kvstore.engines.vllm.process import EngineProcess
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes

BLOCK_TOKENS = 128
COLD_PROMPTS, COLD_TOKENS, COLD_OUTPUTS = 4, 384, 16
PREFIX_TOKENS, NEW_TOKENS = 1024, 16
ARRIVALS, ARRIVAL_STEPS = 4, 12
DECODE_TOKENS = ARRIVALS * ARRIVAL_STEPS + 8
PAIRS, ROUNDS, WARMUP = 3, 6, 1
POOL_BYTES, POOL_BYTES_MIN = 3 << 30, 1 << 30
SETTLE_SECONDS, QUIET_SECONDS = 20.0, 0.5
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 8}


def run(quick: bool = False, model: str = "") -> dict[str, Any]:
    """Ratios of throughput, of time per output token and of time to the first token."""
    place = model or str(smollm2.folder())
    pool = fitting_pool_bytes(POOL_BYTES, POOL_BYTES_MIN)
    samples: dict[str, list[float]] = {}
    different_answers = 0
    for number in range(1 if quick else PAIRS):
        with OwnDaemon(pool) as daemon:
            daemon.wait_prefaulted()
            with contextlib.ExitStack() as stack:
                given = [None, {"address": daemon.target}]
                started = [
                    stack.enter_context(EngineProcess(place, settings, **OPTIONS))
                    for settings in (given if number % 2 else given[::-1])
                ]
                plain, stored = started if number % 2 else started[::-1]
                pair = _Pair(plain.wait(), stored.wait(), daemon, random.Random(number))
                for name, values in pair.measure(1 if quick else ROUNDS).items():
                    samples.setdefault(name, []).extend(values)
                different_answers += pair.different_answers
    return _result(samples, different_answers, place.rstrip("/").rsplit("/", 1)[-1])


def _result(samples: dict[str, list[float]], different_answers: int, model: str) -> dict[str, Any]:
    middle = medians(samples)
    figures = {
        "throughput_ratio": middle["cold_plain"] / middle["cold_stored"],
        "tpot_ratio": middle["tpot_stored"] / middle["tpot_plain"],
        "tpot_ratio_same_engine": middle["tpot_stored"] / middle["tpot_stored_local"],
        "ttft_ratio_warm": middle["warm_stored"] / middle["warm_plain"],
    }
    return document(figures, samples, different_answers=different_answers, model=model)


class _Pair:
    """The two engines, and prompts for them."""

    def __init__(
        self, plain: EngineProcess, stored: EngineProcess, daemon: OwnDaemon, rng: random.Random
    ) -> None:
        self._plain, self._stored, self._daemon = plain, stored, daemon
        self._rng = rng
        self.different_answers = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40000) for _ in range(count)]

    def measure(self, rounds: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {}
        for part in (self._cold, self._decode, self._warm):
            samples |= alternate(part(), rounds, WARMUP)
        return samples

    def _same(
        self, asks: Callable[[], list[dict[str, Any]]],
        measure: Callable[[list[dict[str, Any]]], float],
        engines: Mapping[str, Callable[[], EngineProcess]],
    ) -> dict[str, Callable[[], float]]:  # fmt: skip
        """The same prompts to all `engines` in turns, whichever is first; each makes its ready."""
        given: list[dict[str, Any]] = []
        answers: list[list[list[int]]] = []

        def ask(engine: EngineProcess) -> float:
            if not answers:
                given[:] = asks()
            outcomes = engine.run(*given)
            answers.append([outcome["tokens"] for outcome in outcomes])
            pairs = zip(answers[0], answers[-1], strict=True)
            self.different_answers += sum(a != b for a, b in pairs)
            if len(answers) == len(engines):
                answers.clear()
            return measure(outcomes)

        def asking(ready: Callable[[], EngineProcess]) -> Callable[[], float]:
            return lambda: ask(ready())

        return {name: asking(ready) for name, ready in engines.items()}

    def _as_it_is(self, engine: EngineProcess) -> Callable[[], EngineProcess]:
        return lambda: engine

    def _forgetting(self, engine: EngineProcess) -> Callable[[], EngineProcess]:
        """The engine without what it has in its own cache."""

        def ready() -> EngineProcess:
            engine.call("forget_local")
            return engine

        return ready

    def _cold(self) -> dict[str, Callable[[], float]]:
        def asks() -> list[dict[str, Any]]:
            return [
                {"tokens": self._tokens(COLD_TOKENS), "max_tokens": COLD_OUTPUTS}
                for _ in range(COLD_PROMPTS)
            ]

        plain, stored = self._as_it_is(self._plain), self._as_it_is(self._stored)
        return self._same(asks, _makespan, {"cold_plain": plain, "cold_stored": stored})

    def _decode(self) -> dict[str, Callable[[], float]]:
        prefixes = [self._tokens(PREFIX_TOKENS) for _ in range(ARRIVALS)]
        for engine in (self._plain, self._stored):
            for prefix in prefixes:
                engine.run({"tokens": [*prefix, 1], "max_tokens": 1})
        self._settle()

        def asks() -> list[dict[str, Any]]:
            arrivals = [
                {
                    "tokens": [*prefix, *self._tokens(NEW_TOKENS)], "max_tokens": 1,
                    "after_steps": (n + 1) * ARRIVAL_STEPS,
                }
                for n, prefix in enumerate(prefixes)
            ]  # fmt: skip
            return [{"tokens": self._tokens(64), "max_tokens": DECODE_TOKENS}, *arrivals]

        engines = {
            "tpot_plain": self._as_it_is(self._plain),
            "tpot_stored": self._forgetting(self._stored),
            "tpot_stored_local": self._as_it_is(self._stored),
        }
        return self._same(asks, self._tpot, engines)

    def _tpot(self, outcomes: list[dict[str, Any]]) -> float:
        for outcome in outcomes[1:]:
            if outcome["cached_tokens"] < PREFIX_TOKENS:
                raise KVStoreError(
                    f"{PREFIX_TOKENS} tokens should have been there and "
                    f"{outcome['cached_tokens']} were; nothing was measured"
                )
        return statistics.fmean(outcomes[0]["gaps_seconds"])

    def _warm(self) -> dict[str, Callable[[], float]]:
        prefix = self._tokens(PREFIX_TOKENS)
        self._stored.run({"tokens": [*prefix, 1], "max_tokens": 1})
        self._settle()

        def asks() -> list[dict[str, Any]]:
            return [{"tokens": [*prefix, *self._tokens(NEW_TOKENS)], "max_tokens": 1}]

        engines = {
            "warm_plain": self._forgetting(self._plain),
            "warm_stored": self._forgetting(self._stored),
        }
        return self._same(asks, lambda outcomes: float(outcomes[0]["ttft_seconds"]), engines)

    def _settle(self) -> None:
        """Waits until the daemon has what the engine stores after its steps."""
        before, since, end = -1, perf_seconds(), perf_seconds() + SETTLE_SECONDS
        while perf_seconds() < end:
            count = self._daemon.status()["block_count"]
            if count == before and perf_seconds() - since > QUIET_SECONDS:
                return
            if count != before:
                before, since = count, perf_seconds()
            sleep(0.05)
        raise KVStoreError(f"blocks still come in after {SETTLE_SECONDS:g} s")


def _makespan(outcomes: list[dict[str, Any]]) -> float:
    """Seconds until the last token of prompts that were asked together."""
    for outcome in outcomes:
        if not outcome["tokens"]:
            raise KVStoreError("vLLM gave no token; look at its log")
    ends = [o["ttft_seconds"] + sum(o["gaps_seconds"]) for o in outcomes]
    return float(max(ends))
