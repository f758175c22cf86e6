"""One pool of the host tier: its memory, slot headers, generation map and allocator."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from os import posix_fallocate

import numpy as np

from kvstore.core.block import SLOT_SHIFT, backing_cells, make_place
from kvstore.core.errors import CorruptBlock
from kvstore.tiers import record
from kvstore.tiers.base import BlockHeader, SharedPool, StoredBlock, TierUsage
from kvstore.tiers.chunks import GRANULE_COUNT_MAX, Chunk, granule_shift
from kvstore.tiers.host import files, layout, pages
from kvstore.tiers.host.backing import Backing
from kvstore.tiers.host.files import FileSizes, PoolFiles
from kvstore.tiers.host.layout import HEADERS_AT, PAGE_BYTES, Superblock
from kvstore.tiers.host.sizing import Sizing
from kvstore.tiers.record import SlotRecord
from kvstore.tiers.slab import SlotState
from kvstore.tiers.slab_size import GrowingSlab


def file_sizes(size_bytes: int, max_bytes: int = 0) -> FileSizes:
    """Lengths of the files of a pool that begins with this size and may have that one."""
    shift, most = granule_shift(size_bytes), max(size_bytes, max_bytes)
    while most >> shift > GRANULE_COUNT_MAX:
        shift += 1
    return FileSizes(most >> shift << shift, shift)


class HostPool:
    """Slots of one pool by byte offset. `format` or `load` comes first.

    A block is published by its header, then by its generation; it is un-published in the
    opposite order. x86 keeps stores in order, and so does a killed process's memory.

    The files are as long as the pool may ever be. The slab has granules up to the largest size so
    far, the ceiling is the size there is now, and what lies beyond the slab was never touched.
    """

    slab: GrowingSlab

    def __init__(self, number: int, name: str, made: PoolFiles, sizes: FileSizes) -> None:
        self.number, self.name = number, name
        self.fresh = False
        self.torn_header_count = 0
        self.dropped_chunk_count = 0
        self.files, self.sizes = made, sizes
        self._data_map = mmap.mmap(made.data, sizes.data)
        self._generation_map = mmap.mmap(made.generations, sizes.generations)
        self._header_map = mmap.mmap(made.headers, sizes.headers)
        self.data = np.frombuffer(self._data_map, np.uint8)
        at, count = backing_cells(sizes.data)
        self.generations = memoryview(self._generation_map)[:at].cast("Q")
        self.generation_map = np.frombuffer(self.generations, np.uint64)
        cells = np.frombuffer(self._generation_map, np.uint64, count, at)
        self.backing = Backing(made.data, sizes, cells)
        self.sizing = Sizing(made, sizes, self.backing, self.data.ctypes.data)
        self._headers = memoryview(self._header_map)
        self._seed = 0

    def format(self, size_bytes: int, superblock: Superblock, pool_id: bytes) -> None:
        """Makes zeroed files a pool; a crash before the last line leaves none."""
        self.fresh = True
        self._begin(size_bytes, b"\x00")
        self._seed = int.from_bytes(pool_id[:8], "little")
        layout.write_superblock(self._headers, superblock, pool_id)

    def lengthened(self, superblock: Superblock, pool_id: bytes) -> None:
        """Its files are longer than they were: from now on they are a longer pool."""
        layout.write_superblock(self._headers, superblock, pool_id)

    def load(self, size_bytes: int, superblock: Superblock) -> str:
        """Takes an earlier life's chunks back, all slots RESTING; else says why not.

        The slab reaches as far as these, though the size may be less. Raises OSError.
        """
        found = layout.read_superblock(self._headers[:PAGE_BYTES])
        if found is None:
            return "its superblock is damaged or of another version"
        for field, have, want in zip(Superblock._fields, found[0], superblock, strict=True):
            if have != want:
                return f"its {field.replace('_', ' ')} changed"
        if not self.generation_reservation:
            return "its generation counter is damaged"
        self._seed = int.from_bytes(found[1][:8], "little")
        shift, count = self.sizes.shift, self.sizes.data >> self.sizes.shift
        # Read, not looked at through the map: that would give all of the holes memory.
        raw = memoryview(os.pread(self.files.headers, layout.map_bytes(count), 0))
        valid, damaged = layout.read_chunks(raw, count)
        ends = [granule + (1 << min(order, 30)) for granule, order, _, _ in valid]
        self._begin(max(size_bytes, min(max(ends, default=0), count) << shift), b"\x01")
        for granule, order, slot_bytes, header_bytes in valid:
            if not self.slab.restore_chunk(granule << shift, order, slot_bytes, header_bytes):
                damaged.append(granule)
        for granule in damaged:
            layout.erase_chunk(self._headers, granule)
        self.dropped_chunk_count = len(damaged)
        self.slab.ceiling_bytes = size_bytes
        self._forget_beyond()
        layout.write_superblock(self._headers, *found)  # one of the two may be damaged
        return ""

    def _begin(self, byte_count: int, written: bytes) -> None:
        """So much of the files is the slab's; `written` says whether headers may be there."""
        shift = self.sizes.shift
        self._written = bytearray(written) * (byte_count >> shift)
        self.slab = GrowingSlab(byte_count, self._assign_chunk, self._release_chunk, shift)
        self.sizing.slab = self.slab
        self.backing.use(byte_count)

    def _forget_beyond(self) -> None:
        """Nothing is left beyond the slab of a life that had more."""
        self.backing.give_back_beyond()
        start, end = backing_cells(self.slab.capacity_bytes)[0], backing_cells(self.sizes.data)[0]
        first, last = min(-(-start // PAGE_BYTES) * PAGE_BYTES, end), end // PAGE_BYTES * PAGE_BYTES
        self.generation_map[start // 8 : first // 8] = 0
        self.generation_map[max(first, last) // 8 :] = 0
        if first < last:
            pages.punch(self.files.generations, first, last - first)

    def back(self) -> None:
        """Has memory for its ceiling, all of it, at a start; raises OSError."""
        files.allocate_books(self.files, self.sizes, self.slab.capacity_bytes)
        for cell in self.backing.missing(self.slab.ceiling_bytes):
            self.backing.back(cell)
            self.backing.backed([cell])
        self.backing.use(self.slab.capacity_bytes)

    @property
    def generation_reservation(self) -> int:
        """No generation from here on was ever handed out; 0 if that is not known."""
        return layout.read_generation_reservation(self._headers)

    def reserve_generations(self, below: int) -> None:
        layout.write_generation_reservation(self._headers, below)

    def publish(self, offset: int, header: BlockHeader, checksum: bytes, generation: int) -> None:
        """STAGING -> PUBLISHED."""
        packed = record.pack(header, checksum, generation, offset, self._seed)
        chunk, index, slots = self.slab.publish(offset)
        assert len(packed) <= slots.header_bytes, "the symbol is larger than was reserved for"
        assert header.length <= slots.slot_bytes, "the payload outgrew its slot"
        at = HEADERS_AT + chunk + index * slots.header_bytes
        record.store(self._headers, at, packed)
        self.generations[offset >> SLOT_SHIFT] = generation

    def discard(self, offset: int) -> None:
        """STAGING or PUBLISHED -> RESTING."""
        self.generations[offset >> SLOT_SHIFT] = 0
        chunk, index, slots = self.slab.rest(offset)
        at = HEADERS_AT + chunk + index * slots.header_bytes
        record.erase(self._headers, at, slots.header_bytes)

    def record(self, offset: int) -> SlotRecord:
        """Header of a published slot; raises CorruptBlock if it does not hold."""
        found = record.parse(self._header_at(offset), offset, self._seed)
        if found is None:
            raise CorruptBlock(
                f"the header at byte {offset} of host pool {self.number} is damaged; drop the block"
            )
        return found

    def slot(self, offset: int) -> np.ndarray:
        """All bytes of a slot, writable; any thread."""
        return self.data[offset : offset + self.slab.slot_bytes_at(offset)]

    def recover(self) -> Iterator[StoredBlock]:
        """Blocks with sound headers; others that claim to be blocks are counted as torn."""
        limit = self.generation_reservation
        for chunk in self.slab.chunks():
            region = self._header_region(chunk)
            words = self._state_words(chunk)
            for index in np.flatnonzero(words).tolist():
                offset = chunk.offset + index * chunk.slot_bytes
                start = index * chunk.header_bytes
                raw = region[start : start + chunk.header_bytes]
                found = record.parse(raw, offset, self._seed)
                if (
                    found is None
                    or found.header.length > chunk.slot_bytes
                    or not 0 < found.generation < limit
                ):
                    self.torn_header_count += 1
                    continue
                yield StoredBlock(make_place(self.number, offset), *found[:3])

    def adopt(self, offset: int) -> None:
        """RESTING -> PUBLISHED under the generation its header has."""
        raw = self._header_at(offset)
        start = record.GENERATION_AT
        self.slab.adopt(offset)
        self.generations[offset >> SLOT_SHIFT] = int.from_bytes(raw[start : start + 8], "little")

    def finish_recovery(self) -> list[int]:
        """Un-publishes what is RESTING, headers and generations; returns those offsets."""
        resting: list[int] = []
        kept = [np.empty(0, np.int64)]
        for chunk in self.slab.chunks():
            states = self.slab.states(chunk)
            rows = np.frombuffer(self._header_region(chunk), np.uint8)
            indexes = np.flatnonzero(states == SlotState.RESTING)
            rows.reshape(chunk.slot_count, chunk.header_bytes)[indexes] = 0
            resting += (chunk.offset + indexes * chunk.slot_bytes).tolist()
            published = np.flatnonzero(states == SlotState.PUBLISHED)
            kept.append((chunk.offset + published * chunk.slot_bytes) >> SLOT_SHIFT)
        generations = self._shown()
        stale = np.setdiff1d(np.flatnonzero(generations), np.concatenate(kept))
        generations[stale] = 0
        return resting

    def usage(self) -> TierUsage:
        """As large as its ceiling, or as what it still holds above that."""
        slab = self.slab
        held = slab.used_bytes + slab.resting_bytes
        capacity = min(slab.capacity_bytes, max(slab.ceiling_bytes, held))
        return TierUsage(
            capacity, slab.used_bytes, capacity - held, slab.resting_bytes, slab.published_count
        )

    def shared(self) -> SharedPool:
        return SharedPool(
            self.number, self.name, self.files.data_read, self.files.generations_read,
            self.sizes.data, self.sizes.generations,
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Asserts that allocator, headers and generation map name the same blocks."""
        self.slab.check_integrity()
        generations = self._shown()
        for chunk in self.slab.chunks():
            published = self.slab.states(chunk) == SlotState.PUBLISHED
            valid = self._state_words(chunk) == record.VALID_WORD
            offsets = chunk.offset + np.arange(chunk.slot_count) * chunk.slot_bytes
            visible = generations[offsets >> SLOT_SHIFT] != 0
            assert np.array_equal(published, valid), f"headers of chunk {chunk.offset} disagree"
            assert np.array_equal(published, visible), f"generations at {chunk.offset} disagree"
        shown = np.count_nonzero(generations)
        assert shown == self.slab.published_count, "a generation is set outside published slots"

    def _shown(self) -> np.ndarray:
        """Generations of the slab; beyond it there is no memory to look at."""
        return self.generation_map[: self.slab.capacity_bytes >> SLOT_SHIFT]

    def close(self) -> None:
        """Unmaps, except for what views still show."""
        self.sizing.close()
        self.backing.close()
        self.data = np.empty(0, np.uint8)
        del self.generation_map
        self.generations.release()
        self._headers.release()
        self.files.close()
        for mapping in (self._data_map, self._generation_map, self._header_map):
            try:
                mapping.close()
            except BufferError:
                # Somebody still looks at it: it goes when the last view does.
                continue

    def _assign_chunk(self, chunk: Chunk) -> bool:
        """Gives a chunk its header memory and enters it in the map; False if memory is short."""
        at = HEADERS_AT + chunk.offset
        length = chunk.slot_count * chunk.header_bytes
        first, count = chunk.offset >> self.slab.shift, chunk.size_bytes >> self.slab.shift
        self._written += bytes(max(0, first + count - len(self._written)))  # the pool grew
        try:
            if self._written.find(1, first, first + count) >= 0:
                # A crash may have left headers here that a chunk of this class would believe.
                pages.punch(self.files.headers, at, -(-length // PAGE_BYTES) * PAGE_BYTES)
            posix_fallocate(self.files.headers, at, length)
        except OSError:
            return False
        self._written[first : first + count] = b"\x01" * count
        layout.write_chunk(self._headers, first, count.bit_length() - 1, chunk)
        return True

    def _release_chunk(self, chunk: Chunk) -> None:
        layout.erase_chunk(self._headers, chunk.offset >> self.slab.shift)
        length = chunk.slot_count * chunk.header_bytes
        pages.punch(
            self.files.headers,
            HEADERS_AT + chunk.offset,
            -(-length // PAGE_BYTES) * PAGE_BYTES,
        )

    def _header_region(self, chunk: Chunk) -> memoryview:
        at = HEADERS_AT + chunk.offset
        return self._headers[at : at + chunk.slot_count * chunk.header_bytes]

    def _state_words(self, chunk: Chunk) -> np.ndarray:
        """First 8 bytes of every header of a chunk (a copy)."""
        rows = np.frombuffer(self._header_region(chunk), np.uint8)
        rows = rows.reshape(chunk.slot_count, chunk.header_bytes)
        return rows[:, :8].copy().view("<u8").ravel()

    def _header_at(self, offset: int) -> memoryview:
        chunk, index, slots = self.slab.slot_at(offset)
        at = HEADERS_AT + chunk + index * slots.header_bytes
        return self._headers[at : at + slots.header_bytes]
