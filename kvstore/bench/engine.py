"""`kvstore bench engine`: first tokens of a real model, with the store and without, in turns.

Each prompt is 1,024 tokens that all have in common and 64 that are new. Roots of their own, by
salt, make each read from disk a first one. What computing the 64 on the 1,024 takes without any
store is measured in turns with them: no store can be quicker. Processor time is told beside, as it
says more on a busy machine.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.bench.measure import alternate, cpu_seconds_of, document, medians
from kvstore.client import KVClient, Space
from kvstore.core.clock import cpu_seconds, perf_seconds
from kvstore.core.errors import KVStoreError
from kvstore.engines import smollm2
from kvstore.engines.dynamic_cache import CacheBlocks, PromptMemory
from kvstore.engines.generating import copy_of, extend, prefill_alone
from kvstore.engines.transformers import Prefill, prefill_with_store, spec_of
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
from kvstore.replay.own_disk import disk_section, fitting_disk_bytes, own_disk

SHARED_TOKENS, NEW_TOKENS, BLOCK_TOKENS = 1024, 64, 64
ROUNDS, QUICK_ROUNDS, WARMUP = 8, 2, 1
POOL_BYTES_MIN, POOL_SPARE, DISK_POOLS = 64 << 20, 1.25, 2
CALL_TIMEOUT_SECONDS, PUT_TIMEOUT_SECONDS = 10.0, 60.0


def run(quick: bool = False, path: Path | None = None, model: Any = None) -> dict[str, Any]:
    """Times to the first token: all computed, the common part from host, the same from disk."""
    model, name = (model, type(model).__name__) if model else (smollm2.load()[0], smollm2.NAME)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    spec = spec_of(model, name=name, block_size=BLOCK_TOKENS)
    prompts = SHARED_TOKENS // BLOCK_TOKENS * spec.block_bytes
    # Those from disk, as many that are put in turns, and the one that stays in host.
    wanted = int((2 * (rounds + WARMUP) + 1) * prompts * POOL_SPARE)
    pool = fitting_pool_bytes(max(wanted, POOL_BYTES_MIN), min(wanted, POOL_BYTES_MIN))
    with own_disk(path) as disk:
        disk_bytes = fitting_disk_bytes(disk, max(DISK_POOLS * pool, 1 << 30))
        sections = {"tiers.disk": disk_section(disk, disk_bytes)}
        with OwnDaemon(pool, sections) as daemon:
            bench = _Bench(model, spec, daemon)
            bench.fill(rounds + WARMUP)
            result = bench.measure(rounds)
    return {**result, "model": name, "shared_tokens": SHARED_TOKENS, "new_tokens": NEW_TOKENS}


class _Bench:
    """One model, one common part, one daemon."""

    def __init__(self, model: Any, spec: Any, daemon: OwnDaemon) -> None:
        self._model, self._spec, self._daemon = model, spec, daemon
        self._rng = random.Random(0)
        self._shared = self._tokens(SHARED_TOKENS)
        self._salts: Iterator[str] = iter(())
        self._stores: dict[str, list[float]] = {"host": [], "disk": []}
        self._cpu: defaultdict[str, list[float]] = defaultdict(list)
        self.wrong_bytes = 0

    def _tokens(self, count: int) -> list[int]:
        most = self._model.config.vocab_size
        return [self._rng.randrange(most) for _ in range(count)]

    def _client(self) -> KVClient:
        return KVClient.connect(
            self._daemon.target, call_timeout_seconds=CALL_TIMEOUT_SECONDS,
            put_timeout_seconds=PUT_TIMEOUT_SECONDS,
        )  # fmt: skip

    def fill(self, count: int) -> None:
        """Puts the common part under each salt, and leaves it on disk only."""
        self._cache = prefill_alone(self._model, self._shared).cache
        self._blocks = CacheBlocks(self._cache, self._spec)
        salts = ["host", *map(str, range(count))]
        with self._client() as client:
            space = client.attach(self._spec)
            for salt in salts:
                self._put(space, salt)
        self._daemon.flush()
        self._daemon.stop(free=True)
        self._daemon.start()
        self._daemon.wait_prefaulted()
        self._salts = iter(salts[1:])

    def _put(self, space: Space, salt: str) -> None:
        result = space.put(self._shared, self._blocks, cache_salt=salt)
        if result.rejected:
            raise KVStoreError(f"the daemon took not all of a prompt: {result.reason}")

    def measure(self, rounds: int) -> dict[str, Any]:
        with self._client() as client:
            space = client.attach(self._spec)
            self._first(space, "host")
            fresh = map("put {}".format, range(10**6))
            samples = alternate(
                {
                    "alone": self._alone,
                    "compute_only": self._compute_only,
                    "host": lambda: self._restored(space, "host", "host"),
                    "disk": lambda: self._restored(space, next(self._salts), "disk"),
                    "restore": lambda: self._restore(space),
                    "put": lambda: self._timed_put(space, next(fresh)),
                },
                rounds,
                WARMUP,
            )
        samples |= {f"{tier}_store": seconds[-rounds:] for tier, seconds in self._stores.items()}
        cpu = medians({name: seconds[-rounds:] for name, seconds in self._cpu.items()})
        return self._document(samples, cpu)

    @contextmanager
    def _metered(self, name: str) -> Iterator[None]:
        """Processor time of a contestant, and of the daemon meanwhile."""
        pid = self._daemon.pid
        own, daemon = cpu_seconds(), cpu_seconds_of(pid)
        yield
        self._cpu[name].append(cpu_seconds() - own)
        self._cpu[f"{name}_daemon"].append(cpu_seconds_of(pid) - daemon)

    def _alone(self) -> float:
        with self._metered("alone"):
            return prefill_alone(self._model, self._prompt()).seconds

    def _compute_only(self) -> float:
        """The new tokens on a cache that is there already."""
        ready, ids = copy_of(self._model, self._cache), self._tokens(NEW_TOKENS)
        with self._metered("compute_only"):
            return extend(self._model, ready, ids)

    def _restore(self, space: Space) -> float:
        """The common part from host into memory for a prompt, and nothing else."""
        with self._metered("restore"):
            began = perf_seconds()
            with space.lookup(self._shared, cache_salt="host") as match:
                memory = PromptMemory(self._spec, SHARED_TOKENS + NEW_TOKENS, self._model)
                memory.load(match.ranges[0], space.restore(match))
                match.check()
            return perf_seconds() - began

    def _timed_put(self, space: Space, salt: str) -> float:
        with self._metered("put"):
            began = perf_seconds()
            self._put(space, salt)
            return perf_seconds() - began

    def _prompt(self) -> list[int]:
        return [*self._shared, *self._tokens(NEW_TOKENS)]

    def _first(self, space: Space, salt: str) -> Prefill:
        return prefill_with_store(self._model, self._prompt(), space, cache_salt=salt, store=False)

    def _restored(self, space: Space, salt: str, tier: str) -> float:
        with self._metered(tier):
            done = self._first(space, salt)
        if done.sources != {tier: SHARED_TOKENS}:
            raise KVStoreError(
                f"{SHARED_TOKENS} tokens should have come from {tier} and {done.sources} did: "
                f"{done.problem or done.reason}"
            )
        self.wrong_bytes += _difference(done.cache, self._cache)
        self._stores[tier].append(done.store_seconds)
        return done.seconds

    def _document(self, samples: dict[str, list[float]], cpu: dict[str, float]) -> dict[str, Any]:
        middle = medians(samples)
        # What the model would have computed: the whole less what it still computes.
        saved = middle["alone"] - (middle["host"] - middle["host_store"])
        size = SHARED_TOKENS // BLOCK_TOKENS * self._spec.block_bytes
        return document(
            {
                "ttft_ratio_host": middle["host"] / middle["alone"],
                "ttft_ratio_disk": middle["disk"] / middle["alone"],
                "store_share": (middle["host_store"] + middle["put"]) / saved,
            },
            samples,
            compute_only_ratio=middle["compute_only"] / middle["alone"],
            restore_share=middle["host_store"] / saved,
            put_share=middle["put"] / saved,
            cpu=cpu_figures(cpu),
            medians_cpu_seconds=cpu,
            restored_bytes=size,
            wrong_bytes=self.wrong_bytes,
        )


def cpu_figures(cpu: Mapping[str, float]) -> dict[str, float]:
    """The same figures by processor time, the daemon's with the engine's."""

    def both(name: str) -> float:
        return cpu[name] + cpu[f"{name}_daemon"]

    whole = cpu["alone"]
    return {
        "ttft_ratio_host": both("host") / whole,
        "ttft_ratio_disk": both("disk") / whole,
        "compute_only_ratio": cpu["compute_only"] / whole,
        "store_share": (both("restore") + both("put")) / (whole - cpu["compute_only"]),
    }


def _difference(cache: Any, known: Any) -> int:
    """Bytes of the common part that are others than what was put."""
    wrong = 0
    for one, other in zip(cache.layers, known.layers, strict=True):
        for ours, theirs in ((one.keys, other.keys), (one.values, other.values)):
            wrong += int((ours[:, :, :SHARED_TOKENS] != theirs).sum()) * ours.element_size()
    return wrong
