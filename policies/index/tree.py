"""The tree's structure: roots, links, splits, merges, removals and anchors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.keys import Chain
from kvstore.core.space import Space
from kvstore.policies.index.cells import count_resident, place_bytes, stride_of
from kvstore.policies.index.counters import Counters
from kvstore.policies.index.listener import IndexListener
from kvstore.policies.index.run import (
    MAX_RUN_BLOCKS,
    Anchor,
    Mark,
    Removed,
    Root,
    Run,
    Span,
    add_child,
    children_of,
    drop_child,
)
from kvstore.policies.index.walk import Walk


class Tree(Counters):
    """Runs of every root, their places by tier, and what protects them.

    `changes` counts what may lead a walk astray: splits, merges, removals, new roots.
    """

    def __init__(self, tier_count: int, listener: IndexListener | None = None):
        super().__init__(tier_count, listener)
        self.changes = 0
        self.block_count = 0
        self.run_count = 0
        self.root_count = 0
        self._roots: dict[bytes, dict[bytes, Root]] = {}
        self._blocks: dict[bytes, int] = {}

    def blocks_of(self, space: Space) -> int:
        """How many blocks of a space there are, each counted once whatever tiers it is in."""
        return self._blocks.get(space.id, 0)

    def _count(self, space: Space, blocks: int) -> None:
        self.block_count += blocks
        left = self._blocks.get(space.id, 0) + blocks
        if left:
            self._blocks[space.id] = left
        else:
            self._blocks.pop(space.id, None)

    # Roots

    def root(self, space: Space, digest: bytes) -> Root:
        """The root, a new one when it has no blocks; counted once it has some."""
        return self.find_root(space, digest) or Root(space, digest)

    def find_root(self, space: Space, digest: bytes) -> Root | None:
        roots = self._roots.get(space.id)
        return None if roots is None else roots.get(digest)

    def roots(self, space: Space | None = None) -> Iterator[Root]:
        """Roots that have blocks: all, or those of one space."""
        groups = list(self._roots.values()) if space is None else [self._roots.get(space.id, {})]
        for group in groups:
            yield from list(group.values())

    def runs(self, top: Run | None = None) -> Iterator[Run]:
        """Every run, or those from `top` down, parents first; not while the tree changes."""
        stack = [top] if top is not None else [root.head for root in self.roots()]
        while stack:
            run = stack.pop()
            if run.count:
                yield run
            stack.extend(children_of(run))

    # Finding

    def walk(self, root: Root, chain: Chain) -> Walk:
        """A lookup of `chain`: step it until it is finished."""
        return Walk(self, root, chain)

    def path_to(self, run: Run, depth: int, first_block: int) -> list[Span]:
        """Spans from position `first_block` down to block `depth` (exclusive) of `run`."""
        spans = []
        here: Run | None = run
        while here is not None and here.first + depth > first_block:
            spans.append(Span(here, max(0, first_block - here.first), depth))
            here = here.parent
            depth = here.count if here is not None else 0
        spans.reverse()
        return spans

    def path(self, anchor: Anchor, first_block: int = 0) -> list[Span]:
        """Spans from position `first_block` down to the anchor's block; none once it is gone."""
        run = anchor.run
        return [] if run is None else self.path_to(run, anchor.depth, first_block)

    # Links

    def _link(self, parent: Run, child: Run) -> None:
        """Puts a new run under `parent`."""
        if parent.parent is None and parent.children is None:
            self._file_root(parent.root)
        add_child(parent, child)
        self.run_count += 1
        self._count(child.root.space, child.count)
        self._lift(child, 0)

    def adopt(self, space: Space, runs: list[Run]) -> None:
        """Links the runs of empty roots, parents first; all their blocks are READY."""
        for run in runs:
            assert run.parent is not None
            if run.parent.children is None and run.parent.parent is None:
                self._file_root(run.root)
            add_child(run.parent, run)
        for run in reversed(runs):
            assert run.parent is not None
            run.parent.below += self._held_counters(run)
        self.run_count += len(runs)
        self._count(space, sum(run.count for run in runs))
        for tier in self._tiers:
            slots = sum(run.resident_in(tier) for run in runs)
            if slots:
                self.listener.on_slots(space, tier, slots)
        self.listener.on_adopt(runs)

    def _unlink(self, run: Run) -> None:
        """Takes a run, with all below, off its parent; it keeps pointing at the parent."""
        parent = run.parent
        assert parent is not None
        drop_child(parent, run)
        counters = self._held_counters(run)
        if counters:
            self._release(parent, counters)
        if parent.parent is None and parent.children is None:
            self._forget_root(parent.root)

    def _release(self, parent: Run, counters: int) -> None:
        parent_held = self._held(parent)
        parent.below -= counters
        self._lift(parent, parent_held)
        self._tell_leaf(parent)
        if counters >> self._busy_shift:
            self.listener.on_unanchor(parent)

    def _file_root(self, root: Root) -> None:
        """Counts a root that gets its first block."""
        group = self._roots.setdefault(root.space.id, {})
        assert root.digest not in group
        group[root.digest] = root
        self.root_count += 1
        self.changes += 1

    def _forget_root(self, root: Root) -> None:
        group = self._roots[root.space.id]
        del group[root.digest]
        self.root_count -= 1
        if not group:
            del self._roots[root.space.id]

    def split(self, run: Run, at: int) -> Run:
        """Cuts `run` before block `at`; answers the new run that took the end over."""
        assert 0 < at < run.count
        stride, shards = stride_of(run, self.tier_count), run.root.space.shard_count
        tail = Run(run.root, run, run.first + at, run.symbols[at * run.width :], run.width)
        tail.hits, tail.touched, tail.policy = run.hits, run.touched, run.policy
        self._hand_children(run, tail)
        tail.below, was_resident = run.below, run.resident
        if at < run.ready:
            tail.places = run.places[at * stride :]
            tail.ready = run.ready - at
            tail.resident = count_resident(tail.places, self.tier_count, shards)
            tail.staging, run.staging = run.staging, None
            run.places = run.places[: at * stride]
        elif run.staging is not None:
            tail.staging = run.staging
            front = run.staging.cut(at - run.ready, shards, stride)
            run.staging = front if at > run.ready else None
        run.symbols = run.symbols[: at * run.width]
        run.count, run.ready = at, min(run.ready, at)
        run.resident = was_resident - tail.resident
        self._move_marks(run, tail, at)
        run.below = self._held_counters(tail)
        run.children = tail
        self.run_count += 1
        self.changes += 1
        self.listener.on_split(run, tail)
        self._tell_leaf(tail)
        return tail

    def _merge(self, run: Run, tail: Run) -> None:
        """Appends the only child `tail` of `run`, both all READY, to it."""
        at = run.count
        run.symbols += tail.symbols
        run.places += tail.places
        run.count = run.ready = at + tail.count
        run.resident += tail.resident
        run.below = tail.below
        self._hand_children(tail, run)
        self._move_marks(tail, run, -at)
        tail.ready = -1
        self.run_count -= 1
        self.changes += 1
        self.listener.on_merge(run, tail)
        self._tell_leaf(run)

    def _may_merge(self, run: Run) -> bool:
        """Whether `run` and its parent are one history: nobody came to one and not the other."""
        parent = run.parent
        return (
            parent is not None
            and parent.children is run
            and parent.count > 0
            and run.staging is None
            and parent.staging is None
            and not run.hits
            and not parent.hits
            and parent.width == run.width
            and parent.count + run.count <= MAX_RUN_BLOCKS
        )

    def _hand_children(self, giver: Run, taker: Run) -> None:
        taker.children, giver.children = giver.children, None
        for child in children_of(taker):
            child.parent = taker

    def _move_marks(self, source: Run, target: Run, shift: int) -> None:
        """Moves the marks deeper than `shift` from `source` to `target`, that much less deep."""
        if not source.marks:
            return
        moved = [mark for depth, mark in source.marks.items() if depth > shift]
        if not moved:
            return
        if target.marks is None:
            target.marks = {}
        for mark in moved:
            del source.marks[mark.depth]
            mark.run, mark.depth = target, mark.depth - shift
            target.marks[mark.depth] = mark
        if not source.marks:
            source.marks = None

    # Anchors

    def anchor(self, run: Run, depth: int, owner: int) -> Anchor:
        """Protects the first `depth` blocks of `run`, and all above, until `unanchor`."""
        anchor = Anchor(self._mark(run, depth), owner)
        anchor._mark.anchors.add(anchor)
        return anchor

    def reanchor(self, anchor: Anchor, run: Run, depth: int) -> None:
        """Puts an anchor that is gone on another block."""
        assert anchor.run is None
        anchor._mark = self._mark(run, depth)
        anchor._mark.anchors.add(anchor)

    def _mark(self, run: Run, depth: int) -> Mark:
        assert run.alive
        assert 0 < depth <= run.count
        marks = run.marks
        if marks is None:
            marks = run.marks = {}
        mark = marks.get(depth)
        if mark is None:
            mark = marks[depth] = Mark(run, depth)
            if len(marks) == 1:
                self._lift_anchored(run, 1)
        return mark

    def unanchor(self, anchor: Anchor) -> None:
        """Lets go; nothing happens when the anchor is gone already."""
        mark = anchor._mark
        mark.anchors.discard(anchor)
        run = mark.run
        if run is None or mark.anchors:
            return
        marks = run.marks
        # An anchor let go twice must not take away the mark that came after its own.
        if marks is None or marks.get(mark.depth) is not mark:
            return
        del marks[mark.depth]
        if not marks:
            run.marks = None
            self._lift_anchored(run, -1)
        self.listener.on_unanchor(run)

    def anchored_below(self, run: Run) -> bool:
        """Whether anything below `run` is anchored or STAGING: its blocks are held then, all."""
        if self.tier_count > 1:
            return run.below >> self._busy_shift > 0
        return any(r.marks or r.staging is not None for r in self.runs(run) if r is not run)

    # Removal

    def remove(self, run: Run, keep: int = 0) -> Removed:
        """Takes away blocks [keep, count) of `run` and everything below; kills their anchors."""
        removed = self._removed_nothing()
        if not run.alive or keep >= run.count:
            return removed
        if keep:
            run = self.split(run, keep)
        runs = [run] if run.children is None else list(self.runs(run))
        for gone in reversed(runs):
            self.listener.on_remove(gone)
        self._unlink(run)
        for gone in runs:
            self._bury(gone, removed)
        self.changes += 1
        return removed

    def _removed_nothing(self) -> Removed:
        return Removed([[] for _ in self._tiers], [], [], [])

    def remove_root(self, root: Root) -> Removed:
        """Takes away all blocks of a root."""
        removed = self._removed_nothing()
        for child in list(children_of(root.head)):
            removed.add(self.remove(child))
        return removed

    def remove_space(self, space: Space) -> Removed:
        """Takes away all blocks of a space."""
        removed = self._removed_nothing()
        for root in self.roots(space):
            removed.add(self.remove_root(root))
        return removed

    def _bury(self, run: Run, removed: Removed) -> None:
        space, ready = run.root.space, run.ready
        blob = run.places
        if run.staging is not None:
            blob = place_bytes(run, 0, run.count, stride_of(run, self.tier_count))
        cells = np.frombuffer(blob, np.int64).reshape(-1, self.tier_count, space.shard_count)
        if ready:
            removed.spans.append(Span(run, 0, ready))
            removed.grids.append(cells if run.staging is None else cells[:ready])
        if self.tier_count == 1 and run.staging is None:
            # In the only tier there is, every READY block has its places.
            removed.places[0].extend(memoryview(blob).cast("q"))
            self.listener.on_slots(space, 0, -cells.size)
        else:
            self._bury_places(space, cells, removed)
        if run.marks is not None:
            for mark in run.marks.values():
                removed.anchors.extend(mark.anchors)
                mark.run = None
        self._count(space, -run.count)
        self.run_count -= 1
        run.marks = run.staging = run.children = None
        run.places = b""
        run.ready = -1

    def _bury_places(self, space: Space, cells: np.ndarray, removed: Removed) -> None:
        for tier in self._tiers:
            column = cells[:, tier, :].ravel()
            slots = int((column != NO_PLACE).sum())
            if slots:
                removed.places[tier].extend(column[column >= 0].tolist())
                self.listener.on_slots(space, tier, -slots)
