"""`HostTier`: blocks in pools of host memory that clients on the same machine map read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvstore.core.block import POOL_SHIFT, SLOT_SHIFT, make_place, place_offset, slot_bytes
from kvstore.core.errors import TierError
from kvstore.core.generations import Generations
from kvstore.tiers import payload
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
from kvstore.tiers.host.opening import HugePages, OpenPools, PoolConfig, PoolKind
from kvstore.tiers.host.pool import HostPool
from kvstore.tiers.host.prefault import Prefaulter
from kvstore.tiers.record import SlotRecord, header_bytes

OFFSET_MASK = (1 << POOL_SHIFT) - 1
GENERATION_STEP = 1 << 20
"""Generations reserved at a time; a crash skips at most this many."""


class HostTier:
    """Pools of host memory behind the `Tier` protocol.

    `kind="shm"`: private files in `directory`, on a memory file system; what they hold is taken
    back by the next HostTier on that directory, unless the machine was booted since or the pool's
    name changed. `kind="sealed"`: memory that nobody can map writable, gone with the
    process. With huge pages from hugetlbfs, `shm` keeps the data file in `hugetlb_directory`.
    The caller holds the lock on the directory. `notes` says what was dropped or could not be had.
    Tiers of one store share `generations`. Raises ConfigError or TierError.
    """

    durable = False

    def __init__(
        self,
        pools: Sequence[PoolConfig],
        kind: PoolKind = "shm",
        directory: str | Path | None = None,
        hugepages: HugePages = "off",
        hugetlb_directory: str | Path | None = None,
        prefault: bool = False,
        lock_memory: bool = False,
        first_generation: int = 1,
        name: str = "host",
        generations: Generations | None = None,
    ) -> None:
        self.name = name
        self._opened = OpenPools(
            pools,
            kind,
            Path(directory) if directory is not None else None,
            hugepages,
            Path(hugetlb_directory) if hugetlb_directory is not None else None,
        )
        self._pools = self._opened.pools
        self._by_name = {pool.name: pool for pool in self._pools.values()}
        self._generations = generations or Generations()
        self._start_generations(first_generation)
        regions = [(memory.ctypes.data, len(memory)) for memory in self.memories]
        self._prefaulter = Prefaulter(regions, prefault, lock_memory)
        self._prefaulter.start()

    @property
    def notes(self) -> list[str]:
        """One sentence for each thing that was dropped or could not be had at open."""
        return self._opened.notes

    @property
    def prefault(self) -> Prefaulter:
        """Progress of making pages present and locking them."""
        return self._prefaulter

    @property
    def prefaulted_bytes(self) -> int:
        grown = sum(pool.sizing.prefaulted_bytes for pool in self._pools.values())
        return self._prefaulter.prefaulted_bytes + grown

    @property
    def locked_bytes(self) -> int:
        grown = sum(pool.sizing.locked_bytes for pool in self._pools.values())
        return self._prefaulter.locked_bytes + grown

    @property
    def memories(self) -> list[np.ndarray]:
        """All bytes of each pool that have memory, for a GPU to read them from."""
        return [
            pool.data[start:stop]
            for pool in self._pools.values()
            for start, stop in pool.backing.runs()
        ]

    def keep_memory(self) -> None:
        """Nothing is given back from now on: somebody has pinned it."""
        for pool in self._pools.values():
            pool.sizing.can_give_back = False

    @property
    def torn_header_count(self) -> int:
        """Headers that recovery found torn or damaged."""
        return sum(pool.torn_header_count for pool in self._pools.values())

    @property
    def dropped_chunk_count(self) -> int:
        """Chunks that recovery gave up because their map entry was damaged."""
        return sum(pool.dropped_chunk_count for pool in self._pools.values())

    @property
    def problem(self) -> str:
        return ""

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        room = self._pool(pool)
        offsets = room.sizing.reserve(*_class(payload_bytes, symbol_bytes), count)
        return [make_place(room.number, offset) for offset in offsets]

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        generations = []
        for place, header, checksum in blocks:
            generation = self._generations.take()
            if generation >= self._reserved_generations:
                self._reserve_generations()
            pool = self._pools[place >> POOL_SHIFT]
            pool.publish(place_offset(place), header, checksum, generation)
            generations.append(generation)
        return generations

    def discard(self, places: Sequence[int]) -> None:
        pools = self._pools
        for place in places:
            pools[place >> POOL_SHIFT].discard((place & OFFSET_MASK) << SLOT_SHIFT)

    def free(self, places: Sequence[int]) -> None:
        pools = self._pools
        for place in places:
            pool, offset = pools[place >> POOL_SHIFT], (place & OFFSET_MASK) << SLOT_SHIFT
            pool.slab.free(offset)
            if pool.backing.has_holes:
                pool.sizing.freed(offset)

    def usage(self, pool: str | None = None) -> TierUsage:
        pools = self._pools.values() if pool is None else [self._pool(pool)]
        return sum((p.usage() for p in pools), NO_USAGE)

    def resize(self, pool: str, byte_count: int) -> None:
        """Has a pool be of another size, at most what its files were made for.

        A smaller one holds at once; the owner drops what is over. A larger one holds when memory
        for all of it was had in the background: `is_growing` until then, then `size_problem` says
        why not.
        """
        made = self._prefaulter
        self._pool(pool).sizing.resize(byte_count, made.populates, made.locks)

    def is_growing(self, pool: str) -> bool:
        return self._pool(pool).sizing.is_growing

    def size_problem(self, pool: str) -> str:
        """What kept a pool from the last larger size, in a few words; empty if it has it."""
        return self._pool(pool).sizing.problem

    def tick(self) -> None:
        """Takes memory that came into use; returns some that a smaller pool has too much."""
        for pool in self._pools.values():
            pool.sizing.tick()

    def header(self, place: int) -> BlockHeader:
        return self._record(place).header

    def checksum(self, place: int) -> bytes:
        return self._record(place).checksum

    def generation(self, place: int) -> int:
        return self._pools[place >> POOL_SHIFT].generations[place_offset(place) >> SLOT_SHIFT]

    def generations(self, places: np.ndarray) -> np.ndarray:
        if len(self._pools) == 1:
            (pool,) = self._pools.values()
            try:
                shown: np.ndarray = pool.generation_map[places & OFFSET_MASK]
                return shown
            except IndexError:
                pass  # -1 is among them
        found = np.zeros(len(places), np.uint64)
        pools = places >> POOL_SHIFT
        for number, pool in self._pools.items():
            here = pools == number
            found[here] = pool.generation_map[places[here] & OFFSET_MASK]
        return found

    def next_generation(self) -> int:
        return self._generations.next

    def recover(self) -> Iterator[StoredBlock]:
        for pool in self._pools.values():
            yield from pool.recover()

    def adopt(self, place: int) -> None:
        self._pools[place >> POOL_SHIFT].adopt(place_offset(place))

    def recover_columns(self) -> StoredColumns:
        return columns_of(self.recover())

    def adopt_many(self, places: np.ndarray) -> None:
        for place in places.tolist():
            self.adopt(place)

    def finish_recovery(self) -> list[int]:
        return [
            make_place(pool.number, offset)
            for pool in self._pools.values()
            for offset in pool.finish_recovery()
        ]

    def report_bad(self, place: int) -> None:
        pass

    def drain_candidates(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> list[int]:
        room = self._pool(pool)
        offsets = room.slab.drain(*_class(payload_bytes, symbol_bytes))
        return [make_place(room.number, offset) for offset in offsets]

    def cancel_drain(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> None:
        self._pool(pool).slab.cancel_drain(*_class(payload_bytes, symbol_bytes))

    def check_integrity(self) -> None:
        for pool in self._pools.values():
            pool.check_integrity()

    def probe(self) -> None:
        pass

    def close(self, keep: bool = True) -> None:
        self._prefaulter.stop()
        self._by_name.clear()
        self._opened.close(keep)

    def write(self, place: int, source: Source) -> bytes:
        pool, offset = self._pools[place >> POOL_SHIFT], place_offset(place)
        assert not pool.generations[offset >> SLOT_SHIFT], "a published block is never written"
        return payload.copy_hashed(pool.slot(offset), source)

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        return write_each(self, items)

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        return read_each(self, items, length)

    def read(self, place: int, target: Target, length: int) -> None:
        payload.copy_out(self._stored(place, length), target)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        return payload.digest(self._stored(place, length)) == checksum

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        return self.write(target_place, self._stored(source_place, length))

    def view(self, place: int, length: int) -> memoryview:
        return self._stored(place, length).data.toreadonly()

    def target(self, place: int) -> np.ndarray:
        pool, offset = self._pools[place >> POOL_SHIFT], place_offset(place)
        assert not pool.generations[offset >> SLOT_SHIFT], "a published block is never written"
        return pool.slot(offset)

    def shared_pools(self, tenant_pool: str) -> list[SharedPool]:
        return [self._pool(tenant_pool).shared()]

    def _pool(self, name: str) -> HostPool:
        pool = self._by_name.get(name)
        if pool is None:
            known = ", ".join(map(repr, self._by_name))
            raise TierError(f"tier {self.name} has no pool {name!r}; its pools are {known}")
        return pool

    def _record(self, place: int) -> SlotRecord:
        return self._pools[place >> POOL_SHIFT].record(place_offset(place))

    def _stored(self, place: int, length: int) -> np.ndarray:
        offset = place_offset(place)
        return self._pools[place >> POOL_SHIFT].data[offset : offset + length]

    def _start_generations(self, first_generation: int) -> None:
        known = [pool.generation_reservation for pool in self._pools.values() if not pool.fresh]
        self._generations.raise_to(max(first_generation, *known, 1))
        self._reserve_generations()

    def _reserve_generations(self) -> None:
        """Writes down, in every pool, that more generations may be handed out."""
        self._reserved_generations = self._generations.next + GENERATION_STEP
        for pool in self._pools.values():
            pool.reserve_generations(self._reserved_generations)


def _class(payload_bytes: int, symbol_bytes: int) -> tuple[int, int]:
    """(slot bytes, header bytes); a slot is never smaller than its header."""
    header = header_bytes(symbol_bytes)
    return max(slot_bytes(payload_bytes), slot_bytes(header)), header
