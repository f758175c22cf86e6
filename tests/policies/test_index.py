"""Single promises of the prefix index."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.core.keys import Chain, Segment, chain_keys, token_chain
from kvstore.core.space import Space
from kvstore.policies.index import MAX_RUN_BLOCKS, StageAnswer
from kvstore.policies.index import run as run_module

ROOT, OTHER_ROOT = bytes(32), b"r" * 32


def tokens(blocks: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(16 * blocks)
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def test_a_hit_is_exact(world: Any, new_space: Callable[..., Space]) -> None:
    """I1: space, root and every symbol of a hit are the request's own."""
    space, other = new_space(0), new_space(1)
    chain = tokens(40, 1)
    world.put(space, chain)
    assert world.look(space, chain) == 40
    assert world.look(other, chain) == 0
    assert world.look(space, chain, root=OTHER_ROOT) == 0
    near_root = bytes(31) + b"\1"
    assert world.look(space, chain, root=near_root) == 0
    for wrong in range(40):
        changed = list(chain)
        changed[wrong] = chain[wrong][:-1] + bytes([chain[wrong][-1] ^ 1])
        assert world.look(space, changed) == wrong
    world.check()


def test_symbols_of_another_width_are_other_symbols(
    world: Any, new_space: Callable[..., Space]
) -> None:
    """I1, I2: the same bytes cut into other symbols are another prefix."""
    space = new_space()
    data = bytes(64)
    world.put(space, Chain((Segment(data, 16),)))
    assert world.look(space, Chain((Segment(data, 32),))) == 0
    world.put(space, Chain((Segment(data, 32),)))
    assert world.look(space, Chain((Segment(data, 32),))) == 2
    assert world.look(space, Chain((Segment(data, 16),))) == 4
    world.check()


def test_wide_symbols_of_one_hash_are_told_apart(
    world: Any, new_space: Callable[..., Space], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I1: children filed by a hash of their first symbol are compared in full."""
    monkeypatch.setattr(run_module, "hash", lambda symbol: 7, raising=False)
    space = new_space()
    chains = [[bytes([n]) * 300, bytes([n]) * 300] for n in range(6)]
    for chain in chains:
        world.put(space, chain)
    assert [world.look(space, chain) for chain in chains] == [2] * 6
    assert world.look(space, [b"x" * 300]) == 0
    world.check()
    for chain in chains:
        walk = world.walk(space, Chain((Segment(b"".join(chain), 300),)))
        world.index.remove(walk.path[0].run)
        world.check()
        assert world.look(space, chain) == 0


def test_blocks_are_invisible_until_all_shards_and_the_parent_are_there(
    world: Any, new_space: Callable[..., Space], new_chain: Callable[..., Chain]
) -> None:
    """I3: READY needs every shard committed and a READY parent, whatever the order."""
    space = new_space(shards=2)
    chain = new_chain(tokens(3, 1))
    first, second = world.stage(space, chain, 0), world.stage(space, chain, 1)
    assert list(first.answers) == list(second.answers) == [StageAnswer.WANTED] * 3
    run = first.anchor.run
    for i, shard in ((2, 0), (2, 1), (1, 1), (0, 0)):
        world.index.commit(run, i, shard, 0, i * 2 + shard)
        assert world.index.publish(run) == []
        assert world.walk(space, chain).ready_blocks == 0
    world.index.commit(run, 0, 1, 0, 1)
    assert [(s.start, s.stop) for s in world.index.publish(run)] == [(0, 1)]
    world.index.commit(run, 1, 0, 0, 2)
    assert [(s.start, s.stop) for s in world.index.publish(run)] == [(1, 3)]
    assert world.index.places(world.walk(space, chain).path, 0, 1).tolist() == [1, 3, 5]
    world.check()


def test_publishing_a_parent_publishes_what_waited_below(
    world: Any, new_space: Callable[..., Space], new_chain: Callable[..., Chain]
) -> None:
    """I3: children that were complete before their parent follow it, parents first."""
    space = new_space()
    stem, left, right = tokens(4, 1), tokens(3, 2), tokens(2, 3)
    parent = world.stage(space, new_chain(stem))
    children = [world.stage(space, new_chain(stem + tail)) for tail in (left, right)]
    for child in children:
        assert list(child.answers[:4]) == [StageAnswer.PENDING] * 4
        assert world.commit(child) == []
    spans = world.commit(parent)
    assert sum(stop - start for _, start, stop in spans) == 9
    assert spans[0].run.first == 0
    assert world.look(space, stem + left) == 7
    world.check()


def test_a_writer_that_gives_up_leaves_nothing_visible(
    world: Any, new_space: Callable[..., Space], new_chain: Callable[..., Chain]
) -> None:
    """I4: unstaging from the end takes the blocks away and keeps what is left anchored."""
    space = new_space()
    chain = new_chain(tokens(6, 1))
    staged = world.stage(space, chain)
    for position in (5, 4, 3):
        run, start, _ = world.index.path(staged.anchor, position)[0]
        world.index.unstage(run, start, 0)
    assert staged.anchor.block_count == 3
    assert world.index.block_count == 3
    assert world.commit(staged)
    assert world.look(space, chain) == 3
    world.check()


def test_runs_of_one_history_are_merged_up_to_the_cap(
    world: Any, new_space: Callable[..., Space]
) -> None:
    """A chain that grows block by block, never looked up, stays a few long runs."""
    space = new_space()
    chain = tokens(1100, 1)
    for stop in range(100, 1101, 100):
        world.put(space, chain[:stop])
    assert [run.count for run in world.index.runs()] == [1000, 100]
    assert all(run.count <= MAX_RUN_BLOCKS for run in world.index.runs())
    world.look(space, chain)
    world.put(space, chain + tokens(1, 2))
    assert world.index.run_count == 3, "a run that was used is another history than what follows"
    world.check()


def test_anchors_move_with_splits_and_merges_and_die_with_their_block(
    world: Any, new_space: Callable[..., Space]
) -> None:
    """I6: an anchor keeps covering the same blocks until they are removed."""
    space, index = new_space(), world.index
    chain = tokens(8, 1)
    [span] = world.put(space, chain)
    shallow, deep = index.anchor(span.run, 2, 1), index.anchor(span.run, 7, 2)
    tail = index.split(span.run, 4)
    assert (shallow.run, shallow.depth) == (span.run, 2)
    assert (deep.run, deep.depth) == (tail, 3)
    assert deep.block_count == 7
    world.put(space, chain + tokens(3, 9))
    assert deep.block_count == 7
    removed = index.remove(tail, 1)
    assert removed.anchors == [deep]
    assert deep.run is None
    index.unanchor(deep)
    assert shallow.block_count == 2
    world.check()


def test_a_hundred_thousand_anchors_on_one_run(world: Any, new_space: Callable[..., Space]) -> None:
    """Leases on one hot prefix cost nothing to each other, and move as one when it is split."""
    space, index = new_space(), world.index
    [span] = world.put(space, tokens(100, 1))
    anchors = [index.anchor(span.run, 1 + n % 100, n) for n in range(100_000)]
    tail = index.split(span.run, 50)
    assert sum(anchor.run is tail for anchor in anchors) == 50_000
    assert tail.marks is not None
    assert len(tail.marks) == 50
    for anchor in anchors:
        index.unanchor(anchor)
    assert tail.marks is None
    assert span.run.marks is None
    world.check()


def test_what_is_anchored_below_is_known_without_a_search(
    new_world: type[Any], new_space: Callable[..., Space], new_chain: Callable[..., Chain]
) -> None:
    """I6: a run over thousands of others knows at once whether one is leased or being written."""
    world, space, stem = new_world(tiers=2), new_space(), tokens(3, 1)
    index = world.index
    [top] = world.put(space, stem)
    for n in range(2000):
        world.put(space, stem + tokens(2, n + 9))
    deepest = list(index.runs(top.run))[-1]
    assert not index.anchored_below(top.run)
    anchors = [index.anchor(deepest, depth, 1) for depth in (1, 2, 2)]
    assert not index.anchored_below(deepest)
    index.split(deepest, 1)
    assert index.anchored_below(deepest)
    for anchor in anchors:
        assert index.anchored_below(top.run)
        world.check()
        index.unanchor(anchor)
    assert not index.anchored_below(top.run)
    staged = world.stage(space, new_chain(stem + tokens(1, 5)))
    assert index.anchored_below(top.run)
    world.commit(staged)
    assert not index.anchored_below(top.run)
    lost = index.anchor(deepest, 1, 1)
    index.remove(deepest)
    assert lost.run is None
    assert not index.anchored_below(top.run)
    world.check()


def test_deep_chains_need_no_recursion(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """A million tokens: put, found, keyed, evicted from the end and removed, one run or many."""
    world, space = new_world(), new_space()
    chain = token_chain(random.Random(1).randbytes(62_500 * 64), 16)
    world.put(space, chain)
    assert world.walk(space, chain).ready_blocks == 62_500
    assert world.index.run_count == 62
    last = world.walk(space, chain).path[-1]
    symbols = [chain.segments[0].symbols[i : i + 64] for i in range(0, 62_500 * 64, 64)]
    assert world.index.keys(last)[-1] == chain_keys(ROOT[:16], symbols)[-1]
    assert world.free(space, 30_000) == 30_000
    assert world.walk(space, chain).ready_blocks == 32_500
    world.check()
    assert len(world.index.remove_space(space).places[0]) == 32_500
    assert (world.index.block_count, world.index.run_count, world.index.root_count) == (0, 0, 0)
    world.check()


def test_a_chain_of_many_short_runs_needs_no_recursion(
    world: Any, new_space: Callable[..., Space]
) -> None:
    """20,000 runs of one block: nothing recurses, whatever the depth of the chain."""
    space = new_space()
    chain = Chain(
        tuple(Segment(bytes(16 if n % 2 else 12), 16 if n % 2 else 12) for n in range(20_000))
    )
    world.put(space, chain)
    assert world.index.run_count == 20_000
    assert world.look(space, chain) == 20_000
    assert world.free(space, 500) == 500
    world.check()
    world.index.remove_space(space)
    world.check()


def test_a_sliced_walk_stays_right_while_the_tree_changes(
    world: Any, new_space: Callable[..., Space], new_chain: Callable[..., Chain]
) -> None:
    """I1: runs split, merge, go and come back between two steps; the answer is the tree's."""
    space, index = new_space(), world.index
    chain = tokens(600, 1)
    rng = random.Random(3)
    for stop in range(20, 601, 20):
        world.put(space, chain[:stop])
        if stop % 60 == 0:
            world.put(space, [*chain[: stop - 7], *tokens(2, stop)])
    for _ in range(30):
        walk = index.walk(index.root(space, ROOT), new_chain(chain))
        while not walk.step(40):
            runs = list(index.runs())
            victim = rng.choice(runs)
            if rng.random() < 0.2:
                index.remove(victim, rng.randrange(victim.count))
            elif victim.count > 1:
                index.split(victim, rng.randrange(1, victim.count))
            world.put(space, chain[: rng.randrange(1, 601)])
        fresh = world.walk(space, new_chain(chain))
        assert (walk.ready_blocks, walk.path) == (fresh.ready_blocks, fresh.path)
        world.check()


def test_max_blocks_holds_roots_and_staging_included(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """I16: the index never holds more than `max_blocks`, and says so by a shorter grant."""
    world, space = new_world(max_blocks=50), new_space()
    for n in range(20):
        world.put(space, tokens(7, n), root=bytes([n]) * 32)
    assert world.index.block_count + world.index.root_count <= 50
    assert world.index.free_blocks == 50 - world.index.block_count - world.index.root_count
    assert world.index.free_blocks <= 1
    world.check()


def test_lookups_of_unknown_roots_leave_nothing_behind(
    world: Any, new_space: Callable[..., Space]
) -> None:
    """I16: a root costs memory only while it has blocks."""
    space = new_space()
    for n in range(100):
        assert world.look(space, tokens(2, 1), root=bytes([n]) * 32) == 0
    assert world.index.root_count == 0
    world.put(space, tokens(2, 1))
    world.free(space, 2)
    assert world.index.root_count == 0
    assert world.index.find_root(space, ROOT) is None


def test_removing_a_space_leaves_the_others(world: Any, new_space: Callable[..., Space]) -> None:
    """Clear takes all of a space's roots, their anchors too, and nothing else."""
    spaces = [new_space(n) for n in range(3)]
    for space in spaces:
        for root in (ROOT, OTHER_ROOT):
            world.put(space, tokens(5, 1), root=root)
    run = world.index.find_root(spaces[1], ROOT).head.children
    anchor = world.index.anchor(run, 5, 9)
    removed = world.index.remove_space(spaces[1])
    assert removed.anchors == [anchor]
    assert len(removed.places[0]) == 10
    assert [world.look(space, tokens(5, 1)) for space in spaces] == [5, 0, 5]
    world.check()


@pytest.mark.parametrize("shards", [1, 2])
def test_copies_are_made_and_given_up_in_one_go(
    new_world: type[Any], new_space: Callable[..., Space], shards: int
) -> None:
    """Places of many blocks change together; a block's last copy cannot be given up that way."""
    world, space = new_world(tiers=2), new_space(shards=shards)
    span = world.put(space, tokens(40, 1))[0]
    run, index, accounts = span.run, world.index, world.residency.accounts
    before = index.places_grid(run, 0, 40)
    copies = 1000 + np.arange(30 * shards).reshape(30, shards)
    index.set_places(run, 5, 1, copies)
    world.check()
    assert (before[:, 1] == -1).all(), "a grid shows the moment at which it was asked for"
    assert index.places_grid(run, 0, 40)[5:35, 1].tolist() == copies.tolist()
    assert accounts.used(1) == 30 * shards * space.slot_bytes
    index.set_places(run, 5, 1, copies + 1000)
    assert accounts.used(1) == 30 * shards * space.slot_bytes
    with pytest.raises(AssertionError, match="last copy"):
        index.clear_places(run, 4, 10, 0)
    freed = index.clear_places(run, 5, 10, 0)
    assert freed == before[5:10, 0].ravel().tolist()
    assert index.clear_places(run, 5, 10, 0) == []
    world.check()
    removed = index.drop(run, 8, 0)
    assert removed.spans[0].stop - removed.spans[0].start == 5, "blocks 35 to 39 lay nowhere else"
    assert run.ready == 35
    assert run.resident_in(0) == 5 * shards
    assert run.resident_in(1) == 30 * shards
    world.check()


def test_what_goes_takes_all_that_is_below_with_it(
    world: Any, new_space: Callable[..., Space], new_chain: Callable[..., Chain]
) -> None:
    """I3, I22: no block outlives its parent: a removed one takes every branch below with it, their
    places are handed back, parents before children, and what is anchored there hears of it."""
    space, index = new_space(), world.index
    trunk, branches = tokens(6, 1), [tokens(3, seed) for seed in (2, 3, 4)]
    for branch in branches:
        world.put(space, trunk + branch)
    walk = world.walk(space, new_chain(trunk + branches[1]))
    walk.finish()
    anchor = index.anchor(walk.path[-1].run, 2, 9)
    top = index.find_root(space, ROOT).head.children
    removed = index.remove(top, 4)
    assert len(removed.places[0]) == len(set(removed.places[0])) == 2 + 3 * 3
    assert removed.anchors == [anchor]
    assert removed.spans[0].run.first < min(span.run.first for span in removed.spans[1:])
    assert index.block_count == 4
    assert [world.look(space, trunk + branch) for branch in branches] == [4, 4, 4]
    world.check()
