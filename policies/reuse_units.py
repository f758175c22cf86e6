"""`Units`: parts of requests that are watched until they are reused or too old."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from kvstore.policies.reuse_curves import AGES, BINS, Curves

FORGET_UNITS = 4096  # are taken off at once: the arrays move


class Units:
    """Columns of units in order of time; numbers [first, stop) are watched.

    Each block that is asked for again is an event in the bin of its age; each that lives to a bin
    is exposure there. Exposure is counted in batches (`age`); an event that comes between adds
    what its batch will miss. Both count a block as 1/sqrt(n) in a unit of n.
    """

    def __init__(self, curves: Curves) -> None:
        self._curves = curves
        self.first = 0
        self._taken = 0  # number of the unit that the columns start with
        self._times = array("d")
        self._shapes = array("i")
        self._sizes = array("i")
        self._alive = array("i")
        self._weights = array("d")
        self._thetas = array("d")
        self._codes: list[array[int]] = []
        self._passed = [0] * BINS  # units that were counted in each bin

    @property
    def stop(self) -> int:
        return self._taken + len(self._times)

    def add_factor(self, codes: int, neutral: bool = False) -> int:
        """One more factor of so many codes, before the first unit; answers its number.

        Code 0 of a `neutral` one is not learned about.
        """
        self._codes.append(array("i"))
        return self._curves.factors.add(codes, neutral)

    def time(self, unit: int) -> float:
        return self._times[unit - self._taken]

    def add(self, now: float, shape: int, size: int, theta: float, codes: Sequence[int]) -> None:
        """One more, of so many blocks."""
        self._times.append(now)
        self._shapes.append(shape)
        self._sizes.append(size)
        self._alive.append(size)
        self._weights.append(size**-0.5 if size else 0.0)
        self._thetas.append(theta)
        for column, code in zip(self._codes, codes, strict=True):
            column.append(code)

    def reshape(self, unit: int, shape: int) -> None:
        """It has another shape from now on."""
        self._shapes[unit - self._taken] = shape

    def recode(self, unit: int, factor: int, code: int) -> float:
        """It has another code of a factor from now on; answers with its new multiplier."""
        i, values = unit - self._taken, self._curves.factors.values[factor]
        self._thetas[i] *= values[code] / values[self._codes[factor][i]]
        self._codes[factor][i] = code
        return self._thetas[i]

    def grow(self, unit: int, blocks: int) -> None:
        """It has so many blocks more."""
        if not blocks:
            return
        i = unit - self._taken
        self._sizes[i] += blocks
        self._alive[i] += blocks
        self._weights[i] = self._sizes[i] ** -0.5

    def count(self, found: Sequence[int | None], now: float) -> None:
        """Blocks of these units, in the order of a chain, are asked for again."""
        for unit, blocks in groupby(found):
            assert unit is not None
            self._event(unit, sum(1 for _ in blocks), now)

    def _event(self, unit: int, blocks: int, now: float) -> None:
        i, curves = unit - self._taken, self._curves
        shape, amount = self._shapes[i], blocks * self._weights[i]
        self._alive[i] -= blocks
        here = bisect_right(AGES, now - self._times[i]) - 1
        curves.events[shape, here] += amount
        factors = curves.factors
        for column, observed in zip(self._codes, factors.observed, strict=True):
            observed[column[i]] += amount
        amount *= self._thetas[i]
        while here > 0 and self._passed[here] <= unit:
            curves.exposure[shape, here] += amount
            due = amount * float(curves.curves[shape, here])
            for number, column in enumerate(self._codes):
                code = column[i]
                factors.expected[number][code] += due / factors.values[number][code]
            here -= 1

    def age(self, now: float) -> None:
        """Counts what has come to each bin since the last time."""
        times = np.frombuffer(self._times) if self._times else np.empty(0)
        where, bins = [], []
        for number, age in enumerate(AGES):
            start = self._passed[number] - self._taken
            stop = start + int(np.searchsorted(times[start:], now - age, side="right"))
            if stop > start:
                where.append(np.arange(start, stop))
                bins.append(np.full(stop - start, number))
                self._passed[number] = stop + self._taken
        if where:
            self._expose(np.concatenate(where), np.concatenate(bins))

    def _expose(self, where: np.ndarray, bins: np.ndarray) -> None:
        curves = self._curves
        # A unit starts whole: what was reused of it since left after its first bin began.
        alive = np.where(
            bins == 0, np.frombuffer(self._sizes, np.intc)[where],
            np.frombuffer(self._alive, np.intc)[where],
        )  # fmt: skip
        shapes = np.frombuffer(self._shapes, np.intc)[where]
        amounts = alive * np.frombuffer(self._weights)[where] * np.frombuffer(self._thetas)[where]
        cells = shapes * BINS + bins
        flat = curves.exposure.reshape(-1)
        flat += np.bincount(cells, amounts, len(flat))
        due = amounts * curves.curves.reshape(-1)[cells]
        factors = curves.factors
        for number, column in enumerate(self._codes):
            codes = np.frombuffer(column, np.intc)[where]
            expected = np.frombuffer(factors.expected[number])
            values = np.array(factors.values[number])
            expected += np.bincount(codes, due / values[codes], len(expected))

    def forget(self, count: int) -> None:
        """The first `count` are watched no more."""
        self.first += count
        dead = self.first - self._taken
        if dead < FORGET_UNITS:
            return
        for numbers in (self._shapes, self._sizes, self._alive, *self._codes):
            del numbers[:dead]
        for values in (self._times, self._weights, self._thetas):
            del values[:dead]
        self._taken = self.first
        self._passed = [max(passed, self.first) for passed in self._passed]
