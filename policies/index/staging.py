"""Puts: blocks that are being written, until they become READY or are given up."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.keys import Chain
from kvstore.policies.index.cells import count_resident, stride_of
from kvstore.policies.index.listener import IndexListener
from kvstore.policies.index.moving import MovingTree
from kvstore.policies.index.run import (
    COMMITTED,
    MAX_RUN_BLOCKS,
    NONE,
    PLACE_BYTES,
    RESERVED,
    RESERVED_PLACE,
    Anchor,
    Removed,
    Run,
    Span,
    Staging,
    children_of,
)
from kvstore.policies.index.walk import Walk

NO_LIMIT_BLOCKS = 1 << 62
_RESERVED_CELL = RESERVED_PLACE.to_bytes(PLACE_BYTES, "little", signed=True)
_NO_CELL = NO_PLACE.to_bytes(PLACE_BYTES, "little", signed=True)


class StageAnswer(IntEnum):
    """Answer for one block of a put."""

    LEFT_OUT = 0  # not READY, and before the first block that the writer has
    PRESENT = 1  # READY
    PENDING = 2  # another writer has this shard
    WANTED = 3  # reserved for this writer


class Staged(NamedTuple):
    """What `stage` granted: one `StageAnswer` a byte for the leading blocks that it covers."""

    answers: bytes
    anchor: Anchor | None
    wanted: int


class StagedTree(MovingTree):
    """A tree that takes puts: reserve, commit each shard, publish in chain order."""

    def __init__(
        self,
        tier_count: int,
        listener: IndexListener | None = None,
        max_blocks: int = NO_LIMIT_BLOCKS,
    ):
        super().__init__(tier_count, listener)
        self.max_blocks = max_blocks

    @property
    def free_blocks(self) -> int:
        """How many more blocks fit under `max_blocks`; a root counts as a block, it costs one."""
        return max(0, self.max_blocks - self.block_count - self.root_count)

    def stage(
        self,
        walk: Walk,
        chain: Chain,
        shard: int,
        owner: int,
        max_blocks: int,
        first_block: int = 0,
        tier: int = 0,
    ) -> Staged:
        """Reserves what the tree lacks of `chain` for `owner`, at most `max_blocks` blocks.

        `walk` is a walk of `chain`. Blocks before `first_block` are not the writer's to give. The
        answers end where the grant does; the anchor, if they cover anything, is on their last
        block. Slots are counted as used in `tier` from now on. A block under this key with other
        symbols cannot be: the tree files by symbols, so another symbol is another block.
        """
        assert 0 <= shard < walk.root.space.shard_count
        walk.finish()
        grant = _Grant(walk.ready_blocks, shard, owner, max_blocks, first_block, tier)
        for span in walk.path:
            if span.stop > span.run.ready and not self._stage_known(grant, span):
                break
        else:
            if walk.known_blocks >= first_block:
                self._stage_absent(grant, walk)
        if grant.wanted:
            self.listener.on_slots(walk.root.space, tier, grant.wanted)
        return self._granted(grant, walk)

    def _stage_known(self, grant: _Grant, span: Span) -> bool:
        """Reserves missing shards of STAGING blocks on the path; False when the grant is used."""
        run, staging = span.run, span.run.staging
        assert staging is not None
        shards = run.root.space.shard_count
        for i in range(max(span.start, run.ready), span.stop):
            cell = (i - run.ready) * shards + grant.shard
            if staging.states[cell] != NONE:
                grant.answers.append(StageAnswer.PENDING)
            elif run.first + i < grant.first_block:
                grant.answers.append(StageAnswer.LEFT_OUT)
            elif grant.wanted == grant.max_blocks:
                return False
            else:
                self._reserve(run, i - run.ready, 1, grant)
        return True

    def _stage_absent(self, grant: _Grant, walk: Walk) -> None:
        """Makes STAGING runs for what comes after the walk's end."""
        left = min(
            grant.max_blocks - grant.wanted,
            self.free_blocks - (walk.root.head.children is None),
            walk.chain.block_count - walk.known_blocks,
        )
        if left <= 0:
            return
        run, skip = walk.run, walk.known_blocks
        if walk.depth < run.count:
            self.split(run, walk.depth)
        for segment in walk.chain.segments:
            count, width = segment.block_count, segment.width
            for start in range(min(skip, count), count, MAX_RUN_BLOCKS):
                blocks = min(MAX_RUN_BLOCKS, count - start, left)
                if not blocks:
                    return
                symbols = segment.symbols[start * width : (start + blocks) * width]
                run = self._add_staging(run, symbols, width, grant.tier)
                self._reserve(run, 0, blocks, grant)
                left -= blocks
            skip = max(0, skip - count)

    def _add_staging(self, parent: Run, symbols: bytes, width: int, tier: int) -> Run:
        run = Run(parent.root, parent, parent.first + parent.count, symbols, width)
        shards = run.root.space.shard_count
        run.staging = Staging.empty(tier, run.count, shards, self.tier_count)
        self._link(parent, run)
        return run

    def _reserve(self, run: Run, start: int, count: int, grant: _Grant) -> None:
        """Marks `count` STAGING blocks, from the `start`-th STAGING one on."""
        staging, shards = run.staging, run.root.space.shard_count
        assert staging is not None
        cells = slice(start * shards + grant.shard, (start + count) * shards, shards)
        staging.states[cells] = bytes([RESERVED]) * count
        staging.owners[cells] = array("q", [grant.owner]) * count
        grid = np.frombuffer(staging.places, np.int64).reshape(-1, self.tier_count, shards)
        grid[start : start + count, grant.tier, grant.shard] = RESERVED_PLACE
        grant.answers.extend(bytes([StageAnswer.WANTED]) * count)
        grant.wanted += count

    def _cell_at(self, cell: int, shards: int, tier: int) -> int:
        """Offset of a (block, shard) cell's place in `tier`."""
        block, shard = divmod(cell, shards)
        return ((block * self.tier_count + tier) * shards + shard) * PLACE_BYTES

    def _granted(self, grant: _Grant, walk: Walk) -> Staged:
        covered = len(grant.answers)
        if not covered:
            return Staged(b"", None, 0)
        walk.finish()
        run, depth = walk.run, walk.depth
        while run.first >= covered:
            assert run.parent is not None
            run = run.parent
            depth = run.count
        anchor = self.anchor(run, min(depth, covered - run.first), grant.owner)
        assert anchor.block_count == covered, "a grant covers blocks that are not on its path"
        return Staged(bytes(grant.answers), anchor, grant.wanted)

    def commit(self, run: Run, i: int, shard: int, tier: int, place: int) -> None:
        """A reserved shard of block `i` is written, whole and hashed, at `place`."""
        staging, cell = self._staged(run, i, shard)
        assert staging.states[cell] == RESERVED
        assert place >= 0
        shards = run.root.space.shard_count
        reserved = self._reserved_tier(staging, cell, shards, tier)
        if reserved != tier:
            at = self._cell_at(cell, shards, reserved)
            staging.places[at : at + PLACE_BYTES] = _NO_CELL
            self.listener.on_slots(run.root.space, reserved, -1)
            self.listener.on_slots(run.root.space, tier, 1)
        at = self._cell_at(cell, shards, tier)
        staging.places[at : at + PLACE_BYTES] = place.to_bytes(PLACE_BYTES, "little")
        staging.states[cell] = COMMITTED

    def commit_span(
        self, run: Run, start: int, shard: int, tier: int, places: Sequence[int]
    ) -> None:
        """`commit` of one shard of consecutive blocks, from `start` on; reserved in `tier` too."""
        count, shards = len(places), run.root.space.shard_count
        if not count:
            return
        staging, first = self._staged(run, start, shard)
        assert start + count <= run.count
        grid = np.frombuffer(staging.places, np.int64).reshape(-1, self.tier_count, shards)
        cells = grid[start - run.ready : start - run.ready + count, tier, shard]
        assert (cells == RESERVED_PLACE).all(), "a block is not RESERVED in this tier"
        cells[:] = places
        assert (cells >= 0).all()
        staging.states[first : first + (count - 1) * shards + 1 : shards] = (
            bytes([COMMITTED]) * count
        )

    def _reserved_tier(self, staging: Staging, cell: int, shards: int, guess: int) -> int:
        tiers: tuple[int, ...] = (guess, *self._tiers)
        for tier in tiers:
            at = self._cell_at(cell, shards, tier)
            if staging.places[at : at + PLACE_BYTES] == _RESERVED_CELL:
                return tier
        raise AssertionError("a RESERVED shard is counted in no tier")

    def _staged(self, run: Run, i: int, shard: int) -> tuple[Staging, int]:
        assert run.staging is not None, "the run has no STAGING blocks"
        assert run.ready <= i < run.count, "the block is not STAGING"
        return run.staging, (i - run.ready) * run.root.space.shard_count + shard

    def unstage(self, run: Run, i: int, shard: int) -> Removed:
        """Gives up a RESERVED or COMMITTED shard of a STAGING block.

        A block left without any shard goes, and everything below it: whatever other writers have
        there goes too, their anchors die. This writer's own anchor moves up to what is left.
        """
        staging, cell = self._staged(run, i, shard)
        assert staging.states[cell] != NONE
        owner = staging.owners[cell]
        staging.states[cell], staging.owners[cell] = NONE, 0
        shards, freed = run.root.space.shard_count, self._removed_nothing()
        for tier in self._tiers:
            at = self._cell_at(cell, shards, tier)
            place = int.from_bytes(staging.places[at : at + PLACE_BYTES], "little", signed=True)
            if place != NO_PLACE:
                staging.places[at : at + PLACE_BYTES] = _NO_CELL
                self.listener.on_slots(run.root.space, tier, -1)
            if place >= 0:
                freed.places[tier].append(place)
        first = (i - run.ready) * shards
        if any(staging.states[first : first + shards]):
            return freed
        above = Span(run, 0, i) if i else self._end_of(run.parent)
        removed = self.remove(run, i)
        if above is not None:
            self._move_up(removed.anchors, owner, above)
        for places, more in zip(removed.places, freed.places, strict=True):
            places.extend(more)
        return removed

    def _end_of(self, run: Run | None) -> Span | None:
        """The whole of a run as a span; None for the head."""
        return Span(run, 0, run.count) if run is not None and run.count else None

    def _move_up(self, dead: list[Anchor], owner: int, above: Span) -> None:
        """Revives the owner's anchors among `dead` at the end of `above`."""
        for anchor in [anchor for anchor in dead if anchor.owner == owner]:
            dead.remove(anchor)
            self.reanchor(anchor, above.run, above.stop)

    def publish(self, run: Run) -> list[Span]:
        """Makes READY what can be, in `run` and then below it; answers those blocks.

        A block becomes READY when all its shards are COMMITTED and its parent is READY.
        """
        made: list[Span] = []
        queue = [run]
        while queue:
            run = queue.pop()
            parent = run.parent
            if not run.alive or run.staging is None or parent is None:
                continue
            if parent.ready < parent.count:
                continue
            span = self._make_ready(run)
            if span is not None:
                made.append(span)
            if run.staging is None:
                queue.extend(child for child in children_of(run) if child.staging is not None)
        for span in made:
            self.listener.on_ready(*span)
            self._tell_leaf(span.run)
        return self._merge_up(made)

    def _make_ready(self, run: Run) -> Span | None:
        staging, shards = run.staging, run.root.space.shard_count
        assert staging is not None
        states = staging.states
        blocks = (len(states) - len(states.lstrip(b"\x02"))) // shards
        if not blocks:
            return None
        held = self._held(run)
        start = run.ready
        if start + blocks == run.count:
            cells = bytes(staging.places)
            run.staging = None
        else:
            cells = bytes(staging.cut(blocks, shards, stride_of(run, self.tier_count)).places)
        run.places += cells
        run.ready += blocks
        run.resident += count_resident(cells, self.tier_count, shards)
        self._lift(run, held)
        return Span(run, start, run.ready)

    def _merge_up(self, made: list[Span]) -> list[Span]:
        """Merges runs of one history; answers the same blocks where they are now."""
        spans: list[Span] = []
        for run, start, stop in made:
            parent = run.parent
            if parent is not None and self._may_merge(run):
                at = parent.count
                self._merge(parent, run)
                run, start, stop = parent, start + at, stop + at
            if spans and spans[-1].run is run and spans[-1].stop == start:
                start = spans.pop().start
            spans.append(Span(run, start, stop))
        return spans


class _Grant:
    """What one `stage` call has answered so far."""

    __slots__ = ("answers", "first_block", "max_blocks", "owner", "shard", "tier", "wanted")

    def __init__(
        self, ready: int, shard: int, owner: int, max_blocks: int, first_block: int, tier: int
    ):
        self.answers = bytearray([StageAnswer.PRESENT]) * ready
        self.shard = shard
        self.owner = owner
        self.max_blocks = max_blocks
        self.first_block = first_block
        self.tier = tier
        self.wanted = 0
