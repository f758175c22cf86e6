"""Timing: seconds that an executable restore takes under given costs.

A matched prefix of M tokens lies in segments, each in one tier; N new tokens follow. A restore is a
cut (start, resume): load [0, start) and [resume, M), compute what is between. With resume = M that
is a prefix (computed in one go with the new tokens), else the middle is computed while the rest is
still coming.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple

from kvstore.core.plan import PREFIX
from kvstore.policies.cost import CallCost, LinkCost, chain_fixed_seconds

NONE, LAYERWISE = "none", "layerwise"
SPLIT = "split"
CHUNK_BYTES = 4 << 20
PARTS_MAX = 8  # that plans are cut by
CAUTION = 0.05


class Segment(NamedTuple):
    """Consecutive matched tokens in one tier, and the links their bytes cross on the way up."""

    tokens: int
    byte_count: int
    source: str
    links: tuple[str, ...]


class Costs(NamedTuple):
    """Seconds of calls and of links, all at one quantile."""

    call: CallCost
    links: Mapping[str, LinkCost]


class Prices(NamedTuple):
    """What a second of the GPU and a byte on a link cost others, in seconds of first token."""

    gpu_second: float = 0.0
    link_byte: Mapping[str, float] = {}


class Situation(NamedTuple):
    """A request, and what is going on when it comes."""

    segments: tuple[Segment, ...]
    new_tokens: int
    local_tokens: int = 0  # already in the engine, before the segments
    block_size: int = 16
    shapes: frozenset[str] = frozenset({PREFIX})
    overlap: str = LAYERWISE
    deadline_seconds: float | None = None
    prices: Prices = Prices()
    queued_bytes: Mapping[str, int] = {}
    queued_prefill_tokens: int = 0
    prefill_chunk_tokens: int = 0
    chunk_bytes: int = CHUNK_BYTES
    # Share of its seconds that recomputing must lose by, since it never disappoints.
    caution: float = CAUTION

    @property
    def matched_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


class Cut(NamedTuple):
    """Load [0, start) and [resume, M), compute [start, resume)."""

    start: int
    resume: int


Line = tuple[float, float]  # seconds at + per_token * x: a link's part of a load


# Tokens [low, high), a segment or many neighbours taken together; of each link, the bytes that a
# token moves; and the links crossed in a row, with the bytes that cross them.
Path = tuple[tuple[str, ...], int]
Part = tuple[int, int, tuple[tuple[str, float], ...], tuple[Path, ...]]


class Layout:
    """What the timings of one situation have in common, whatever the costs."""

    def __init__(self, situation: Situation) -> None:
        self.bounds = [0]
        for segment in situation.segments:
            self.bounds.append(self.bounds[-1] + segment.tokens)
        names = dict.fromkeys([name for segment in situation.segments for name in segment.links])
        self.link_names = tuple(names)
        found = zip(self.bounds, situation.segments, strict=False)
        if len(situation.segments) <= PARTS_MAX:
            self.parts = [_alone(low, segment) for low, segment in found if segment.tokens]
        else:
            self.parts = list(_together(found, self.bounds[-1]))


def _alone(low: int, segment: Segment) -> Part:
    tokens, byte_count, _, links = segment
    density = byte_count / tokens
    return low, low + tokens, tuple([(n, density) for n in links]), ((links, byte_count),)


def _together(found: Iterable[tuple[int, Segment]], matched: int) -> Iterator[Part]:
    """A chain that alternates between tiers has many segments, so neighbours become one part.

    Its bytes count as spread evenly, so what a cut within it takes is an estimate; the whole of it
    takes what its segments take.
    """
    full = (one for one in found if one[1].tokens)
    for _, group in groupby(full, key=lambda one: one[0] * PARTS_MAX // matched):
        members = list(group)
        low, last = members[0][0], members[-1]
        high = last[0] + last[1].tokens
        moved: dict[str, float] = {}
        paths: dict[tuple[str, ...], int] = {}
        for _, segment in members:
            paths[segment.links] = paths.get(segment.links, 0) + segment.byte_count
            for name in segment.links:
                moved[name] = moved.get(name, 0.0) + segment.byte_count
        densities = tuple((name, size / (high - low)) for name, size in moved.items())
        yield low, high, densities, tuple(paths.items())


class Timing:
    """Times cuts of one situation under one set of costs."""

    def __init__(self, situation: Situation, costs: Costs, layout: Layout | None = None) -> None:
        self.situation = situation
        self.costs, self.call = costs, costs.call
        self.layout = layout = layout or Layout(situation)
        self.bounds, self.link_names = layout.bounds, layout.link_names
        self.matched = self.bounds[-1]
        self.chunk = situation.prefill_chunk_tokens
        queued = situation.queued_prefill_tokens
        self.wait = costs.call.seconds(queued, 0, self.chunk) if queued else 0.0
        self.tail = self.after(self.matched)
        links = costs.links
        self._queued = {
            name: situation.queued_bytes.get(name, 0) * links[name].byte_seconds
            for name in layout.link_names
        }
        # Of each part: its ends, seconds that come on top of the slowest link's, and for each
        # link the seconds that a token keeps it busy.
        self._parts = [
            (
                low, high, self._fixed(paths),
                tuple([(name, density * links[name].byte_seconds) for name, density in densities]),
            )
            for low, high, densities, paths in layout.parts
        ]  # fmt: skip
        self.gpu_price, link_byte = situation.prices
        self.is_free = not self.gpu_price and not any(link_byte.values())
        # What loading a token of each part costs others.
        self.token_prices = [
            0.0
            if self.is_free
            else sum([density * link_byte.get(name, 0.0) for name, density in densities])
            for _, _, densities, _ in layout.parts
        ]

    def _fixed(self, paths: tuple[Path, ...]) -> float:
        """Seconds of the slowest path that don't depend on how much is loaded."""
        longest, chunk = 0.0, self.situation.chunk_bytes
        for names, byte_count in paths:
            if len(names) == 1:
                seconds = self.costs.links[names[0]].latency_seconds
            else:
                links = [self.costs.links[name] for name in names]
                seconds = chain_fixed_seconds(links, byte_count, chunk)
            if seconds > longest:
                longest = seconds
        return longest

    def after(self, loaded: int) -> float:
        """Seconds to compute everything after `loaded` tokens in one go."""
        situation = self.situation
        new = self.matched + situation.new_tokens - loaded
        return self.call.seconds(new, situation.local_tokens + loaded, self.chunk)

    def middle(self, start: int, resume: int) -> float:
        """Seconds to compute [start, resume)."""
        return self.call.seconds(resume - start, self.situation.local_tokens + start, self.chunk)

    def gpu_seconds(self, cut: Cut) -> float:
        if cut.resume == self.matched:
            return self.after(cut.start)
        return self.middle(*cut) + self.tail

    def loaded(self, cut: Cut) -> list[int]:
        """Tokens of each part that a cut loads."""
        start, resume = cut
        return [
            (min(high, start) - low if start > low else 0)
            + (high - max(low, resume) if resume < high else 0)
            for low, high, _, _ in self._parts
        ]

    def link_bytes(self, cut: Cut) -> dict[str, float]:
        """Bytes that the loads of a cut move over each link."""
        moved = dict.fromkeys(self.link_names, 0.0)
        for tokens, (_, _, densities, _) in zip(self.loaded(cut), self.layout.parts, strict=True):
            for name, density in densities:
                moved[name] += tokens * density
        return moved

    def load_seconds(self, cut: Cut) -> float:
        """Seconds until all loads of a cut are done: the slowest path, T = L + (Q + V)/B each."""
        start, resume = cut
        busy, used = self._queued.copy(), []
        # In the open, since this is most of what planning takes.
        for low, high, fixed, rates in self._parts:
            tokens = 0
            if start > low:
                tokens = (start if start < high else high) - low
            if resume < high:
                tokens += high - (resume if resume > low else low)
            if tokens:
                for name, rate in rates:
                    busy[name] += tokens * rate
                used.append((fixed, rates))
        longest = 0.0
        for fixed, rates in used:
            for name, _ in rates:
                seconds = fixed + busy[name]
                if seconds > longest:
                    longest = seconds
        return longest

    def seconds(self, cut: Cut) -> float:
        """Time to first token."""
        loads = self.load_seconds(cut)
        if cut.resume == self.matched:
            return max(loads, self.wait) + self.after(cut.start)
        return self._split_seconds(*cut, self.ready(cut.start), loads)

    def _split_seconds(self, start: int, resume: int, ready: float, loads: float) -> float:
        if self.situation.overlap == NONE:
            return max(loads, self.wait) + self.middle(start, resume) + self.tail
        return max(ready + self.middle(start, resume), loads) + self.tail

    def split_objective(self, start: int, resume: int, ready: float, loads: float) -> float:
        """The objective of a split, less what its loads cost others."""
        gpu_seconds = self.middle(start, resume) + self.tail
        return self._split_seconds(start, resume, ready, loads) + self.gpu_price * gpu_seconds

    def ready(self, start: int) -> float:
        """When [0, start) is loaded and the GPU is ours."""
        loads = self.load_seconds(Cut(start, self.matched)) if start else 0.0
        return max(loads, self.wait)

    def price(self, cut: Cut) -> float:
        """What a cut costs others: mu x GPU-seconds + sum nu x bytes."""
        if self.is_free:
            return 0.0
        return self.gpu_price * self.gpu_seconds(cut) + self.load_price(cut)

    def load_price(self, cut: Cut) -> float:
        if self.is_free:
            return 0.0
        prices = zip(self.loaded(cut), self.token_prices, strict=True)
        return sum([tokens * token_price for tokens, token_price in prices])

    def objective(self, cut: Cut) -> float:
        return self.seconds(cut) + self.price(cut)

    def lines(self, number: int, cut: Cut, direction: int) -> list[Line]:
        """What `load_seconds` is the maximum of while an end of the cut moves within a part.

        As functions of how many tokens it has moved: `direction` 1 loads more, -1 less.
        """
        busy, used = self._queued.copy(), []
        moving = {name: direction * rate for name, rate in self._parts[number][3]}
        for n, tokens in enumerate(self.loaded(cut)):
            if tokens or n == number:
                _, _, fixed, rates = self._parts[n]
                used.append((fixed, rates))
                for name, rate in rates:
                    busy[name] += tokens * rate
        return [
            (fixed + busy[name], moving.get(name, 0.0))
            for fixed, rates in used
            for name, _ in rates
        ]
