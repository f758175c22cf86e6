"""`EngineModel`: when first tokens come, given what each request found in the store.

Engines have a queue of prefills each, worked off in steps of at most `chunk_tokens` shared by those
that are ready, first come first served; a request is ready when what it restores is there. What it
restores is the planner's decision, made when it comes, from what is queued then. A link carries one
transfer after the other. Decodes are not modelled.
"""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

import numpy as np

from kvstore.policies.cost import CallCost, LinkCost, RecomputePrior
from kvstore.policies.planner import Costs, Decision, Segment, Situation, decide

# Of what prefills without a store would take, so many engines leave a fifth idle.
BUSY_SHARE = 0.8
BYTES_PER_TOKEN = 131_072
HOST_LINK, DISK_LINK, HBM_LINK = "host>hbm", "disk>host", "hbm>hbm"
P99_SIGMAS = 2.326  # of a normal distribution


class EngineCosts(NamedTuple):
    """What the engines and links are like; as defaults one large accelerator and local drives.

    With `noise`, true durations are log-normally spread around what is predicted, by that much.
    """

    cost: CallCost = RecomputePrior().cost
    host: LinkCost = LinkCost.of(20e-6, 50e9)
    disk: LinkCost = LinkCost.of(100e-6, 6e9)
    chunk_tokens: int = 2048
    bytes_per_token: int = BYTES_PER_TOKEN
    engine_count: int = 1
    deadline_seconds: float | None = None
    noise: float = 0.0
    hbm: LinkCost = LinkCost.of(20e-6, 1e12)

    def planned(self, sigmas: float = 0.0) -> Costs:
        """What the planner is told: the costs, or those that are rarely exceeded."""
        factor = math.exp(self.noise * sigmas)
        links = {
            HOST_LINK: self.host.times(factor),
            DISK_LINK: self.disk.times(factor),
            HBM_LINK: self.hbm.times(factor),
        }
        return Costs(self.cost.times(factor), links)


class Found(NamedTuple):
    """Tokens of a prompt in host, those behind them on disk only, and before both on the GPU."""

    host_tokens: int = 0
    disk_tokens: int = 0
    hbm_tokens: int = 0

    @property
    def tokens(self) -> int:
        return sum(self)


class Served(NamedTuple):
    """What came of all requests; arrays have one entry a request."""

    ttft_seconds: np.ndarray
    residual_seconds: np.ndarray
    restored_tokens: np.ndarray
    disk_read_bytes: int
    predicted_misses: int
    unpredicted_misses: int
    recomputed_requests: int
    hbm_read_bytes: int = 0

    @property
    def restored_token_count(self) -> int:
        return int(self.restored_tokens.sum())


class _Job:
    """A prefill that waits or goes on; `pace` is how much slower it is than predicted."""

    __slots__ = ("cached", "left", "number", "pace", "ready")

    def __init__(self, number: int, ready: float, cached: int, left: int, pace: float) -> None:
        self.number = number
        self.ready = ready
        self.cached = cached
        self.left = left
        self.pace = pace


class _Link:
    """A link that carries one transfer after the other."""

    def __init__(self, cost: LinkCost) -> None:
        self._cost = cost
        self.free = 0.0

    def queued_bytes(self, now: float) -> int:
        return int(max(0.0, self.free - now) / self._cost.byte_seconds)

    def carry(self, now: float, byte_count: int, pace: float) -> float:
        """When bytes that are sent now have arrived: T = L + (Q + V)/B."""
        if not byte_count:
            return now
        self.free = max(now, self.free) + byte_count * self._cost.byte_seconds * pace
        return self.free + self._cost.latency_seconds * pace


class _Engine:
    """One engine's queue, and its own links from host memory and from its GPU's own."""

    def __init__(self, costs: EngineCosts) -> None:
        self._costs = costs
        self._queue: list[_Job] = []
        self.free = 0.0
        self._queued_seconds = 0.0
        self.link, self.hbm = _Link(costs.host), _Link(costs.hbm)

    def add(self, job: _Job) -> None:
        self._queue.append(job)
        self._queued_seconds += self._alone(job)

    def _alone(self, job: _Job) -> float:
        """Seconds that a prefill would still take if nothing else ran."""
        return self._costs.cost.seconds(job.left, job.cached, self._costs.chunk_tokens)

    def backlog_seconds(self, now: float) -> float:
        """Work before one that comes now."""
        return max(0.0, self.free - now) + self._queued_seconds

    def advance(self, until: float, finished: np.ndarray) -> None:
        """Runs the steps that begin before `until`; `finished` takes when each prefill ended."""
        while self._queue:
            start = max(self.free, min(job.ready for job in self._queue))
            if start >= until:
                return
            self._step(start, finished)

    def _step(self, start: float, finished: np.ndarray) -> None:
        cost, budget = self._costs.cost, self._costs.chunk_tokens
        seconds, over = cost.call_seconds, []
        for job in self._queue:
            if job.ready > start:
                continue
            tokens = min(budget, job.left)
            seconds += cost.block_value(job.cached, tokens) * job.pace
            self._queued_seconds -= self._alone(job)
            job.cached, job.left = job.cached + tokens, job.left - tokens
            self._queued_seconds += self._alone(job)
            budget -= tokens
            if not job.left:
                over.append(job)
            if budget <= 0:
                break
        self.free = start + seconds
        for job in over:
            self._queue.remove(job)
            finished[job.number] = self.free
        if not self._queue:
            self._queued_seconds = 0.0


class EngineModel:
    """Engines that share a store; the requests come in the order of time."""

    def __init__(
        self,
        costs: EngineCosts,
        arrivals: np.ndarray,
        inputs: np.ndarray,
        block_size: int,
        seed: int = 0,
    ) -> None:
        self._costs = costs
        self._block_size = block_size
        self._planned = costs.planned(), costs.planned(P99_SIGMAS) if costs.noise else None
        self._arrivals = arrivals
        self._inputs = inputs
        self._rng = Random(seed)
        self._engines = [_Engine(costs) for _ in range(costs.engine_count)]
        self._disk = _Link(costs.disk)
        self._finished = np.zeros(len(inputs))
        self._expected = np.zeros(len(inputs), dtype=bool)
        self._residual = np.zeros(len(inputs))
        self._restored = np.zeros(len(inputs), dtype=np.int64)
        self._disk_bytes = self._hbm_bytes = self._recomputed = 0

    def serve(self, found: list[Found]) -> Served:
        """All requests."""
        for number, one in enumerate(found):
            self._request(number, one)
        for engine in self._engines:
            engine.advance(np.inf, self._finished)
        ttft = self._finished - self._arrivals
        deadline = self._costs.deadline_seconds
        missed = np.zeros(len(ttft), dtype=bool) if deadline is None else ttft > deadline
        return Served(
            ttft,
            self._residual,
            self._restored,
            self._disk_bytes,
            int((missed & self._expected).sum()),
            int((missed & ~self._expected).sum()),
            self._recomputed,
            self._hbm_bytes,
        )

    def _request(self, number: int, found: Found) -> None:
        now, length = float(self._arrivals[number]), int(self._inputs[number])
        for engine in self._engines:
            engine.advance(now, self._finished)
        engine = min(self._engines, key=lambda one: one.backlog_seconds(now))
        decision = self._decide(engine, now, length, found)
        self._expected[number] = decision.is_predicted_miss
        kept = decision.restore_tokens
        moved = decision.link_bytes
        near = moved.get(HBM_LINK, 0)
        ready = max(
            engine.link.carry(now, moved.get(HOST_LINK, 0), self._pace()),
            self._disk.carry(now, moved.get(DISK_LINK, 0), self._pace()),
            # Without copies on the GPU no pace is drawn for them.
            engine.hbm.carry(now, near, self._pace()) if near else now,
        )
        # A prompt that is in the store as a whole still has its last token computed.
        cached = min(kept, max(0, length - 1))
        engine.add(_Job(number, ready, cached, max(1, length - cached), self._pace()))
        self._residual[number] = self._costs.cost.seconds(length - cached, cached)
        self._restored[number] = kept
        self._disk_bytes += moved.get(DISK_LINK, 0)
        self._hbm_bytes += near
        self._recomputed += kept < found.tokens

    def _pace(self) -> float:
        return math.exp(self._rng.gauss(0.0, self._costs.noise)) if self._costs.noise else 1.0

    def _decide(self, engine: _Engine, now: float, length: int, found: Found) -> Decision:
        """The planner's answer to what is found and queued now."""
        costs, size = self._costs, self._costs.bytes_per_token
        host, disk, hbm = found
        segments = (
            Segment(hbm, hbm * size, "hbm", (HBM_LINK,)),
            Segment(host, host * size, "host", (HOST_LINK,)),
            Segment(disk, disk * size, "disk", (DISK_LINK, HOST_LINK)),
        )
        queued = {
            HOST_LINK: engine.link.queued_bytes(now),
            DISK_LINK: self._disk.queued_bytes(now),
            HBM_LINK: engine.hbm.queued_bytes(now),
        }
        situation = Situation(
            tuple(segment for segment in segments if segment.tokens),
            length - found.tokens,
            block_size=self._block_size,
            deadline_seconds=costs.deadline_seconds,
            queued_bytes=queued,
            queued_prefill_tokens=_tokens_of(engine.backlog_seconds(now), costs),
            prefill_chunk_tokens=costs.chunk_tokens,
        )
        return decide(situation, *self._planned)


def _tokens_of(seconds: float, costs: EngineCosts) -> int:
    """Tokens of one prompt that take so long: the queue in the planner's unit.

    The positive root of c/2 n^2 + (b + a/chunk) n = seconds.
    """
    half = costs.cost.pair_seconds / 2
    slope = costs.cost.token_seconds + costs.cost.call_seconds / costs.chunk_tokens
    return round(2 * seconds / (slope + math.sqrt(slope * slope + 4 * half * seconds)))


def engines_needed(costs: EngineCosts, arrivals: np.ndarray, inputs: np.ndarray) -> int:
    """How many engines a workload without a store keeps busy, and a fifth more."""
    span = float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0
    work = sum(costs.cost.seconds(int(n), 0, costs.chunk_tokens) for n in inputs)
    return max(1, int(np.ceil(work / span / BUSY_SHARE))) if span > 0 else 1
