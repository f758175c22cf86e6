"""A tier around a tier: passes everything on, for decorators to override what they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from kvstore.tiers.base import (
    AddressableTier,
    BlockHeader,
    ResizableTier,
    SharedPool,
    Source,
    StoredBlock,
    StoredColumns,
    Target,
    TierUsage,
)
from kvstore.tiers.bulk import read_each, write_each


class TierDecorator:
    """Behaves exactly as `inner` does."""

    def __init__(self, inner: AddressableTier) -> None:
        self.inner = inner
        self.name = inner.name
        self.durable = inner.durable

    @property
    def problem(self) -> str:
        return self.inner.problem

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        return self.inner.reserve(payload_bytes, symbol_bytes, count, pool)

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        return self.inner.commit(blocks)

    def discard(self, places: Sequence[int]) -> None:
        self.inner.discard(places)

    def free(self, places: Sequence[int]) -> None:
        self.inner.free(places)

    def usage(self, pool: str | None = None) -> TierUsage:
        return self.inner.usage(pool)

    def header(self, place: int) -> BlockHeader:
        return self.inner.header(place)

    def checksum(self, place: int) -> bytes:
        return self.inner.checksum(place)

    def generation(self, place: int) -> int:
        return self.inner.generation(place)

    def generations(self, places: np.ndarray) -> np.ndarray:
        return self.inner.generations(places)

    def next_generation(self) -> int:
        return self.inner.next_generation()

    def recover(self) -> Iterator[StoredBlock]:
        return self.inner.recover()

    def adopt(self, place: int) -> None:
        self.inner.adopt(place)

    def recover_columns(self) -> StoredColumns:
        return self.inner.recover_columns()

    def adopt_many(self, places: np.ndarray) -> None:
        self.inner.adopt_many(places)

    def finish_recovery(self) -> list[int]:
        return self.inner.finish_recovery()

    def report_bad(self, place: int) -> None:
        self.inner.report_bad(place)

    def drain_candidates(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> list[int]:
        return self.inner.drain_candidates(payload_bytes, symbol_bytes, pool)

    def cancel_drain(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> None:
        self.inner.cancel_drain(payload_bytes, symbol_bytes, pool)

    def begin_resize(self, byte_count: int) -> int:
        return self._resizable.begin_resize(byte_count)

    @property
    def owed_bytes(self) -> int:
        return self._resizable.owed_bytes

    def choose_leaving(self, unmovable: np.ndarray) -> bool:
        return self._resizable.choose_leaving(unmovable)

    def is_leaving(self, places: np.ndarray) -> np.ndarray:
        return self._resizable.is_leaving(places)

    def reserve_for_move(self, payload_bytes: int, symbol_bytes: int, count: int) -> list[int]:
        return self._resizable.reserve_for_move(payload_bytes, symbol_bytes, count)

    def finish_resize(self) -> int:
        return self._resizable.finish_resize()

    @property
    def _resizable(self) -> ResizableTier:
        """A tier of these calls; the type of `inner` does not promise them."""
        return cast("ResizableTier", self.inner)

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def probe(self) -> None:
        self.inner.probe()

    def close(self, keep: bool = True) -> None:
        self.inner.close(keep)

    def write(self, place: int, source: Source) -> bytes:
        return self.inner.write(place, source)

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        return write_each(self, items)

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        return read_each(self, items, length)

    def read(self, place: int, target: Target, length: int) -> None:
        self.inner.read(place, target, length)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        return self.inner.verify(place, length, checksum)

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        return self.inner.copy(source_place, target_place, length)

    def view(self, place: int, length: int) -> memoryview:
        return self.inner.view(place, length)

    def target(self, place: int) -> np.ndarray:
        return self.inner.target(place)

    def shared_pools(self, tenant_pool: str) -> list[SharedPool]:
        return self.inner.shared_pools(tenant_pool)
