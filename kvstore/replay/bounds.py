"""Offline bounds: what no policy can do better than, given the whole trace.

Tokens: Belady's rule with bypass. Next use along a chain is never later above than below, so ties
that go leaf first keep it prefix-closed; it is exact for blocks of one size.

Seconds: keeping a block from one use to the next is an interval of the trace, worth the seconds
that the hit saves, and at any time no more than the capacity can be kept. That is a min-cost flow;
its dual has a price for a place at each time, and *any* prices give an upper bound (FOO and PFOO of
Berger, Beckmann and Harchol-Balter, SIGMETRICS 2018, are this dual, solved and with one price).
A hit counts only with all before it, so the dual takes the best *leading part* of what each request
finds: a tighter bound than blocks on their own. Keeping what the prices say is the lower bound.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from kvstore.policies.cost import CallCost, RecomputePrior
from kvstore.replay.columns import TraceColumns

PRICE_STEPS = 1000
STEP_WORK_MAX = 100_000_000  # stretches looked at in all steps together
NEVER = 1 << 62
DEFAULT_COST = RecomputePrior().cost
# Adam (Kingma and Ba, 2015) on the prices; the last two are its usual decays.
STEP_SHARE, STEP_HALVING, MEAN_DECAY, SQUARE_DECAY = 0.3, 100, 0.9, 0.99


class Optimum(NamedTuple):
    """Shares of all tokens and of all prefill seconds that can be saved at one capacity.

    `token_hit_ratio` is the optimum for tokens and `saved_seconds_ratio` what it saves; for seconds
    the optimum is between `seconds_lower` and `seconds_upper`.
    """

    capacity_blocks: int
    token_hit_ratio: float
    saved_seconds_ratio: float
    seconds_lower: float
    seconds_upper: float


class Reuses(NamedTuple):
    """Stretches of blocks that a request finds and that were last used by the same request.

    Those of a request lie one after the other, its first blocks first: [`first[i]`, `first[i+1]`)
    are of one request. `row` is the request's row among them.
    """

    start: np.ndarray
    stop: np.ndarray
    seconds: np.ndarray
    blocks: np.ndarray
    first: np.ndarray
    row: np.ndarray


def block_seconds(trace: TraceColumns, cost: CallCost = DEFAULT_COST) -> np.ndarray:
    """Seconds that each reference costs to recompute: v = b s + c s (p + s/2)."""
    tokens, depth = trace.tokens, trace.depths * trace.block_size
    pairs = tokens * (depth + tokens / 2)
    seconds: np.ndarray = cost.token_seconds * tokens + cost.pair_seconds * pairs
    return seconds


def optimum(
    trace: TraceColumns, capacity: int, cost: CallCost = DEFAULT_COST, steps: int = PRICE_STEPS
) -> Optimum:
    """Bounds for a cache of `capacity` blocks; with 0 steps the price is one for all times."""
    seconds = block_seconds(trace, cost)
    total = max(float(seconds.sum()), 1e-12)
    belady = keep_hits(trace, capacity, _soonest_first(trace))
    token_ratio, seconds_ratio = saved_shares(trace, belady, seconds)
    reuses = find_reuses(trace, seconds)
    upper, prices = price_bound(reuses, capacity, trace.request_count, steps)
    lower = seconds_ratio
    if lower < upper / total - 1e-9:
        priced = keep_hits(trace, capacity, _worth_first(trace, reuses, prices))
        lower = max(lower, saved_shares(trace, priced, seconds)[1])
    return Optimum(capacity, token_ratio, seconds_ratio, lower, max(lower, upper / total))


def saved_shares(trace: TraceColumns, hits: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(share of tokens, share of seconds) saved by so many leading blocks of each request."""
    hit = trace.depths < hits[trace.owners]
    tokens = float(trace.tokens[hit].sum()) / max(int(trace.inputs.sum()), 1)
    return tokens, float(seconds[hit].sum()) / max(float(seconds.sum()), 1e-12)


def keep_hits(trace: TraceColumns, capacity: int, keys: np.ndarray) -> np.ndarray:
    """Leading full blocks that each request finds, when what has the smallest key goes first.

    `keys` has one entry a reference, for the time until the block's next one. After each request
    blocks go until the capacity holds, those that just came and leaves at equal keys first.
    """
    full = (trace.inputs // trace.block_size).tolist()
    starts, blocks, depths = trace.starts.tolist(), trace.blocks.tolist(), trace.depths.tolist()
    again, rank = (trace.after >= 0).tolist(), keys.tolist()
    kept: dict[int, int] = {}
    heap: list[tuple[float, int, int]] = []
    hits = []
    for start, count in zip(starts, full, strict=False):
        found = start
        while found < start + count and blocks[found] in kept:
            found += 1
        hits.append(found - start)
        for i in range(start, start + count):
            if again[i]:
                kept[blocks[i]] = i
                heapq.heappush(heap, (rank[i], -depths[i], i))
            else:
                kept.pop(blocks[i], None)
        while len(kept) > capacity:
            i = heapq.heappop(heap)[2]
            if kept.get(blocks[i]) == i:
                del kept[blocks[i]]
    return np.array(hits, dtype=np.int64)


def _soonest_first(trace: TraceColumns) -> np.ndarray:
    """Belady's keys: what is used again last goes first."""
    return np.where(trace.after >= 0, -trace.owners[trace.after].astype(np.float64), -NEVER)


def find_reuses(trace: TraceColumns, seconds: np.ndarray) -> Reuses:
    """All that a cache without limits would find, in stretches."""
    found = np.flatnonzero((trace.before >= 0) & trace.full)
    stop, start = trace.owners[found], trace.owners[trace.before[found]]
    heads = _changes(stop) | _changes(start)
    edges = np.flatnonzero(heads)
    first = np.flatnonzero(_changes(stop[edges]))
    lengths = np.diff(np.append(first, len(edges)))
    return Reuses(
        start[edges],
        stop[edges],
        np.add.reduceat(seconds[found], edges) if len(edges) else np.zeros(0),
        np.diff(np.append(edges, len(found))),
        first,
        np.repeat(np.arange(len(first)), lengths),
    )


def _changes(values: np.ndarray) -> np.ndarray:
    """Where a value differs from the one before; the first does."""
    return np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]


def price_bound(
    reuses: Reuses, capacity: int, request_count: int, steps: int
) -> tuple[float, np.ndarray]:
    """(most seconds that can be saved, the prices that show it), one price a request.

    Starts from the best single price and moves each price with the room left at its time; fewer
    steps where each would take long.
    """
    free = np.zeros(request_count)
    value, room = _dual(reuses, capacity, free)
    if not len(reuses.start) or room.min() >= 0:
        return value, free  # All that comes again fits at all times.
    prices = free + _single_price(reuses, capacity, request_count)
    best, best_prices = _dual(reuses, capacity, prices)[0], prices.copy()
    step = STEP_SHARE * (prices[0] or _mean_density(reuses))
    mean, square = np.zeros(request_count), np.zeros(request_count)
    for k in range(1, min(steps, STEP_WORK_MAX // len(reuses.start)) + 1):
        value, room = _dual(reuses, capacity, prices)
        if value < best:
            best, best_prices = value, prices.copy()
        mean = MEAN_DECAY * mean + (1 - MEAN_DECAY) * room
        square = SQUARE_DECAY * square + (1 - SQUARE_DECAY) * room * room
        scale = np.sqrt(square / (1 - SQUARE_DECAY**k)) + 1e-9
        move = step / (1 + k / STEP_HALVING) * mean / (1 - MEAN_DECAY**k) / scale
        prices = np.maximum(0.0, prices - move)
    return best, best_prices


def _mean_density(reuses: Reuses) -> float:
    room = reuses.blocks * (reuses.stop - reuses.start)
    return float(reuses.seconds.sum() / max(room.sum(), 1)) * 0.1


def _single_price(reuses: Reuses, capacity: int, request_count: int) -> float:
    """The price at which what is worth it fills the cache over the whole trace, and no more."""
    room = reuses.blocks * (reuses.stop - reuses.start)
    density = reuses.seconds / room
    order = np.argsort(-density)
    filled = np.cumsum(room[order])
    if filled[-1] <= capacity * request_count:
        return 0.0
    return float(density[order[np.searchsorted(filled, capacity * request_count)]])


def _gains(reuses: Reuses, prices: np.ndarray) -> np.ndarray:
    """Seconds of each stretch less what its places cost, summed up along its request."""
    paid = np.concatenate([[0.0], np.cumsum(prices)])
    gain = reuses.seconds - reuses.blocks * (paid[reuses.stop] - paid[reuses.start])
    total = np.cumsum(gain)
    before = total[reuses.first] - gain[reuses.first]
    gains: np.ndarray = total - before[reuses.row]
    return gains


def _dual(reuses: Reuses, capacity: int, prices: np.ndarray) -> tuple[float, np.ndarray]:
    """(upper bound at these prices, room that what is worth its price leaves at each time)."""
    if not len(reuses.start):
        return 0.0, np.full(len(prices), capacity)
    gains = _gains(reuses, prices)
    top = np.maximum.reduceat(gains, reuses.first)
    places = np.where(gains >= top[reuses.row], np.arange(len(gains)), len(gains))
    last = np.minimum.reduceat(places, reuses.first)
    taken = (np.arange(len(gains)) <= last[reuses.row]) & (top[reuses.row] > 0)
    blocks = np.where(taken, reuses.blocks, 0)
    come = np.bincount(reuses.start, blocks, minlength=len(prices))
    go = np.bincount(reuses.stop, blocks, minlength=len(prices))
    value = capacity * float(prices.sum()) + float(np.maximum(top, 0).sum())
    return value, capacity - np.cumsum(come - go)


def _worth_first(trace: TraceColumns, reuses: Reuses, prices: np.ndarray) -> np.ndarray:
    """Keys by what is gained beyond the prices, for all up to the best end of the next request."""
    keys = np.full(len(trace.blocks), -np.inf)
    if not len(reuses.start):
        return keys
    best = _best_from_here(_gains(reuses, prices), reuses)
    whole = np.add.reduceat(reuses.seconds, reuses.first)
    found = np.flatnonzero((trace.before >= 0) & trace.full)
    keys[trace.before[found]] = np.repeat(best / whole[reuses.row], reuses.blocks)
    return keys


def _best_from_here(gains: np.ndarray, reuses: Reuses) -> np.ndarray:
    """For each stretch, the best sum at it or at a later one of its request."""
    # One running maximum from the end does for all requests, each lifted above those after it.
    lift = (gains.max() - gains.min() + 1.0) * (len(reuses.first) - reuses.row)
    best: np.ndarray = np.maximum.accumulate((gains + lift)[::-1])[::-1] - lift
    return best
