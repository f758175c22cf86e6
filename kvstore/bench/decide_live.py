"""The live form of `kvstore bench decide`: first tokens with the store against those without.

A daemon whose disk tier is slowed down to 0.5 GB/s, and an engine whose prefill is a sleep of its
true cost. Each request is served with and without the store, one after the other: prompts of 2,048
tokens and more, with nothing of them stored, or all but a few tokens, or half, in host or on disk.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.bench.subject import MIB, Subject
from kvstore.client import Match
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError, LeaseLost, NotFound
from kvstore.policies.cost import CallCost
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
from kvstore.replay.own_disk import disk_section, fitting_disk_bytes, own_disk

# The test values of the cost model: a large accelerator and a model of 8 billion parameters.
COST = CallCost(10e-3, 32e-6, 1.3e-9)
DISK_BYTES_PER_SECOND = 500_000_000
BLOCK_TOKENS = 16
# Of a token, by model: its load takes a quarter of what its computation takes, as long, and twice.
TOKEN_BYTES = (4 << 10, 16 << 10, 32 << 10)
DOCUMENT_TOKENS = (2_048, 4_096)
COLD, HOT = 12, 2  # documents of each model: on disk when their turn comes, and in host
POOL_BYTES, POOL_BYTES_MIN = 768 * MIB, 768 * MIB
TIER_BYTES, TIER_BYTES_MIN = 6 << 30, 3 << 30
WARM_UP, WARM_UP_QUICK = 72, 36
MEASURED, MEASURED_QUICK = 300, 30
SUFFIX_TOKENS = (16, 512)
KINDS = ("miss", "host", "disk", "part_host", "part_disk")
SLOWER_RATIO, SLOWER_SECONDS = 1.10, 3e-3
PUT_BLOCKS = 64


class Served(NamedTuple):
    """One request: seconds to its first token with the store, and without."""

    kind: str
    token_bytes: int
    plan: str
    seconds: float
    off_seconds: float

    @property
    def is_slower(self) -> bool:
        """Slower than without a store, by 10 % and by 3 ms."""
        more = self.seconds - self.off_seconds
        return self.seconds > SLOWER_RATIO * self.off_seconds and more > SLOWER_SECONDS


def run_live(quick: bool = False, path: Path | None = None, seed: int = 0) -> dict[str, Any]:
    """Figures, samples and facts of the live form, for the document of `bench decide`."""
    pool = fitting_pool_bytes(POOL_BYTES, POOL_BYTES_MIN)
    with own_disk(path) as directory:
        size = fitting_disk_bytes(directory, TIER_BYTES, least=TIER_BYTES_MIN)
        limit = f"{DISK_BYTES_PER_SECOND}B"
        sections = {
            "tiers.disk": disk_section(
                directory, size, demote_watermark=1.0, bytes_per_second_max=limit
            ),
            "limits": {"leased_bytes_per_session": pool, "leased_bytes_per_tenant": pool},
            # So that it is known what has left the host tier.
            "policy": {"eviction": "lru"},
        }
        with OwnDaemon(pool, sections) as daemon:
            daemon.wait_prefaulted()
            bench = LiveBench(daemon.target, seed)
            try:
                bench.serve(WARM_UP_QUICK if quick else WARM_UP)
                served = bench.serve(MEASURED_QUICK if quick else MEASURED)
                regret = bench.regret()
            finally:
                bench.close()
    return {**live_figures(served), "live": _facts(served, regret)}


class Engine:
    """A model on one engine: its documents, and a GPU whose calls are sleeps."""

    def __init__(self, target: str, token_bytes: int, rng: random.Random) -> None:
        self.token_bytes = token_bytes
        block_bytes = token_bytes * BLOCK_TOKENS
        self._subject = Subject(target, block_bytes, BLOCK_TOKENS, rng.randrange(1 << 30))
        self._rng = rng
        most = DOCUMENT_TOKENS[1] + SUFFIX_TOKENS[1]
        self._hbm = np.empty((most // BLOCK_TOKENS + 1, block_bytes), np.uint8)
        self._hbm.fill(0)
        self.cold, self.hot = self._documents(COLD), self._documents(HOT)
        for document in self.cold:
            self.store(document)
        self._subject.wait_mapped()

    def close(self) -> None:
        self._subject.close()

    def _documents(self, count: int) -> list[np.ndarray]:
        low, high = (tokens // BLOCK_TOKENS for tokens in DOCUMENT_TOKENS)
        return [self._subject.prompt(self._rng.randint(low, high)) for _ in range(count)]

    def store(self, tokens: np.ndarray) -> None:
        """Puts a prompt and has it written."""
        self.put(tokens)
        if self._subject.client.admin.flush().left_out_blocks:
            raise KVStoreError("the disk did not take a prompt; name a larger one with --path")

    def put(self, tokens: np.ndarray) -> None:
        """Puts what of a prompt is not stored yet."""
        subject, rows = self._subject, self._hbm[:PUT_BLOCKS]
        total = len(tokens) // BLOCK_TOKENS
        for at in range(0, total, PUT_BLOCKS):
            upto = tokens[: min(at + PUT_BLOCKS, total) * BLOCK_TOKENS]
            subject.put(upto, subject.payloads(upto, rows, at), first_block=at)

    def touch(self) -> None:
        """Has the hot documents in host, used last."""
        for document in self.hot:
            with self._subject.space.lookup(document) as match:
                there = match.matched_tokens
            if there < len(document):
                self.store(document)

    def request(self, kind: str, turn: Iterator[np.ndarray]) -> np.ndarray:
        """A prompt of one kind; each document of a kind has its turn."""
        fresh = self._subject.prompt(DOCUMENT_TOKENS[1] // BLOCK_TOKENS)
        if kind == "miss":
            return fresh[: self._rng.randint(*DOCUMENT_TOKENS)]
        document = next(turn)
        if kind.startswith("part_"):
            half = len(document) // 2 // BLOCK_TOKENS * BLOCK_TOKENS
            return np.concatenate([document[:half], fresh[: len(document) - half]])
        return np.concatenate([document, fresh[: self._rng.randint(*SUFFIX_TOKENS)]])

    def without(self, tokens: np.ndarray) -> float:
        """Seconds to the first token without a store."""
        start = perf_seconds()
        sleep(COST.seconds(len(tokens), 0))
        return perf_seconds() - start

    def with_store(self, tokens: np.ndarray, name: str) -> float:
        """Seconds to the first token: lookup, restore, copy, and the prefill of the rest."""
        space = self._subject.space
        start = perf_seconds()
        with space.lookup(tokens, request_id=name) as match:
            cached, copied, copy_seconds = self._load(match)
            new = len(tokens) - cached
            began = perf_seconds()
            sleep(COST.seconds(new, cached))
            end = perf_seconds()
            if copied:
                space.report_transfer("host>hbm", copied, copy_seconds, match=match)
        space.report_step(end - began, [(new, cached, name)], clock="device")
        return end - start

    def _load(self, match: Match) -> tuple[int, int, float]:
        """Tokens that are in the engine then, bytes copied to it and the seconds of the copy."""
        if not match.block_count:
            return 0, 0, 0.0
        try:
            views = self._subject.space.restore(match, partial=True)
            start = perf_seconds()
            for row, view in zip(self._hbm, views, strict=False):
                np.copyto(row, np.frombuffer(view, np.uint8))
            match.check()
        except (LeaseLost, NotFound):
            return 0, 0, 0.0
        copied = sum(view.nbytes for view in views)
        return match.restore_tokens, copied, perf_seconds() - start

    def explain(self, name: str) -> dict[str, Any]:
        """What the daemon knows of a request."""
        told: dict[str, Any] = json.loads(self._subject.client.admin.explain(name).document)
        return told


class LiveBench:
    """Requests of all kinds to engines of one daemon, each served with and without the store."""

    def __init__(self, target: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._engines = [Engine(target, size, self._rng) for size in TOKEN_BYTES]
        self._turns = {
            (engine, hot): itertools.cycle(engine.hot if hot else engine.cold)
            for engine in self._engines
            for hot in (False, True)
        }
        self._numbers = itertools.count()
        self._names: list[tuple[Engine, str]] = []

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def serve(self, count: int) -> list[Served]:
        """So many requests, all kinds and engines as often, in an order drawn for each round."""
        self._names = []
        cells = list(itertools.product(self._engines, KINDS))
        found: list[Served] = []
        while len(found) < count:
            self._rng.shuffle(cells)
            found += [self._serve(engine, kind) for engine, kind in cells]
        return found

    def _serve(self, engine: Engine, kind: str) -> Served:
        hot = kind.endswith("host")
        if hot:
            engine.touch()
        tokens = engine.request(kind, self._turns[engine, hot])
        name = f"decide-{next(self._numbers)}"
        seconds: Mapping[str, float] = self._both(engine, tokens, name)
        self._names.append((engine, name))
        told = engine.explain(name)
        if kind == "miss":
            engine.put(tokens)  # which drives what was not used for long out of host
        else:
            sources = {part["source"] for part in told.get("segments", told["plan"]["steps"])}
            place = "disk" if "disk" in sources else "host"
            kind = f"part_{place}" if kind.startswith("part_") else place
        return Served(kind, engine.token_bytes, told["plan"]["kind"], seconds["on"], seconds["off"])

    def _both(self, engine: Engine, tokens: np.ndarray, name: str) -> dict[str, float]:
        if self._rng.random() < 0.5:
            return {"off": engine.without(tokens), "on": engine.with_store(tokens, name)}
        return {"on": engine.with_store(tokens, name), "off": engine.without(tokens)}

    def regret(self) -> dict[str, float]:
        """What the daemon itself says of these requests: seconds predicted, measured, regretted."""
        total = dict.fromkeys(("judged", "predicted", "measured", "regret"), 0.0)
        for engine, name in self._names:
            told = engine.explain(name)
            outcome = told["outcome"]
            if outcome["measured_seconds"] is not None:
                total["judged"] += 1
                total["predicted"] += told["plan"]["predicted_p50_seconds"]
                total["measured"] += outcome["measured_seconds"]
                total["regret"] += outcome["regret_seconds"]
        return total


def live_figures(served: list[Served]) -> dict[str, float]:
    """First tokens with the store over those without: medians, means, and how many are slower."""
    on, off = [one.seconds for one in served], [one.off_seconds for one in served]
    return {
        "live_ttft_ratio_to_store_off": statistics.median(on) / statistics.median(off),
        "live_ttft_mean_ratio_to_store_off": statistics.fmean(on) / statistics.fmean(off),
        "live_share_slower_than_store_off": statistics.fmean(one.is_slower for one in served),
    }


def _facts(served: list[Served], regret: dict[str, float]) -> dict[str, Any]:
    cells = []
    for kind, size in itertools.product(KINDS, TOKEN_BYTES):
        found = [one for one in served if (one.kind, one.token_bytes) == (kind, size)]
        if found:
            plans = [one.plan for one in found]
            cells.append(
                {
                    "kind": kind, "token_bytes": size, "requests": len(found),
                    "plans": {plan: plans.count(plan) for plan in sorted(set(plans))},
                    **live_figures(found),
                }
            )  # fmt: skip
    return {
        "requests": len(served),
        "disk_bytes_per_second": DISK_BYTES_PER_SECOND,
        "daemon_seconds": regret,
        "kinds": {
            kind: live_figures(found)
            for kind in KINDS
            if (found := [one for one in served if one.kind == kind])
        },
        "cells": cells,
        "samples": [one._asdict() for one in served],
    }
