"""`kvstore bench decide`: restore plans from learned costs against the best plans there are.

Simulated on a manual clock: engines and links whose true costs have knees, queues and 20 % noise.
The models start from a prior that is wrong and learn from what is executed. After a warm-up each
decision is judged by the true costs, without noise. The live form is in `decide_live.py`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.bench.decide_live import run_live
from kvstore.bench.decide_world import BLOCK_TOKENS, World, noise
from kvstore.bench.measure import document
from kvstore.core.clock import ManualClock
from kvstore.policies.cost import LinkCost, LinkIdentity, PathModel, RecomputeIdentity
from kvstore.policies.cost import RecomputeModel as Model
from kvstore.policies.planner import RECOMPUTE_ALL, Decision, decide
from kvstore.policies.timing import Costs, Cut, Segment, Situation

BANDWIDTHS = (60e6, 200e6, 600e6, 2e9, 6e9)
CONCURRENT = (1, 4, 16)
SHAPES = (frozenset({"prefix"}), frozenset({"prefix", "split"}))
PROMPT_TOKENS = (128, 65_536)
WARM_UP, JUDGED = 200, 200
QUICK_BANDWIDTHS, QUICK_CONCURRENT, QUICK_JUDGED = BANDWIDTHS[::2], (1, 16), 50
# Optimistic, so that a link is tried: what is never tried is never measured.
LINK_PRIOR = LinkCost.of(100e-6, 10e9)
SLOWER_RATIO, SLOWER_SECONDS = 1.10, 3e-3


class Judged(NamedTuple):
    """One decision's true seconds, beside those of what else could have been done."""

    kind: str
    seconds: float
    best_seconds: float
    recompute_seconds: float
    load_seconds: float

    @property
    def is_slower(self) -> bool:
        """Slower than without a store, by 10 % and by 3 ms."""
        more = self.seconds - self.recompute_seconds
        return self.seconds > SLOWER_RATIO * self.recompute_seconds and more > SLOWER_SECONDS

    @property
    def regret_ratio(self) -> float:
        return self.seconds / self.best_seconds - 1.0


@dataclass
class Transfer:
    """A transfer under way; a daemon knows all of it but the end."""

    end: float
    begin: float
    byte_count: int
    queued_bytes: int
    look_at: float


def run(
    quick: bool = False, seed: int = 0, live: bool = True, path: Path | None = None
) -> dict[str, Any]:
    """Both forms: simulated decisions, and those of a daemon with a slow disk below `path`."""
    found = simulated(quick, seed)
    return found | run_live(quick, path, seed) if live else found


def simulated(quick: bool = False, seed: int = 0) -> dict[str, Any]:
    """Judges decisions in every combination of bandwidth, concurrency and plan shapes."""
    judged: list[Judged] = []
    cells: list[dict[str, Any]] = []
    count = QUICK_JUDGED if quick else JUDGED
    for bandwidth, concurrent, shapes in itertools.product(
        QUICK_BANDWIDTHS if quick else BANDWIDTHS,
        QUICK_CONCURRENT if quick else CONCURRENT,
        SHAPES,
    ):
        rng = random.Random(f"{seed}/{bandwidth}/{concurrent}/{len(shapes)}")
        bench = Bench(rng, World.draw(rng, bandwidth), concurrent, shapes)
        found = list(bench.decisions(WARM_UP + count))[WARM_UP:]
        judged += found
        cells.append(
            {
                "disk_bytes_per_second": bandwidth,
                "concurrent_restores": concurrent,
                "plan_shapes": sorted(shapes),
                **_figures(found),
            }
        )
    kinds = dict.fromkeys((RECOMPUTE_ALL, "load_all", "prefix", "split"), 0)
    for one in judged:
        kinds[one.kind] += 1
    return document(
        _figures(judged),
        {
            "plan": [one.seconds for one in judged],
            "best_plan": [one.best_seconds for one in judged],
            "recompute_all": [one.recompute_seconds for one in judged],
            "load_all": [one.load_seconds for one in judged],
        },
        seed=seed,
        decisions=len(judged),
        plans=kinds,
        cells=cells,
    )


def _figures(judged: list[Judged]) -> dict[str, float]:
    total = sum(one.seconds for one in judged)
    return {
        "share_slower_than_recompute": sum(one.is_slower for one in judged) / len(judged),
        "mean_regret_ratio": sum(one.regret_ratio for one in judged) / len(judged),
        "seconds_ratio_to_recompute": total / sum(one.recompute_seconds for one in judged),
        "seconds_ratio_to_load_all": total / sum(one.load_seconds for one in judged),
    }


class Bench:
    """Engines that restore at the same time over the same links, each its own GPU."""

    def __init__(
        self, rng: random.Random, world: World, concurrent: int, shapes: frozenset[str]
    ) -> None:
        self._rng, self._world, self._shapes = rng, world, shapes
        self._clock = ManualClock(0.0)
        self._recompute = Model(RecomputeIdentity("simulated"))
        self._paths = {
            name: PathModel(LinkIdentity(name), LINK_PRIOR) for name in world.bytes_per_second
        }
        # When each link is free, and its queue.
        self._free = dict.fromkeys(self._paths, 0.0)
        self._under_way: dict[str, list[Transfer]] = {name: [] for name in self._paths}
        self._idle = [rng.random() * 1e-3 for _ in range(concurrent)]
        # Measurements become known when what they measure ends.
        self._pending: list[tuple[float, int, tuple[Any, ...]]] = []
        self._serial = itertools.count()

    def decisions(self, count: int) -> Iterator[Judged]:
        heapq.heapify(self._idle)
        for _ in range(count):
            at = heapq.heappop(self._idle)
            self._clock.advance(max(0.0, at - self._clock.now()))
            self._learn()
            self._look_at_overdue()
            situation = self._request()
            decision = decide(situation, self._costs(0.5), self._costs(0.99))
            end = self._execute(situation, decision)
            heapq.heappush(self._idle, end)
            yield self._judge(situation, decision)

    def _costs(self, share: float) -> Costs:
        links = {name: model.cost(share) for name, model in self._paths.items()}
        return Costs(self._recompute.cost(share), links)

    def _request(self) -> Situation:
        low, high = map(math.log, PROMPT_TOKENS)
        total = int(math.exp(self._rng.uniform(low, high)))
        matched = int(total * self._rng.uniform(0.05, 0.99)) // BLOCK_TOKENS
        in_host = self._rng.choice([0, 0, self._rng.randint(0, matched)])
        parts = [(in_host, "host"), (matched - in_host, "disk")]
        segments = [
            Segment(
                blocks * BLOCK_TOKENS, blocks * BLOCK_TOKENS * self._world.token_bytes, name,
                (name,),
            )
            for blocks, name in parts
            if blocks or name == "host"
        ]  # fmt: skip
        return Situation(
            tuple(segments),
            total - matched * BLOCK_TOKENS,
            block_size=BLOCK_TOKENS,
            shapes=self._shapes,
            queued_bytes={name: self._queued(name) for name in self._paths},
            prefill_chunk_tokens=self._world.chunk_tokens,
        )

    def _queued(self, link: str) -> int:
        now = self._clock.now()
        self._under_way[link] = [one for one in self._under_way[link] if one.end > now]
        return sum(one.byte_count for one in self._under_way[link])

    def _look_at_overdue(self) -> None:
        """A transfer that should be there by now tells something before it ends."""
        now = self._clock.now()
        for name, transfers in self._under_way.items():
            for one in transfers:
                if one.end > now >= one.look_at:
                    seconds = now - one.begin
                    self._paths[name].observe_overdue(seconds, one.byte_count, one.queued_bytes)
                    one.look_at = now + seconds  # again when it took twice as long

    def _judge(self, situation: Situation, decision: Decision) -> Judged:
        world, matched = self._world, situation.matched_tokens
        return Judged(
            decision.kind,
            world.seconds(situation, decision.chosen.cut),
            world.best_seconds(situation),
            world.seconds(situation, Cut(0, matched)),
            world.seconds(situation, Cut(matched, matched)),
        )

    def _execute(self, situation: Situation, decision: Decision) -> float:
        """Moves and computes with noise; answers when the request ends."""
        now, end = self._clock.now(), self._clock.now()
        for name, size in decision.link_bytes.items():
            end = max(end, self._move(name, size, situation.queued_bytes[name]))
        cut, matched = decision.chosen.cut, situation.matched_tokens
        if cut.resume < matched:
            end = max(end, self._compute(now, cut.resume - cut.start, cut.start))
            return self._compute(end, situation.new_tokens, matched)
        return self._compute(end, matched + situation.new_tokens - cut.start, cut.start)

    def _move(self, name: str, size: int, queued: int) -> float:
        world, now = self._world, self._clock.now()
        plain = float(world.busy(name, np.array([size]), queued > 0)[0])
        begin = max(now, self._free[name])
        self._free[name] = begin + plain * noise(self._rng)
        end = self._free[name] + world.latency_seconds[name]
        self._under_way[name].append(Transfer(self._free[name], now, size, queued, now))
        self._later(end, name, end - now, size, queued)
        return end

    def _compute(self, begin: float, new: int, cached: int) -> float:
        chunk = self._world.chunk_tokens or new
        while new > 0:
            part = min(new, chunk)
            plain = float(self._world.compute(np.array([part]), np.array([cached]))[0])
            seconds = plain * noise(self._rng)
            begin += seconds
            self._later(begin, "", seconds, part, cached)
            new, cached = new - part, cached + part
        return begin

    def _later(self, at: float, *measurement: Any) -> None:
        heapq.heappush(self._pending, (at, next(self._serial), measurement))

    def _learn(self) -> None:
        while self._pending and self._pending[0][0] <= self._clock.now():
            link, seconds, *rest = heapq.heappop(self._pending)[2]
            if link:
                self._paths[link].observe(seconds, *rest)
            else:
                self._recompute.observe(seconds, [tuple(rest)])
