"""Reference tier over a dictionary: the contract in its plainest form, for tests and simulation.

Slots are handed out again as soon as they are freed, last first, so that a reader that outlives
its lease sees other bytes, as it would in a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np

from kvstore.core.block import make_place, slot_bytes
from kvstore.core.errors import CorruptBlock, TierError
from kvstore.core.generations import Generations
from kvstore.tiers.base import (
    NO_USAGE,
    BlockHeader,
    SharedPool,
    Source,
    StoredBlock,
    StoredColumns,
    Target,
    TierUsage,
)
from kvstore.tiers.bulk import columns_of, read_each, write_each
from kvstore.tiers.payload import copy_hashed, copy_out, digest
from kvstore.tiers.slab import SlotState


class _Slot:
    """One slot: its bytes and what was committed with them."""

    __slots__ = ("data", "pool", "record", "state")

    def __init__(self, pool: str, data: np.ndarray) -> None:
        self.pool = pool
        self.data = data
        self.state = SlotState.STAGING
        self.record: StoredBlock | None = None


class _Pool:
    """Capacity and free slots of one pool.

    Addresses are only names: a freed slot keeps its bytes until it is reserved again or another
    size needs the room.
    """

    def __init__(self, number: int, capacity_bytes: int) -> None:
        self.number = number
        self.capacity_bytes = capacity_bytes
        self.end_bytes = 0
        self.idle: dict[int, list[tuple[int, np.ndarray]]] = {}
        self.idle_bytes = 0
        self.free_bytes = capacity_bytes
        self.resting_bytes = 0
        self.block_count = 0

    def take(self, size: int) -> tuple[int, np.ndarray]:
        """A slot of `size` bytes, a freed one if there is one; the caller saw that it fits."""
        self.free_bytes -= size
        if self.idle.get(size):
            self.idle_bytes -= size
            return self.idle[size].pop()
        while self.idle_bytes > self.free_bytes:
            other = next(k for k, slots in self.idle.items() if slots)
            self.idle[other].pop()
            self.idle_bytes -= other
        self.end_bytes += size
        return make_place(self.number, self.end_bytes - size), np.zeros(size, np.uint8)

    def give(self, place: int, data: np.ndarray) -> None:
        self.free_bytes += len(data)
        self.idle_bytes += len(data)
        self.idle.setdefault(len(data), []).append((place, data))


class MemoryTier:
    """Blocks in process memory; `pools` maps pool names to their bytes."""

    durable = False

    def __init__(
        self,
        capacity_bytes: int | Mapping[str, int],
        name: str = "host",
        first_generation: int = 1,
        generations: Generations | None = None,
    ) -> None:
        self.name = name
        sizes = {"": capacity_bytes} if isinstance(capacity_bytes, int) else capacity_bytes
        self._pools = {pool: _Pool(i, size) for i, (pool, size) in enumerate(sizes.items())}
        self._slots: dict[int, _Slot] = {}
        self._generations = generations or Generations()
        self._generations.raise_to(first_generation)

    @property
    def problem(self) -> str:
        return ""

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        size, room = slot_bytes(payload_bytes), self._pool(pool)
        places: list[int] = []
        while len(places) < count and room.free_bytes >= size:
            place, data = room.take(size)
            self._slots[place] = _Slot(pool, data)
            places.append(place)
        return sorted(places)

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        generations = []
        for place, header, checksum in blocks:
            slot = self._slots[place]
            assert slot.state is SlotState.STAGING, f"place {place} is {slot.state.name}"
            assert header.length <= len(slot.data), f"place {place} is too small"
            slot.record = StoredBlock(place, header, checksum, self._generations.take())
            slot.state = SlotState.PUBLISHED
            self._pools[slot.pool].block_count += 1
            generations.append(slot.record.generation)
        return generations

    def discard(self, places: Sequence[int]) -> None:
        for place in places:
            slot = self._slots[place]
            assert slot.state is not SlotState.RESTING, f"place {place} is discarded twice"
            room = self._pools[slot.pool]
            room.block_count -= slot.state is SlotState.PUBLISHED
            room.resting_bytes += len(slot.data)
            slot.state, slot.record = SlotState.RESTING, None

    def free(self, places: Sequence[int]) -> None:
        for place in places:
            slot = self._slots[place]
            assert slot.state is SlotState.RESTING, f"place {place} is {slot.state.name}"
            room = self._pools[slot.pool]
            room.resting_bytes -= len(slot.data)
            room.give(place, slot.data)
            del self._slots[place]

    def usage(self, pool: str | None = None) -> TierUsage:
        pools = self._pools.values() if pool is None else [self._pool(pool)]
        return sum((_usage(room) for room in pools), NO_USAGE)

    def header(self, place: int) -> BlockHeader:
        return self._record(place).header

    def checksum(self, place: int) -> bytes:
        return self._record(place).checksum

    def generation(self, place: int) -> int:
        slot = self._slots.get(place)
        return slot.record.generation if slot is not None and slot.record is not None else 0

    def generations(self, places: np.ndarray) -> np.ndarray:
        return np.array([self.generation(place) for place in places.tolist()], np.uint64)

    def next_generation(self) -> int:
        return self._generations.next

    def reopened(self) -> MemoryTier:
        """What a daemon finds after this one died: committed blocks, all else resting."""
        sizes = {pool: room.capacity_bytes for pool, room in self._pools.items()}
        again = MemoryTier(sizes, self.name, self._generations.next)
        for pool, room in self._pools.items():
            heir = again._pools[pool]
            heir.end_bytes, heir.free_bytes = room.end_bytes, room.free_bytes
        for place, slot in self._slots.items():
            kept = again._slots[place] = _Slot(slot.pool, slot.data.copy())
            kept.record, kept.state = slot.record, SlotState.RESTING
            again._pools[slot.pool].resting_bytes += len(slot.data)
        return again

    def recover(self) -> Iterator[StoredBlock]:
        return (slot.record for slot in list(self._slots.values()) if slot.record is not None)

    def adopt(self, place: int) -> None:
        slot = self._slots[place]
        assert slot.record is not None, f"place {place} was not recovered"
        assert slot.state is SlotState.RESTING, f"place {place} is {slot.state.name}"
        slot.state = SlotState.PUBLISHED
        room = self._pools[slot.pool]
        room.resting_bytes -= len(slot.data)
        room.block_count += 1

    def recover_columns(self) -> StoredColumns:
        return columns_of(self.recover())

    def adopt_many(self, places: np.ndarray) -> None:
        for place in places.tolist():
            self.adopt(place)

    def finish_recovery(self) -> list[int]:
        resting = [p for p, slot in self._slots.items() if slot.state is SlotState.RESTING]
        for place in resting:
            self._slots[place].record = None
        return sorted(resting)

    def report_bad(self, place: int) -> None:
        pass

    def drain_candidates(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> list[int]:
        return []

    def cancel_drain(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> None:
        pass

    def check_integrity(self) -> None:
        for name, room in self._pools.items():
            slots = [slot for slot in self._slots.values() if slot.pool == name]
            held = sum(len(slot.data) for slot in slots)
            resting = [slot for slot in slots if slot.state is SlotState.RESTING]
            assert room.free_bytes + held == room.capacity_bytes, f"pool {name!r} lost bytes"
            assert room.resting_bytes == sum(len(slot.data) for slot in resting)
            published = [slot for slot in slots if slot.state is SlotState.PUBLISHED]
            assert room.block_count == len(published), f"pool {name!r} miscounts blocks"
            assert all(slot.record is not None for slot in published), "published without header"

    def probe(self) -> None:
        pass

    def close(self, keep: bool = True) -> None:
        if not keep:
            self._slots.clear()

    def write(self, place: int, source: Source) -> bytes:
        slot = self._slots[place]
        assert slot.state is SlotState.STAGING, f"place {place} is {slot.state.name}"
        return copy_hashed(slot.data, source)

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        return write_each(self, items)

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        return read_each(self, items, length)

    def read(self, place: int, target: Target, length: int) -> None:
        copy_out(self._slots[place].data[:length], target)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        return digest(self._slots[place].data[:length]) == checksum

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        return self.write(target_place, self._slots[source_place].data[:length])

    def view(self, place: int, length: int) -> memoryview:
        return self._slots[place].data[:length].data.toreadonly()

    def target(self, place: int) -> np.ndarray:
        slot = self._slots[place]
        assert slot.state is SlotState.STAGING, f"place {place} is {slot.state.name}"
        return slot.data

    def shared_pools(self, tenant_pool: str) -> list[SharedPool]:
        self._pool(tenant_pool)
        return []

    def _pool(self, name: str) -> _Pool:
        if name not in self._pools:
            _unknown_pool(self.name, name, self._pools)
        return self._pools[name]

    def _record(self, place: int) -> StoredBlock:
        record = self._slots[place].record
        if record is None:
            raise CorruptBlock(f"place {place} of tier {self.name} holds no committed block")
        return record


def _usage(room: _Pool) -> TierUsage:
    used = room.capacity_bytes - room.free_bytes - room.resting_bytes
    return TierUsage(
        room.capacity_bytes, used, room.free_bytes, room.resting_bytes, room.block_count
    )


def _unknown_pool(tier: str, name: str, pools: Mapping[str, object]) -> NoReturn:
    raise TierError(
        f"tier {tier} has no pool {name!r}; its pools are {', '.join(map(repr, pools))}"
    )
