"""`kvstore bench predict`: seconds that restores from disk were predicted to take, and did take.

A daemon on a real disk, blocks of 1 MiB. Once the daemon's model of its disk is fitted, clients
restore prompts of 1 to 64 MiB, 1 to 4 clients at the same time, each one after the other; every
prompt has left the host tier when its turn comes again.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.bench.measure import document
from kvstore.bench.subject import MIB, Subject
from kvstore.core.clock import perf_seconds
from kvstore.core.errors import KVStoreError, NotFound
from kvstore.replay.own_daemon import OwnDaemon, fitting_pool_bytes
from kvstore.replay.own_disk import disk_section, fitting_disk_bytes, own_disk

SIZES = (1, 2, 4, 8, 16, 32, 64)  # blocks of 1 MiB of a prompt
PROMPTS_EACH, PROMPTS_EACH_QUICK = 10, 6
POOL_BYTES, POOL_BYTES_MIN = 512 * MIB, 320 * MIB
TIER_BYTES, TIER_BYTES_MIN = 8 << 30, 2 << 30
CLIENTS = (1, 2, 3, 4)
WARM_UP, WARM_UP_QUICK = 240, 48
MEASURED, MEASURED_QUICK = 1200, 96
PHASES_EACH = 2  # for each restore that is wanted, before it is given up
PHASE_RESTORES = 12  # of each client, before the number of clients changes
# An engine so slow that no plan recomputes: what is judged is the prediction of loads.
TOKEN_SECONDS = 0.05
STEPS = 40


class Restored(NamedTuple):
    """One restore: what was predicted of it, and what its client saw."""

    clients: int
    blocks: int
    p50_seconds: float
    p99_seconds: float
    seconds: float

    @property
    def error_ratio(self) -> float:
        return abs(self.p50_seconds / self.seconds - 1.0)


def run(quick: bool = False, path: Path | None = None, seed: int = 0) -> dict[str, Any]:
    """Measures a daemon with a disk tier in a temporary directory, below `path` if given."""
    pool = fitting_pool_bytes(POOL_BYTES, POOL_BYTES_MIN)
    with own_disk(path) as directory:
        size = fitting_disk_bytes(directory, TIER_BYTES, least=TIER_BYTES_MIN)
        sections = {
            "tiers.disk": disk_section(directory, size, demote_watermark=1.0),
            "limits": {"leased_bytes_per_session": pool, "leased_bytes_per_tenant": pool},
            # So that it is known when a prompt has left the host tier.
            "policy": {"eviction": "lru"},
        }
        with OwnDaemon(pool, sections) as daemon:
            daemon.wait_prefaulted()
            bench = Bench(daemon.target, PROMPTS_EACH_QUICK if quick else PROMPTS_EACH, seed)
            try:
                bench.run(WARM_UP_QUICK if quick else WARM_UP)
                model = bench.model()
                restored = bench.run(MEASURED_QUICK if quick else MEASURED)
                wrong = bench.wrong_bytes()
            finally:
                bench.close()
    return _document(restored, model, bench, wrong_bytes=wrong, seed=seed)


class Bench:
    """Clients of one daemon, and the prompts that they restore in turn."""

    def __init__(self, target: str, prompts_each: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._subjects = [Subject(target, MIB, seed=seed) for _ in CLIENTS]
        self._lock = threading.Lock()
        first = self._subjects[0]
        self._prompts = {n: [first.prompt(n) for _ in range(prompts_each)] for n in SIZES}
        self._turns = {n: itertools.cycle(prompts) for n, prompts in self._prompts.items()}
        self._numbers = itertools.count()
        self.left_out = self.given_up = 0
        self._store()
        for subject in self._subjects:
            subject.wait_mapped()

    def close(self) -> None:
        for subject in self._subjects:
            subject.close()

    def _store(self) -> None:
        """Puts all prompts and has them written; each client's engine tells what it costs."""
        subject, rows = self._subjects[0], np.empty((max(SIZES), MIB), dtype=np.uint8)
        for tokens in itertools.chain.from_iterable(self._prompts.values()):
            subject.put(tokens, subject.payloads(tokens, rows))
            if subject.client.admin.flush().left_out_blocks:
                raise KVStoreError("the disk did not take all prompts; name a larger one")
        for i in range(STEPS):
            new, cached = 16 << i % 5, 512 * (i % 7)
            subject.space.report_step(TOKEN_SECONDS * new, [(new, cached)], clock="device")

    def run(self, count: int) -> list[Restored]:
        """About so many restores, by changing numbers of clients at the same time."""
        found: list[Restored] = []
        phases_left = PHASES_EACH * count
        with ThreadPoolExecutor(len(CLIENTS)) as pool:
            while len(found) < count:
                if not phases_left:
                    raise KVStoreError(
                        f"only {len(found)} of {count} restores came from disk; give the host tier "
                        "less of the memory"
                    )
                phases_left -= 1
                clients = self._rng.choice(CLIENTS)
                seeds = [self._rng.random() for _ in range(clients)]
                phase = [
                    pool.submit(self._restores, subject, clients, random.Random(seed))
                    for subject, seed in zip(self._subjects, seeds, strict=False)
                ]
                for one in phase:
                    found += one.result()
        return found

    def _restores(self, subject: Subject, clients: int, rng: random.Random) -> list[Restored]:
        found = (self._restore(subject, clients, rng) for _ in range(PHASE_RESTORES))
        return [one for one in found if one is not None]

    def _restore(self, subject: Subject, clients: int, rng: random.Random) -> Restored | None:
        blocks = rng.choice(SIZES)
        with self._lock:
            tokens, number = next(self._turns[blocks]), next(self._numbers)
        name = f"predict-{number}"
        with subject.space.lookup([*tokens, 1], request_id=name) as match:
            sources = {step.source for step in match.plan.steps}
            if sources == {"host"}:
                self.left_out += 1
                return None
            start = perf_seconds()
            try:
                subject.space.restore(match)
            except NotFound:
                self.given_up += 1  # as late; the time that this took counts
            seconds = perf_seconds() - start
            if sources != {"disk"}:
                # Restored all the same: else parts of prompts would stay in host for ever.
                self.left_out += 1
                return None
        told = json.loads(subject.client.admin.explain(request_id=name).document)
        if "load_p50_seconds" not in told:
            return None
        return Restored(
            clients, blocks, told["load_p50_seconds"], told["load_p99_seconds"], seconds
        )

    def wrong_bytes(self) -> int:
        """Restores the next prompt of each size, and compares it."""
        subject = self._subjects[0]
        return sum(subject.stored_wrong_bytes(next(turn)) for turn in self._turns.values())

    def model(self) -> dict[str, Any]:
        """The daemon's model of reads from its disk."""
        costs = self._subjects[0].client.status().costs
        read = next(cost for cost in costs if cost.subject == "disk>host")
        return {"state": read.state, "reason": read.reason, "sample_count": read.sample_count}


def _document(
    restored: list[Restored], model: dict[str, Any], bench: Bench, **facts: int
) -> dict[str, Any]:
    cells = [
        {"clients": clients, "bytes": blocks * MIB, "restores": len(found), **figures(found)}
        for clients, blocks in itertools.product(CLIENTS, SIZES)
        if (found := [r for r in restored if (r.clients, r.blocks) == (clients, blocks)])
    ]
    return document(
        figures(restored),
        {
            "predicted_p50": [one.p50_seconds for one in restored],
            "predicted_p99": [one.p99_seconds for one in restored],
            "measured": [one.seconds for one in restored],
        },
        restores=len(restored),
        given_up=bench.given_up,
        not_from_disk=bench.left_out,
        model=model,
        cells=cells,
        clients=[one.clients for one in restored],
        blocks=[one.blocks for one in restored],
        **facts,
    )


def figures(restored: list[Restored]) -> dict[str, float]:
    """How far predictions were off in the middle, and how often 99 % of restores held."""
    return {
        "median_abs_error_ratio": statistics.median(one.error_ratio for one in restored),
        "p99_coverage": statistics.fmean(one.seconds <= one.p99_seconds for one in restored),
        "p99_over_p50": statistics.median(one.p99_seconds / one.p50_seconds for one in restored),
    }
