"""Reuse curves: how likely a block is to be asked for again, by its age and kind of request.

A *turn-reuse index*. Every request makes two *units*, the blocks that were known and the new ones.
A unit has a shape (hint, output length, turn, known or new), each with a curve of reuse over age,
and a multiplier from rating factors. From these comes the index that ranks its blocks: the best,
over horizons, of the chance to be asked for within it per second of waiting (Gittins 1979; hit
density by age is LHD's, Beckmann et al., NSDI 2018).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right

import numpy as np

# Ages in seconds where the bins start; the last one ends, and blocks are forgotten, at the end.
AGES = (
    0.0, 1.0, 3.5, 6.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 110.0, 150.0, 200.0, 270.0,
    360.0, 480.0, 640.0, 850.0, 1100.0, 1500.0, 2000.0, 3000.0,
)  # fmt: skip
AGE_END = 6000.0
BINS = len(AGES)
WIDTHS = np.diff(np.array([*AGES, AGE_END]))
OUTPUT_CLASSES = (16, 128, 400)  # tokens
TURN_CLASSES = 3
SHAPES = (len(OUTPUT_CLASSES) + 1) * TURN_CLASSES * 2  # of one hint
# Multipliers are rounded to a grid, so that a table has a row for each.
GRID, GRID_LOW, GRID_STEP = 14, -2.1, 0.35
FACTOR_CODES = 16
CURVE_PRIOR, FACTOR_PRIOR, START = 50.0, 20.0, 0.05
CHANCE_MAX = 0.95
DECAY = 0.9995  # of all counts, a request
REBUILD_REQUESTS = 50
REBUILD_SECONDS = 1.0  # apart at least: it takes some milliseconds
# Edges of the bins, and beyond the last: there it goes on as it was, by the logarithm of the age.
EDGES = (*AGES, *(AGE_END * 2.0**n for n in range(5)))


def index_table(chances: np.ndarray) -> np.ndarray:
    """The index of each row at each age: rows of the chance to be reused within each bin.

    From bin b on: the greatest, over end bins x, of N/D with N the chance to be reused by the end
    of x and D the expected wait until then or until the reuse, in the middle of a bin.
    """
    # Bins first: what is left of the rows at each step then lies together in memory.
    chance = np.ascontiguousarray(chances.T)
    stays, waits = 1 - chance, WIDTHS[:, None] * (1 - chance / 2)
    gain, wait = chance.copy(), waits.copy()
    alive, best, part = stays.copy(), chance / waits, np.empty_like(chance)
    for ahead in range(1, BINS):
        starts = BINS - ahead
        left, some, sums, times = alive[:starts], part[:starts], gain[:starts], wait[:starts]
        sums += np.multiply(left, chance[ahead:], out=some)
        times += np.multiply(left, waits[ahead:], out=some)
        left *= stays[ahead:]
        np.maximum(best[:starts], np.divide(sums, times, out=some), out=best[:starts])
    return np.ascontiguousarray(best.T)


def _shrunk(events: np.ndarray, exposure: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Events over exposure, as if CURVE_PRIOR more had been seen of what was expected."""
    found: np.ndarray = (events + CURVE_PRIOR * expected) / (exposure + CURVE_PRIOR)
    return found


def grid_step(multiplier: float, log: float) -> int:
    """Where a multiplier, of which `log` is the logarithm, stands in the grid."""
    return min(max(int((log - GRID_LOW) / GRID_STEP + 0.5), 0), GRID - 1)


class Curves:
    """Events and exposure by shape and age, the curves and factors they give, and the table.

    Shapes of a hint that nobody has given yet cost nothing: the arrays grow with the hints.
    """

    def __init__(self) -> None:
        self.hints = 1
        self.events = np.zeros((SHAPES, BINS))
        self.exposure = np.zeros((SHAPES, BINS))
        self.curves = np.full((SHAPES, BINS), START)
        self.factors = Factors()
        self.table = self._index()
        self.rows: list[list[float]] = []
        self._fades: np.ndarray | None = None
        self._seen = np.zeros(BINS)
        self._publish()

    def grow(self, hints: int) -> None:
        """There are curves for so many kinds of hints now."""
        if hints <= self.hints:
            return
        added = (hints - self.hints) * SHAPES
        none = np.zeros((added, BINS))
        self.events = np.concatenate([self.events, none])
        self.exposure = np.concatenate([self.exposure, none])
        plain = np.tile(self.curves[:SHAPES], (hints - self.hints, 1))
        self.curves = np.concatenate([self.curves, plain])
        self.hints = hints
        self.table = self._index()
        self._publish()

    def rebuild(self, requests: int = REBUILD_REQUESTS) -> None:
        """Curves, factors and table anew from what so many requests counted, which then decays."""
        groups = (self.hints, SHAPES, BINS)
        events, exposure = self.events.reshape(groups), self.exposure.reshape(groups)
        pooled = (events.sum((0, 1)) + 0.01) / (exposure.sum((0, 1)) + 1)
        expected = pooled
        if self.hints > 1:
            # Until a shape of a hint has its own events, it is the shape's of all hints, times what
            # the hint makes of all shapes: a hint that says nothing costs nothing.
            shapes = _shrunk(events.sum(0), exposure.sum(0), pooled)
            said = _shrunk(events.sum(1), exposure.sum(1), pooled) / pooled
            expected = shapes * said[:, None, :]
        curves = _shrunk(events, exposure, expected)
        self.curves = np.minimum(curves, CHANCE_MAX).reshape(-1, BINS)
        self.factors.rebuild(requests)
        self.table = self._index()
        self._publish()
        kept = DECAY**requests
        self.events *= kept
        self.exposure *= kept

    def _index(self) -> np.ndarray:
        return index_table(1 - np.exp(-self._hazards()))

    def _hazards(self) -> np.ndarray:
        """Of each row, minus the logarithm of the chance to pass each bin without a reuse."""
        multipliers = np.exp(GRID_LOW + GRID_STEP * np.arange(GRID))
        curves = self.curves * (1 + self.curves / 2)
        hazards: np.ndarray = multipliers[None, :, None] * curves[:, None, :]
        return hazards.reshape(-1, BINS)

    def _publish(self) -> None:
        self.rows = self.table.tolist()
        self._fades = None
        self._seen = self.exposure.sum(0)

    # Chances

    def is_known(self, age: float) -> bool:
        """Whether as much was seen of blocks so old as each curve starts from."""
        bin_ = min(bisect_right(EDGES, age), BINS) - 1
        return float(self._seen[bin_]) >= CURVE_PRIOR

    def chance(self, row: int, age: float, seconds: float) -> float:
        """The chance that a block of the row's kind, so old, is reused within so many seconds.

        Ages of which little was seen so far count as little: what nobody saw come back does not.
        """
        fades = self._fades
        if fades is None:
            fades = self._fades = self._faded()
        before, after = _along(fades[row], age), _along(fades[row], age + seconds)
        return 1.0 - math.exp(before - after)

    def _faded(self) -> np.ndarray:
        """Hazards from age 0 up to each edge, summed over the bins, of each row."""
        hazards = self._hazards() * (self._seen / (self._seen + CURVE_PRIOR))
        beyond = np.repeat(hazards[:, -1:], len(EDGES) - 1 - BINS, axis=1)
        sums = np.cumsum(np.concatenate([hazards, beyond], axis=1), axis=1)
        return np.concatenate([np.zeros((len(sums), 1)), sums], axis=1)


def _along(fades: np.ndarray, age: float) -> float:
    """The sum up to an age, in a straight line within a bin."""
    upper = bisect_right(EDGES, max(age, 0.0))
    if upper == len(EDGES):
        return float(fades[-1])
    low, high = float(fades[upper - 1]), float(fades[upper])
    start, stop = EDGES[upper - 1], EDGES[upper]
    return low + (high - low) * (max(age, 0.0) - start) / (stop - start)


class Factors:
    """How much more than its curve a unit with some code is reused: observed over expected.

    A factor starts at its code's guess and keeps to it as if FACTOR_PRIOR events had shown it.
    """

    def __init__(self) -> None:
        self.observed: list[array[float]] = []
        self.expected: list[array[float]] = []
        self.values: list[list[float]] = []
        self._guesses: list[array[float]] = []
        self._neutral: list[bool] = []

    def add(self, codes: int, neutral: bool = False) -> int:
        """One more factor, of so many codes; answers its number."""
        self._neutral.append(neutral)
        for columns in (self.observed, self.expected, self._guesses):
            columns.append(array("d"))
        self.values.append([])
        number = len(self.values) - 1
        for _ in range(codes):
            self.add_code(number, 1.0)
        return number

    def add_code(self, number: int, guess: float) -> int:
        """One more code of a factor; answers it."""
        self.observed[number].append(0.0)
        self.expected[number].append(0.0)
        self._guesses[number].append(guess)
        self.values[number].append(guess)
        return len(self.values[number]) - 1

    def rebuild(self, requests: int = REBUILD_REQUESTS) -> None:
        """Values anew from what so many requests counted, which then decays."""
        kept = DECAY**requests
        for number, guesses in enumerate(self._guesses):
            seen = np.frombuffer(self.observed[number])
            due = np.frombuffer(self.expected[number])
            guess = np.frombuffer(guesses)
            values = (seen + FACTOR_PRIOR * guess) / (due + FACTOR_PRIOR)
            if self._neutral[number]:
                values[0] = 1.0
            self.values[number] = values.tolist()
            seen *= kept
            due *= kept
