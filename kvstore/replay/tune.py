"""`kvstore tune`: tier sizes and a policy for a trace, prices and a budget.

A store is worth the GPU time that it saves, what is restored instead of computed, and costs its
memory, its disk, the disk's wear and the GPUs' memory. Sizes grow step by step, each time the tier
that nets more, so that each step's gain shows; copies on GPUs, which change no hit, grow last. Then
the policies compete at the sizes chosen, and each tier is tried a step smaller and larger.

How sure a figure is comes from a block bootstrap: sessions, whose requests stand and fall together,
are drawn anew with all that came of them. It does not run the caches anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.errors import InvalidRequest
from kvstore.core.prices import GIB, Prices
from kvstore.replay.formats import TraceRequest
from kvstore.replay.simulate import SECONDS_A_DAY, Bench, Cell
from kvstore.replay.simulate_pool import Workers

HOST_STEPS = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
DISK_STEPS = (0.0, 0.1, 0.25, 0.5, 1.0)
HBM_STEPS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25)
RESAMPLES = 400
INTERVAL = (5.0, 95.0)
# So many steps in a row that only cost end the search.
PATIENCE = 3


class Limits(NamedTuple):
    """What may be bought: money a month, and bytes of each tier; None is no limit, 0 none."""

    budget: float | None = None
    host_bytes: float | None = None
    disk_bytes: float | None = None
    hbm_bytes: float | None = 0


class Sizes(NamedTuple):
    """Blocks of each tier; 0 is no such tier."""

    host: int
    disk: int = 0
    hbm: int = 0

    @property
    def are_of_use(self) -> bool:
        """Whether each tier adds something: a disk, or host, that holds what no tier above does."""
        return (not self.disk or self.disk > self.host) and self.hbm <= self.host


class Steps(NamedTuple):
    """Sizes of each tier that are tried, in blocks."""

    host: list[int]
    disk: list[int]
    hbm: list[int]


class Probe(NamedTuple):
    """One policy at sizes of tiers, tried in a worker at some prices."""

    policy: str
    capacities: Sizes
    prices: Prices

    def run(self, bench: Bench) -> Outcome:
        host, disk, hbm = self.capacities
        capacities = (host, disk) if disk else (host,)
        simulation = bench.simulation(Cell(self.policy, capacities, self.prices, hbm))
        result = simulation.run()
        served = bench.serve(simulation.hits)
        return Outcome(
            self.policy,
            self.capacities,
            result.token_hit_ratio,
            bench.saved_ratio(simulation.hits),
            result.written_blocks,
            float(served.ttft_seconds.mean()),
            float(np.percentile(served.ttft_seconds, 50)),
            float(np.percentile(served.ttft_seconds, 99)),
            served.residual_seconds,
        )


class Outcome(NamedTuple):
    """What came of a probe; `residual_seconds` is what each request still computed."""

    policy: str
    capacities: Sizes
    token_hit_ratio: float
    prefill_seconds_saved_ratio: float
    written_blocks: int
    ttft_mean_seconds: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    residual_seconds: np.ndarray


def _size_of(tier: str) -> Callable[[Outcome], int]:
    return lambda outcome: int(getattr(outcome.capacities, tier))


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
        self._given = bench.setup.hbm_blocks
        if self._given:
            self._limits = limits._replace(hbm_bytes=None)
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
        self._steps = self._step_sizes()
        self._known: dict[Probe, Outcome] = {}

    def tune(self, policies: Sequence[str]) -> dict[str, Any]:
        """The recommendation, the steps to it, how the policies compare there, and other sizes."""
        path = self._climb(policies[0])
        steps = list(zip([None, *path], path, strict=False))
        chosen = max(path, key=self._net) if path else None
        recommended = best = chosen
        rivals: list[Outcome] = []
        if chosen is not None:
            copies = self._grow_copies(chosen)
            steps += zip([chosen, *copies], copies, strict=False)
            chosen = max([chosen, *copies], key=self._net)
            rivals = self._probe(
                [Probe(policy, chosen.capacities, self._prices) for policy in policies]
            )
            best = max(rivals, key=self._net)
            recommended = best if self._net(best) > 0 else None
        smallest = Sizes(self._steps.host[0])
        return {
            "sessions": self._resamples.session_count,
            "smallest": {
                "tiers": self._tiers(smallest),
                "cost_per_month": self._prices.month(smallest.host * self._block_bytes),
            },
            "prefill_gpu_share": float(self._whole.sum()) / self._span,
            "recommended": None if recommended is None else self._described(recommended),
            "steps": [self._step(before, after) for before, after in steps],
            "policies": [
                {**self._described(rival), **self._against(rival, recommended)}
                for rival in sorted(rivals, key=self._net, reverse=True)
            ],
            "around": [] if best is None else self._around(best),
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
            outcomes = self._tried(policy, [one for one in sizes if one is not None])
            if not outcomes:
                break
            best = max(outcomes, key=self._net)
            host, disk = sizes[best.capacities]
            worse = worse + 1 if path and self._net(best) < self._net(path[-1]) else 0
            path.append(best)
        return path

    def _grow_copies(self, base: Outcome) -> list[Outcome]:
        """Growing tiers hbm above `base`, up to the limits."""
        path: list[Outcome] = []
        worse = 0
        for blocks in () if self._given else self._steps.hbm[1:]:
            sizes = base.capacities._replace(hbm=blocks)
            tried = self._tried(base.policy, [sizes] if self._is_allowed(sizes) else [])
            if not tried or worse == PATIENCE:
                break
            before = path[-1] if path else base
            worse = worse + 1 if self._net(tried[0]) < self._net(before) else 0
            path.append(tried[0])
        return path

    def _step_sizes(self) -> Steps:
        """Blocks of the steps of each tier, from small to large, each size once."""
        capacity = self._bench.workload.capacity
        hbm = {0, self._given} if self._given else {capacity(share) for share in HBM_STEPS}
        return Steps(
            sorted({max(1, capacity(share)) for share in HOST_STEPS}),
            sorted({capacity(share) for share in DISK_STEPS}),
            sorted(hbm),
        )

    def _sizes(self, step: tuple[int, int]) -> Sizes | None:
        """Blocks at so many steps of host and disk; None beyond the last or the limits."""
        host, disk = step
        if host > len(self._steps.host) or disk >= len(self._steps.disk):
            return None
        blocks = self._steps.host[host - 1]
        sizes = Sizes(blocks, self._steps.disk[disk], min(self._given, blocks))
        return sizes if self._is_allowed(sizes) else None

    def _is_allowed(self, sizes: Sizes) -> bool:
        """Whether sizes are within the limits, and no tier is there for nothing."""
        for count, limit in zip(sizes, self._limits[1:], strict=True):
            if limit is not None and count * self._block_bytes > limit:
                return False
        return sizes.are_of_use

    def _around(self, best: Outcome) -> list[dict[str, Any]]:
        """What the last GiB of each tier save, and the next ones would, by a step of each.

        Limits do not count here, but a tier that is not wanted is left out.
        """
        found = []
        for (tier, steps), limit in zip(
            self._steps._asdict().items(), self._limits[1:], strict=True
        ):
            here = getattr(best.capacities, tier)
            smaller = [size for size in steps if size < here][-1:]
            larger = [size for size in steps if size > here][:1] if limit != 0 else []
            sizes = [best.capacities._replace(**{tier: size}) for size in smaller + larger]
            tried = [Probe(best.policy, one, self._prices) for one in sizes if one.are_of_use]
            for other in self._probe(tried):
                found.append(self._between(tier, *sorted((best, other), key=_size_of(tier))))
        return found

    def _between(self, tier: str, less: Outcome, more: Outcome) -> dict[str, Any]:
        """What each GiB costs and saves from one size of a tier to a larger one."""
        ends = [getattr(one.capacities, tier) * self._block_bytes for one in (less, more)]
        gib = (ends[1] - ends[0]) / GIB
        return {
            "tier": tier,
            "from_bytes": ends[0],
            "to_bytes": ends[1],
            "costs_per_gib_month": (self._cost(more) - self._cost(less)) / gib,
            "saves_per_gib_month": (self._saves(more) - self._saves(less)) / gib,
            "confidence": float((self._drawn(more) > self._drawn(less)).mean()),
            "ttft_mean_seconds": [less.ttft_mean_seconds, more.ttft_mean_seconds],
        }

    def _tried(self, policy: str, sizes: Sequence[Sizes]) -> list[Outcome]:
        """What comes of sizes, but for those beyond the budget."""
        found = self._probe([Probe(policy, one, self._prices) for one in sizes])
        return [one for one in found if self._affordable(one)]

    def _probe(self, probes: Sequence[Probe]) -> list[Outcome]:
        new = [probe for probe in dict.fromkeys(probes) if probe not in self._known]
        self._known.update(zip(new, self._workers.run(new, self._progress), strict=True))
        return [self._known[probe] for probe in probes]

    # Money

    def _affordable(self, outcome: Outcome) -> bool:
        budget = self._limits.budget
        return budget is None or self._cost(outcome) <= budget

    def _cost(self, outcome: Outcome) -> float:
        host, disk, hbm = (count * self._block_bytes for count in outcome.capacities)
        written = outcome.written_blocks * self._block_bytes / self._span
        allowed = self._bench.setup.endurance_dwpd * disk / SECONDS_A_DAY
        # A short trace uses up what is allowed at first; that does not go on for a month.
        return self._prices.month(host, disk, min(written, allowed) if allowed else written, hbm)

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
        low, high = np.percentile(self._drawn(outcome), INTERVAL)
        written = outcome.written_blocks * self._block_bytes / self._span * SECONDS_A_DAY
        disk = outcome.capacities.disk * self._block_bytes
        return {
            "policy": outcome.policy,
            "tiers": self._tiers(outcome.capacities),
            "cost_per_month": self._cost(outcome),
            "saves_per_month": self._saves(outcome),
            "net_per_month": self._net(outcome),
            "net_per_month_interval": [float(low), float(high)],
            "token_hit_ratio": outcome.token_hit_ratio,
            "prefill_seconds_saved_ratio": outcome.prefill_seconds_saved_ratio,
            "ttft_mean_seconds": outcome.ttft_mean_seconds,
            "ttft_p50_seconds": outcome.ttft_p50_seconds,
            "ttft_p99_seconds": outcome.ttft_p99_seconds,
            "drive_writes_per_day": written / disk if disk else None,
        }

    def _tiers(self, sizes: Sizes) -> dict[str, Any]:
        unique = self._bench.workload.unique_blocks
        return {
            name: {
                "capacity_blocks": count,
                "capacity_fraction": count / unique,
                "capacity_bytes": count * self._block_bytes,
            }
            for name, count in sizes._asdict().items()
            if count
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
