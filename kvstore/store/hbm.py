"""Copies in a GPU's memory: made of host blocks, shown to engines of that GPU, dropped.

    LoadDevice -> which blocks have copies -> into the session's staging, or their offsets
               -> which others should (policies/promotion.py) -> room -> copy up -> checksum right?

A copy lives no longer than the host copy it was made of: who frees that slot frees this one. So no
block's life depends on a GPU, and what an engine checks of a host slot holds for the copy too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.core.block import place_offset
from kvstore.core.completion import Completion
from kvstore.core.errors import CorruptBlock, FailedPrecondition, InvalidRequest, TierError
from kvstore.core.space import Space
from kvstore.mover import ARENA_IN_LINK, ARENA_OUT_LINK, Job, Moved
from kvstore.policies.index import Span
from kvstore.policies.promotion import Promotion
from kvstore.store.costs import ENGINE_PRIOR, PRIORS, SAMPLES_MIN
from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, SLICE_BLOCKS, Parts
from kvstore.store.restore import RestoreFlow, shard_of
from kvstore.store.retire import RetiredSlots
from kvstore.store.sessions import Attachment, Session
from kvstore.store.staging_book import DeviceShare, StagingBook
from kvstore.tiers.base import BlockHeader, DeviceTier

IN_PLACE = "in_place"
PIECE_BYTES = 4 << 20
PROMOTED_A_TURN = 128  # 20 us each; of a longer prompt the rest comes with its next loads
VICTIMS_FOR_EACH = 4  # a copy of another size leaves a hole that may be of no use


class Piece(NamedTuple):
    """Blocks on their way up: host places and generations, slots, headers and checksums."""

    places: list[int]
    generations: list[int]
    slots: list[int]
    headers: list[BlockHeader]
    checksums: list[bytes]


class HbmCopies:
    """The tier above host. Only the owner thread calls it; nothing in it waits."""

    def __init__(
        self, parts: Parts, remover: Remover, restores: RestoreFlow, tier: DeviceTier
    ) -> None:
        self.tier = tier
        self._parts, self._remover, self._restores = parts, remover, restores
        self._promotion = Promotion()
        self._retired = RetiredSlots(tier)
        self._copies: dict[int, int] = {}  # slots by the host place of their block's shard
        self._moving: set[int] = set()
        self._held: dict[int, set[int]] = {}  # host places by who reads their copies
        self._holds: Counter[int] = Counter()
        self._staging = StagingBook(parts, tier)
        parts.retired[HOST].on_retire = self.gone

    def attach(self, session: Session, device: str, staging_bytes: int) -> Completion[DeviceShare]:
        """What of the GPU's memory the session's engine may open.

        Raises FailedPrecondition for another GPU or host, LimitReached for too much staging.
        """
        if session.staging is None:
            raise FailedPrecondition("device memory is shared with engines on this host only")
        if device != self.tier.device_uuid:
            raise FailedPrecondition(
                f"tier hbm is in the memory of {self.tier.device_uuid}, not of {device or '?'}"
            )
        if self._parts.config.tiers.hbm.share != IN_PLACE:
            return self._staging.open(session, staging_bytes)
        answer: Completion[DeviceShare] = Completion()
        try:
            answer.resolve(DeviceShare(IN_PLACE, self.tier.share_arena()))
        except TierError as error:
            raise FailedPrecondition(str(error)) from error
        return answer

    def session_closed(self, session: Session) -> None:
        self._staging.session_closed(session)

    def load(
        self, session: Session, lease_id: int, first_block: int, block_count: int,
        offset: int, room: int,
    ) -> Completion[np.ndarray]:  # fmt: skip
        """Where copies of leased blocks are readable by the engine: int64 offsets, -1 for none.

        In the arena as long as the lease lives; else in the session's staging, of which [offset,
        offset + room) may be overwritten. At most SLICE_BLOCKS blocks, a turn's worth. Raises
        LeaseLost, InvalidRequest, FailedPrecondition.
        """
        lease = self._restores.owned(session, lease_id)
        count = block_count or lease.block_count - first_block
        if count > SLICE_BLOCKS:
            raise InvalidRequest(f"{count} blocks are too many; ask for {SLICE_BLOCKS} at a time")
        path = self._restores.path(lease, first_block, block_count)
        attachment = lease.attachment
        places = self._parts.index.places(path, HOST, shard_of(session, lease)).tolist()
        answer: Completion[np.ndarray] = Completion()
        found = {i: p for i, p in enumerate(places) if p in self._copies and not self.tier.problem}
        offsets = np.full(len(places), -1, np.int64)
        if self._parts.config.tiers.hbm.share == IN_PLACE:
            self._show(lease_id, found, offsets)
            answer.resolve(offsets)
        else:
            self._copy_down(session, attachment.space, found, offsets, offset, room, answer)
        now = self._parts.clock.now()
        here = [place for place in places if place >= 0]
        spared = self._spared(attachment, len(here) * attachment.space.block_bytes)
        wanted = set(self._promotion.loaded(here, now, spared)[:PROMOTED_A_TURN])
        if wanted and not self.tier.problem:
            self._promote(path, places, wanted, attachment)
        return answer

    def _show(self, lease_id: int, found: dict[int, int], offsets: np.ndarray) -> None:
        self._hold(lease_id, list(found.values()))
        for i, place in found.items():
            offsets[i] = place_offset(self._copies[place])
        self._restored(len(found))

    def _copy_down(
        self, session: Session, space: Space, found: dict[int, int], offsets: np.ndarray,
        offset: int, room: int, answer: Completion[np.ndarray],
    ) -> None:  # fmt: skip
        staging = self._staging.of(session)
        fit = max(0, min(room, staging.length - offset)) // space.slot_bytes
        taken = dict(list(found.items())[:fit])
        if not taken:
            answer.resolve(offsets)
            return
        for number, i in enumerate(taken):
            offsets[i] = offset + number * space.slot_bytes
        blocks = [(self._copies[place], int(offsets[i])) for i, place in taken.items()]
        reader = self._parts.start_reading()
        self._hold(reader, list(taken.values()))

        def done(moved: Moved) -> None:
            self._let_go(reader)
            self._parts.stop_reading(reader)
            if moved.error is not None:
                offsets.fill(-1)  # the engine loads from host instead
            else:
                self._restored(len(blocks))
            answer.resolve(offsets)

        self._staging.fill(session, space, blocks, done)

    def _restored(self, count: int) -> None:
        if count:
            self._parts.recorder.hbm_loaded(count)

    def _spared(self, attachment: Attachment, size: int) -> float:
        """The share of a load's seconds from host that one from copies spares, as measured."""
        costs = self._parts.costs
        upward = costs.upward(attachment.device)
        host = ENGINE_PRIOR.seconds(size)
        if upward is not None and upward.sample_count >= SAMPLES_MIN:
            host = upward.seconds(size)
        down = costs.link(costs.arena_links[ARENA_OUT_LINK])
        prior = PRIORS[ARENA_OUT_LINK].seconds(size)
        own = down.seconds(size) if down and down.sample_count >= SAMPLES_MIN else prior
        return 1.0 - own / host if host > 0 else 0.0

    # ---- Up ----

    def _promote(
        self, path: Sequence[Span], places: list[int], wanted: set[int], attachment: Attachment
    ) -> None:
        """Begins to copy the wanted ones of a path's blocks up, as far as there is room."""
        space = attachment.space
        most, at = max(1, PIECE_BYTES // space.block_bytes), 0
        for run, start, stop in path:
            here = [
                i for i in range(start, stop)
                if places[at + i - start] in wanted and places[at + i - start] not in self._moving
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
            ARENA_IN_LINK, space.tenant, attachment.session.id, len(places) * length, work, done
        )
        self._moving.update(places)
        if not parts.mover.submit(job):
            parts.recorder.queue_rejected(ARENA_IN_LINK, len(places))
            parts.index.unanchor(anchor)
            parts.stop_reading(reader)
            self._moving.difference_update(places)
            self._retired.retire(slots)
            return False
        return whole

    def _arrived(self, piece: Piece, moved: Moved, length: int) -> None:
        parts = self._parts
        self._moving.difference_update(piece.places)
        sums = moved.value if moved.error is None else [None] * len(piece.places)
        arrived, headers = [], []
        for i, place in enumerate(piece.places):
            unchanged = parts.host.generation(place) == piece.generations[i] and (
                place not in self._copies
            )
            if unchanged and sums[i] == piece.checksums[i]:
                self.tier.commit([(piece.slots[i], piece.headers[i], piece.checksums[i])])
                self._copies[place] = piece.slots[i]
                arrived.append(place)
                headers.append(piece.headers[i])
                continue
            self._retired.retire([piece.slots[i]])
            if unchanged and sums[i] is not None:
                self._remover.quarantine(place)
        self._promotion.arrived(arrived, parts.clock.now())
        self._tell_stored(headers)
        if arrived:
            parts.recorder.copied(ARENA_IN_LINK, len(arrived) * length, moved.seconds)
            parts.recorder.hbm_promoted(len(arrived), len(arrived) * length)

    def _room(self, space: Space, count: int) -> list[int]:
        """Up to `count` slots: free ones, then those of the coldest copies that nobody reads."""
        symbol = space.symbol_bytes_max
        slots = self.tier.reserve(space.block_bytes, symbol, count)
        self._promotion.full(len(slots) < count)
        victims = self._promotion.victims(self._holds.keys(), self._parts.clock.now())
        left = VICTIMS_FOR_EACH * count
        while len(slots) < count and left:
            victim = next(victims, None)
            if victim is None:
                break
            left -= 1
            self._parts.recorder.evicted("hbm", "capacity", 1, space.slot_bytes)
            self._drop(victim)
            slots += self.tier.reserve(space.block_bytes, symbol, count - len(slots))
        return slots

    # ---- Ends ----

    def gone(self, places: Sequence[int]) -> None:
        """Host slots hold these blocks no more, and so the copies do not either."""
        for place in places:
            if place in self._copies:
                self._drop(place)
            else:
                self._promotion.gone(place)

    def _drop(self, place: int) -> None:
        readers: list[int] = []
        if self._holds[place]:
            readers = [reader for reader, held in self._held.items() if place in held]
        slot = self._copies.pop(place)
        self._tell_removed(self.tier.header(slot))
        self._retired.retire([slot], readers)
        self._promotion.gone(place)

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

    def _hold(self, reader: int, places: list[int]) -> None:
        """Slots of these copies are read until the reader has ended."""
        if not places:
            return
        held = self._held.setdefault(reader, set())
        new = set(places) - held
        held |= new
        self._holds.update(new)

    def _let_go(self, reader: int) -> None:
        for place in self._held.pop(reader, ()):
            self._holds[place] -= 1
            if not self._holds[place]:
                del self._holds[place]
        self._retired.reader_ended(reader)

    def lease_ended(self, lease_id: int) -> None:
        self._let_go(lease_id)

    def check_integrity(self) -> None:
        """Recounts; raises AssertionError."""
        self.tier.check_integrity()
        assert self.tier.usage().block_count == len(self._copies) == len(self._promotion)
        assert not set(self._copies) & self._moving
        for place, slot in self._copies.items():
            assert self.tier.generation(slot), "a copy is not published"
            assert self._parts.host.generation(place), "a copy outlived its host copy"
            assert self.tier.checksum(slot) == self._parts.host.checksum(place)
        held = Counter(place for places in self._held.values() for place in places)
        assert held == self._holds
