"""`kvstore tune`: tier sizes and a policy for a trace, prices and a budget.

A store is worth the GPU time that it saves, what is restored instead of computed, and costs its
memory, its disk and the disk's wear. Sizes grow step by step, each time the tier that nets more,
so that each step's gain shows; then the policies compete at the sizes chosen.

How sure a figure is comes from a block bootstrap: sessions, whose requests stand and fall together,
are drawn anew with all that came of them. It does not run the caches anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.errors import InvalidRequest
from kvstore.core.prices import Prices
from kvstore.replay.formats import TraceRequest
from kvstore.replay.simulate import SECONDS_A_DAY, Bench, Cell
from kvstore.replay.simulate_pool import Workers

HOST_STEPS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
DISK_STEPS = (0.0, 0.1, 0.25, 0.5, 1.0)
RESAMPLES = 400
INTERVAL = (5.0, 95.0)
# So many steps in a row that only cost end the search.
PATIENCE = 3


class Limits(NamedTuple):
    """What may be bought: money a month, and bytes of each tier; None is no limit, disk 0 none."""

    budget: float | None = None
    host_bytes: float | None = None
    disk_bytes: float | None = None


class Probe(NamedTuple):
    """One policy at host and disk sizes in blocks, tried in a worker at some prices."""

    policy: str
    capacities: tuple[int, int]
    prices: Prices

    def run(self, bench: Bench) -> Outcome:
        host, disk = self.capacities
        capacities = (host, disk) if disk else (host,)
        simulation = bench.simulation(Cell(self.policy, capacities, self.prices))
        result = simulation.run()
        served = bench.serve(simulation.hits)
        return Outcome(
            self.policy,
            self.capacities,
            result.token_hit_ratio,
            bench.saved_ratio(simulation.hits),
            result.written_blocks,
            float(np.percentile(served.ttft_seconds, 50)),
            float(np.percentile(served.ttft_seconds, 99)),
            served.residual_seconds,
        )


class Outcome(NamedTuple):
    """What came of a probe; `residual_seconds` is what each request still computed."""

    policy: str
    capacities: tuple[int, int]
    token_hit_ratio: float
    prefill_seconds_saved_ratio: float
    written_blocks: int
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    residual_seconds: np.ndarray


class Resamples:
    """Sessions drawn with replacement, so many times; the same draws for everything compared."""

    def __init__(self, requests: Sequence[TraceRequest], seed: int) -> None:
        names: dict[object, int] = {}
        self._owners = np.array([names.setdefault(session_of(r), len(names)) for r in requests])
        self.session_count = len(names)
        rng, count = Random(seed), self.session_count
        drawn = [
            np.bincount(rng.choices(range(count), k=count), minlength=count)
            for _ in range(RESAMPLES)
        ]
        self._weights = np.array(drawn, dtype=np.float64)

    def shares(self, part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Sum of `part` over sum of `whole`, both one a request, in each resample."""
        parts = self._weights @ np.bincount(self._owners, part)
        wholes = self._weights @ np.bincount(self._owners, whole)
        shares: np.ndarray = parts / np.maximum(wholes, 1e-12)
        return shares


def session_of(request: TraceRequest) -> object:
    """Whose outcomes stand and fall together: the session, else what the prompt begins with.

    The first block may be a system prompt that everybody shares; the second is a conversation's.
    """
    if request.session:
        return request.tenant, request.session
    return request.tenant, tuple(request.hash_ids[1:2]) or tuple(request.hash_ids[:1])


class Tuner:
    """Finds sizes and a policy; `tries` tells how many probes were carried out."""

    def __init__(
        self, bench: Bench, prices: Prices, limits: Limits, workers: Workers,
        progress: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._bench, self._prices, self._limits = bench, prices, limits
        self._workers, self._progress = workers, progress
        self._resamples = Resamples(bench.requests, bench.setup.seed)
        costs = bench.costs
        self._whole = np.array([costs.cost.seconds(int(n), 0) for n in bench.trace.inputs])
        self._span = float(bench.trace.times[-1])
        if self._span <= 0:
            raise InvalidRequest(
                f"{bench.setup.trace} spans no time; money a month needs a trace of some seconds"
            )
        self._block_bytes = bench.trace.block_size * costs.bytes_per_token
        self._known: dict[Probe, Outcome] = {}

    def tune(self, policies: Sequence[str]) -> dict[str, Any]:
        """The recommendation, the steps to it, and how the policies compare there."""
        steps = self._climb(policies[0])
        chosen = max(steps, key=self._net) if steps else None
        recommended = chosen
        rivals: list[Outcome] = []
        if chosen is not None:
            rivals = self._probe(
                [Probe(policy, chosen.capacities, self._prices) for policy in policies]
            )
            recommended = max(rivals, key=self._net)
            if self._net(recommended) <= 0:
                recommended = None
        return {
            "sessions": self._resamples.session_count,
            "prefill_gpu_share": float(self._whole.sum()) / self._span,
            "recommended": None if recommended is None else self._described(recommended),
            "steps": [
                self._step(before, after)
                for before, after in zip([None, *steps], steps, strict=False)
            ],
            "policies": [
                {**self._described(rival), **self._against(rival, recommended)}
                for rival in sorted(rivals, key=self._net, reverse=True)
            ],
        }

    # Searching

    def _climb(self, policy: str) -> list[Outcome]:
        """Growing sizes, each the step that nets most, up to the limits."""
        path: list[Outcome] = []
        host = disk = worse = 0
        while worse < PATIENCE:
            options = [(host + 1, disk)] if not path else [(host + 1, disk), (host, disk + 1)]
            sizes = {self._sizes(option): option for option in reversed(options)}
            sizes.pop(None, None)
            outcomes = self._probe(
                [Probe(policy, one, self._prices) for one in sizes if one is not None]
            )
            outcomes = [one for one in outcomes if self._affordable(one)]
            if not outcomes:
                break
            best = max(outcomes, key=self._net)
            host, disk = sizes[best.capacities]
            if path and best.capacities == path[-1].capacities:
                continue  # of a trace so small that several steps are one size
            worse = worse + 1 if path and self._net(best) < self._net(path[-1]) else 0
            path.append(best)
        return path

    def _sizes(self, step: tuple[int, int]) -> tuple[int, int] | None:
        """Blocks at so many steps of host and disk; None beyond the last or the limits."""
        host, disk = step
        if not 0 < host <= len(HOST_STEPS) or disk >= len(DISK_STEPS):
            return None
        workload = self._bench.workload
        blocks = (
            max(1, workload.capacity(HOST_STEPS[host - 1])),
            workload.capacity(DISK_STEPS[disk]),
        )
        allowed = self._limits.host_bytes, self._limits.disk_bytes
        for count, limit in zip(blocks, allowed, strict=True):
            if limit is not None and count * self._block_bytes > limit:
                return None
        # A disk smaller than host would hold nothing that host does not.
        return blocks if not blocks[1] or blocks[1] > blocks[0] else None

    def _probe(self, probes: Sequence[Probe]) -> list[Outcome]:
        new = [probe for probe in dict.fromkeys(probes) if probe not in self._known]
        self._known.update(zip(new, self._workers.run(new, self._progress), strict=True))
        return [self._known[probe] for probe in probes]

    # Money

    def _affordable(self, outcome: Outcome) -> bool:
        budget = self._limits.budget
        return budget is None or self._cost(outcome) <= budget

    def _cost(self, outcome: Outcome) -> float:
        host, disk = (count * self._block_bytes for count in outcome.capacities)
        written = outcome.written_blocks * self._block_bytes / self._span
        allowed = self._bench.setup.endurance_dwpd * disk / SECONDS_A_DAY
        # A short trace uses up what is allowed at first; that does not go on for a month.
        return self._prices.month(host, disk, min(written, allowed) if allowed else written)

    def _saves(self, outcome: Outcome) -> float:
        saved = float((self._whole - outcome.residual_seconds).sum())
        return self._prices.worth(saved / self._span)

    def _net(self, outcome: Outcome) -> float:
        return self._saves(outcome) - self._cost(outcome)

    def _drawn(self, outcome: Outcome | None) -> np.ndarray:
        """Net worth in each resample, of no store 0."""
        if outcome is None:
            return np.zeros(RESAMPLES)
        shares = self._resamples.shares(self._whole - outcome.residual_seconds, self._whole)
        everything = self._prices.worth(float(self._whole.sum()) / self._span)
        drawn: np.ndarray = everything * shares - self._cost(outcome)
        return drawn

    # Words

    def _described(self, outcome: Outcome) -> dict[str, Any]:
        unique = self._bench.workload.unique_blocks
        tiers = {
            name: {
                "capacity_blocks": count,
                "capacity_fraction": count / unique,
                "capacity_bytes": count * self._block_bytes,
            }
            for name, count in zip(("host", "disk"), outcome.capacities, strict=True)
            if count
        }
        low, high = np.percentile(self._drawn(outcome), INTERVAL)
        written = outcome.written_blocks * self._block_bytes / self._span * SECONDS_A_DAY
        disk = outcome.capacities[1] * self._block_bytes
        return {
            "policy": outcome.policy,
            "tiers": tiers,
            "cost_per_month": self._cost(outcome),
            "saves_per_month": self._saves(outcome),
            "net_per_month": self._net(outcome),
            "net_per_month_interval": [float(low), float(high)],
            "token_hit_ratio": outcome.token_hit_ratio,
            "prefill_seconds_saved_ratio": outcome.prefill_seconds_saved_ratio,
            "ttft_p50_seconds": outcome.ttft_p50_seconds,
            "ttft_p99_seconds": outcome.ttft_p99_seconds,
            "drive_writes_per_day": written / disk if disk else None,
        }

    def _step(self, before: Outcome | None, after: Outcome) -> dict[str, Any]:
        """A step, with what it adds and in how many resamples that is more than nothing."""
        gained = self._drawn(after) - self._drawn(before)
        low, high = np.percentile(gained, INTERVAL)
        base = 0.0 if before is None else self._net(before)
        return {
            **self._described(after),
            "adds_net_per_month": self._net(after) - base,
            "adds_net_per_month_interval": [float(low), float(high)],
            "confidence": float((gained > 0).mean()),
        }

    def _against(self, rival: Outcome, best: Outcome | None) -> dict[str, Any]:
        """In how many resamples the recommended policy is at least as good."""
        behind = self._drawn(best) - self._drawn(rival)
        return {"recommended_at_least_as_good": float((behind >= 0).mean())}
