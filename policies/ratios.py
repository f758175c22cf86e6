"""Ratios: decayed quantiles of measured over predicted seconds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

STEP_LOG, RANGE_LOG = 0.04, 4.8  # bins of 4 %, from 1/120 to 120
BINS = 2 * round(RANGE_LOG / STEP_LOG) + 1
FORGETTING = 0.995  # 200 samples: a single outlier is below the 99 % quantile
# What is believed before anything is measured: log-normal, 99 % below twice the prediction.
PRIOR_WEIGHT, PRIOR_SIGMA = 20.0, 0.3
EDGES = (np.arange(BINS + 1) - BINS / 2) * STEP_LOG
RENORMALISE = 1e9


def _believed() -> np.ndarray:
    density = np.exp(-0.5 * ((EDGES[:-1] + STEP_LOG / 2) / PRIOR_SIGMA) ** 2)
    weights: np.ndarray = PRIOR_WEIGHT * density / density.sum()
    return weights


class RatioQuantiles:
    """A histogram over the logarithm of the ratio whose past fades."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Back to what is believed before anything is measured."""
        self.count = 0
        self._mass = _believed()
        # Newer samples weigh more instead of all older ones less: one bin a sample is touched.
        self._next = 1.0
        self._known: dict[float, float] = {}

    def add(self, log_ratio: float) -> None:
        place = math.floor(min(RANGE_LOG, max(-RANGE_LOG, log_ratio)) / STEP_LOG + BINS / 2)
        self.count += 1
        self._next /= FORGETTING
        self._mass[place] += self._next
        if self._next > RENORMALISE:
            self._mass /= self._next
            self._next = 1.0
        if self._known:
            self._known = {}

    def quantile(self, share: float) -> float:
        """The ratio that `share` of the measurements were below."""
        known = self._known.get(share)
        if known is None:
            sums = np.cumsum(self._mass)
            wanted = share * sums[-1]
            place = min(int(np.searchsorted(sums, wanted)), BINS - 1)
            inside = 1.0 - float(sums[place] - wanted) / max(float(self._mass[place]), 1e-300)
            known = math.exp(float(EDGES[place]) + STEP_LOG * min(1.0, max(0.0, inside)))
            self._known[share] = known
        return known

    def dump(self) -> list[float]:
        """The histogram; how many measurements are in it is not kept, only what they weigh."""
        return [float(value) for value in self._mass / self._next]

    @classmethod
    def of(cls, saved: Any) -> RatioQuantiles:
        """Raises ValueError for anything that `dump` does not make."""
        mass = np.array(saved, dtype=np.float64)
        if mass.shape != (BINS,) or not np.isfinite(mass).all() or mass.min() < 0 or not mass.any():
            raise ValueError("the histogram of ratios is damaged; measure anew")
        quantiles = cls()
        quantiles._mass, quantiles.count = mass, round(float(mass.sum()))
        return quantiles
