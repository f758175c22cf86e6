"""Copies in GPUs' memory: made of host blocks, shown to engines, dropped.

    LoadDevice -> which blocks have copies -> into the session's staging, or their offsets
               -> which others should (policies/promotion.py) -> room -> copy up -> checksum right?

A copy lives no longer than the host copy it was made of: who frees that slot frees this one. So no
block's life depends on a GPU, and what an engine checks of a host slot holds for the copy too. A
block has one copy: on the GPU whose engines load it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstore.core.block import place_offset
from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, InvalidRequest, TierError
from kvstore.core.space import Space
from kvstore.mover import ARENA_OUT_LINK, PEER_LINK, Moved
from kvstore.policies.cost import LinkIdentity, PathModel
from kvstore.policies.ghost_hbm import Copies
from kvstore.policies.index import Span
from kvstore.policies.promotion import PROMOTED_A_LOAD
from kvstore.policies.sampling import GhostSpace, live_blocks
from kvstore.store.costs import DEVICE_LINK, ENGINE_PRIOR, PRIORS, SAMPLES_MIN
from kvstore.store.evict import Remover
from kvstore.store.gpu_copies import GpuCopies, Marks
from kvstore.store.parts import HOST, SLICE_BLOCKS, Parts
from kvstore.store.restore import RestoreFlow, shard_of
from kvstore.store.sessions import Attachment, Session
from kvstore.store.staging_book import DeviceShare, StagingBook
from kvstore.tiers.base import DeviceTier

IN_PLACE = "in_place"
MOVED_AFTER = 2  # loads of another GPU in a row: a copy that both read stays where it is


class Found(NamedTuple):
    """A block's copy: on which GPU, and the host place it was made of."""

    gpu: GpuCopies
    place: int


class Near(NamedTuple):
    """Blocks with copies on an engine's GPU: a flag a block; they are read there `in_place`."""

    mask: np.ndarray
    device: str
    in_place: bool


class HbmCopies:
    """The tier above host, on one GPU or several. Only the owner calls it; nothing waits."""

    def __init__(
        self, parts: Parts, remover: Remover, restores: RestoreFlow, tiers: Sequence[DeviceTier]
    ) -> None:
        self._parts, self._restores = parts, restores
        self._marks = Marks()
        self.gpus = [
            GpuCopies(parts, remover, tier, number, self._marks, self._moved_here)
            for number, tier in enumerate(tiers)
        ]
        self._by_uuid = {gpu.tier.device_uuid: gpu for gpu in self.gpus}
        self._attached: dict[int, dict[str, GpuCopies]] = {}  # by session, in order
        self._staging = StagingBook(parts)
        parts.retired[HOST].on_retire = self.gone

    @property
    def tiers(self) -> list[DeviceTier]:
        return [gpu.tier for gpu in self.gpus]

    def attach(self, session: Session, device: str, staging_bytes: int) -> Completion[DeviceShare]:
        """What of the GPU's memory the session's engine may open.

        Raises FailedPrecondition for another GPU or host, LimitReached for too much staging.
        """
        if session.staging is None:
            raise FailedPrecondition("device memory is shared with engines on this host only")
        gpu = self._by_uuid.get(device)
        if gpu is None:
            known = " and ".join(self._by_uuid)
            raise FailedPrecondition(
                f"tier hbm is in the memory of {known}, not of {device or '?'}"
            )
        attached = self._attached.setdefault(session.id, {})
        if self._parts.config.tiers.hbm.share != IN_PLACE:
            answer = self._staging.open(session, gpu.tier, staging_bytes)
        else:
            answer = Completion()
            try:
                answer.resolve(DeviceShare(IN_PLACE, gpu.tier.share_arena()))
            except TierError as error:
                raise FailedPrecondition(str(error)) from error
        attached[device] = gpu
        return answer

    def session_closed(self, session: Session) -> None:
        self._attached.pop(session.id, None)
        self._staging.session_closed(session)

    def load(
        self, session: Session, lease_id: int, first_block: int, block_count: int,
        offset: int, room: int, device: str = "",
    ) -> Completion[np.ndarray]:  # fmt: skip
        """Where copies of leased blocks are readable by the engine: int64 offsets, -1 for none.

        In the arena of its GPU as long as the lease lives; else in the session's staging there, of
        which [offset, offset + room) may be overwritten. `device` is the GPU, of several that the
        session attached. At most SLICE_BLOCKS blocks, a turn's worth. Raises LeaseLost,
        InvalidRequest, FailedPrecondition.
        """
        lease = self._restores.owned(session, lease_id)
        count = block_count or lease.block_count - first_block
        if count > SLICE_BLOCKS:
            raise InvalidRequest(f"{count} blocks are too many; ask for {SLICE_BLOCKS} at a time")
        path = self._restores.path(lease, first_block, block_count)
        gpu, attachment = self._gpu_of(session, device), lease.attachment
        places = self._parts.index.places(path, HOST, shard_of(session, lease)).tolist()
        answer: Completion[np.ndarray] = Completion()
        offsets = np.full(len(places), -1, np.int64)
        found = self._found(gpu, places)
        if self._parts.config.tiers.hbm.share == IN_PLACE:
            self._show(lease_id, gpu, found, offsets)
            answer.resolve(offsets)
        else:
            found = self._worth_it(attachment, gpu, found)
            self._copy_down(session, attachment, gpu, found, offsets, offset, room, answer)
        self._promote(gpu, path, places, attachment)
        return answer

    def _gpu_of(self, session: Session, device: str) -> GpuCopies:
        attached = self._attached.get(session.id, {})
        gpu = attached.get(device) if device else next(iter(attached.values()), None)
        if gpu is None:
            raise FailedPrecondition(
                "the session has no device staging; call AttachDevice first"
                if not device
                else f"the session has attached no GPU {device}; call AttachDevice first"
            )
        return gpu

    def _found(self, gpu: GpuCopies, places: list[int]) -> dict[int, Found]:
        """Copies by block, on this GPU and others, but for those of a GPU that failed."""
        if len(self.gpus) == 1:
            known = () if gpu.tier.problem else gpu.slots
            return {i: Found(gpu, place) for i, place in enumerate(places) if place in known}
        sound = [one for one in self.gpus if not one.tier.problem]
        return {
            i: Found(one, place)
            for i, place in enumerate(places)
            for one in sound
            if place in one.slots
        }

    def _show(
        self, lease_id: int, gpu: GpuCopies, found: dict[int, Found], offsets: np.ndarray
    ) -> None:
        """In place are only copies on the engine's own GPU; of others it has none."""
        own = {i: place for i, (one, place) in found.items() if one is gpu}
        gpu.hold(lease_id, list(own.values()))
        for i, place in own.items():
            offsets[i] = place_offset(gpu.slots[place])
        self._restored(len(own))

    def _worth_it(
        self, attachment: Attachment, gpu: GpuCopies, found: dict[int, Found]
    ) -> dict[int, Found]:
        """Without copies on other GPUs where host is as near."""
        count = sum(one is not gpu for one, _ in found.values())
        if not count:
            return found
        size = count * attachment.space.block_bytes
        if self._spared(attachment, PEER_LINK, gpu, size) > 0:
            return found
        return {i: one for i, one in found.items() if one.gpu is gpu}

    def _copy_down(
        self, session: Session, attachment: Attachment, gpu: GpuCopies, found: dict[int, Found],
        offsets: np.ndarray, offset: int, room: int, answer: Completion[np.ndarray],
    ) -> None:  # fmt: skip
        """Copies into the session's staging on `gpu`: all there before it answers."""
        space = attachment.space
        staging = self._staging.of(session, gpu.tier)
        fit = max(0, min(room, staging.length - offset)) // space.slot_bytes
        taken = list(found.items())[:fit]
        if not taken:
            answer.resolve(offsets)
            return
        by_gpu: dict[int, list[int]] = {}
        for number, (i, one) in enumerate(taken):
            offsets[i] = offset + number * space.slot_bytes
            by_gpu.setdefault(one.gpu.number, []).append(i)
        reader, left = self._parts.start_reading(), set(by_gpu)

        def ended(number: int, moved: Moved) -> None:
            blocks = by_gpu[number]
            if moved.error is not None:
                offsets[blocks] = -1  # the engine loads these from host instead
            else:
                self._restored(len(blocks))
            left.discard(number)
            if not left:
                self._let_go(reader)
                self._parts.stop_reading(reader)
                answer.resolve(offsets)

        fills = []
        for number, blocks in by_gpu.items():
            source = self.gpus[number]
            source.hold(reader, [found[i].place for i in blocks])
            slots = [source.slots[found[i].place] for i in blocks]
            fills.append((source, list(zip(slots, offsets[blocks].tolist(), strict=True))))
        for source, pairs in fills:
            done, peer = partial(ended, source.number), None if source is gpu else source.tier
            self._staging.fill(session, gpu.tier, space, pairs, done, peer)

    def _restored(self, count: int) -> None:
        if count:
            self._parts.recorder.hbm_loaded(count)

    def _spared(self, attachment: Attachment | None, link: str, gpu: GpuCopies, size: int) -> float:
        """The share of a load's seconds from host that one from copies spares, as measured.

        Without an attachment it is an engine's with the quickest link.
        """
        costs = self._parts.costs
        upward = costs.upward(attachment.device) if attachment else costs.fastest_upward()
        host = ENGINE_PRIOR.seconds(size)
        if upward is not None and upward.sample_count >= SAMPLES_MIN:
            host = upward.seconds(size)
        known = costs.link(LinkIdentity(link, gpu.tier.device_uuid))
        prior = PRIORS[link].seconds(size)
        own = known.seconds(size) if known and known.sample_count >= SAMPLES_MIN else prior
        return 1.0 - own / host if host > 0 else 0.0

    # ---- For plans ----

    def near(self, attachment: Attachment, places: np.ndarray) -> Near | None:
        """Which of these blocks a load by the attachment's engine would find on its own GPU.

        None where no rank of the engine has attached one, or none is there. Of several shards the
        attachment's stands for all, since ranks load alike.
        """
        gpu = self._engine_gpu(attachment)
        if gpu is None or gpu.tier.problem or not gpu.slots:
            return None
        mask = self._marks.of(places) == gpu.number
        in_place = self._parts.config.tiers.hbm.share == IN_PLACE
        if not in_place:  # what there is no room for comes from host
            mask &= mask.cumsum() <= self._room(attachment.space)
        return Near(mask, gpu.tier.device_uuid, in_place) if mask.any() else None

    def _room(self, space: Space) -> int:
        """Blocks of a load that its half of a session's staging has room for."""
        staging = int(self._parts.config.tiers.hbm.staging_bytes_per_session)
        return staging // 2 // space.slot_bytes

    def _engine_gpu(self, attachment: Attachment) -> GpuCopies | None:
        for session in (attachment.session, *attachment.engine.sessions):
            attached = self._attached.get(session.id)
            shards = {one.shard for one in session.attachments.values()}
            if attached and attachment.shard in shards:
                return next(iter(attached.values()))
        return None

    # ---- For shadows, and what blocks are worth ----

    def copies(self) -> Copies:
        """The tier as ghosts have it, whose blocks may stand for several of all shards."""

        def spared(space: Space, count: int) -> float:
            live = space.live if isinstance(space, GhostSpace) else space
            size = count * live_blocks(space) * live.block_bytes
            return self._spared(None, ARENA_OUT_LINK, self.gpus[0], size)

        def fit(space: Space) -> int:
            live = space.live if isinstance(space, GhostSpace) else space
            return self._room(live) // live_blocks(space)

        size = sum(gpu.tier.usage().capacity_bytes for gpu in self.gpus)
        if self._parts.config.tiers.hbm.share == IN_PLACE:
            return Copies(size, spared)
        return Copies(size, spared, fit)

    @property
    def byte_seconds(self) -> float:
        """Seconds that a byte takes from a copy into an engine's memory."""
        costs, uuid = self._parts.costs, self.gpus[0].tier.device_uuid
        own = [
            model.cost().byte_seconds
            for model in costs
            if isinstance(model, PathModel) and model.identity[0] == DEVICE_LINK
        ]
        staged = 0.0
        if self._parts.config.tiers.hbm.share != IN_PLACE:
            known = costs.link(LinkIdentity(ARENA_OUT_LINK, uuid))
            staged = (
                PRIORS[ARENA_OUT_LINK].byte_seconds if known is None else known.cost().byte_seconds
            )
        return staged + min(own, default=0.0)

    # ---- Up, and from GPU to GPU ----

    def _promote(
        self, gpu: GpuCopies, path: Sequence[Span], places: list[int], attachment: Attachment
    ) -> None:
        """Begins to copy up what is worth it, now that these blocks were loaded."""
        now = self._parts.clock.now()
        here = [place for place in places if place >= 0]
        spared = self._spared(
            attachment, ARENA_OUT_LINK, gpu, len(here) * attachment.space.block_bytes
        )
        wanted = gpu.promotion.loaded(here, now, spared)
        if len(self.gpus) > 1:
            kept = self._kept_elsewhere(gpu, here)
            wanted = [place for place in wanted if place not in kept]
        if wanted and not gpu.tier.problem:
            gpu.promote(path, places, set(wanted[:PROMOTED_A_LOAD]), attachment)

    def _kept_elsewhere(self, gpu: GpuCopies, places: Iterable[int]) -> set[int]:
        """Of blocks that `gpu` has loaded, those whose copy, or coming one, another GPU keeps.

        One moves after MOVED_AFTER loads here with none there between, and from a GPU that failed.
        """
        kept = set()
        others = [one for one in self.gpus if one is not gpu and not one.tier.problem]
        for place in places:
            gpu.lent.pop(place, None)
            for other in others:
                if place in other.moving:
                    kept.add(place)
                elif place in other.slots:
                    number, count = other.lent.get(place, (gpu.number, 0))
                    count = count + 1 if number == gpu.number else 1
                    other.lent[place] = gpu.number, count
                    if count < MOVED_AFTER:
                        kept.add(place)
        return kept

    def _moved_here(self, gpu: GpuCopies, place: int) -> bool:
        """A block has one copy: another GPU's ends when this one's is there."""
        for other in self.gpus:
            if other is not gpu and place in other.slots:
                other.drop(place, tell=False)
                return True
        return False

    # ---- Ends ----

    def gone(self, places: Sequence[int]) -> None:
        """Host slots hold these blocks no more, and so the copies do not either."""
        for gpu in self.gpus:
            for place in places:
                gpu.gone(place)

    def _let_go(self, reader: int) -> None:
        for gpu in self.gpus:
            gpu.let_go(reader)

    def lease_ended(self, lease_id: int) -> None:
        self._let_go(lease_id)

    def check_integrity(self) -> None:
        """Recounts; raises AssertionError."""
        seen: set[int] = set()
        for gpu in self.gpus:
            gpu.check_integrity()
            assert not seen & set(gpu.slots), "a block has copies on two GPUs"
            seen |= set(gpu.slots)
        assert len(self._marks) == len(seen), "a block without a copy is marked"
