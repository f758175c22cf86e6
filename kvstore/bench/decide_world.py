"""A simulated engine and its links, with true costs that no model has the shape of."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import numpy as np

from kvstore.policies.timing import Cut, Situation

BLOCK_TOKENS = 16
NOISE = 0.2
CALL_KNEE_TOKENS = 256  # smaller calls take as long for their tokens
LINK_KNEE_BYTES = 1 << 20  # the first bytes of a transfer move at half the speed
ALONE = 0.7  # of a link's bandwidth, for a transfer that finds it idle


class World(NamedTuple):
    """True costs of one engine and two links, host and disk."""

    call_seconds: float
    token_seconds: float
    pair_seconds: float
    chunk_tokens: int
    token_bytes: int
    latency_seconds: dict[str, float]
    bytes_per_second: dict[str, float]

    @classmethod
    def draw(cls, rng: random.Random, bandwidth: float) -> World:
        """An engine from a third to three times as fast as the prior says; `bandwidth` of disk."""
        speed = math.exp(rng.uniform(-1.1, 1.1))
        return cls(
            call_seconds=10e-3 * speed,
            token_seconds=32e-6 * speed,
            pair_seconds=1.3e-9 * speed * rng.uniform(0.5, 2.0),
            chunk_tokens=rng.choice([0, 2_048, 8_192]),
            token_bytes=rng.choice([4 << 10, 16 << 10, 64 << 10]),
            latency_seconds={"host": 50e-6, "disk": rng.choice([100e-6, 1e-3])},
            bytes_per_second={"host": 8 * bandwidth, "disk": bandwidth},
        )

    def compute(self, new: np.ndarray, cached: np.ndarray) -> np.ndarray:
        """True seconds to prefill, in calls of `chunk_tokens`."""
        chunk = self.chunk_tokens or 1 << 40
        calls = -(-new // chunk)
        last = new - (calls - 1) * chunk
        worked = new + np.maximum(0, CALL_KNEE_TOKENS - last)
        seconds = self.call_seconds * calls + self.token_seconds * worked
        seconds = seconds + self.pair_seconds * new * (cached + new / 2)
        return np.where(new > 0, seconds, 0.0)

    def move(self, link: str, size: np.ndarray, queued: int) -> np.ndarray:
        """True seconds of a transfer behind `queued` bytes."""
        wait = self.latency_seconds[link] + queued / self.bytes_per_second[link]
        return np.where(size > 0, wait + self.busy(link, size, queued > 0), 0.0)

    def busy(self, link: str, size: np.ndarray, others: bool) -> np.ndarray:
        """True seconds that a transfer keeps a link busy; one alone doesn't fill it."""
        share = 1.0 if others else ALONE
        worked: np.ndarray = size / share + np.minimum(size, LINK_KNEE_BYTES)
        return worked / self.bytes_per_second[link]

    def first_token(
        self, situation: Situation, start: np.ndarray, resume: np.ndarray
    ) -> np.ndarray:
        """True seconds to the first token of cuts, without noise."""
        matched, new = situation.matched_tokens, situation.new_tokens
        loads = self._loads(situation, start, resume)
        is_split = resume < matched
        front = self._loads(situation, start, np.full_like(start, matched))
        split = np.maximum(front + self.compute(resume - start, start), loads)
        split = split + self.compute(np.full_like(start, new), np.full_like(start, matched))
        whole = loads + self.compute(matched - start + new, start)
        seconds: np.ndarray = np.where(is_split, split, whole)
        return seconds

    def _loads(self, situation: Situation, start: np.ndarray, resume: np.ndarray) -> np.ndarray:
        longest, low = np.zeros(len(start)), 0
        for segment in situation.segments:
            high = low + segment.tokens
            tokens = np.clip(start - low, 0, segment.tokens)
            tokens = tokens + np.clip(high - np.maximum(resume, low), 0, segment.tokens)
            queued = situation.queued_bytes.get(segment.source, 0)
            seconds = self.move(segment.source, tokens * self.token_bytes, queued)
            longest, low = np.maximum(longest, seconds), high
        return longest

    def seconds(self, situation: Situation, cut: Cut) -> float:
        """True seconds of one cut."""
        start, resume = np.array([cut.start]), np.array([cut.resume])
        return float(self.first_token(situation, start, resume)[0])

    def best_seconds(self, situation: Situation) -> float:
        """True seconds of the best plan that the engine can execute."""
        matched = situation.matched_tokens
        places = np.arange(0, matched + 1, BLOCK_TOKENS)
        best = float(self.first_token(situation, places, np.full_like(places, matched)).min())
        if "split" in situation.shapes:
            for begin in {0, situation.segments[0].tokens}:
                ends = np.arange(begin + BLOCK_TOKENS, matched, BLOCK_TOKENS)
                if len(ends):
                    found = self.first_token(situation, np.full_like(ends, begin), ends)
                    best = min(best, float(found.min()))
        return best


def noise(rng: random.Random) -> float:
    """A factor with mean 1 and a spread of 20 %."""
    return math.exp(rng.gauss(-(NOISE**2) / 2, NOISE))
