"""Generated traces: seeded multi-tenant workloads of chats, agents, documents and one-shot prompts.

Every prompt is the beginning of an older prompt of its session, or of a shared prefix, plus new
tokens; so an id has one parent by construction. Ids are numbered at first use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import NamedTuple

import msgspec

from kvstore.replay.formats import TraceRequest
from kvstore.replay.generate_preset import Kind, Preset, draw, zipf, zipf_weights

DOCUMENT_SKEW = 1.0
VARIANT_SKEW = 1.0
LENGTH_MAX = 1 << 20


class _Prompt(NamedTuple):
    """Unnumbered ids of the blocks that a prompt fills or begins, and its length in tokens."""

    ids: tuple[int, ...]
    tokens: int


class _Planned(NamedTuple):
    """A request before its ids are numbered; ordered by time, then as drawn."""

    seconds: float
    order: int
    prompt: _Prompt
    output: int
    tenant: str
    session: str


class Generator:
    """A workload's requests, all drawn from one seed."""

    def __init__(self, preset: Preset, seed: int) -> None:
        self._preset = preset
        self._rng = Random(seed)
        self._next_id = 0
        self._order = 0
        self._shared: dict[tuple[str, str, int], _Prompt] = {}
        self._tenants = zipf_weights(preset.tenants, preset.tenant_skew)
        self._kinds = list(accumulate(kind.share for kind in preset.kinds))
        self._busy = _busy_clock(preset, self._rng)

    def requests(self) -> Iterator[TraceRequest]:
        """The trace in the order of time."""
        planned: list[_Planned] = []
        for number in range(self._preset.sessions):
            planned.extend(self._session(number))
        heapq.heapify(planned)
        numbers: dict[int, int] = {}
        while planned:
            one = heapq.heappop(planned)
            for i in one.prompt.ids:
                numbers.setdefault(i, len(numbers))
            yield TraceRequest(
                timestamp=self._milliseconds(one.seconds),
                input_length=one.prompt.tokens,
                output_length=one.output,
                hash_ids=[numbers[i] for i in one.prompt.ids],
                tenant=one.tenant,
                session=one.session,
                block_size=self._preset.block_size,
            )

    def _milliseconds(self, seconds: float) -> float:
        tick = self._preset.tick_seconds
        return round(1000 * (seconds // tick * tick if tick else seconds))

    def _session(self, number: int) -> Iterator[_Planned]:
        rng, preset = self._rng, self._preset
        kind = preset.kinds[zipf(self._kinds, rng)]
        tenant = f"tenant-{zipf(self._tenants, rng)}" if preset.tenants > 1 else ""
        seconds = self._busy.seconds(draw(kind.starts, rng))
        shared, prompt = self._first(kind, tenant, seconds)
        turn = 1
        while seconds < preset.span_seconds:
            output = max(1, round(draw(kind.output_tokens, rng)))
            self._order += 1
            yield _Planned(seconds, self._order, prompt, output, tenant, f"{kind.name}-{number}")
            if rng.random() >= kind.continue_by_turn[min(turn, len(kind.continue_by_turn)) - 1]:
                return
            seconds += max(0.0, draw(kind.gap_seconds, rng))
            prompt = self._next(kind, shared, prompt)
            turn += 1

    def _first(self, kind: Kind, tenant: str, seconds: float) -> tuple[_Prompt, _Prompt]:
        """The prefix that a session shares with others, and its first prompt."""
        rng = self._rng
        if kind.documents:
            alive = zipf(zipf_weights(kind.documents, DOCUMENT_SKEW), rng)
            number = int(seconds * kind.documents / kind.document_seconds) + alive
            shared = self._shared_prompt(kind, tenant, number)
            return shared, self._extended(shared, max(0, round(draw(kind.growth_tokens, rng))))
        variant = zipf(zipf_weights(kind.variants, VARIANT_SKEW), rng)
        owner = "" if kind.shared_by_all else tenant
        shared = self._shared_prompt(kind, owner, variant)
        return shared, self._extended(shared, max(1, round(draw(kind.first_tokens, rng))))

    def _shared_prompt(self, kind: Kind, owner: str, number: int) -> _Prompt:
        key = ("" if kind.shared_by_all else kind.name, owner, number)
        if key not in self._shared:
            lengths = kind.first_tokens if kind.documents else kind.shared_tokens
            tokens = max(0, round(draw(lengths, self._rng)))
            self._shared[key] = self._extended(_Prompt((), 0), tokens)
        return self._shared[key]

    def _next(self, kind: Kind, shared: _Prompt, before: _Prompt) -> _Prompt:
        rng = self._rng
        chance = rng.random()
        if chance < kind.compact_share:
            return self._extended(shared, max(1, round(draw(kind.first_tokens, rng))))
        length = max(shared.tokens, 1, before.tokens + round(draw(kind.growth_tokens, rng)))
        kept = before.tokens
        if chance < kind.compact_share + kind.branch_share:
            part = min(1.0, max(0.0, draw(kind.branch_keep, rng)))
            kept = max(shared.tokens, round(before.tokens * part))
        return self._cut(before, min(kept, length), length)

    def _extended(self, prompt: _Prompt, tokens: int) -> _Prompt:
        return self._cut(prompt, prompt.tokens, prompt.tokens + tokens)

    def _cut(self, prompt: _Prompt, kept: int, length: int) -> _Prompt:
        """The first `kept` tokens of a prompt and new ones up to `length`.

        The same tokens again are the same prompt: only then is a block that is not full shared.
        """
        length = min(length, LENGTH_MAX)
        if kept >= length == prompt.tokens:
            return prompt
        size = self._preset.block_size
        old = min(kept, length) // size
        new = -(-length // size) - old
        ids = prompt.ids[:old] + tuple(range(self._next_id, self._next_id + new))
        self._next_id += new
        return _Prompt(ids, length)


class _BusyClock:
    """Turns even shares of all arrivals into times, more of them while the process is busy."""

    def __init__(self, times: list[float], shares: list[float]) -> None:
        self._times = times
        self._shares = shares

    def seconds(self, share: float) -> float:
        """When `share` of all arrivals have come."""
        goal = share * self._shares[-1]
        low, high = 0, len(self._shares) - 1
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self._shares[middle] <= goal else (low, middle)
        span = self._shares[high] - self._shares[low]
        part = (goal - self._shares[low]) / span if span else 0.0
        return self._times[low] + part * (self._times[high] - self._times[low])


def _busy_clock(preset: Preset, rng: Random) -> _BusyClock:
    times, shares, busy = [0.0], [0.0], False
    while times[-1] < preset.span_seconds:
        dwell = min(rng.expovariate(1 / preset.dwell_seconds), preset.span_seconds - times[-1])
        times.append(times[-1] + max(dwell, 1e-6))
        shares.append(shares[-1] + dwell * (preset.burst if busy else 1.0))
        busy = not busy
    return _BusyClock(times, shares)


def scaled(
    preset: Preset,
    rate: float = 1.0,
    seconds: float | None = None,
    tenants: int | None = None,
) -> Preset:
    """The workload at `rate` times its arrivals, for another span, of other tenants."""
    span = seconds or preset.span_seconds
    return msgspec.structs.replace(
        preset,
        sessions=max(1, round(preset.sessions * rate * span / preset.span_seconds)),
        span_seconds=span,
        tenants=tenants or preset.tenants,
    )


def generate(preset: Preset, seed: int) -> Iterator[TraceRequest]:
    """Requests of a workload; equal seeds make equal traces."""
    return Generator(preset, seed).requests()
