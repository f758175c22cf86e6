"""The index against a dictionary of prefixes: it may forget, it may never lie."""

from __future__ import annotations

from itertools import count
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core.keys import Chain, Segment, chain_keys
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.policies.index import Anchor, PrefixIndex, Run, Span, Walk
from kvstore.policies.residency import Residency

Prefix = tuple[bytes, ...]
Where = tuple[int, Prefix]  # root number, symbols down to the block

SHARDS, TIERS = 2, 2
ROOTS = [bytes([n]) * 32 for n in range(2)]
# Two symbols of one width, one of another, and two too wide to be dictionary keys themselves.
SYMBOLS = [b"aaaa", b"bbbb", b"aaaabbbb", b"w" * 200, b"w" * 199 + b"v"]
symbols = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3, 4]).map(SYMBOLS.__getitem__)
prefixes = st.lists(symbols, min_size=1, max_size=7).map(tuple)
roots = st.sampled_from([0, 0, 0, 1])
numbers = st.integers(0, 1 << 16)


class Block:
    """What the model knows of a block: owner and place of each staged shard, places once READY."""

    def __init__(self) -> None:
        self.ready = False
        self.staged: dict[int, tuple[int, int | None]] = {}
        self.places: dict[tuple[int, int], int] = {}

    @property
    def complete(self) -> bool:
        return len(self.staged) == SHARDS and all(p is not None for _, p in self.staged.values())


def chain_of(prefix: Prefix) -> Chain:
    segments: list[Segment] = []
    for symbol in prefix:
        if segments and segments[-1].width == len(symbol):
            segments[-1] = Segment(segments[-1].symbols + symbol, len(symbol))
        else:
            segments.append(Segment(symbol, len(symbol)))
    return Chain(tuple(segments))


class IndexMachine(RuleBasedStateMachine):
    """Stages, commits, gives up, anchors, moves, removes and evicts; compares after each step."""

    def __init__(self) -> None:
        super().__init__()
        spec = KVSpec(
            model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=8, dtype="int8",
            block_size=1, shard_count=SHARDS,
        )  # fmt: skip
        self.space = Space(0, spec, "t")
        self.residency = Residency("lru")
        self.index = PrefixIndex(TIERS, None, 1 << 30)
        self.residency.attach(self.index)
        self.blocks: dict[Where, Block] = {}
        self.anchors: list[tuple[Anchor, Where]] = []
        self.walks: list[tuple[Walk, int, Prefix]] = []
        self.numbers = count(1)

    # Helpers

    def known(self, root: int, prefix: Prefix) -> int:
        n = 0
        while n < len(prefix) and (root, prefix[: n + 1]) in self.blocks:
            n += 1
        return n

    def ready(self, root: int, prefix: Prefix) -> int:
        n = 0
        while n < len(prefix):
            block = self.blocks.get((root, prefix[: n + 1]))
            if block is None or not block.ready:
                break
            n += 1
        return n

    def finished(self, root: int, prefix: Prefix) -> Walk:
        walk = self.index.walk(self.index.root(self.space, ROOTS[root]), chain_of(prefix))
        while not walk.step(1):
            pass
        return walk

    def locate(self, where: Where) -> tuple[Run, int]:
        walk = self.finished(*where)
        assert walk.known_blocks == len(where[1])
        return walk.run, walk.depth - 1

    def where(self, run: Run, i: int) -> Where:
        prefix: list[bytes] = []
        for above, start, stop in self.index.path_to(run, i + 1, 0):
            prefix += [above.symbol(n) for n in range(start, stop)]
        return ROOTS.index(run.root.digest), tuple(prefix)

    def below(self, where: Where) -> list[Where]:
        """The block and all below it."""
        root, prefix = where
        size = len(prefix)
        return [w for w in self.blocks if w[0] == root and w[1][:size] == prefix]

    def forget(self, where: Where, survivor: int | None = None) -> set[int]:
        """Removes a subtree from the model; answers the places it had in each tier."""
        gone = set(self.below(where))
        places: set[int] = set()
        for w in gone:
            block = self.blocks.pop(w)
            places.update(block.places.values())
            places.update(p for _, p in block.staged.values() if p is not None)
        for n, (anchor, w) in enumerate(self.anchors):
            if w in gone and anchor.owner == survivor and where[1][:-1]:
                self.anchors[n] = (anchor, (where[0], where[1][:-1]))
            elif w in gone:
                assert anchor.run is None
        self.anchors = [(a, w) for a, w in self.anchors if w not in gone]
        return places

    def pick(self, number: int, ready: bool) -> Where | None:
        found = sorted(w for w, block in self.blocks.items() if block.ready == ready)
        return found[number % len(found)] if found else None

    def settle(self) -> None:
        for where in sorted(self.blocks, key=lambda w: len(w[1])):
            block = self.blocks[where]
            parent = self.blocks.get((where[0], where[1][:-1]))
            if not block.ready and block.complete and (parent is None or parent.ready):
                block.ready = True
                block.places = {(0, s): p for s, (_, p) in block.staged.items() if p is not None}
                block.staged = {}

    # Rules

    @initialize(root=roots, prefix=prefixes)
    def start(self, root: int, prefix: Prefix) -> None:
        self.put(root, prefix)

    @rule(root=roots, prefix=prefixes)
    def put(self, root: int, prefix: Prefix) -> None:
        for shard in range(SHARDS):
            self.stage(root, prefix, shard, 99, 0)
        for n in range(len(prefix)):
            for shard in range(SHARDS):
                self.commit((root, prefix[: n + 1]), shard)

    @rule(number=numbers, tail=prefixes)
    def extend(self, number: int, tail: Prefix) -> None:
        where = self.pick(number, ready=True)
        if where is not None:
            self.put(where[0], where[1] + tail[:2])

    @rule(root=roots, prefix=prefixes, shard=st.integers(0, SHARDS - 1), limit=st.integers(0, 8),
          first=st.integers(0, 3))  # fmt: skip
    def stage(self, root: int, prefix: Prefix, shard: int, limit: int, first: int) -> None:
        owner = next(self.numbers)
        known = self.known(root, prefix)
        walk = self.finished(root, prefix)
        staged = self.index.stage(walk, walk.chain, shard, owner, limit, first)
        wanted: list[int] = []
        expected: list[int] = []
        for n in range(len(prefix)):
            block = self.blocks.get((root, prefix[: n + 1]))
            if block is not None and block.ready:
                expected.append(1)
            elif block is not None and shard in block.staged:
                expected.append(2)
            elif n < known and n < first:
                expected.append(0)
            elif (n >= known and first > known) or len(wanted) == limit:
                break
            else:
                expected.append(3)
                wanted.append(n)
        assert list(staged.answers) == expected
        assert staged.wanted == len(wanted)
        for n in wanted:
            block = self.blocks.setdefault((root, prefix[: n + 1]), Block())
            block.staged[shard] = (owner, None)
        if staged.anchor is not None:
            assert staged.anchor.block_count == len(expected)
            self.anchors.append((staged.anchor, (root, prefix[: len(expected)])))

    @rule(number=numbers, shard=st.integers(0, SHARDS - 1))
    def commit_one(self, number: int, shard: int) -> None:
        where = self.pick(number, ready=False)
        if where is not None:
            self.commit(where, shard)

    def commit(self, where: Where, shard: int) -> None:
        block = self.blocks.get(where)
        if block is None or block.staged.get(shard, (0, 0))[1] is not None:
            return
        place = next(self.numbers)
        run, i = self.locate(where)
        self.index.commit(run, i, shard, 0, place)
        block.staged[shard] = (block.staged[shard][0], place)
        before = {w for w, b in self.blocks.items() if b.ready}
        spans = self.index.publish(run)
        self.settle()
        made = [self.where(run, i) for run, start, stop in spans for i in range(start, stop)]
        assert len(made) == len(set(made))
        assert set(made) == {w for w, b in self.blocks.items() if b.ready} - before

    @rule(number=numbers, shard=st.integers(0, SHARDS - 1))
    def unstage(self, number: int, shard: int) -> None:
        where = self.pick(number, ready=False)
        if where is None or shard not in self.blocks[where].staged:
            return
        block = self.blocks[where]
        run, i = self.locate(where)
        removed = self.index.unstage(run, i, shard)
        owner, place = block.staged.pop(shard)
        places = set() if place is None else {place}
        if not block.staged:
            places |= self.forget(where, owner)
        assert set(removed.places[0]) == places
        assert not removed.spans

    @rule(root=roots, prefix=prefixes)
    def access(self, root: int, prefix: Prefix) -> None:
        path = self.finished(root, prefix).path
        assert self.residency.access(path) == path

    @rule(number=numbers)
    def anchor(self, number: int) -> None:
        where = self.pick(number, ready=True)
        if where is not None:
            run, i = self.locate(where)
            self.anchors.append((self.index.anchor(run, i + 1, next(self.numbers)), where))

    @rule(number=numbers)
    def unanchor(self, number: int) -> None:
        if self.anchors:
            anchor, _ = self.anchors.pop(number % len(self.anchors))
            self.index.unanchor(anchor)

    @rule(number=numbers)
    def copy_down(self, number: int) -> None:
        where = self.pick(number, ready=True)
        if where is not None:
            run, i = self.locate(where)
            for shard in range(SHARDS):
                place = next(self.numbers)
                self.index.set_place(run, i, shard, 1, place)
                self.blocks[where].places[1, shard] = place

    @rule(number=numbers, blocks=st.integers(1, 4), tier=st.integers(0, TIERS - 1))
    def copy_many(self, number: int, blocks: int, tier: int) -> None:
        where = self.pick(number, ready=True)
        if where is None:
            return
        run, i = self.locate(where)
        stop = min(run.ready, i + blocks)
        chain = [self.where(run, n) for n in range(i, stop)]
        places = [[next(self.numbers) for _ in range(SHARDS)] for _ in chain]
        self.index.set_places(run, i, tier, np.array(places, np.int64))
        for w, row in zip(chain, places, strict=True):
            self.blocks[w].places.update({(tier, s): place for s, place in enumerate(row)})
        grid = self.index.places_grid(run, i, stop)
        assert grid[:, tier].tolist() == places

    @rule(number=numbers, blocks=st.integers(1, 4), tier=st.integers(0, TIERS - 1))
    def clear_many(self, number: int, blocks: int, tier: int) -> None:
        where = self.pick(number, ready=True)
        if where is None:
            return
        run, i = self.locate(where)
        stop = i
        while stop < min(run.ready, i + blocks):
            if not self.has_other(self.where(run, stop), tier):
                break
            stop += 1
        victims = [self.where(run, n) for n in range(i, stop)]
        freed = [self.blocks[w].places.pop((tier, s), -1) for w in victims for s in range(SHARDS)]
        assert self.index.clear_places(run, i, stop, tier) == [p for p in freed if p >= 0]

    def has_other(self, where: Where, tier: int) -> bool:
        return any(t != tier for t, _ in self.blocks[where].places)

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        where = self.pick(number, ready=number % 4 > 0)
        if where is None:
            return
        ready = {w for w in self.below(where) if self.blocks[w].ready}
        run, i = self.locate(where)
        removed = self.index.remove(run, i)
        made = [self.where(run, i) for run, a, b in removed.spans for i in range(a, b)]
        assert set(made) == ready
        for span in removed.spans:
            self.check_keys(span)
        assert {p for places in removed.places for p in places} == self.forget(where)

    @rule(blocks=st.integers(1, 4), tier=st.integers(0, TIERS - 1))
    def evict(self, blocks: int, tier: int) -> None:
        size = blocks * self.space.slot_bytes * SHARDS
        for drop in self.residency.make_room(tier, "", "t", size):
            self.drop(drop.run, drop.keep, tier)

    def drop(self, run: Run, keep: int, tier: int) -> None:
        victims = [self.where(run, i) for i in range(keep, run.ready)]
        lost = next((w for w in victims if all(t == tier for t, _ in self.blocks[w].places)), None)
        gone = set(self.below(lost)) if lost else set()
        for where in victims:
            # I6 and closure: nothing leased, nothing that another copy in the tier hangs on.
            held = {w for _, w in self.anchors}
            assert not held & set(self.below(where))
            in_tier = {w for w in self.below(where) if (tier, 0) in self.blocks[w].places}
            assert in_tier <= set(victims)
        assert all(self.blocks[w].ready for w in gone)
        removed = self.index.drop(run, keep, tier)
        freed = {
            place
            for w in victims
            if w not in gone
            for (t, _), place in self.blocks[w].places.items()
            if t == tier
        }
        for where in victims:
            for shard in range(SHARDS):
                if where not in gone:
                    self.blocks[where].places.pop((tier, shard), None)
        if lost:
            freed |= self.forget(lost)
        assert {p for places in removed.places for p in places} == freed

    @rule(root=roots, prefix=prefixes)
    def begin_walk(self, root: int, prefix: Prefix) -> None:
        walk = self.index.walk(self.index.root(self.space, ROOTS[root]), chain_of(prefix))
        walk.step(1)
        self.walks.append((walk, root, prefix))

    @precondition(lambda self: self.walks)
    @rule(number=numbers)
    def go_on_walking(self, number: int) -> None:
        walk, root, prefix = self.walks.pop(number % len(self.walks))
        if not walk.step(1) and number % 2:
            self.walks.append((walk, root, prefix))
            return
        while not walk.step(1):
            pass
        self.compare(walk, root, prefix)

    @rule(root=roots, prefix=prefixes)
    def lookup(self, root: int, prefix: Prefix) -> None:
        self.compare(self.finished(root, prefix), root, prefix)

    def compare(self, walk: Walk, root: int, prefix: Prefix) -> None:
        """I1: a walk answers with the request's own blocks, and all of them."""
        known, ready = self.known(root, prefix), self.ready(root, prefix)
        assert (walk.known_blocks, walk.ready_blocks) == (known, ready)
        path = [(run, i) for run, start, stop in walk.path for i in range(start, stop)]
        assert [run.symbol(i) for run, i in path] == list(prefix[:known])
        for tier in range(TIERS):
            for shard in range(SHARDS):
                places = self.index.places(walk.path, tier, shard).tolist()[:ready]
                blocks = [self.blocks[root, prefix[: n + 1]] for n in range(ready)]
                assert places == [b.places.get((tier, shard), -1) for b in blocks]

    @invariant()
    def agrees(self) -> None:
        """Everything that is there is in the model and the other way round."""
        self.index.check_integrity()
        self.residency.check_integrity()
        found: dict[Where, Any] = {}
        for run in self.index.runs():
            for i in range(run.count):
                found[self.where(run, i)] = i < run.ready
        assert found == {w: block.ready for w, block in self.blocks.items()}
        for anchor, where in self.anchors:
            assert anchor.run is not None
            assert self.where(anchor.run, anchor.depth - 1) == where

    def check_keys(self, span: Span) -> None:
        root, prefix = self.where(span.run, span.stop - 1)
        expected = chain_keys(ROOTS[root][:16], prefix)
        assert self.index.keys(span) == expected[len(prefix) - (span.stop - span.start) :]


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.__doc__ = "I1, I3, I6, closure: the index never says more than was put."
