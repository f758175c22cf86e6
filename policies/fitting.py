"""Fitting: seconds as a non-negative sum of features, learned one measurement at a time.

What the cost models have in common. A model starts from a prior and may only be trusted once the
measurements span enough to tell its terms apart; until then it keeps the prior's shape and learns
its scale. One measurement, however wrong, moves it little; a lasting change is followed quickly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.policies.least_squares import Vector, solve_non_negative, trace, with_ridge
from kvstore.policies.ratios import RatioQuantiles

SECONDS_MAX = 1e6  # longer than that is a stopped clock, not a measurement
SECONDS_MIN = 1e-9
FEATURE_MAX = float(1 << 80)
SAMPLES_TO_FIT = 24
JUDGED_EVERY = 8  # samples between two looks at the condition number

# A measurement counts as at most this much above or below its prediction.
CLIP_LOG = math.log(4.0)
# Page's CUSUM test on the clipped log ratios: a change is a mean shift above ALLOWANCE, found once
# the excess adds up to ALARM (a tenfold one after five samples; single outliers fade away).
ALLOWANCE_LOG, ALARM_LOG = 0.4, 4.5
SHIFT_MAX = 1e3
RECENT = 8
REMEMBERED = 0.1  # of what was known before a change
# Pull to the prior, in samples: while only its scale is learned, and once fitted.
SCALE_RIDGE, FIT_RIDGE = 1.0, 0.02
CONDITION_MAX = 1e3
FLOOR = 1e-4  # of the prior's prediction: what a weight is computed from is at least that


class State(NamedTuple):
    """`prior` or `fitted`, and why."""

    name: str
    reason: str


class Span(NamedTuple):
    """A quantity that must vary before a model is fitted; all values below `floor` are as one."""

    name: str
    floor: float = 1.0
    ratio: float = 4.0

    def problem(self, low: float, high: float) -> str:
        if high < low:
            return f"no {self.name} was measured"
        if high == low:
            return f"one {self.name} only ({high:,.0f})"
        if max(high, self.floor) < self.ratio * max(low, self.floor):
            between = f"{low:,.0f} to {high:,.0f}"
            return f"{self.name} spans {between} only, less than {self.ratio:g} x"
        return ""


class RecursiveFit:
    """Recursive least squares with forgetting, in information form.

    Each row is weighted by one over its predicted seconds: errors count relative to their size.
    `prior` holds seconds per unit of each feature, all positive, and `groups` the group of each
    feature: until fitted, the features of a group keep their proportions. The first `core` features
    must be told apart by the measurements, the others may be absent from them.
    """

    def __init__(
        self,
        prior: Sequence[float],
        groups: Sequence[int],
        forgetting: float,
        spans: Sequence[Span],
        core: int | None = None,
        kinds: int = 0,
    ) -> None:
        if not all(0 < value < math.inf for value in prior):
            raise ValueError(f"the prior is {tuple(prior)}; pass positive seconds")
        self.prior = tuple(prior)
        self._members = [
            [i for i, group in enumerate(groups) if group == number]
            for number in range(max(groups) + 1)
        ]
        self._forgetting = forgetting
        self._spans = tuple(spans)
        self._core = core or len(prior)
        self._kinds = kinds
        self.rejected = {"not_finite": 0, "not_positive": 0, "too_large": 0}
        self.clipped = self.shifts = 0
        self._forget()

    def _forget(self) -> None:
        # All of these are in units of the prior: a coefficient of 1 is the prior's.
        size = len(self.prior)
        self.count = 0
        self.ratios = RatioQuantiles()
        self.ratios_of = [RatioQuantiles() for _ in range(self._kinds)]
        self._gram = [[0.0] * size for _ in range(size)]
        self._vector = [0.0] * size
        self._weight = 0.0
        self._scale = 1.0  # of the prior, after lasting changes
        # What it was when last fitted: the shape to keep should measurements become alike.
        self._held: Vector | None = None
        self._ranges = [(math.inf, 0.0) for _ in self._spans]
        self._condition = math.inf
        self._above = self._below = 0.0
        self._recent: deque[tuple[Vector, float]] = deque(maxlen=RECENT)
        self._settle()

    @property
    def state(self) -> State:
        return self._state

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        return self._coefficients

    def observe(
        self,
        features: Sequence[float],
        seconds: float,
        spanned: Sequence[float],
        kind: int | None = None,
    ) -> bool:
        """Learns from one measurement; False if it can be none.

        `spanned` are the values of the quantities that must vary, in the order of the spans.
        Measurements of a `kind` have quantiles of their own, too.
        """
        if not self._plausible(features, seconds):
            return False
        scaled = [feature * unit for feature, unit in zip(features, self.prior, strict=True)]
        predicted = self._predicted(scaled)
        log_ratio = math.log(seconds / predicted)
        self.ratios.add(log_ratio)
        if kind is not None:
            self.ratios_of[kind].add(log_ratio)
        clipped = min(CLIP_LOG, max(-CLIP_LOG, log_ratio))
        self.clipped += clipped != log_ratio
        self.count += 1
        self._ranges = [
            (min(low, value), max(high, value))
            for (low, high), value in zip(self._ranges, spanned, strict=True)
        ]
        self._add([value / predicted for value in scaled], math.exp(clipped))
        was_prior = self._held is None
        self._settle()
        if was_prior and self._held is not None:
            self._forget_ratios()  # errors of the prior are none of what was learned
        self._watch(scaled, seconds, clipped)
        return True

    def _plausible(self, features: Sequence[float], seconds: float) -> bool:
        values = (*features, seconds)
        if not all(map(math.isfinite, values)):
            self.rejected["not_finite"] += 1
        elif seconds < SECONDS_MIN or min(features) < 0 or not any(features):
            self.rejected["not_positive"] += 1
        elif seconds > SECONDS_MAX or max(features) > FEATURE_MAX:
            self.rejected["too_large"] += 1
        else:
            return True
        return False

    def _predicted(self, scaled: Vector) -> float:
        return max(sum(map(float.__mul__, scaled, self._solution)), FLOOR * sum(scaled))

    def _add(self, row: Vector, value: float) -> None:
        keep = self._forgetting
        self._weight = self._weight * keep + 1.0
        for i, left in enumerate(row):
            if not left:
                self._gram[i] = [value * keep for value in self._gram[i]]
                self._vector[i] *= keep
                continue
            line = self._gram[i]
            self._gram[i] = [
                old * keep + left * right for old, right in zip(line, row, strict=True)
            ]
            self._vector[i] = self._vector[i] * keep + left * value

    def _watch(self, scaled: Vector, seconds: float, log_ratio: float) -> None:
        """Looks for a lasting change; after one, all coefficients move by the same factor."""
        self._recent.append((scaled, seconds))
        self._above = max(0.0, self._above + log_ratio - ALLOWANCE_LOG)
        self._below = max(0.0, self._below - log_ratio - ALLOWANCE_LOG)
        if max(self._above, self._below) >= ALARM_LOG:
            ratios = sorted(seconds / self._predicted(row) for row, seconds in self._recent)
            self._shift(min(SHIFT_MAX, max(1 / SHIFT_MAX, ratios[len(ratios) // 2])))

    def _shift(self, factor: float) -> None:
        """All that was known is `factor` slower, and counts for little beside what comes."""
        moved = [value * factor for value in self._solution]
        self._scale *= factor
        if self._held is not None:
            self._held = [max(FLOOR, value * factor) for value in self._held]
        self._gram = [[value * REMEMBERED / factor**2 for value in row] for row in self._gram]
        self._vector = [sum(map(float.__mul__, row, moved)) for row in self._gram]
        self._weight *= REMEMBERED
        self._above = self._below = 0.0
        self.shifts += 1
        self._forget_ratios()
        self._settle()

    def _forget_ratios(self) -> None:
        for ratios in (self.ratios, *self.ratios_of):
            ratios.forget()

    def _settle(self) -> None:
        """Works coefficients and state out anew."""
        self._state = self._judge()
        if self._state.name == "fitted" and self._condition <= CONDITION_MAX:
            target = self._scaled([self._scale] * len(self.prior))
            ridge = FIT_RIDGE * trace(self._gram) / self._weight
            self._solution = self._solve(target, ridge)
            self._held = [max(FLOOR, value) for value in self._solution]
        else:
            self._solution = self._scaled(self._held or [self._scale] * len(self.prior))
        self._coefficients = tuple(map(float.__mul__, self._solution, self.prior))

    def _solve(self, target: Vector, ridge: float) -> Vector:
        """The fit itself; features that were never measured stay at their target."""
        seen = [i for i in range(len(target)) if self._gram[i][i]]
        gram = [[self._gram[i][j] for j in seen] for i in seen]
        wanted = [target[i] for i in seen]
        solution = list(target)
        found = solve_non_negative(
            *with_ridge(gram, [self._vector[i] for i in seen], wanted, ridge)
        )
        for i, value in zip(seen, found, strict=True):
            solution[i] = value
        return solution

    def _scaled(self, shape: Vector) -> Vector:
        """`shape` with each group's scale as measured, pulled to 1 by one sample's worth."""
        groups = self._members
        gram = [
            [sum(self._gram[i][j] * shape[i] * shape[j] for i in a for j in b) for b in groups]
            for a in groups
        ]
        vector = [sum(self._vector[i] * shape[i] for i in group) for group in groups]
        ridge = SCALE_RIDGE * trace(gram) / max(self._weight, 1.0)
        if not ridge:
            return shape
        scales = solve_non_negative(*with_ridge(gram, vector, [1.0] * len(groups), ridge))
        scaled = list(shape)
        for scale, group in zip(scales, groups, strict=True):
            for i in group:
                scaled[i] *= scale
        return scaled

    def _judge(self) -> State:
        if self.count < SAMPLES_TO_FIT:
            return State("prior", f"{self.count} of {SAMPLES_TO_FIT} measurements")
        for span, (low, high) in zip(self._spans, self._ranges, strict=True):
            if problem := span.problem(low, high):
                return State("prior", problem)
        if self.count % JUDGED_EVERY == 0 or not math.isfinite(self._condition):
            self._condition = self._condition_number()
        if self._condition <= CONDITION_MAX:
            return State("fitted", f"{self.count} measurements")
        if self._held is not None:
            return State("fitted", "by earlier measurements; the last ones are too alike")
        return State("prior", f"measurements too alike (condition number {self._condition:,.0f})")

    def _condition_number(self) -> float:
        """Condition number of the core features, each scaled to length 1."""
        core = np.array(self._gram)[: self._core, : self._core]
        length = np.sqrt(np.diag(core))
        if not length.all():
            return math.inf
        values = np.linalg.eigvalsh(core / np.outer(length, length))
        return float(values[-1] / values[0]) if values[0] > 0 else math.inf

    def dump(self) -> dict[str, Any]:
        """All it knows, in plain values and in absolute units, so that the prior may change."""
        units = np.array(self.prior)
        return {
            "gram": (np.array(self._gram) / np.outer(units, units)).tolist(),
            "vector": (np.array(self._vector) / units).tolist(),
            "held": None if self._held is None else (np.array(self._held) * units).tolist(),
            "scale": self._scale,
            "weight": self._weight,
            "count": self.count,
            "ranges": [[low, high] if low <= high else None for low, high in self._ranges],
            "ratios": self.ratios.dump(),
            "ratios_of": [ratios.dump() for ratios in self.ratios_of],
        }

    def load(self, saved: Any) -> bool:
        """Takes a dump over; False, and nothing changed, if it is damaged."""
        units = np.array(self.prior)
        try:
            gram = _array(saved["gram"], (len(units), len(units))) * np.outer(units, units)
            vector = _array(saved["vector"], units.shape) * units
            held = None if saved["held"] is None else _array(saved["held"], units.shape) / units
            weight, count, scale = (
                float(saved["weight"]),
                int(saved["count"]),
                float(saved["scale"]),
            )
            ranges = [
                (math.inf, 0.0) if pair is None else (float(pair[0]), float(pair[1]))
                for pair in saved["ranges"]
            ]
            ratios = RatioQuantiles.of(saved["ratios"])
            ratios_of = [RatioQuantiles.of(each) for each in saved.get("ratios_of", ())]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            return False
        if not (
            (gram == gram.T).all()
            and np.linalg.eigvalsh(gram)[0] >= -1e-9 * max(float(np.trace(gram)), 1e-9)
            and (held is None or held.min() > 0)
            and 0 < scale < math.inf
            and 0 <= weight <= 1 / (1 - self._forgetting) + 1
            and count >= 0
            and len(ranges) == len(self._spans)
            and len(ratios_of) in (0, self._kinds)
            and all(low >= 0 and 0 <= high < math.inf for low, high in ranges)
        ):
            return False
        self._forget()
        self._gram, self._vector, self._weight = gram.tolist(), vector.tolist(), weight
        self._held = None if held is None else held.tolist()
        self._scale, self.count, self.ratios = scale, count, ratios
        self._ranges, self.ratios_of = ranges, ratios_of or self.ratios_of
        self._settle()
        return True


def _array(saved: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Raises ValueError unless `saved` is finite numbers in that shape."""
    array = np.array(saved, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"saved costs are damaged; {shape} finite numbers were expected")
    return array
