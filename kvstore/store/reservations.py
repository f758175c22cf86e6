"""Reservations: blocks somebody promised to write, the slots kept for them, and how they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from kvstore.core.lease import Deadlines
from kvstore.policies.index import Anchor, Run
from kvstore.policies.uses import Use
from kvstore.store.evict import Remover, block_before
from kvstore.store.parts import HOST, Parts
from kvstore.store.sessions import Attachment, Session


class Reservation:
    """Wanted blocks of one Reserve, by position.

    A block is in `waiting` (with its slot) until its copy starts, in `copying` until that ends, in
    `committed` until it is READY: a shard ahead of its siblings, or of its parent. `lost` is set
    when the index let the blocks go: their parent was cleared. `copies` are those under way, in
    the order they were asked for.
    """

    __slots__ = (
        "anchor", "attachment", "committed", "copies", "copying", "ended", "epoch", "id", "lost",
        "use", "waiting",
    )  # fmt: skip

    def __init__(self, reservation_id: int, attachment: Attachment, epoch: int) -> None:
        self.id = reservation_id
        self.attachment = attachment
        self.epoch = epoch
        self.anchor: Any = None
        self.waiting: dict[int, int] = {}
        self.copying: dict[int, int] = {}
        self.copies: deque[Any] = deque()
        self.committed: set[int] = set()
        self.use: Use | None = None
        self.lost = False
        self.ended = False

    @property
    def session(self) -> Session:
        return self.attachment.session


class ReservationTable:
    """Live reservations: each ends when all its blocks are READY, or aborted, or late."""

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover
        self._reservations: dict[int, Reservation] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._unfinished: dict[int, set[Reservation]] = {}
        self.reserved_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def get(self, reservation_id: int) -> Reservation | None:
        return self._reservations.get(reservation_id)

    def all(self) -> list[Reservation]:
        return list(self._reservations.values())

    def add(self, reservation: Reservation) -> None:
        self._reservations[reservation.id] = reservation
        reservation.session.reservations[reservation.id] = reservation
        self.extend(reservation)
        self._count(reservation, len(reservation.waiting))

    def extend(self, reservation: Reservation) -> None:
        """Gives a reservation its full time from now."""
        due = self._parts.clock.now() + self._parts.limits.staging_ttl_seconds
        self._deadlines.set(reservation.id, due)

    def tick(self, now: float) -> None:
        for reservation_id in self._deadlines.pop_due(now):
            self.end(self._reservations[reservation_id], "expired")

    def end(self, reservation: Reservation, reason: str) -> None:
        """Takes back what is not READY; running copies finish first and find it ended."""
        if reservation.ended:
            return
        reservation.ended = True
        self._deadlines.drop(reservation.id)
        waiting, reservation.waiting = reservation.waiting, {}
        committed, reservation.committed = reservation.committed, set()
        self._count(reservation, -len(waiting))
        self.give_up(reservation, {**waiting, **dict.fromkeys(committed)})
        if reason != "aborted":
            self._parts.recorder.reservation_expired()
        self.settle(reservation)

    def give_up(self, reservation: Reservation, blocks: Mapping[int, int | None]) -> None:
        """Un-stages blocks and frees the slots they come with; last blocks first."""
        self._parts.retired[HOST].retire([place for place in blocks.values() if place is not None])
        for position in sorted(blocks, reverse=True):
            self._unstage(reservation, position)

    def copied(self, reservation: Reservation, positions: range) -> list[int]:
        """Copies of these blocks are over; answers with their slots."""
        self._count(reservation, -len(positions))
        return [reservation.copying.pop(position) for position in positions]

    def committed(self, reservation: Reservation, positions: range) -> None:
        """These blocks are COMMITTED; they stay the reservation's until they are READY."""
        reservation.committed.update(positions)
        number = reservation.attachment.space.number
        self._unfinished.setdefault(number, set()).add(reservation)

    def published(self, space_number: int) -> None:
        """Blocks of a space became READY: reservations that waited for them may be over."""
        for reservation in list(self._unfinished.get(space_number, ())):
            self._drop_ready(reservation)
            self.settle(reservation)

    def settle(self, reservation: Reservation) -> None:
        """Removes a reservation that holds nothing any more."""
        if not reservation.committed:
            self._forget_unfinished(reservation)
        if reservation.waiting or reservation.copying or reservation.committed:
            return
        if self._reservations.pop(reservation.id, None) is None:
            return
        reservation.ended = True
        self._deadlines.drop(reservation.id)
        del reservation.session.reservations[reservation.id]
        self._parts.index.unanchor(reservation.anchor)

    def block(self, reservation: Reservation, position: int) -> tuple[Any, int] | None:
        """(run, block in it) of a position; None when it is gone."""
        anchor = reservation.anchor
        if anchor.run is None or position >= anchor.run.first + anchor.depth:
            return None
        run, start, _ = self._parts.index.path(anchor, position)[0]
        return run, start

    def slot_bytes(self) -> int:
        """Bytes of the slots that live reservations hold outside the index."""
        return sum(
            (len(reservation.waiting) + len(reservation.copying))
            * reservation.attachment.space.slot_bytes
            for reservation in self._reservations.values()
        )

    def check_integrity(self) -> None:
        """Recounts reserved bytes; raises AssertionError."""
        total = self.slot_bytes()
        for reservation in self._reservations.values():
            assert reservation.session.reservations[reservation.id] is reservation
        assert total == sum(self.reserved_bytes.values()), "reserved bytes are miscounted"

    def _unstage(self, reservation: Reservation, position: int) -> None:
        block = self.block(reservation, position)
        if block is None:
            return
        run, i = block
        if i >= run.ready:
            removed = self._parts.index.unstage(run, i, reservation.attachment.shard)
            self._move_up(removed.anchors, run, i)
            self._remover.removed(reservation.attachment.space, removed, "unfinished")

    def _move_up(self, anchors: list[Anchor], run: Run, i: int) -> None:
        """Others wrote below block `i` of `run`, which is gone; what they have above it stays."""
        last, depth = block_before(run, i)
        for anchor in list(anchors) if depth else ():
            if anchor.owner in self._reservations:
                anchors.remove(anchor)
                self._parts.index.reanchor(anchor, last, depth)

    def _drop_ready(self, reservation: Reservation) -> None:
        """Forgets blocks that became READY, or are gone."""
        run = reservation.anchor.run
        if run is None:
            reservation.committed.clear()
            return
        end = run.first + reservation.anchor.depth
        while run.parent is not None and not run.ready:
            run = run.parent
        # Blocks are READY parents first, so that one number says which of them are.
        ready = run.first + run.ready
        committed = reservation.committed
        reservation.committed = {block for block in committed if ready <= block < end}

    def _forget_unfinished(self, reservation: Reservation) -> None:
        number = reservation.attachment.space.number
        waiting = self._unfinished.get(number)
        if waiting is not None:
            waiting.discard(reservation)
            if not waiting:
                del self._unfinished[number]

    def _count(self, reservation: Reservation, block_count: int) -> None:
        space = reservation.attachment.space
        amount = block_count * space.slot_bytes
        reservation.session.reserved_bytes += amount
        left = self.reserved_bytes.get(space.tenant, 0) + amount
        if left:
            self.reserved_bytes[space.tenant] = left
        else:
            self.reserved_bytes.pop(space.tenant, None)
