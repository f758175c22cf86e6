"""Restoring: one Restore under way, until all has come or the rest is not worth waiting for.

host at once, disk piece by piece -> behind its plan? -> cut short -> its seconds teach the model
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.core.completion import Completion
from kvstore.core.lease import Lease
from kvstore.core.plan import FailedBlocks, Slots
from kvstore.mover import READ_LINK
from kvstore.policies.index import Span
from kvstore.policies.replanning import Progress, replan
from kvstore.store.costs import UnderWay
from kvstore.store.lookup import LookupFlow
from kvstore.store.parts import DISK, HOST, Parts
from kvstore.store.promote import Promoter

TURN_BLOCKS = 32  # slots for more of them, and who has to go for that, hold lookups up
DISK_ONLY = frozenset({READ_LINK})

Emit = Callable[[Slots | FailedBlocks], None]


class Restoring:
    """One Restore: goes along the chain a bounded part a turn, and ends when all has arrived."""

    def __init__(
        self, parts: Parts, lookups: LookupFlow, promoter: Promoter, lease: Lease, shard: int,
        emit: Emit, keeps_part: bool = False,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._lookups = lookups
        self._promoter = promoter
        self.lease = lease
        self._shard = shard
        self._emit = emit
        self._keeps_part = keeps_part
        self._answer: Completion[None] = Completion()
        self._waiting = 0
        self._failed_blocks = 0
        self._is_shared = False  # others read a part of it
        self._blocked = False  # until a piece arrives and leaves room in the queue

    def start(self, session: int, first: int, stop: int, path: list[Span]) -> Completion[None]:
        self._session, self._first, self._next, self._stop = session, first, first, stop
        # Blocks that the client has heard of.
        self._came: np.ndarray = np.zeros(stop - first, np.bool_)
        self._began = self._parts.clock.now()
        entry = self.lease.decision
        if entry is not None and entry.began is None:
            entry.began = self._began
        self._measure(path)
        self._go_on()
        return self._answer

    def _measure(self, path: list[Span]) -> None:
        """What has to come from disk is measured as a whole, as it was planned."""
        parts, space = self._parts, self.lease.attachment.space
        absent = parts.index.places(path, HOST, self._shard) < 0 if path else np.zeros(0, np.bool_)
        sums = np.concatenate(([0], np.cumsum(absent)))
        # Bytes that the disk has to bring for the leading n blocks.
        self._absent: np.ndarray = sums * (space.block_bytes * space.shard_count)
        size = int(self._absent[-1])
        self._transfer = 0
        if size:
            ahead = parts.mover.bytes_ahead(READ_LINK, space.tenant, self._session, size)
            self._transfer = parts.costs.begin_transfer(
                UnderWay(parts.costs.read_link, self._began, size, ahead)
            )

    def _go_on(self) -> None:
        self._blocked = False
        limit = min(self._stop, self._next + TURN_BLOCKS)
        while self._next < limit and not self._blocked:
            path = cut_at(self._parts.index.path(self.lease.anchor, self._next), limit)
            if not path:
                self._fail(self._stop - self._next, "lost", "the lease is over")
                break
            self._serve(path[0])
        if self._next >= self._stop:
            self._settle()
        elif not self._blocked:
            self._parts.defer(self._go_on)

    def _serve(self, span: Span) -> None:
        """Serves the leading blocks of a span that are in the same state."""
        run, start, stop = span
        grid = self._parts.index.places_grid(run, start, stop)
        here: Any = (grid[:, HOST] >= 0).all(axis=1)
        if here[0]:
            count = len(here) if here.all() else int(here.argmin())
            self._serve_ready(run, start, count)
            return
        count = int(here.argmax()) if here.any() else len(here)
        piece = self._promoter.piece_of(int(grid[0, DISK, 0]))
        if piece is not None:
            self._join(piece)
            return
        places = grid[:count, DISK, 0].tolist()
        reading = self._promoter.piece_of
        count = next((i for i, place in enumerate(places) if reading(place)), count)
        self._read(run, start, count)

    @property
    def has_plan(self) -> bool:
        return self.lease.decision is not None and self.lease.decision.decision is not None

    def look(self, now: float) -> tuple[int, str] | None:
        """The block where a restore that is behind its plan had better end, and why."""
        decision = self.lease.decision.decision
        size, base = self.lease.attachment.space.block_size, decision.situation.local_tokens
        first = max(0, self._first * size - base)
        progress = Progress(
            first,
            self._stop * size - base,
            max(0, (self._first + self._leading()) * size - base - first),
            self._step_blocks() * size,
            now - self._began,
            DISK_ONLY,
            self._keeps_part,
        )
        found = replan(decision, progress)
        if found is None:
            return None
        return self._first + found.tokens // size, found.reason

    def _leading(self) -> int:
        """Blocks that the client has heard of, without a gap."""
        came = self._came[: self._stop - self._first]
        return len(came) if came.all() else int(came.argmin())

    def _step_blocks(self) -> int:
        """Blocks that arrive about together: a piece for each reader."""
        pieces = self._parts.config.tiers.disk.read_threads
        return pieces * self._promoter.piece_blocks(self.lease.attachment.space)

    def cut(self, block: int, why: str) -> None:
        """Ends the restore before `block`: the client computes the rest, or all."""
        entry, block = self.lease.decision, max(block, self._first)
        if self._answer.done or block >= self._stop:
            return
        kept = block if self._keeps_part else 0
        if entry.kept_blocks is None or kept < entry.kept_blocks:
            entry.cut(kept, why)
        if self._transfer:
            self._parts.costs.transfer_is_late(self._transfer, self._parts.clock.now())
        self._fail_absent(block, why)
        self._stop = block
        if self._next >= block:
            self._blocked = False
            self._settle()

    def _fail_absent(self, block: int, why: str) -> None:
        """Tells the client not to wait for what has not come from `block` on."""
        came = self._came[block - self._first : self._stop - self._first]
        edges = np.flatnonzero(np.diff(np.concatenate(([True], came, [True]))))
        for start, stop in edges.reshape(-1, 2).tolist():
            self._tell_failed(block + start, stop - start, "late", why)

    def _serve_ready(self, run: Any, start: int, count: int) -> None:
        span = Span(run, start, start + count)
        first = run.first + start
        self._tell_ready([span], first, count)
        self._next = first + count

    def _join(self, piece: Any) -> None:
        self._is_shared = True
        piece.heard.append(self._heard)
        self._waiting += 1
        self._next = piece.first + piece.count

    def _read(self, run: Any, start: int, count: int) -> None:
        if self._promoter.stalled:
            self._fail(count, "timeout", "the disk does not answer at present")
            return
        end, pieces, kind, reason = self._promoter.begin(
            run, start, start + count, self._session, self._heard
        )
        self._waiting += pieces
        self._next = run.first + end
        if kind == "queue" and self._waiting:
            self._blocked = True
        elif kind:
            self._fail(start + count - end, kind, reason)

    def _heard(self, first: int, readable: int, failed: int, kind: str, reason: str) -> None:
        """A piece is over: its blocks are in host, or not to be had."""
        self._waiting -= 1
        if self._answer.done:
            return  # given up meanwhile
        low, high = max(first, self._first), min(first + readable, self._stop)
        path = cut_at(self._parts.index.path(self.lease.anchor, low), high)
        if low < high and path:
            self._tell_ready(path, low, high - low)
        elif low < high:
            self._tell_failed(low, high - low, "lost", "the lease is over")
        low, high = max(first + readable, self._first), min(first + readable + failed, self._stop)
        if low < high:
            self._tell_failed(low, high - low, kind, reason)
        self._tell_progress()
        if self._blocked:
            self._go_on()
        else:
            self._settle()

    def _fail(self, count: int, kind: str, reason: str) -> None:
        self._tell_failed(self._next, count, kind, reason)
        self._next += count

    def _tell_ready(self, path: list[Span], first: int, count: int) -> None:
        self._came[first - self._first : first - self._first + count] = True
        self._emit(self._lookups.slots(path, self._shard, first))

    def _tell_failed(self, first: int, count: int, kind: str, reason: str) -> None:
        self._came[first - self._first : first - self._first + count] = True
        self._failed_blocks += count
        self._parts.recorder.restore_failed(kind, count)
        self._emit(FailedBlocks(first, count, reason, kind == "room"))

    def _tell_progress(self) -> None:
        leading, left = self._leading(), len(self._came)
        if self._transfer and leading < left:
            due = min(left, leading + self._step_blocks())
            arrived = int(self._absent[leading])
            self._parts.costs.part_arrived(
                self._transfer, self._parts.clock.now(), arrived, int(self._absent[due])
            )

    def _settle(self) -> None:
        if self._answer.done or self._next < self._stop:
            return
        if not self._waiting or self._leading() >= self._stop - self._first:
            self._end()

    def _end(self) -> None:
        entry, parts = self.lease.decision, self._parts
        if self._transfer:
            is_whole = not self._failed_blocks and not self._is_shared
            parts.costs.end_transfer(self._transfer, parts.clock.now(), is_whole)
        if entry is not None:
            parts.decisions.restore_ended(entry, self._failed_blocks)
        self._answer.resolve(None)


def cut_at(path: list[Span], last: int) -> list[Span]:
    """The part of a path that comes before block `last` of its chain."""
    cut = []
    for run, start, stop in path:
        stop = min(stop, last - run.first)
        if start < stop:
            cut.append(Span(run, start, stop))
    return cut
