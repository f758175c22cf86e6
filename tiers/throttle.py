"""Slows a tier down to a bandwidth and a latency: a disk that others use too, what-if runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import kvstore.core.clock
from kvstore.core.clock import Clock, SystemClock
from kvstore.tiers.base import AddressableTier, Source, Target
from kvstore.tiers.decorator import TierDecorator
from kvstore.tiers.payload import as_bytes


class ThrottledTier(TierDecorator):
    """One link of `bandwidth` bytes a second that all byte movers share, `latency` each.

    `sleep` waits the difference: with a ManualClock, pass its `advance`.
    """

    def __init__(
        self,
        inner: AddressableTier,
        bandwidth_bytes_per_second: float,
        latency_seconds: float = 0.0,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = kvstore.core.clock.sleep,
    ) -> None:
        super().__init__(inner)
        self.bandwidth_bytes_per_second = bandwidth_bytes_per_second
        self.latency_seconds = latency_seconds
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._lock = threading.Lock()
        self._busy_until = 0.0

    def write(self, place: int, source: Source) -> bytes:
        self._pass(as_bytes(source).size)
        return self.inner.write(place, source)

    def read(self, place: int, target: Target, length: int) -> None:
        self._pass(length)
        self.inner.read(place, target, length)

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        self._pass(sum(as_bytes(source).size for _, source in items))
        return self.inner.write_many(items)

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        self._pass(length * len(items))
        return self.inner.read_many(items, length)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        self._pass(length)
        return self.inner.verify(place, length, checksum)

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        self._pass(length)
        return self.inner.copy(source_place, target_place, length)

    def _pass(self, length: int) -> None:
        """Waits until `length` bytes have gone over the link, behind what is on it."""
        with self._lock:
            now = self._clock.now()
            start = max(now, self._busy_until)
            self._busy_until = start + length / self.bandwidth_bytes_per_second
            wait = self._busy_until + self.latency_seconds - now
        if wait > 0:
            self._sleep(wait)
