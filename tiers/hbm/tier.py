"""`HbmTier`: blocks in device memory, brought there and back by batched copies."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from kvstore.core.block import POOL_SHIFT, SLOT_SHIFT, make_place, place_offset, slot_bytes
from kvstore.core.errors import TierError
from kvstore.core.generations import Generations
from kvstore.cuda.device import Device, Shared
from kvstore.cuda.driver import CudaError
from kvstore.tiers.base import (
    NO_USAGE,
    BlockHeader,
    Source,
    StoredBlock,
    StoredColumns,
    Target,
    TierUsage,
)
from kvstore.tiers.bulk import columns_of
from kvstore.tiers.hbm.arena import Arena
from kvstore.tiers.hbm.lane import Lane
from kvstore.tiers.hbm.staging import DeviceStaging
from kvstore.tiers.payload import as_bytes
from kvstore.tiers.record import header_bytes

OFFSET_MASK = (1 << POOL_SHIFT) - 1
BUFFER_BYTES = 8 << 20
REGISTER_CHUNK_BYTES = 256 << 20


class HbmTier:
    """Arenas of one GPU behind the `Tier` protocol; `pools` maps pool names to their bytes.

    Each pool is an allocation of its own, since a handle opens a whole one. `lanes` threads move
    bytes at once, each through two buffers of `buffer_bytes`. Nothing survives the process. Where
    the GPU fails, `problem` says so, no more slots are given, and reads fail: the blocks' copies
    below stay. Tiers of one store share `generations`. Raises TierError where memory lacks.
    """

    durable = False

    def __init__(
        self,
        device: Device,
        pools: Mapping[str, int],
        name: str = "hbm",
        lanes: int = 2,
        buffer_bytes: int = BUFFER_BYTES,
        generations: Generations | None = None,
    ) -> None:
        self.name, self.device, self.problem = name, device, ""
        self._pools = [Arena(device, i, n, size) for i, (n, size) in enumerate(pools.items())]
        self._by_name = {pool.name: pool for pool in self._pools}
        self._generations = generations or Generations()
        self._lanes: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._all_lanes = [Lane(device, buffer_bytes) for _ in range(lanes)]
        for lane in self._all_lanes:
            self._lanes.put(lane)
        self._stable: list[tuple[int, int]] = []
        self._registered: list[int] = []

    @property
    def device_uuid(self) -> str:
        return self.device.uuid

    def use_stable_memory(self, memory: np.ndarray, register: bool = True) -> None:
        """Lets blocks in this host memory be copied without a buffer between.

        The caller promises that a source in it does not change while it is copied, as READY blocks
        of the host tier do not. Registers it in chunks, which takes 0.1 s a GB or more: call it
        from a worker. Without `register` a tier on another GPU has done so, which is for all of
        them and has to last as long as this tier. Raises TierError.
        """
        start, size = memory.ctypes.data, memory.nbytes
        try:
            for at in range(0, size, REGISTER_CHUNK_BYTES):
                if register:
                    self.device.register(start + at, min(REGISTER_CHUNK_BYTES, size - at))
                    self._registered.append(start + at)
                self._stable.append((start + at, start + min(at + REGISTER_CHUNK_BYTES, size)))
        except CudaError as error:
            raise TierError(f"host memory cannot be registered with the GPU: {error}") from error

    def reserve(
        self, payload_bytes: int, symbol_bytes: int, count: int, pool: str = ""
    ) -> list[int]:
        room = self._pool(pool)
        if self.problem:
            return []
        offsets = room.slab.reserve(*_class(payload_bytes, symbol_bytes), count)
        return [make_place(room.number, offset) for offset in offsets]

    def commit(self, blocks: Sequence[tuple[int, BlockHeader, bytes]]) -> list[int]:
        generations = []
        for place, header, checksum in blocks:
            generation = self._generations.take()
            self._pools[place >> POOL_SHIFT].publish(
                place_offset(place), header, checksum, generation
            )
            generations.append(generation)
        return generations

    def discard(self, places: Sequence[int]) -> None:
        for place in places:
            self._pools[place >> POOL_SHIFT].discard(place_offset(place))

    def free(self, places: Sequence[int]) -> None:
        for place in places:
            self._pools[place >> POOL_SHIFT].slab.free(place_offset(place))

    def usage(self, pool: str | None = None) -> TierUsage:
        pools = self._pools if pool is None else [self._pool(pool)]
        return sum((p.usage() for p in pools), NO_USAGE)

    def header(self, place: int) -> BlockHeader:
        return self._pools[place >> POOL_SHIFT].record(place_offset(place))[0]

    def checksum(self, place: int) -> bytes:
        return self._pools[place >> POOL_SHIFT].record(place_offset(place))[1]

    def generation(self, place: int) -> int:
        return int(self._pools[place >> POOL_SHIFT].generations[place & OFFSET_MASK])

    def generations(self, places: np.ndarray) -> np.ndarray:
        found = np.zeros(len(places), np.uint64)
        for pool in self._pools:
            here = places >> POOL_SHIFT == pool.number
            found[here] = pool.generations[places[here] & OFFSET_MASK]
        return found

    def next_generation(self) -> int:
        return self._generations.next

    def recover(self) -> Iterator[StoredBlock]:
        return iter(())

    def adopt(self, place: int) -> None:
        raise AssertionError(f"place {place} was not recovered: device memory keeps nothing")

    def recover_columns(self) -> StoredColumns:
        return columns_of(self.recover())

    def adopt_many(self, places: np.ndarray) -> None:
        assert not len(places), "nothing was recovered: device memory keeps nothing"

    def finish_recovery(self) -> list[int]:
        return []

    def report_bad(self, place: int) -> None:
        pass

    def drain_candidates(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> list[int]:
        room = self._pool(pool)
        offsets = room.slab.drain(*_class(payload_bytes, symbol_bytes))
        return [make_place(room.number, offset) for offset in offsets]

    def cancel_drain(self, payload_bytes: int, symbol_bytes: int, pool: str = "") -> None:
        self._pool(pool).slab.cancel_drain(*_class(payload_bytes, symbol_bytes))

    def check_integrity(self) -> None:
        for pool in self._pools:
            pool.check_integrity()

    def probe(self) -> None:
        """A broken GPU context stays broken, so a problem is over only if copies work again."""
        try:
            with self._lane() as lane:
                lane.hash(self._pools[0].address, 1)
        except TierError:
            return
        self.problem = ""

    def close(self, keep: bool = True) -> None:
        for address in self._registered:
            self.device.unregister(address)
        self._registered, self._stable = [], []
        closing: list[Lane | Arena] = [*self._all_lanes, *self._pools]
        for part in closing:
            try:
                part.close()
            except CudaError:
                self.problem = f"GPU {self.device.uuid} failed before the tier was closed"
        self._all_lanes, self._pools = [], []
        self._by_name.clear()

    def write(self, place: int, source: Source) -> bytes:
        return self.write_many([(place, source)])[0]

    def write_many(self, items: Sequence[tuple[int, Source]]) -> list[bytes]:
        payloads = [(self._free_slot(place, data := as_bytes(s)), data) for place, s in items]
        with self._lane() as lane:
            for (place, _), (address, payload) in zip(items, payloads, strict=True):
                rest = self._slot_bytes(place) - len(payload)
                if rest:
                    lane.stream.fill(address + len(payload), 0, rest)
            if all(self._is_stable(payload) for _, payload in payloads):
                return lane.upload_stable(payloads)
            return lane.upload(payloads)

    def read(self, place: int, target: Target, length: int) -> None:
        with self._lane() as lane:
            lane.download([(self.address(place), _room(target, length))])

    def read_many(self, items: Sequence[tuple[int, Target]], length: int) -> list[bytes | None]:
        wanted = [(self.address(place), _room(target, length)) for place, target in items]
        try:
            with self._lane() as lane:
                return list(lane.download(wanted))
        except TierError:
            return [None] * len(items)

    def verify(self, place: int, length: int, checksum: bytes) -> bool:
        with self._lane() as lane:
            return lane.hash(self.address(place), length) == checksum

    def copy(self, source_place: int, target_place: int, length: int) -> bytes:
        source, size = self.address(source_place), self._slot_bytes(target_place)
        target = self._free_slot(target_place, np.empty(0, np.uint8))
        with self._lane() as lane:
            lane.stream.copy(target, source, length)
            if size > length:
                lane.stream.fill(target + length, 0, size - length)
            return lane.hash(target, length)

    def share_arena(self, pool: str = "") -> Shared:
        """What an engine opens to attend to blocks in place: offsets of places are `place_offset`.

        Whoever opens it can write to it: only for engines of the daemon's own trust domain.
        """
        return self._pool(pool).share()

    def open_staging(self, length: int) -> DeviceStaging:
        """Device memory of one session: blocks are copied there, the arena is not exported."""
        return DeviceStaging(self, length)

    def address(self, place: int) -> int:
        """Where a place's block lies in the GPU's memory, as this process sees it."""
        return self._pools[place >> POOL_SHIFT].address + place_offset(place)

    def _slot_bytes(self, place: int) -> int:
        return self._pools[place >> POOL_SHIFT].slab.slot_bytes_at(place_offset(place))

    def _free_slot(self, place: int, payload: np.ndarray) -> int:
        """Address of a slot that may be written. Raises TierError if the payload is too long."""
        pool = self._pools[place >> POOL_SHIFT]
        assert not pool.generations[place_offset(place) >> SLOT_SHIFT], (
            "a published block is never written"
        )
        size = self._slot_bytes(place)
        if len(payload) > size:
            raise TierError(
                f"a payload of {len(payload)} bytes does not fit its slot of {size}; "
                "reserve slots for the largest payload"
            )
        return self.address(place)

    def _is_stable(self, payload: np.ndarray) -> bool:
        start, end = payload.ctypes.data, payload.ctypes.data + len(payload)
        return any(low <= start and end <= high for low, high in self._stable)

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        """A lane for this thread; what the GPU cannot do is a TierError and the tier's problem."""
        lane = self._lanes.get()
        try:
            yield lane
        except CudaError as error:
            self.problem = f"GPU {self.device.uuid} failed: {error}"
            raise TierError(self.problem) from error
        finally:
            self._lanes.put(lane)

    def _pool(self, name: str) -> Arena:
        pool = self._by_name.get(name)
        if pool is None:
            known = ", ".join(map(repr, self._by_name))
            raise TierError(f"tier {self.name} has no pool {name!r}; its pools are {known}")
        return pool


def _room(target: Target, length: int) -> np.ndarray:
    room = as_bytes(target)
    if len(room) < length:
        raise TierError(
            f"a target of {len(room)} bytes is too small for {length}; pass a larger one"
        )
    return room[:length]


def _class(payload_bytes: int, symbol_bytes: int) -> tuple[int, int]:
    """(slot bytes, header bytes), as the host tier has them, so that promotion finds room alike."""
    header = header_bytes(symbol_bytes)
    return max(slot_bytes(payload_bytes), slot_bytes(header)), header
