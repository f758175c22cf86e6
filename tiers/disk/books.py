"""Books of a disk tier: slots, segments, and removals that are not durable yet. Memory only.

The owner thread and workers that commit share them under one short lock, never held during I/O.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from kvstore.core.block import SLOT_SHIFT
from kvstore.core.errors import CorruptBlock
from kvstore.tiers.base import TierUsage
from kvstore.tiers.chunks import Chunk, SlotState
from kvstore.tiers.disk.index import pack_key
from kvstore.tiers.disk.layout import CHUNK_OVERHEAD, geometry_of
from kvstore.tiers.disk.segments import Room, Segment, SegmentFiles
from kvstore.tiers.slab_size import ResizableSlab

BAD_REPORTS_MAX = 3
REMOVALS_MAX = 2048
"""In one transaction: the owner thread waits while they are gathered."""
LOCKED_MAX = 256


class DiskBooks:
    """Slots by place: a place is the slot's byte in a space of all segments, >> 12.

    A slot comes free when it was discarded, freed by the owner, and its removal is durable. One
    that is `suspect` (its bytes may not be what they seem) stays RESTING for this life.
    """

    def __init__(
        self, capacity_bytes: int, shift: int, least_order: int, room: Room, next_serial: int,
        with_seals: bool = False,
    ) -> None:  # fmt: skip
        self.lock = threading.Lock()
        self.slab = ResizableSlab(
            capacity_bytes, self._assign, self._release, shift, CHUNK_OVERHEAD, least_order
        )
        self.room = room
        self.next_serial = next_serial
        self._with_seals = with_seals
        self.segments: dict[int, Segment] = {}
        self.doomed: list[Segment] = []
        self.gone_serials: set[int] = set()
        self.removals: dict[int, bool] = {}
        """Slots whose removal is not durable, and whether the owner has freed them."""
        self.suspects: set[int] = set()
        self._bad: Counter[tuple[int, int]] = Counter()

    def _assign(self, chunk: Chunk) -> bool:
        length = geometry_of(chunk).file_bytes
        if not self.room.may_grow(length):
            return False
        self.room.planned_bytes += length
        segment = Segment(self.next_serial, chunk, with_seals=self._with_seals)
        self.segments[chunk.offset] = segment
        self.next_serial += 1
        return True

    def _release(self, chunk: Chunk) -> None:
        segment = self.segments.pop(chunk.offset)
        length = segment.geometry.file_bytes
        if segment.fd < 0:
            self.room.planned_bytes -= length
            return
        self.room.doomed_bytes += length
        self.doomed.append(segment)
        if segment.entered:
            self.gone_serials.add(segment.serial)

    def reserve(self, slot_bytes: int, header_bytes: int, count: int) -> list[int]:
        with self.lock:
            if self.room.is_short:
                # Files that nothing is stored in give way, those not made yet first of all.
                self.slab.dissolve_empty()
            offsets = self.slab.reserve(slot_bytes, header_bytes, count)
        return [offset >> SLOT_SHIFT for offset in offsets]

    def locate(self, place: int) -> tuple[Segment, int]:
        """Segment and slot number; any thread may ask about a slot it was given."""
        chunk, index, _ = self.slab.slot_at(place << SLOT_SHIFT)
        return self.segments[chunk], index

    def discard(self, places: Sequence[int]) -> None:
        with self.lock:
            for place in places:
                chunk, index, _ = self.slab.rest(place << SLOT_SHIFT)
                generations = self.segments[chunk].generations
                if generations[index]:
                    generations[index] = 0
                    self.removals[place] = False

    def free(self, places: Sequence[int]) -> None:
        with self.lock:
            for place in places:
                freed = self.removals.get(place)
                if freed is not None:
                    assert not freed, f"place {place} is freed twice"
                    self.removals[place] = True
                elif place in self.suspects:
                    state = self.slab.state(place << SLOT_SHIFT)
                    assert state is SlotState.RESTING, f"place {place} is {state.name}"
                else:
                    self.slab.free(place << SLOT_SHIFT)

    def check_staging(self, places: Iterable[int]) -> bool:
        """Whether none of these STAGING slots is suspect."""
        with self.lock:
            for place in places:
                state = self.slab.state(place << SLOT_SHIFT)
                assert state is SlotState.STAGING, f"place {place} is {state.name}"
            return self.suspects.isdisjoint(places)

    def publish(self, blocks: Sequence[tuple[int, int, bytes]]) -> None:
        """(place, generation, checksum) of each block of a durable group."""
        with self.lock:
            for place, generation, checksum in blocks:
                chunk, index, _ = self.slab.publish(place << SLOT_SHIFT)
                segment = self.segments[chunk]
                segment.checksums[index] = np.frombuffer(checksum, np.uint8)
                segment.generations[index] = generation

    def pending(self, count: int = REMOVALS_MAX) -> dict[int, bytes]:
        """Up to `count` places whose removal is not durable yet, and their keys in the index."""
        with self.lock:
            keys = {}
            for place in islice(self.removals, count):
                segment, index = self.locate(place)
                keys[place] = pack_key(segment.serial, index)
            return keys

    def removed(self, places: Iterable[int]) -> None:
        """Their removal is durable now."""
        left = iter(places)
        while some := list(islice(left, LOCKED_MAX)):
            with self.lock:
                for place in some:
                    if self.removals.pop(place) and place not in self.suspects:
                        self.slab.free(place << SLOT_SHIFT)

    def suspect(self, places: Iterable[int]) -> None:
        """Keeps slots from use until the next start."""
        with self.lock:
            self.suspects.update(places)

    def suspect_staging(self, segments: Iterable[Segment]) -> None:
        """A sync of these failed: what was written to them and not committed may be lost."""
        with self.lock:
            for segment in segments:
                chunk = segment.chunk
                for index in np.flatnonzero(self.slab.states(chunk) == SlotState.STAGING).tolist():
                    self.suspects.add((chunk.offset + index * chunk.slot_bytes) >> SLOT_SHIFT)

    def report_bad(self, place: int) -> None:
        with self.lock:
            segment, index = self.locate(place)
            self._bad[segment.serial, index] += 1
            if self._bad[segment.serial, index] >= BAD_REPORTS_MAX:
                self.suspects.add(place)

    def drain(self, slot_bytes: int, header_bytes: int) -> list[int]:
        with self.lock:
            offsets = self.slab.drain(slot_bytes, header_bytes)
        return [offset >> SLOT_SHIFT for offset in offsets]

    def cancel_drain(self, slot_bytes: int, header_bytes: int) -> None:
        with self.lock:
            self.slab.cancel_drain(slot_bytes, header_bytes)

    def unlink_doomed(self, files: SegmentFiles) -> None:
        """Removes files that no class uses any more; a worker, with the lock of the files.

        For good, before others take their room: together they might be too many at a start.
        """
        found = bool(self.doomed)
        while self.doomed:
            segment = self.doomed[-1]
            files.unlink(segment)
            with self.lock:
                self.doomed.remove(segment)
                self.room.doomed_bytes -= segment.geometry.file_bytes
        if found:
            files.sync_directory()
        self.measured(files.free_bytes())

    def made(self, segment: Segment, free_bytes: int) -> None:
        """The file of a segment is there now."""
        with self.lock:
            self.room.planned_bytes -= segment.geometry.file_bytes
            self.room.free_bytes = free_bytes

    def measured(self, free_bytes: int) -> None:
        with self.lock:
            self.room.free_bytes = free_bytes

    def close(self) -> None:
        for segment in [*self.segments.values(), *self.doomed]:
            if segment.fd >= 0:
                os.close(segment.fd)
                segment.fd = -1
        self.segments.clear()
        self.doomed.clear()

    def check_integrity(self) -> None:
        """Asserts that generations are set of PUBLISHED slots, and of no others."""
        with self.lock:
            self.slab.check_integrity()
            for chunk in self.slab.chunks():
                published = self.slab.states(chunk) == SlotState.PUBLISHED
                shown = self.segments[chunk.offset].generations != 0
                assert np.array_equal(published, shown), f"generations at {chunk.offset} disagree"

    def usage(self) -> TierUsage:
        """As large as it is to be, or as what it still holds above that."""
        slab = self.slab
        with self.lock:
            held = slab.used_bytes + slab.resting_bytes
            capacity = max(slab.ceiling_bytes, held)
            return TierUsage(
                capacity, slab.used_bytes, capacity - held, slab.resting_bytes,
                slab.published_count,
            )  # fmt: skip

    def set_size(self, capacity_bytes: int, least_order: int) -> int:
        with self.lock:
            self.slab.set_size(capacity_bytes, least_order)
            return self.slab.ceiling_bytes

    def choose_leaving(self, unmovable: np.ndarray) -> bool:
        """Chooses the segments to empty; none in which a place is suspect, or `unmovable`."""
        with self.lock:
            stay = [*self.suspects, *unmovable.tolist()]
            return self.slab.choose_leaving([place << SLOT_SHIFT for place in stay])

    def is_leaving(self, places: np.ndarray) -> np.ndarray:
        """Which places (int64) lie in a segment that is to be emptied; -1 does not."""
        with self.lock:
            leaving = self.slab.is_leaving(np.maximum(places, 0) << SLOT_SHIFT)
        answer: np.ndarray = leaving & (places >= 0)
        return answer

    def reserve_for_move(self, slot_bytes: int, header_bytes: int, count: int) -> list[int]:
        with self.lock:
            offsets = self.slab.reserve_for_move(slot_bytes, header_bytes, count)
        return [offset >> SLOT_SHIFT for offset in offsets]

    def generations(self, places: np.ndarray) -> np.ndarray:
        """Of each place (int64); 0 for what is no slot, too: its segment may be gone."""
        found = np.zeros(len(places), np.uint64)
        inside = (places >= 0) & (places < self.slab.span_bytes >> SLOT_SHIFT)
        known = np.flatnonzero(inside)
        offsets = places[known] << SLOT_SHIFT
        heads = self.slab.chunk_heads(offsets)
        for head in np.unique(heads[heads >= 0]).tolist():
            segment = self.segments.get(head)
            if segment is None:
                continue
            index, rest = np.divmod(offsets - head, segment.chunk.slot_bytes)
            here = np.flatnonzero(
                (heads == head) & (rest == 0) & (index < segment.chunk.slot_count)
            )
            found[known[here]] = segment.generations[index[here]]
        return found

    def streams(self) -> np.ndarray:
        """The streams of the seals of all published slots, in a tier with keys."""
        with self.lock:
            found = [s.seals["stream"][s.generations != 0] for s in self.segments.values()]
        return np.concatenate([*found, np.zeros(0, np.uint32)])

    def checksum(self, place: int) -> bytes:
        segment, index = self.locate(place)
        if not segment.generations[index]:
            raise CorruptBlock(f"place {place} of the disk tier holds no committed block")
        checksum: bytes = segment.checksums[index].tobytes()
        return checksum
