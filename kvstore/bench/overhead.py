"""`kvstore bench overhead`: vLLM with the store against vLLM without it, in turns.

Two engines of one model, each in a process of its own, are given the same prompts:

cold    prompts that nobody asked before, several at once: what storing costs where nothing hits
decode  one long answer while prompts arrive whose prefix one engine restores from the daemon and
        the other has in its own cache: what restoring costs the others
warm    a prompt whose prefix the daemon has against the same prompt computed
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
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
ROUNDS, QUICK_ROUNDS, WARMUP = 6, 1, 1
POOL_BYTES, POOL_BYTES_MIN = 3 << 30, 1 << 30
SETTLE_SECONDS, QUIET_SECONDS = 20.0, 0.5
OPTIONS: dict[str, Any] = {"max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 8}


def run(quick: bool = False, model: str = "") -> dict[str, Any]:
    """Ratios of throughput, of time per output token and of time to the first token."""
    place = model or str(smollm2.folder())
    pool = fitting_pool_bytes(POOL_BYTES, POOL_BYTES_MIN)
    with OwnDaemon(pool) as daemon:
        daemon.wait_prefaulted()
        settings = {"address": daemon.target}
        with (
            EngineProcess(place, None, **OPTIONS) as plain,
            EngineProcess(place, settings, **OPTIONS) as stored,
        ):
            bench = _Bench(plain.wait(), stored.wait(), daemon)
            result = bench.measure(QUICK_ROUNDS if quick else ROUNDS)
    return {**result, "model": place.rstrip("/").rsplit("/", 1)[-1]}


class _Bench:
    """The two engines, and prompts for them."""

    def __init__(self, plain: EngineProcess, stored: EngineProcess, daemon: OwnDaemon) -> None:
        self._plain, self._stored, self._daemon = plain, stored, daemon
        self._rng = random.Random(0)
        self._numbers = itertools.count()
        self.different_answers = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40000) for _ in range(count)]

    def measure(self, rounds: int) -> dict[str, Any]:
        samples: dict[str, list[float]] = {}
        for part in (self._cold, self._decode, self._warm):
            samples |= alternate(part(), rounds, WARMUP)
        middle = medians(samples)
        return document(
            {
                "throughput_ratio": middle["cold_plain"] / middle["cold_stored"],
                "tpot_ratio": middle["tpot_stored"] / middle["tpot_plain"],
                "ttft_ratio_warm": middle["warm_stored"] / middle["warm_plain"],
            },
            samples,
            different_answers=self.different_answers,
        )

    def _pair(
        self, name: str, asks: Callable[[], list[dict[str, Any]]],
        measure: Callable[[list[dict[str, Any]]], float],
    ) -> dict[str, Callable[[], float]]:  # fmt: skip
        """The same prompts to the one engine and then to the other, whichever is first."""
        answers: list[tuple[list[dict[str, Any]], list[list[int]]]] = []

        def one(engine: EngineProcess) -> float:
            if answers:
                given, before = answers.pop()
            else:
                given, before = asks(), []
            outcomes = engine.run(*given)
            tokens = [outcome["tokens"] for outcome in outcomes]
            if before:
                self.different_answers += sum(a != b for a, b in zip(before, tokens, strict=True))
            else:
                answers.append((given, tokens))
            return measure(outcomes)

        return {
            f"{name}_plain": lambda: one(self._plain), f"{name}_stored": lambda: one(self._stored)
        }  # fmt: skip

    def _cold(self) -> dict[str, Callable[[], float]]:
        def asks() -> list[dict[str, Any]]:
            return [
                {"tokens": self._tokens(COLD_TOKENS), "max_tokens": COLD_OUTPUTS}
                for _ in range(COLD_PROMPTS)
            ]

        return self._pair("cold", asks, _makespan)

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

        pair = self._pair("tpot", asks, self._tpot)
        stored = pair["tpot_stored"]

        def from_store() -> float:
            self._stored.call("forget_local")
            return stored()

        return {**pair, "tpot_stored": from_store}

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

        pair = self._pair("warm", asks, lambda outcomes: float(outcomes[0]["ttft_seconds"]))

        def forgetting(engine: EngineProcess, name: str) -> Callable[[], float]:
            def call() -> float:
                engine.call("forget_local")
                return pair[name]()

            return call

        return {
            "warm_plain": forgetting(self._plain, "warm_plain"),
            "warm_stored": forgetting(self._stored, "warm_stored"),
        }

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
