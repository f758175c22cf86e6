"""Re-planning: what to do with a restore that falls behind its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.policies.planner import Decision, decide
from kvstore.policies.timing import Costs, Cut, Situation

SLACK_SECONDS = 1e-3  # later than that is late
REPLAN_GAIN = 0.05  # of what going on would take: for less nothing is changed


class Progress(NamedTuple):
    """How far a restore has come: leading tokens loaded or computed, and the seconds it took."""

    ready_tokens: int
    elapsed_seconds: float


def replan(
    decision: Decision,
    progress: Progress,
    p50: Costs,
    p99: Costs,
    queued_bytes: Mapping[str, int] | None = None,
) -> Decision | None:
    """A better decision on what is left of a restore that fell behind; None if there is none.

    It is behind once the block after those that are ready should have been there, even at the 99 %
    costs. The links it waits for are then believed to be as much slower as they have been so far:
    loading less may be better, or giving the restore up (recompute all). `queued_bytes` are those
    ahead of it now.
    """
    situation, (start, resume) = decision.situation, decision.chosen.cut
    matched, ready = situation.matched_tokens, progress.ready_tokens
    if ready >= start and (resume == matched or ready >= matched):
        return None
    awaited = Cut(start, resume)  # once the front is there, the rest after the middle counts
    if ready < start:
        awaited = Cut(min(ready + situation.block_size, start), matched)
    due, late = decision.load_seconds_of(awaited)
    if progress.elapsed_seconds <= late + SLACK_SECONDS:
        return None
    factor = progress.elapsed_seconds / due
    links = _links_of(situation, ready, ready + 1) if ready < start else None
    again = decide(
        _left(situation, progress, queued_bytes or {}),
        _slower(p50, links or _links_of(situation, resume, matched), factor),
        _slower(p99, links or _links_of(situation, resume, matched), factor),
    )
    going_on = Cut(max(0, start - ready), max(0, resume - ready))
    if again.chosen.cut == going_on or again.gain_over(going_on) < REPLAN_GAIN:
        return None
    again.note = f"the restore is {factor:.3g} x slower than predicted: "
    return again


def _links_of(situation: Situation, first: int, last: int) -> set[str]:
    """Links that the segments of tokens [first, last) cross."""
    links: set[str] = set()
    low = 0
    for segment in situation.segments:
        high = low + segment.tokens
        if low < last and first < high:
            links.update(segment.links)
        low = high
    return links


def _left(situation: Situation, progress: Progress, queued_bytes: Mapping[str, int]) -> Situation:
    """What remains once the leading tokens are in the engine."""
    segments, skip = [], progress.ready_tokens
    for segment in situation.segments:
        gone = min(skip, segment.tokens)
        skip -= gone
        if gone < segment.tokens:
            kept = segment.tokens - gone
            size = segment.byte_count * kept // segment.tokens
            segments.append(segment._replace(tokens=kept, byte_count=size))
    deadline = situation.deadline_seconds
    return situation._replace(
        segments=tuple(segments),
        local_tokens=situation.local_tokens + progress.ready_tokens,
        queued_bytes=queued_bytes,
        deadline_seconds=None if deadline is None else deadline - progress.elapsed_seconds,
    )


def _slower(costs: Costs, names: set[str], factor: float) -> Costs:
    links = {
        name: link.times(factor) if name in names else link for name, link in costs.links.items()
    }
    return costs._replace(links=links)
