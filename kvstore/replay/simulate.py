"""Simulations of a trace over policies and capacities: what `kvstore simulate` answers.

A cell is one policy at one set of capacities. Its cache is simulated with the daemon's own index,
residency and policy, then the engines with what each request found. Every set of capacities has the
leaf-first LRU and the offline optimum beside it, which say how much of the gap a policy closes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.errors import InvalidRequest
from kvstore.core.prices import Prices
from kvstore.core.space import Space
from kvstore.policies.cost import CallCost
from kvstore.policies.ghost import Hit
from kvstore.policies.ghost_hbm import Copies
from kvstore.replay.bounds import Optimum, optimum
from kvstore.replay.cachesim import CacheResult, CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.columns import TraceColumns, trace_columns
from kvstore.replay.formats import TraceRequest, load_trace
from kvstore.replay.transform import spread_ticks
from kvstore.replay.ttft import EngineCosts, EngineModel, Found, Served, engines_needed

BASELINE = "lru"
TIERS = ("host", "disk")
SECONDS_A_DAY = 86_400
CURVE_PERCENTS = (0, 1, 2, 5, *range(10, 91, 5), 92, 94, 96, 97, 98, 99, 99.5, 100)
# More requests than this a timestamp, on average, are ticks of a coarse clock.
TICK_SHARE = 0.5


class Setup(NamedTuple):
    """What all cells of a run share. `engines` of 0 takes as many as the trace needs.

    `endurance_dwpd` bounds what is written to disk, in drive writes a day; 0 does not. By `prices`
    it is judged what is worth a write; with None all that is due is written.
    `hints` is the accuracy of made-up hints that a prompt will be continued; None gives none.
    `hbm_blocks` are copies of host blocks that all GPUs have room for; 0 is no such tier.
    `exact`, if any, answers with the most seconds that can be saved, as `exact_upper` does.
    """

    trace: Path
    costs: EngineCosts = EngineCosts()
    engines: int = 0
    hints: float | None = None
    seed: int = 0
    limit: int = 0
    endurance_dwpd: float = 0.0
    prices: Prices | None = Prices()
    exact: Callable[[TraceColumns, int, CallCost], float] | None = None
    hbm_blocks: int = 0


class Cell(NamedTuple):
    """One policy at the capacities of host and, if there is one, of disk.

    `prices` and `hbm_blocks` are other ones than the setup's.
    """

    policy: str
    capacities: tuple[int, ...]
    prices: Prices | None = None
    hbm_blocks: int | None = None


class Bench:
    """A trace made ready for cells; a worker process has one."""

    def __init__(self, setup: Setup, requests: Sequence[TraceRequest] | None = None) -> None:
        self.setup = setup
        self.requests = load_trace(setup.trace, setup.limit) if requests is None else requests
        self.workload = Workload(
            self.requests, setup.hints, setup.seed, setup.costs.bytes_per_token
        )
        self.trace: TraceColumns = trace_columns(self.requests, by_tenant=True)
        if not self.trace.unique_blocks:
            raise InvalidRequest(f"{setup.trace} has no block; every prompt in it is empty")
        self.arrivals = _arrivals(self.requests, self.trace, setup.seed)
        engines = setup.engines or engines_needed(setup.costs, self.arrivals, self.trace.inputs)
        self.costs = setup.costs._replace(engine_count=engines)

    def serve(self, hits: Sequence[Hit]) -> Served:
        """The engines, given what each request found."""
        size = self.trace.block_size
        found = [
            Found(
                (hit.blocks - hit.disk_blocks - hit.hbm_blocks) * size,
                hit.disk_blocks * size,
                hit.hbm_blocks * size,
            )
            for hit in hits
        ]
        model = EngineModel(self.costs, self.arrivals, self.trace.inputs, size, self.setup.seed)
        return model.serve(found)

    def without_store(self) -> dict[str, Any]:
        """First tokens when every prompt is computed whole."""
        served = self.serve([Hit(0)] * len(self.requests))
        return {**_ttft_figures(served), "ttft_curve": _curve(served)}

    def optimum(self, capacities: tuple[int, ...]) -> Optimum:
        """Bounds for all tiers together, for their speeds do not matter to hits."""
        capacity, cost = sum(capacities), self.costs.cost
        best = optimum(self.trace, capacity, cost)
        if self.setup.exact is None:
            return best
        upper = self.setup.exact(self.trace, capacity, cost)
        return best._replace(seconds_upper=max(best.seconds_lower, min(best.seconds_upper, upper)))

    def simulation(self, cell: Cell) -> CacheSimulation:
        """A new cache for a cell, told what computing and restoring cost here."""
        costs, setup, limit = self.costs, self.setup, 0.0
        if len(cell.capacities) > 1:
            limit = setup.endurance_dwpd * cell.capacities[1] * self._block_bytes
        back = costs.disk.seconds(self._block_bytes)
        hbm = setup.hbm_blocks if cell.hbm_blocks is None else cell.hbm_blocks
        slot = next(iter(self.workload.spaces.values())).slot_bytes
        made = CacheSimulation(
            self.workload, cell.policy, cell.capacities, back, limit, cell.prices or setup.prices,
            Copies(hbm * slot, self._spared) if hbm else None,
        )  # fmt: skip
        made.residency.set_rates(None, costs.cost.token_seconds, costs.cost.pair_seconds)
        return made

    def _spared(self, space: Space, blocks: int) -> float:
        """The share of a load's seconds from host that copies on the GPU spare."""
        size = blocks * self._block_bytes
        return 1.0 - self.costs.hbm.seconds(size) / self.costs.host.seconds(size)

    def saved_seconds(self, hits: Sequence[Hit]) -> float:
        """Prefill seconds of the hit blocks: b n + c n^2/2 for n tokens."""
        cost, size = self.costs.cost, self.trace.block_size
        return sum(cost.block_value(0, hit.blocks * size) for hit in hits)

    def saved_ratio(self, hits: Sequence[Hit]) -> float:
        """The same, of what all blocks take."""
        cost = self.costs.cost
        whole = sum(cost.block_value(0, int(tokens)) for tokens in self.trace.inputs)
        return self.saved_seconds(hits) / max(whole, 1e-12)

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Figures of one cell."""
        simulation = self.simulation(cell)
        result = simulation.run()
        served, saved = self.serve(simulation.hits), self.saved_seconds(simulation.hits)
        return {
            "policy": cell.policy,
            "tiers": self._tiers(result),
            "token_hit_ratio": result.token_hit_ratio,
            "prefill_seconds_saved": saved,
            "prefill_seconds_saved_ratio": self.saved_ratio(simulation.hits),
            **_ttft_figures(served),
            "ttft_curve": _curve(served),
            **self._bytes(result, served, saved),
            "deadline_misses": {
                "predicted": served.predicted_misses,
                "unpredicted": served.unpredicted_misses,
            },
            "recomputed_hit_requests": served.recomputed_requests,
            "block_references_per_second": result.references_per_second,
            "endurance": self._endurance(result),
        }

    def _tiers(self, result: CacheResult) -> dict[str, Any]:
        tokens, unique = self.workload.input_tokens, self.workload.unique_blocks
        found = list(zip(TIERS, result.capacity_blocks, result.tier_tokens, strict=False))
        if self.setup.hbm_blocks:
            found.append(("hbm", self.setup.hbm_blocks, result.hbm_tokens))
        return {
            name: {
                "capacity_fraction": capacity / unique,
                "capacity_blocks": capacity,
                "capacity_bytes": capacity * self._block_bytes,
                "token_hit_ratio": hit / max(tokens, 1),
            }
            for name, capacity, hit in found
        }

    @property
    def _block_bytes(self) -> int:
        return self.trace.block_size * self.costs.bytes_per_token

    def _bytes(self, result: CacheResult, served: Served, saved: float) -> dict[str, Any]:
        restored = served.restored_token_count * self.costs.bytes_per_token
        full = int((self.trace.inputs // self.trace.block_size).sum())
        from_host = restored - served.hbm_read_bytes
        links = {"host>hbm": from_host, "hbm>host": (full - result.hit_blocks) * self._block_bytes}
        if self.setup.hbm_blocks:
            links["hbm>hbm"] = served.hbm_read_bytes
            links["host>arena"] = result.promoted_blocks * self._block_bytes
        if len(result.capacity_blocks) > 1:
            links["disk>host"] = served.disk_read_bytes
            links["host>disk"] = result.written_blocks * self._block_bytes
        return {
            "restored_bytes": restored,
            "bytes_by_link": links,
            "bytes_per_saved_second": restored / saved if saved > 0 else None,
        }

    def _endurance(self, result: CacheResult) -> dict[str, Any] | None:
        """Disk writes, and what they take of the allowance: a day's to begin with."""
        if len(result.capacity_blocks) < 2 or not result.capacity_blocks[1]:
            return None
        days = max(float(self.trace.times[-1]), 1e-9) / SECONDS_A_DAY
        written = result.written_blocks * self._block_bytes
        capacity = result.capacity_blocks[1] * self._block_bytes
        allowed = self.setup.endurance_dwpd * capacity * (1 + days)
        return {
            "written_bytes": written,
            "not_worth_bytes": result.passed_blocks * self._block_bytes,
            "written_bytes_per_day": written / days,
            "drive_writes_per_day": written / days / capacity,
            "allowed_bytes": allowed or None,
            "allowance_used_ratio": written / allowed if allowed else None,
        }


def _arrivals(requests: Sequence[TraceRequest], trace: TraceColumns, seed: int) -> np.ndarray:
    """When requests reach the engines: ticks of a coarse clock are spread, as nobody sent them."""
    times = trace.times
    if len(times) < 2 or float((np.diff(times) == 0).mean()) < TICK_SHARE:
        return times
    spread = np.array([r.timestamp for r in spread_ticks(requests, seed)]) / 1000
    arrivals: np.ndarray = spread - spread[0]
    return arrivals


def _ttft_figures(served: Served) -> dict[str, Any]:
    ttft, residual = served.ttft_seconds, served.residual_seconds
    return {
        "ttft_p50_seconds": float(np.percentile(ttft, 50)),
        "ttft_p99_seconds": float(np.percentile(ttft, 99)),
        "ttft_mean_seconds": float(ttft.mean()),
        "residual_prefill_p99_seconds": float(np.percentile(residual, 99)),
    }


def _curve(served: Served) -> list[list[float]]:
    """[percent, seconds] pairs of the distribution of first tokens."""
    values = np.percentile(served.ttft_seconds, CURVE_PERCENTS)
    return [[float(p), float(v)] for p, v in zip(CURVE_PERCENTS, values, strict=True)]


def with_gaps(cell: dict[str, Any], baseline: dict[str, Any], best: Optimum) -> dict[str, Any]:
    """A cell with the share of the gap between LRU and the optimum that it closes."""
    return {
        **cell,
        "gap_closed_tokens_ratio": _gap(cell, baseline, "token_hit_ratio", best.token_hit_ratio),
        "gap_closed_seconds_ratio": _gap(
            cell, baseline, "prefill_seconds_saved_ratio", best.saved_seconds_ratio
        ),
        "optimum": {
            "token_hit_ratio": best.token_hit_ratio,
            "prefill_seconds_saved_ratio": best.saved_seconds_ratio,
            "prefill_seconds_saved_ratio_bounds": [best.seconds_lower, best.seconds_upper],
        },
    }


def _gap(cell: dict[str, Any], baseline: dict[str, Any], name: str, best: float) -> float | None:
    """None where LRU is as good as the optimum: there is no gap."""
    gap = best - baseline[name]
    return (cell[name] - baseline[name]) / gap if gap > 1e-9 else None


def share_text(tier: dict[str, Any]) -> str:
    """A share as it was asked for: 1% of the blocks, rounded down, may be 0.9995% of them."""
    blocks, percent = tier["capacity_blocks"], 100 * tier["capacity_fraction"]
    past = percent * (blocks + 1) / blocks
    for digits in range(4):
        rounded = math.ceil(percent * 10**digits - 1e-9) / 10**digits
        if rounded < past:
            return f"{rounded:g}%"
    return f"{percent:.3g}%"
