"""`GpuCopies`: copies in one GPU's memory: made, counted, kept while they are read, given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.block import POOL_SHIFT
from kvstore.core.errors import CorruptBlock
from kvstore.core.space import Space
from kvstore.mover import ARENA_IN_LINK, Job, Moved
from kvstore.policies.index import Span
from kvstore.policies.promotion import Promotion
from kvstore.store.evict import Remover
from kvstore.store.parts import Parts
from kvstore.store.retire import RetiredSlots
from kvstore.store.sessions import Attachment
from kvstore.tiers.base import BlockHeader, DeviceTier

PIECE_BYTES = 4 << 20
NOWHERE = -1
PAGE_MASK = (1 << POOL_SHIFT) - 1


class Marks:
    """On which GPU host blocks have copies, for many at once: an array by host slot and pool."""

    def __init__(self) -> None:
        self._pools: dict[int, np.ndarray] = {}

    def set(self, place: int, gpu: int) -> None:
        pool, page = place >> POOL_SHIFT, place & PAGE_MASK
        known = self._pools.get(pool)
        if known is None or page >= len(known):
            # Of zeros nobody has touched the system keeps no page: 1 MiB is for 4 GiB of host.
            grown = np.zeros(1 << max(20, int(page).bit_length()), np.int8)
            if known is not None:
                grown[: len(known)] = known
            known = self._pools[pool] = grown
        known[page] = gpu + 1

    def __len__(self) -> int:
        """How many blocks have copies; counted anew."""
        return sum(int(np.count_nonzero(known)) for known in self._pools.values())

    def of(self, places: np.ndarray) -> np.ndarray:
        """The GPU's number for each place (int64), NOWHERE where there is no copy."""
        found = np.full(len(places), NOWHERE, np.int8)
        for pool, known in self._pools.items():
            pages = places & PAGE_MASK
            here = (places >= 0) & (places >> POOL_SHIFT == pool) & (pages < len(known))
            found[here] = known[pages[here]] - 1
        return found


class Piece(NamedTuple):
    """Blocks on their way up: host places and generations, slots, headers and checksums."""

    places: list[int]
    generations: list[int]
    slots: list[int]
    headers: list[BlockHeader]
    checksums: list[bytes]


class GpuCopies:
    """Copies on one GPU by the host place of their block's shard. Only the owner calls it.

    `moved_here` is asked about a block that has arrived whether another GPU gave its copy up for
    it: then nobody hears that the tier has it, since it had it before.
    """

    def __init__(
        self, parts: Parts, remover: Remover, tier: DeviceTier, number: int,
        marks: Marks, moved_here: Callable[[GpuCopies, int], bool],
    ) -> None:  # fmt: skip
        self.tier, self.number = tier, number
        self.promotion = Promotion()
        self.slots: dict[int, int] = {}
        self.moving: set[int] = set()
        self.lent: dict[int, tuple[int, int]] = {}
        """Which other GPU loaded a copy since this one last did, and how many times in a row."""
        self._parts, self._remover, self._moved_here = parts, remover, moved_here
        self._marks = marks
        self._retired = RetiredSlots(tier)
        self._held: dict[int, set[int]] = {}  # host places by who reads their copies
        self._holds: Counter[int] = Counter()

    # ---- Up ----

    def promote(
        self, path: Sequence[Span], places: list[int], wanted: set[int], attachment: Attachment
    ) -> None:
        """Begins to copy the wanted ones of a path's blocks up, as far as there is room."""
        space = attachment.space
        most, at = max(1, PIECE_BYTES // space.block_bytes), 0
        for run, start, stop in path:
            here = [
                i for i in range(start, stop)
                if places[at + i - start] in wanted and places[at + i - start] not in self.moving
            ]  # fmt: skip
            for first in range(0, len(here), most):
                part = here[first : first + most]
                picked = [places[at + i - start] for i in part]
                if not self._begin(run, part[-1] + 1, picked, attachment):
                    return
            at += stop - start

    def _begin(self, run: Any, depth: int, places: list[int], attachment: Attachment) -> bool:
        """One piece on its way; False where there is no room for all of it."""
        parts, space = self._parts, attachment.space
        slots = self._room(space, len(places))
        whole, places = len(slots) == len(places), places[: len(slots)]
        if not places:
            return False
        try:
            headers = [parts.host.header(place) for place in places]
            checksums = [parts.host.checksum(place) for place in places]
        except CorruptBlock:  # whoever reads it next finds out
            self._retired.retire(slots)
            return False
        generations = [parts.host.generation(place) for place in places]
        piece = Piece(places, generations, slots, headers, checksums)
        reader = parts.start_reading()
        anchor = parts.index.anchor(run, depth, reader)
        length, host = space.block_bytes, parts.host

        def work() -> list[bytes]:
            items = [(s, host.view(p, length)) for s, p in zip(slots, places, strict=True)]
            return self.tier.write_many(items)

        def done(moved: Moved) -> None:
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            self._arrived(piece, moved, length)

        job = Job(
            ARENA_IN_LINK, space.tenant, attachment.session.id, len(places) * length, work, done,
            device=self.tier.device_uuid,
        )  # fmt: skip
        self.moving.update(places)
        if not parts.mover.submit(job):
            parts.recorder.queue_rejected(ARENA_IN_LINK, len(places))
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            self.moving.difference_update(places)
            self._retired.retire(slots)
            return False
        return whole

    def _arrived(self, piece: Piece, moved: Moved, length: int) -> None:
        parts = self._parts
        self.moving.difference_update(piece.places)
        sums = moved.value if moved.error is None else [None] * len(piece.places)
        arrived, headers = [], []
        for i, place in enumerate(piece.places):
            unchanged = parts.host.generation(place) == piece.generations[i] and (
                place not in self.slots
            )
            if unchanged and sums[i] == piece.checksums[i]:
                self.tier.commit([(piece.slots[i], piece.headers[i], piece.checksums[i])])
                if not self._moved_here(self, place):
                    headers.append(piece.headers[i])
                self.slots[place] = piece.slots[i]
                self._marks.set(place, self.number)
                arrived.append(place)
                continue
            self._retired.retire([piece.slots[i]])
            if unchanged and sums[i] is not None:
                self._remover.quarantine(place)
        self.promotion.arrived(arrived, parts.clock.now())
        self._tell_stored(headers)
        if arrived:
            parts.recorder.copied(ARENA_IN_LINK, len(arrived) * length, moved.seconds)
            parts.recorder.hbm_promoted(len(arrived), len(arrived) * length)

    def _room(self, space: Space, count: int) -> list[int]:
        """Up to `count` slots: free ones, then those of the coldest copies that nobody reads."""

        def reserve(wanted: int) -> list[int]:
            return self.tier.reserve(space.block_bytes, space.symbol_bytes_max, wanted)

        def drop(victim: int) -> None:
            self._parts.recorder.evicted("hbm", "capacity", 1, space.slot_bytes)
            self.drop(victim)

        now = self._parts.clock.now()
        return self.promotion.make_room(count, reserve, drop, self._holds.keys(), now)

    # ---- Ends ----

    def gone(self, place: int) -> None:
        """The host slot holds this block no more, and so the copy does not either."""
        if place in self.slots:
            self.drop(place)
        else:
            self.promotion.gone(place)

    def drop(self, place: int, tell: bool = True) -> None:
        """Gives a copy up; who reads it keeps its slot until it has ended."""
        readers: list[int] = []
        if self._holds[place]:
            readers = [reader for reader, held in self._held.items() if place in held]
        slot = self.slots.pop(place)
        self._marks.set(place, NOWHERE)
        self.lent.pop(place, None)
        if tell:
            self._tell_removed(self.tier.header(slot))
        self._retired.retire([slot], readers)
        self.promotion.gone(place)

    def hold(self, reader: int, places: Sequence[int]) -> None:
        """Slots of these copies are read until the reader has ended."""
        if not places:
            return
        held = self._held.setdefault(reader, set())
        new = set(places) - held
        held |= new
        self._holds.update(new)

    def let_go(self, reader: int) -> None:
        for place in self._held.pop(reader, ()):
            self._holds[place] -= 1
            if not self._holds[place]:
                del self._holds[place]
        self._retired.reader_ended(reader)

    # ---- Events: of a block's first shard, the others lie on other GPUs ----

    def _tell_stored(self, headers: list[BlockHeader]) -> None:
        chains: list[list[BlockHeader]] = []
        for header in headers:
            if header.shard:
                continue
            if chains and chains[-1][-1].key == header.parent_key:
                chains[-1].append(header)
            else:
                chains.append([header])
        for chain in chains:
            space = self._parts.spaces.get(chain[0].space)
            if space is not None:
                keys = b"".join(header.key for header in chain)
                symbols = b"".join(header.symbol for header in chain)
                self._parts.events.stored(space, "hbm", keys, chain[0].parent_key, symbols)

    def _tell_removed(self, header: BlockHeader) -> None:
        space = self._parts.spaces.get(header.space)
        if space is not None and not header.shard:
            self._parts.events.removed(space, "hbm", header.key)

    def check_integrity(self) -> None:
        """Recounts; raises AssertionError."""
        tier, host = self.tier, self._parts.host
        tier.check_integrity()
        assert tier.usage().block_count == len(self.slots) == len(self.promotion)
        assert not set(self.slots) & self.moving
        assert set(self.lent) <= set(self.slots)
        marked = self._marks.of(np.fromiter(self.slots, np.int64, len(self.slots)))
        assert (marked == self.number).all(), "a copy is not marked"
        for place, slot in self.slots.items():
            assert tier.generation(slot), "a copy is not published"
            assert host.generation(place), "a copy outlived its host copy"
            assert tier.checksum(slot) == host.checksum(place)
        held = Counter(place for places in self._held.values() for place in places)
        assert held == self._holds
