"""Restore plans: what of a matched prefix to load from where, and what to compute anew.

Every plan that the engine can execute competes: load all, recompute all, a shorter prefix, and for
engines that can the middle split, each by its time to the first token plus what it costs others.
With a deadline it is the cheapest one whose 99 % time meets it. Recomputing all wins near ties: it
takes what it takes, while loads depend on what others do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from kvstore.core.plan import LOAD_ALL, PREFIX, RECOMPUTE, RECOMPUTE_ALL, PlanStep, RestorePlan
from kvstore.policies.candidates import best_prefix, best_split
from kvstore.policies.timing import SPLIT, Costs, Cut, Prices, Segment, Situation, Timing

BUSY_MAX = 0.9
PRICE_MIN = 0.02


class Alternative:
    """A plan that could be executed, and what it was predicted to take."""

    def __init__(self, kind: str, cut: Cut, timing: Timing, late: Timing) -> None:
        self.kind, self.cut = kind, cut
        self.p50_seconds = timing.seconds(cut)
        self.price = timing.price(cut)  # what it costs others, in seconds
        self._late = late

    @cached_property
    def p99_seconds(self) -> float:
        return self._late.seconds(self.cut)

    @property
    def objective(self) -> float:
        return self.p50_seconds + self.price


class Decision:
    """The plan chosen, those not chosen, and why."""

    def __init__(
        self, timing: Timing, late: Timing, chosen: Alternative, others: list[Alternative]
    ) -> None:
        self.situation = timing.situation
        self.chosen = chosen
        self.alternatives = (chosen, *others)
        self.note = ""  # what led to the question, ahead of the reason
        self._timing, self._late = timing, late

    @property
    def kind(self) -> str:
        return self.chosen.kind

    @cached_property
    def plan(self) -> RestorePlan:
        return RestorePlan(
            self.chosen.kind, self.steps(self.chosen.cut),
            self.chosen.p50_seconds, self.chosen.p99_seconds,
        )  # fmt: skip

    def steps(self, cut: Cut) -> tuple[PlanStep, ...]:
        """Where the matched tokens come from under a cut."""
        return tuple(_steps(self.situation, self._timing.bounds, cut))

    @property
    def gpu_seconds(self) -> float:
        """Predicted seconds of the engine, for what is recomputed and for the new tokens."""
        return self._timing.gpu_seconds(self.chosen.cut)

    @property
    def restore_tokens(self) -> int:
        """Matched tokens that the plan loads."""
        cut = self.chosen.cut
        return self._timing.matched - (cut.resume - cut.start)

    @property
    def costs(self) -> tuple[Costs, Costs]:
        """What it was decided by: the middle of the measurements, and 99 % of them."""
        return self._timing.costs, self._late.costs

    def compute_seconds(self, loaded: int) -> float:
        """Predicted seconds to compute everything after `loaded` matched tokens in one go."""
        return self._timing.after(loaded)

    @property
    def recompute_all(self) -> Alternative:
        """The plan that loads nothing, which always competes."""
        return next(plan for plan in self.alternatives if plan.kind == RECOMPUTE_ALL)

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that the plan moves over each link."""
        moved = self._timing.link_bytes(self.chosen.cut)
        return {name: round(size) for name, size in moved.items() if size}

    @property
    def load_seconds(self) -> tuple[float, float]:
        """Predicted seconds until all is loaded, p50 and p99: look again after the latter."""
        cut = self.chosen.cut
        return self._timing.load_seconds(cut), self._late.load_seconds(cut)

    def gain_over(self, cut: Cut) -> float:
        """The share of another cut's objective that the chosen one spares."""
        other = self._timing.objective(cut)
        return 1.0 - self.chosen.objective / other if other > 0 else 0.0

    @property
    def is_predicted_miss(self) -> bool:
        """No plan was predicted to meet the deadline."""
        deadline = self.situation.deadline_seconds
        return deadline is not None and self.chosen.p99_seconds > deadline

    def regret(self, measured_seconds: float) -> float:
        """Seconds that it took longer than the best other plan was predicted to."""
        others = [other.p50_seconds for other in self.alternatives[1:]]
        return max(0.0, measured_seconds - min(others, default=measured_seconds))

    @cached_property
    def reason(self) -> str:
        """One sentence with the numbers."""
        chosen = self.chosen
        what = f"{self.note}{self._words(chosen)} takes {_ms(chosen.p50_seconds)}"
        what += f" (99 %: {_ms(chosen.p99_seconds)})"
        others = ", ".join(
            f"{other.kind.replace('_', ' ')} {_ms(other.p50_seconds)}"
            for other in self.alternatives[1:]
        )
        if others:
            what += f" against {others}"
        if chosen.price:
            what += f", with {_ms(chosen.price)} for what it costs others"
        deadline = self.situation.deadline_seconds
        if deadline is None and chosen.objective > min(p.objective for p in self.alternatives):
            what += "; what a load gains is not worth its risk"
        if deadline is not None:
            verdict = "missed by every plan" if self.is_predicted_miss else "met"
            what += f"; the deadline of {_ms(deadline)} is {verdict}"
        return what

    def _words(self, alternative: Alternative) -> str:
        if alternative.kind == RECOMPUTE_ALL:
            return f"recompute all {self._timing.matched:,} matched tokens"
        amounts: dict[str, int] = {}
        for step in self.steps(alternative.cut):
            amounts[step.source] = amounts.get(step.source, 0) + step.token_count
        computed = amounts.pop(RECOMPUTE, 0)
        loads = " and ".join(f"{tokens:,} from {source}" for source, tokens in amounts.items())
        if alternative.kind == SPLIT:
            return f"load {loads} while {computed:,} are recomputed"
        return f"load {loads}, recompute {computed:,}" if computed else f"load all: {loads}"


def decide(situation: Situation, p50: Costs, p99: Costs | None = None) -> Decision:
    """The best executable plan; `p99` are the costs that 99 % of measurements stay below."""
    timing = Timing(situation, p50)
    late = timing if p99 is None else Timing(situation, p99, timing.layout)
    alternatives = _best(timing, late)
    if situation.deadline_seconds is not None and late is not timing:
        # What is best when all is slow may be cut elsewhere; prices don't matter to being in time.
        free = Timing(situation._replace(prices=Prices()), late.costs, timing.layout)
        known = {plan.cut for plan in alternatives}
        alternatives += [
            Alternative(slow.kind, slow.cut, timing, late)
            for slow in _best(free, free)
            if slow.cut not in known
        ]
    chosen = _choose(alternatives, situation)
    others = [other for other in alternatives if other is not chosen]
    return Decision(timing, late, chosen, others)


def _best(timing: Timing, late: Timing) -> list[Alternative]:
    """The best cut of each kind; what moves nothing comes first and wins a tie.

    A prefix or split that can't be better than what is there already is left out.
    """
    matched = timing.matched
    best = [Alternative(RECOMPUTE_ALL, Cut(0, matched), timing, late)]
    if matched:
        best.append(Alternative(LOAD_ALL, Cut(matched, matched), timing, late))
        limit = min(best[0].objective, best[1].objective)
        shapes = timing.situation.shapes
        prefix = best_prefix(timing, limit) if shapes else None
        if prefix is not None:
            best.append(Alternative(PREFIX, prefix[1], timing, late))
            limit = prefix[0]
        split = best_split(timing, limit) if SPLIT in shapes else None
        if split is not None:
            best.append(Alternative(SPLIT, split[1], timing, late))
    return best


def _choose(alternatives: list[Alternative], situation: Situation) -> Alternative:
    deadline = situation.deadline_seconds
    if deadline is None:
        recompute, caution = alternatives[0], situation.caution
        worth_it = [plan for plan in alternatives if _is_worth_it(plan, recompute, caution)]
        return min(worth_it, key=lambda plan: plan.objective)
    in_time = [plan for plan in alternatives if plan.p99_seconds <= deadline]
    if in_time:
        return min(in_time, key=lambda plan: (plan.price, plan.p50_seconds))
    return min(alternatives, key=lambda plan: plan.p99_seconds)


def _is_worth_it(plan: Alternative, recompute: Alternative, caution: float) -> bool:
    """Whether a plan gains enough over recomputing all, for what it may cost if all is slow."""
    if plan is recompute or not caution:
        return True
    risk = max(0.0, plan.p99_seconds - recompute.p99_seconds)
    return plan.objective + caution * (recompute.objective + risk) < recompute.objective


def _steps(situation: Situation, bounds: list[int], cut: Cut) -> Iterator[PlanStep]:
    """Loads by segment around what is recomputed, in the order of tokens."""
    base = situation.local_tokens
    stretches = (
        (0, cut.start, False),
        (cut.start, cut.resume, True),
        (cut.resume, bounds[-1], False),
    )
    for first, last, computed in stretches:
        if computed and first < last:
            yield PlanStep(base + first, last - first, RECOMPUTE)
            continue
        for number, segment in enumerate(situation.segments):
            low, high = max(first, bounds[number]), min(last, bounds[number + 1])
            if low < high:
                yield PlanStep(base + low, high - low, segment.source)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def waiting_in(busy_ratio: float) -> float:
    """How many wait on average where so much of the time is taken: busy^2 / (1 - busy), M/M/1."""
    busy = min(BUSY_MAX, max(0.0, busy_ratio))
    return busy * busy / (1.0 - busy)


def gpu_price(busy_ratio: float, queued_prefill_tokens: int = 0) -> float:
    """What a GPU-second costs others: nothing when idle, 1 and more when requests wait.

    A second of work delays everybody who waits: as many as that are on average, as far as they are
    below 1, and one more if it is known that somebody does. So no request pays more than twice its
    own work for others.
    """
    return min(1.0, waiting_in(busy_ratio)) + (1.0 if queued_prefill_tokens > 0 else 0.0)


def link_price(mean_waiting: float, byte_count: int, queued_bytes: int = 0) -> float:
    """What a second of a link costs others, for a load of so many bytes: as `gpu_price`, 0 to 2.

    `mean_waiting` is how many transfers waited of late, on average. Of `queued_bytes`, those that
    share the link with this load until it is through, each delays it and is delayed by it. What is
    next to nothing is nothing: prices make planning slower.
    """
    shared = min(1.0, queued_bytes / byte_count) if queued_bytes and byte_count > 0 else 0.0
    price = min(1.0, mean_waiting) + shared
    return price if price >= PRICE_MIN else 0.0


__all__ = [
    "RECOMPUTE_ALL",
    "Alternative",
    "Costs",
    "Decision",
    "Prices",
    "Segment",
    "Situation",
    "decide",
    "gpu_price",
    "link_price",
    "waiting_in",
]
