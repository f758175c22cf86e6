"""Candidates: the cuts among which the best one of each shape must be.

Within one segment, load seconds are a maximum of straight lines, and compute seconds a parabola
with a step at each call. So a best place to cut is an end of the segment, a corner of the lines,
the crossing of compute and load, a point without slope, or where a call less is needed; each on
the grid of blocks, on either side. That is a handful instead of every block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from kvstore.policies.timing import LAYERWISE, Cut, Line, Timing

Scored = tuple[float, Cut]  # a cut's objective, and the cut


def best_prefix(timing: Timing, limit: float) -> Scored | None:
    """The best cut that loads a prefix, neither nothing nor all; None if none is below `limit`."""
    best = None
    for number, (low, high, _, _) in enumerate(timing.layout.parts):
        least = timing.ready(low) + (1.0 + timing.gpu_price) * timing.after(high)
        if least >= limit:
            continue
        for scored in _prefixes(timing, number):
            if scored[0] < limit:
                best, limit = scored, scored[0]
    return best


def _prefixes(timing: Timing, number: int) -> Iterator[Scored]:
    """Prefixes that end in a segment.

    While more is loaded, load seconds rise along convex corners and compute seconds fall ever
    faster, so between two corners only the ends can be best.
    """
    grid, matched = timing.situation.block_size, timing.matched
    low, high, _, _ = timing.layout.parts[number]
    cut = Cut(low, matched)
    lines = [*timing.lines(number, cut, 1), (timing.wait, 0.0)]
    load_price, token_price = timing.load_price(cut), timing.token_prices[number]
    ends = [low, *[low + corner for corner in corners(lines, high - low)], high]
    places = ends[1:]
    if timing.chunk:
        places += _fewer_calls(ends, matched + timing.situation.new_tokens, timing.chunk)
    for start in {edge for place in places for edge in around(place, low, high, grid)}:
        if low < start < matched:
            moved = start - low
            loads = max([at + slope * moved for at, slope in lines])
            price = load_price + token_price * moved
            compute = timing.after(start)
            yield loads + compute + timing.gpu_price * compute + price, Cut(start, matched)


def _fewer_calls(ends: Sequence[float], total: int, chunk: int) -> Iterator[float]:
    """First and last places between two ends from where on a call less is needed."""
    for left, right in pairwise(ends):
        yield total - math.floor((total - left) / chunk) * chunk
        yield total - math.ceil((total - right) / chunk) * chunk


def best_split(timing: Timing, limit: float) -> Scored | None:
    """The best cut that computes the middle, from a segment's start; None if none is below."""
    find = _meeting if timing.is_free and timing.situation.overlap == LAYERWISE else _everywhere
    best = None
    for number, (low, _, _, _) in enumerate(timing.layout.parts):
        ready = timing.ready(low)
        least = ready + timing.call.call_seconds + (1.0 + timing.gpu_price) * timing.tail
        if least >= limit:
            continue
        for scored in find(timing, number, ready):
            if scored[0] < limit:
                best, limit = scored, scored[0]
    return best


def _meeting(timing: Timing, first: int, ready: float) -> Iterator[Scored]:
    """Where compute meets load: one rises with every block computed, the other falls."""
    parts, matched, grid = timing.layout.parts, timing.matched, timing.situation.block_size
    start = parts[first][0]
    for number in range(first, len(parts)):
        low, high, _, _ = parts[number]
        if high < matched:
            rest = timing.load_seconds(Cut(start, high))
            if ready + timing.middle(start, high) < rest:
                continue
        lines = timing.lines(number, Cut(start, low), -1)
        moved = _crossing(timing, start, number, ready, lines)
        for resume in (low + moved, low + moved - grid):
            if start < resume < matched and low <= resume <= high:
                compute = ready + timing.middle(start, resume)
                loads = max([at + slope * (resume - low) for at, slope in lines])
                yield max(compute, loads) + timing.tail, Cut(start, resume)
        if low + moved < high:
            return


def _crossing(timing: Timing, start: int, number: int, ready: float, lines: Sequence[Line]) -> int:
    """How far into a segment, in blocks, computing takes no less than loading the rest.

    All of the segment if it does nowhere.
    """
    low, high, _, _ = timing.layout.parts[number]
    grid = timing.situation.block_size
    if timing.chunk and timing.chunk < high - start:
        moved: float = _stepped_crossing(timing, low - start, high - start, start, ready, lines)
    else:
        moved = _smooth_crossing(timing, low - start, start, ready, lines)
    return min(math.ceil(moved / grid) * grid, high - low) if moved < high - low else high - low


def _smooth_crossing(
    timing: Timing, before: int, start: int, ready: float, lines: Sequence[Line]
) -> float:
    """How far to go so that one call over everything from `start` takes what each line does.

    The positive root of (c/2) x^2 + (b + c p - slope) x + ready + a - load = 0, x tokens in all.
    """
    call, token, pair = timing.call
    furthest = float(before)
    linear = token + pair * (timing.situation.local_tokens + start)
    for at, slope in lines:
        short = at - slope * before - ready - call
        if short > 0.0:
            middle = linear - slope
            root = math.sqrt(middle * middle + 2.0 * pair * short)
            furthest = max(furthest, 2.0 * short / (middle + root) if root else math.inf)
    return furthest - before


def _stepped_crossing(
    timing: Timing, before: int, total: int, start: int, ready: float, lines: Sequence[Line]
) -> int:
    """The same with a step at each call, by bisection over blocks."""
    grid = timing.situation.block_size
    below, above = 0, -(-(total - before) // grid)
    while below < above:
        middle = (below + above) // 2
        moved = middle * grid
        compute = ready + timing.middle(start, start + before + moved)
        if max([at + slope * moved for at, slope in lines]) > compute:
            below = middle + 1
        else:
            above = middle
    return below * grid


def _everywhere(timing: Timing, first: int, ready: float) -> Iterator[Scored]:
    """All places where an objective with prices, or without overlap, can be lowest."""
    parts, matched, grid = timing.layout.parts, timing.matched, timing.situation.block_size
    start = parts[first][0]
    for number in range(first, len(parts)):
        low, high, _, _ = parts[number]
        cut = Cut(start, low)
        lines = timing.lines(number, cut, -1)
        load_price, token_price = timing.load_price(cut), timing.token_prices[number]
        meeting = low + _crossing(timing, start, number, ready, lines)
        level = [*lines, (timing.wait, 0.0)]
        found = [low + corner for corner in corners(level, high - low)]
        found += [meeting - grid, meeting, *_flat(timing, number, lines)]
        places: set[float] = {low, high, *[min(max(low, place), high) for place in found]}
        if timing.chunk:
            places.update(_whole_calls(places, start, timing.chunk))
        for resume in {edge for place in places for edge in around(place, low, high, grid)}:
            if start < resume < matched:
                moved = resume - low
                loads = max([at + slope * moved for at, slope in lines])
                price = load_price - token_price * moved
                yield (
                    timing.split_objective(start, resume, ready, loads) + price,
                    Cut(start, resume),
                )


def _whole_calls(places: Iterable[float], start: int, chunk: int) -> list[float]:
    """The places next to these up to which whole calls compute."""
    calls = {edge for place in places for edge in _both((place - start) / chunk)}
    return [start + call * chunk for call in calls]


def _both(value: float) -> tuple[int, int]:
    return math.floor(value), math.ceil(value)


def _flat(timing: Timing, number: int, lines: Sequence[Line]) -> Iterator[float]:
    """Where a token computed more saves in loads and prices what it costs.

    The marginal token costs b + c (s + k), times what share of it counts; with chunks also a
    share of a call.
    """
    situation = timing.situation
    price, chunk = timing.gpu_price, timing.chunk
    call, token, pair = timing.call
    if not pair:
        return
    shares = [price, 1.0 + price] if situation.overlap == LAYERWISE else [1.0 + price]
    gains = {0.0, *[-per_token for _, per_token in lines]}
    for share in shares:
        for gain in gains:
            worth = gain + timing.token_prices[number]
            for cost in {token, token + (call / chunk if chunk else 0.0)}:
                if share and worth > share * cost:
                    yield (worth / share - cost) / pair - situation.local_tokens


def corners(lines: Sequence[Line], stop: float) -> list[float]:
    """Places between 0 and `stop` where the maximum of the lines goes over to another line."""
    found: list[float] = []
    here = 0.0
    at, slope = max(lines)
    while True:
        nearest, following = stop, None
        for line in lines:
            if line[1] > slope:
                meeting = (at - line[0]) / (line[1] - slope)
                if here <= meeting < nearest:
                    nearest, following = meeting, line
        if following is None:
            return found
        here = nearest
        found.append(here)
        at, slope = following


def around(place: float, low: int, high: int, grid: int) -> tuple[int, ...]:
    """The blocks' edges next to `place`, within [low, high]; edges count from `low`."""
    if not low < place < high:
        return (low,) if place <= low else (high,)
    first = low + math.floor((place - low) / grid) * grid
    return (first, min(first + grid, high))
