"""Integrity: recounts everything the index keeps count of; for tests and `verify`."""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvstore.policies.index.cells import count_resident, place_bytes, stride_of
from kvstore.policies.index.run import (
    COMMITTED,
    MAX_RUN_BLOCKS,
    NONE,
    RESERVED,
    RESERVED_PLACE,
    Run,
    children_of,
    find_child,
)
from kvstore.policies.index.tree import Tree


def check_tree(tree: Tree) -> None:
    """Raises AssertionError where the tree contradicts itself."""
    blocks = runs = roots = 0
    spaces: Counter[bytes] = Counter()
    for root in tree.roots():
        roots += 1
        assert root.head.children is not None, "an empty root is filed"
        assert tree.find_root(root.space, root.digest) is root
        _check_below(tree, root.head)
        for run in tree.runs(root.head):
            assert run.root is root
            _check_run(tree, run)
            _check_below(tree, run)
            blocks += run.count
            spaces[root.space.id] += run.count
            runs += 1
    assert (blocks, runs, roots) == (tree.block_count, tree.run_count, tree.root_count)
    assert all(tree.blocks_of(root.space) == spaces[root.space.id] for root in tree.roots())
    assert sum(spaces.values()) == sum(tree._blocks.values())


def _check_run(tree: Tree, run: Run) -> None:
    parent = run.parent
    assert parent is not None
    assert run.alive
    assert 0 < run.count <= MAX_RUN_BLOCKS
    assert len(run.symbols) == run.count * run.width
    assert run.first == parent.first + parent.count
    assert run.ready <= run.count
    assert not run.ready or parent.ready == parent.count, "a READY block under one that is not"
    assert (run.staging is None) == (run.ready == run.count)
    shards, stride = run.root.space.shard_count, stride_of(run, tree.tier_count)
    assert len(run.places) == run.ready * stride
    assert run.resident == count_resident(run.places, tree.tier_count, shards)
    _check_cells(tree, run, stride, shards)
    for depth, mark in (run.marks or {}).items():
        assert mark.run is run
        assert mark.depth == depth
        assert 0 < depth <= run.count
        assert mark.anchors


def _check_cells(tree: Tree, run: Run, stride: int, shards: int) -> None:
    cells = np.frombuffer(place_bytes(run, 0, run.count, stride), np.int64)
    grid = cells.reshape(-1, tree.tier_count, shards)
    whole = np.asarray(grid[: run.ready] >= 0).all(axis=2)
    assert np.any(whole, axis=1).all(), "READY without a copy"
    assert (grid[: run.ready] >= RESERVED_PLACE).all()
    if run.staging is None:
        return
    states = np.frombuffer(run.staging.states, np.uint8).reshape(-1, shards)
    staged = grid[run.ready :]
    assert len(states) == len(staged)
    assert ((staged >= 0).sum(axis=1) == (states == COMMITTED)).all()
    assert ((staged == RESERVED_PLACE).sum(axis=1) == (states == RESERVED)).all()
    assert (states != NONE).any(axis=1).all(), "a STAGING block that nobody writes"


def _check_below(tree: Tree, run: Run) -> None:
    tiers, above_tiers = range(tree.tier_count), tree.tier_count
    below = [0] * tree.tier_count
    busy = 0
    for child in children_of(run):
        assert child.parent is run
        assert run.children is not None
        assert find_child(run.children, child.width, child.symbol(0)) is child
        for tier in tiers:
            staged = child.staging is not None and child.staging.tier == tier
            below[tier] += staged or bool(child.resident_in(tier) or child.below_in(tier))
        busy += bool(child.marks or child.staging is not None or child.below_in(above_tiers))
    assert not isinstance(run.children, tuple) or len(run.children) > 1
    assert below == [run.below_in(tier) for tier in tiers]
    assert run.below_in(above_tiers) == (busy if tree.tier_count > 1 else 0)
