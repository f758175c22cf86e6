"""Reserve, the first half of a put: which blocks are wanted, and slots kept for them.

walk the index -> stage absent blocks (STAGING) -> take slots, evicting if need be -> WANTED
"""

from __future__ import annotations

from functools import partial

import numpy as np

from kvstore.core.completion import Completion
from kvstore.core.errors import Draining, InvalidRequest
from kvstore.core.plan import BlockOutcome, Query, ReserveResult
from kvstore.core.space import Space
from kvstore.policies.accounts import pool_in
from kvstore.policies.index import StageAnswer, Staged, Walk
from kvstore.store.evict import Remover
from kvstore.store.parts import HOST, RESERVE_BLOCKS_MAX, SLICE_BLOCKS, Parts
from kvstore.store.reservations import Reservation, ReservationTable
from kvstore.store.room import HostRoom
from kvstore.store.sessions import Attachment
from kvstore.store.slices import SlicedWalk

OUTCOMES = bytes.maketrans(
    bytes([StageAnswer.LEFT_OUT, StageAnswer.PRESENT, StageAnswer.PENDING, StageAnswer.WANTED]),
    bytes([BlockOutcome.REJECTED, BlockOutcome.PRESENT, BlockOutcome.PENDING, BlockOutcome.WANTED]),
)


class ReserveFlow:
    """Answers Reserve: partial grants, never waits."""

    def __init__(
        self, parts: Parts, table: ReservationTable, remover: Remover, room: HostRoom
    ) -> None:
        self._parts = parts
        self._table = table
        self._remover = remover
        self._room = room

    def reserve(
        self, attachment: Attachment, query: Query, first_block: int
    ) -> ReserveResult | Completion[ReserveResult]:
        """An outcome for each block from `first_block` on, WANTED ones with a slot kept."""
        # What was just released may have to make room for these blocks.
        self._parts.leases.flush()
        total = query.chain.block_count
        if self._parts.draining:
            raise Draining("the daemon is draining and takes no new blocks")
        if not 0 <= first_block <= total:
            raise InvalidRequest(
                f"first_block is {first_block} but the prompt has {total} full blocks"
            )
        last = min(total, first_block + RESERVE_BLOCKS_MAX)
        reason = _refusal(attachment, query)
        if reason or last == first_block:
            return self._rejected(first_block, last, reason)
        space, index = attachment.space, self._parts.index
        digest = attachment.root_digest(query.adapter, query.cache_salt)
        root = index.root(space, digest)
        walk = index.walk(root, query.chain if last == total else query.chain.cut(last))
        if walk.step(SLICE_BLOCKS):
            return self._stage(attachment, query, walk, first_block, last)
        finish = partial(self._stage, attachment, query, walk, first_block, last)
        return SlicedWalk(self._parts, walk, finish).answer

    def _rejected(self, first_block: int, last: int, reason: str) -> ReserveResult:
        self._parts.recorder.put_blocks("rejected", last - first_block)
        return ReserveResult(0, first_block, bytes(last - first_block), 0.0, reason)

    def _stage(
        self, attachment: Attachment, query: Query, walk: Walk, first_block: int, last: int
    ) -> ReserveResult:
        parts = self._parts
        refusal = _walk_refusal(attachment, walk, first_block)
        if refusal:
            return self._rejected(first_block, last, refusal)
        allowed, limit = self._allowed(attachment, last - first_block)
        self._make_index_room(walk, min(allowed, last - walk.known_blocks))
        reservation = Reservation(parts.next_id(), attachment, attachment.space.epoch)
        reservation.use = parts.requests.put(attachment, query, first_block)
        staged = parts.index.stage(
            walk, walk.chain, attachment.shard, reservation.id, allowed, first_block, HOST
        )
        self._take_slots(reservation, staged)
        if reservation.waiting:
            self._table.add(reservation)
        elif staged.anchor is not None:
            parts.index.unanchor(staged.anchor)
        outcomes = _outcomes(staged, reservation, first_block, last)
        for outcome in (BlockOutcome.PRESENT, BlockOutcome.PENDING, BlockOutcome.REJECTED):
            if count := outcomes.count(outcome):
                parts.recorder.put_blocks(outcome.name.lower(), count)
        return ReserveResult(
            reservation.id if reservation.waiting else 0,
            first_block,
            outcomes,
            parts.limits.staging_ttl_seconds,
            _shortage(outcomes, limit),
        )

    def _allowed(self, attachment: Attachment, wanted: int) -> tuple[int, str]:
        """How many blocks the limits let this session write now, and which limit cut it."""
        limits, space = self._parts.limits, attachment.space
        fits = {
            "reserved_bytes_per_session": int(limits.reserved_bytes_per_session)
            - attachment.session.reserved_bytes,
            "reserved_bytes_per_tenant": int(limits.reserved_bytes_per_tenant)
            - self._table.reserved_bytes.get(space.tenant, 0),
        }
        name, left = min(fits.items(), key=lambda item: item[1])
        allowed = max(0, left) // space.slot_bytes
        if allowed >= wanted:
            return wanted, ""
        self._parts.recorder.limit_rejected(name)
        return allowed, f"limits.{name} leaves room for {allowed} blocks now"

    def _make_index_room(self, walk: Walk, wanted: int) -> None:
        """Evicts until the index takes `wanted` more blocks, but nothing of what they extend."""
        index, space = self._parts.index, walk.root.space
        if index.free_blocks > wanted:
            return
        held = index.anchor(walk.run, walk.depth, 0) if walk.known_blocks else None
        while (short := wanted + 1 - index.free_blocks) > 0:
            if not self._give_up(space, short):
                break
        if held is not None:
            index.unanchor(held)

    def _give_up(self, space: Space, count: int) -> bool:
        """Evicts the coldest copies, on disk first, for `count` blocks less: those that had no
        other leave the index. False if nothing more may go."""
        index, accounts = self._parts.index, self._parts.residency.accounts
        blocks, moved = index.block_count, False
        for tier in reversed(range(len(self._parts.tiers))):
            pool = pool_in(tier, space.pool)
            used = accounts.used(tier, pool)
            self._remover.make_room(space, count * space.slot_bytes * space.shard_count, tier)
            moved = moved or accounts.used(tier, pool) < used
            if index.block_count < blocks:
                break
        return moved

    def _take_slots(self, reservation: Reservation, staged: Staged) -> None:
        """Gives wanted blocks their slots, first blocks first, and gives up those without one."""
        reservation.anchor = staged.anchor
        if not staged.wanted:
            return
        answers = np.frombuffer(staged.answers, np.uint8)
        wanted: list[int] = np.flatnonzero(answers == StageAnswer.WANTED).tolist()
        places = self._room.take(reservation.attachment.space, len(wanted))
        reservation.waiting = dict(zip(wanted, places, strict=False))
        self._table.give_up(reservation, dict.fromkeys(wanted[len(places) :]))


def _refusal(attachment: Attachment, query: Query) -> str:
    if query.reuse.no_store:
        return "the request asked not to be stored"
    if attachment.space.closing:
        return "the space is being cleared; put again"
    return ""


def _walk_refusal(attachment: Attachment, walk: Walk, first_block: int) -> str:
    if attachment.session.closed:
        return "the session is over"
    if attachment.space.closing:
        return "the space is being cleared; put again"
    if walk.known_blocks < first_block:
        return (
            f"blocks before first_block {first_block} are not stored; "
            f"put from block {walk.known_blocks} on"
        )
    return ""


def _outcomes(staged: Staged, reservation: Reservation, first_block: int, last: int) -> bytes:
    """Outcomes of blocks [first_block, last): WANTED only where a slot is kept."""
    outcomes = bytearray(staged.answers[first_block:last].translate(OUTCOMES))
    for i, outcome in enumerate(outcomes):
        if outcome == BlockOutcome.WANTED and first_block + i not in reservation.waiting:
            outcomes[i] = BlockOutcome.REJECTED
    return bytes(outcomes).ljust(last - first_block, bytes([BlockOutcome.REJECTED]))


def _shortage(outcomes: bytes, limit: str) -> str:
    rejected = outcomes.count(BlockOutcome.REJECTED)
    if not rejected:
        return ""
    return limit or (
        f"no room for {rejected} blocks in host: what is there is leased, pinned, within another "
        "tenant's floor, or being moved"
    )
