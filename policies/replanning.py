"""Re-planning: what to do with a load that falls behind its plan.

It is behind once what should come next should have been there even at the 99 % costs. Then its
links are believed to be as much slower for the rest as they have been so far, and going on competes
with loading less and computing more.
"""

from __future__ import annotations

from typing import NamedTuple

from kvstore.core.plan import PREFIX
from kvstore.policies.planner import Decision, decide
from kvstore.policies.timing import Costs, Cut, Layout, Segment, Situation, Timing

SLACK_SECONDS = 5e-3  # what comes later than that is late
REPLAN_GAIN = 0.05  # of what going on would take: for less nothing is changed
# Of the whole load: a hitch at the start says little about the rest. It is as if so much had
# taken as long as predicted.
BELIEVED = 0.1


class Progress(NamedTuple):
    """How far the load of a plan's matched tokens [first, stop) has come.

    The leading `ready_tokens` of them are there, and those that come next come `step_tokens` at a
    time. `links` are the ones that the load goes over. With `keeps_part` whoever loads can use a
    leading part of it; else all matched tokens are computed anew if it is given up.
    """

    first: int
    stop: int
    ready_tokens: int
    step_tokens: int
    elapsed_seconds: float
    links: frozenset[str]
    keeps_part: bool = False


class Shorter(NamedTuple):
    """Go on with the leading `tokens` of the load only, and why; 0 gives it up."""

    tokens: int
    reason: str


def replan(decision: Decision, progress: Progress) -> Shorter | None:
    """What to do instead of going on with a load; None if that is best, or nothing is late."""
    size, ready = progress.stop - progress.first, progress.ready_tokens
    if ready >= size:
        return None
    part = _part(decision.situation, progress.first, progress.stop)
    watched = _only(part, progress.links)
    p50, p99 = decision.costs
    layout = Layout(watched)
    usual, late = Timing(watched, p50, layout), Timing(watched, p99, layout)
    awaited = Cut(min(size, ready + progress.step_tokens), size)
    if progress.elapsed_seconds <= late.load_seconds(awaited) + SLACK_SECONDS:
        return None
    whole = usual.load_seconds(Cut(size, size))
    behind = progress.elapsed_seconds + BELIEVED * whole
    factor = max(1.0, behind / (usual.load_seconds(awaited) + BELIEVED * whole))
    if progress.keeps_part and decision.chosen.cut.resume == decision.situation.matched_tokens:
        return _shortened(decision, progress, factor)
    left = factor * (whole - usual.load_seconds(Cut(ready, size)))
    return _given_up(decision, left, factor)


def _shortened(decision: Decision, progress: Progress, factor: float) -> Shorter | None:
    """The best prefix of what is left of a prefix."""
    situation, ready = decision.situation, progress.first + progress.ready_tokens
    planned = decision.chosen.cut.start
    deadline = situation.deadline_seconds
    left = _part(situation, ready, planned)._replace(
        shapes=frozenset({PREFIX}),
        queued_bytes={} if progress.ready_tokens else situation.queued_bytes,
        deadline_seconds=None if deadline is None else deadline - progress.elapsed_seconds,
    )
    slower = [_slower(costs, progress.links, factor) for costs in decision.costs]
    again = decide(left, *slower)
    kept, going_on = again.chosen.cut, Cut(left.matched_tokens, left.matched_tokens)
    tokens = kept.start + progress.ready_tokens
    if tokens >= progress.stop - progress.first or again.gain_over(going_on) < REPLAN_GAIN:
        return None
    return Shorter(tokens, f"{_behind(factor)}: {again.reason}")


def _given_up(decision: Decision, left_seconds: float, factor: float) -> Shorter | None:
    """All or nothing: to wait for the rest, or to compute all matched tokens."""
    after = max(0.0, decision.chosen.p50_seconds - decision.load_seconds[0])
    going_on = left_seconds + after + decision.chosen.price
    anew = decision.recompute_all
    if anew.p99_seconds + anew.price >= (1.0 - REPLAN_GAIN) * going_on:
        return None
    what = f"to recompute all takes {anew.p99_seconds * 1e3:,.2f} ms (99 %)"
    return Shorter(0, f"{_behind(factor)}: {what} against {going_on * 1e3:,.2f} ms to go on")


def _behind(factor: float) -> str:
    return f"the restore is behind its plan, {factor:,.1f} x slower than predicted"


def _part(situation: Situation, first: int, stop: int) -> Situation:
    """The load of matched tokens [first, stop); what is behind them is computed."""
    segments, low = [], 0
    for segment in situation.segments:
        high = low + segment.tokens
        kept = min(high, stop) - max(low, first)
        if kept > 0:
            size = segment.byte_count * kept // segment.tokens
            segments.append(segment._replace(tokens=kept, byte_count=size))
        low = high
    return situation._replace(
        segments=tuple(segments),
        local_tokens=situation.local_tokens + first,
        new_tokens=situation.matched_tokens - stop + situation.new_tokens,
    )


def _only(situation: Situation, links: frozenset[str]) -> Situation:
    """The same as far as it goes over these links: what others do takes no time."""

    def over(segment: Segment) -> Segment:
        return segment._replace(links=tuple(name for name in segment.links if name in links))

    return situation._replace(segments=tuple(map(over, situation.segments)))


def _slower(costs: Costs, names: frozenset[str], factor: float) -> Costs:
    links = {n: cost.times(factor) if n in names else cost for n, cost in costs.links.items()}
    return costs._replace(links=links)
