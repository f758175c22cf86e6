"""A tier that fails on purpose, reproducibly: for tests of whoever lives on top of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

import numpy as np

import kvstore.core.clock
from kvstore.core.errors import TierError
from kvstore.tiers.base import AddressableTier, BlockHeader, Source, Target
from kvstore.tiers.decorator import TierDecorator
from kvstore.tiers.payload import as_bytes, copy_out, digest


class Fault(StrEnum):
    """What can go wrong."""

    LATENCY = "latency"
    SHORT_WRITE = "short_write"
    FLIP_ON_WRITE = "flip_on_write"
    FLIP_AT_REST = "flip_at_rest"
    WRITE_ERROR = "write_error"
    NO_SPACE = "no_space"
    CRASH_BEFORE_COMMIT = "crash_before_commit"


class SimulatedCrash(BaseException):
    """The process died here: no handler of errors runs, only whoever simulates a restart."""


@dataclass
class FaultBudget:
    """How likely each fault is at each occasion, and how many of it may still happen.

    A fault without a `left` entry has no limit. `happened` counts what did.
    """

    rates: dict[Fault, float] = field(default_factory=dict)
    left: dict[Fault, int] = field(default_factory=dict)
    happened: dict[Fault, int] = field(default_factory=dict)

    def draw(self, fault: Fault, random: Random) -> bool:
        rate = self.rates.get(fault, 0.0)
        if rate <= 0 or self.left.get(fault, 1) <= 0 or random.random() >= rate:
            return False
        if fault in self.left:
            self.left[fault] -= 1
        self.happened[fault] = self.happened.get(fault, 0) + 1
        return True


class FaultyTier(TierDecorator):
    """Breaks `inner` as `random` and the budget say; with an empty budget it changes nothing.

    A short write or a flip answers with the checksum of the bytes that were meant, as hardware
    that lies does. Flips at rest show in `view`, `read`, `verify` and `copy` here, not to a
    client that maps the pool. One seed gives one run, as long as one thread moves bytes.
    """

    def __init__(
        self,
        inner: AddressableTier,
        random: Random,
        budget: FaultBudget | None = None,
        latency_seconds: float = 0.01,
        sleep: Callable[[float], None] = kvstore.core.clock.sleep,
    ) -> None:
        super().__init__(inner)
        self.budget = budget or FaultBudget()
        self.latency_seconds = latency_seconds
        self._random = random
        self._sleep = sleep
        self._lock = threading.Lock()
        self._flips: dict[int, tuple[int, int]] = {}

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        if self._draw(Fault.NO_SPACE):
            count = self._below(count)
        return self.inner.reserve(payload_bytes, symbol_bytes, count, pool)

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        if self._draw(Fault.CRASH_BEFORE_COMMIT):
            self.inner.commit(blocks[: self._below(len(blocks))])
            raise SimulatedCrash
        return self.inner.commit(blocks)

    def discard(self, places: Sequence[int]) -> None:
        for place in places:
            self._flips.pop(place, None)
        self.inner.discard(places)

    def write(self, place: int, source: Source) -> bytes:
        self._wait()
        if self._draw(Fault.WRITE_ERROR):
            raise TierError(f"tier {self.name} failed to write place {place} (injected)")
        if self._draw(Fault.SHORT_WRITE):
            return self._write_other(place, source, self._shorten)
        if self._draw(Fault.FLIP_ON_WRITE):
            return self._write_other(place, source, self._flip)
        return self.inner.write(place, source)

    def read(self, place: int, target: Target, length: int) -> None:
        self._wait()
        copy_out(as_bytes(self.view(place, length)), target)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        self._wait()
        return digest(as_bytes(self.view(place, length))) == checksum

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        return self.write(target_place, self.view(source_place, length))

    def view(self, place: int, length: int) -> memoryview:
        if length and self._draw(Fault.FLIP_AT_REST):
            self._flips[place] = self._below(length), 1 << self._below(8)
        stored = self.inner.view(place, length)
        at, bit = self._flips.get(place, (length, 0))
        if at >= length:
            return stored
        spoiled = bytearray(stored)
        spoiled[at] ^= bit
        return memoryview(spoiled).toreadonly()

    def _write_other(
        self, place: int, source: Source, spoil: Callable[[np.ndarray], None]
    ) -> bytes:
        meant = as_bytes(source).copy()
        checksum = digest(meant)
        if len(meant):
            spoil(meant)
        self.inner.write(place, meant)
        return checksum

    def _shorten(self, payload: np.ndarray) -> None:
        start = self._below(len(payload))
        payload[start:] = 0

    def _flip(self, payload: np.ndarray) -> None:
        payload[self._below(len(payload))] ^= 1 << self._below(8)

    def _wait(self) -> None:
        if self._draw(Fault.LATENCY):
            self._sleep(self.latency_seconds)

    def _draw(self, fault: Fault) -> bool:
        with self._lock:
            return self.budget.draw(fault, self._random)

    def _below(self, count: int) -> int:
        with self._lock:
            return self._random.randrange(count) if count else 0
