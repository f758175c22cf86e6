"""Grafts: what recovery finds becomes a tree again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from plain_graft import GraftBlock
from plain_graft import graft as plain_graft

from kvstore.core.keys import Chain, Segment, chain_keys
from kvstore.core.space import Space
from kvstore.policies.index import Grafted
from kvstore.policies.index import graft as graft_module
from kvstore.tiers.base import ROW

ROOT = bytes(32)
Blocks = list[GraftBlock]


def tokens(blocks: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(16 * blocks)
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def graft(
    world: Any,
    space: Space,
    blocks: Blocks,
    digests: tuple[bytes, ...] = (ROOT,),
    numbers: list[int] | None = None,
) -> Grafted:
    rows = np.zeros(len(blocks), ROW)
    for row, block in zip(rows, blocks, strict=True):
        row["key"], row["parent_key"] = np.void(block.key), np.void(block.parent_key)
        row["shard"], row["place"] = block.shard, block.place
    tiers = np.array([block.tier for block in blocks], np.int64)
    symbols = [block.symbol for block in blocks]
    roots = np.array(numbers or [0] * len(blocks), np.int64)
    grafted: Grafted = world.index.graft_columns(space, list(digests), roots, rows, symbols, tiers)
    return grafted


def refused(grafted: Grafted, blocks: Blocks) -> list[tuple[int, int]]:
    lives = grafted.adopted.tolist()
    return [(b.tier, b.place) for b, live in zip(blocks, lives, strict=True) if not live]


def chain_blocks(
    chain: list[bytes], tier: int, place: int, shards: int = 1, root: bytes = ROOT
) -> Blocks:
    """All shards of a chain's blocks as one tier has them, places counting up."""
    keys = [root[:16], *chain_keys(root[:16], chain)]
    return [
        GraftBlock(keys[n + 1], keys[n], symbol, shard, tier, place + n * shards + shard)
        for n, symbol in enumerate(chain)
        for shard in range(shards)
    ]


def shape(world: Any) -> list[Any]:
    """Everything that a graft makes, parents first."""
    return [
        (run.first, run.width, run.symbols, run.places, run.ready, run.resident, run.below)
        for run in world.index.runs()
    ]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_graft_rebuilds_the_tree(
    new_world: type[Any], new_space: Callable[..., Space], shards: int
) -> None:
    """I13: from headers in any order comes the same tree; what hangs on nothing is refused."""
    space, rng = new_space(shards=shards), random.Random(5)
    stem = tokens(2000, 1)
    chains = [stem, stem[:700] + tokens(30, 2), stem[:1500] + tokens(900, 3), tokens(4, 4)]
    blocks: dict[bytes, Blocks] = {}
    for place, chain in enumerate(chains):
        for block in chain_blocks(chain, 0, place * 10_000, shards):
            made = blocks.setdefault(block.key, [])
            if all(other.shard != block.shard for other in made):
                made.append(block)
    lost = chain_keys(ROOT[:16], chains[1])[710]
    records = [b for key, made in blocks.items() for b in made if key != lost]
    forged = records[0]._replace(key=b"f" * 16, place=10**6)
    records.append(forged)
    rng.shuffle(records)
    world = new_world()
    grafted = graft(world, space, records)
    world.check()
    found = [world.look(space, chain) for chain in chains]
    assert found == [2000, 710, 2400, 4]
    assert grafted.block_count == len(blocks) - 20
    assert len(refused(grafted, records)) == 19 * shards + 1
    assert (0, 10**6) in refused(grafted, records)
    for chain in chains[2:]:
        walk = world.walk(space, Chain((Segment(b"".join(chain), 16),)))
        keys = chain_keys(ROOT[:16], chain)
        for shard in range(shards):
            places = world.index.places(walk.path, 0, shard).tolist()
            assert places == [blocks[key][shard].place for key in keys]


def test_a_graft_is_cut_at_max_blocks(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """I16: recovery keeps to `max_blocks` as well, and what is left over is refused."""
    chain = tokens(60, 1)
    records = chain_blocks(chain, 0, 0)
    world, space = new_world(max_blocks=50), new_space()
    grafted = graft(world, space, records)
    assert grafted.block_count == 49
    assert refused(grafted, records) == [(0, place) for place in range(49, 60)]
    assert world.look(space, chain) == 49
    world.check()
    other = new_space(1)
    assert graft(world, other, records).block_count == 0
    world.check()


def test_a_graft_joins_what_two_tiers_have_of_a_chain(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """I13: a block on disk alone lives under one in host alone; a copy lost in one is no loss."""
    chain = tokens(90, 1)
    host = chain_blocks(chain[:60], 0, 0, shards=2)
    disk = [b for b in chain_blocks(chain, 1, 1000, shards=2) if b.place >= 1060]
    del disk[-1]
    world, space = new_world(tiers=2), new_space(shards=2)
    grafted = graft(world, space, host + disk)
    assert grafted.block_count == 89
    assert refused(grafted, host + disk) == [(1, 1178)]
    assert world.look(space, chain) == 89
    [run] = world.index.runs()
    assert (run.resident_in(0), run.resident_in(1)) == (120, 118)
    [made] = grafted.runs
    assert (made.run, made.parent_key) == (run, ROOT[:16])
    assert made.keys == b"".join(chain_keys(ROOT[:16], chain[:89]))
    world.check()


def test_roots_are_grafted_together_and_kept_apart(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """I1: the same symbols under two roots are two chains; a row under the wrong one is refused."""
    digests = (ROOT, b"r" * 32, b"q" * 32)
    chain, other = tokens(9, 1), tokens(4, 2)
    parts = [
        chain_blocks(chain, 0, 0),
        chain_blocks(chain, 0, 100, root=digests[1]),
        chain_blocks(other, 0, 200, root=digests[1]),
    ]
    blocks = [block for part in parts for block in part]
    numbers = [0] * 9 + [1] * 13
    numbers[5], numbers[20] = 1, 2
    world, space = new_world(), new_space()
    grafted = graft(world, space, blocks, digests, numbers)
    assert refused(grafted, blocks) == [(0, n) for n in (5, 6, 7, 8, 202, 203)]
    assert [world.look(space, chain, root=root) for root in digests] == [5, 9, 0]
    assert world.look(space, other, root=digests[1]) == 2
    world.check()
    small = new_world(max_blocks=15)
    assert graft(small, space, blocks, digests, numbers).block_count == 13
    assert small.index.root_count == 2
    small.check()


@pytest.mark.parametrize("roots", [1, 40])
def test_what_was_grafted_can_be_evicted(
    new_world: type[Any], new_space: Callable[..., Space], roots: int
) -> None:
    """Blocks taken back are ranked like others: leaves go first, until nothing is left."""
    world, stem = new_world(tiers=2), tokens(20, 1)
    spaces = [new_space(n) for n in range(roots)]
    for space in spaces:
        for tier in (0, 1):
            chains = [stem + tokens(3, 10 + n) for n in range(30)]
            blocks = {b.key: b for chain in chains for b in chain_blocks(chain, tier, 0)}
            if not tier:
                host = list(blocks.values())
        graft(world, space, [*host, *blocks.values()])
    world.check()
    assert world.free(spaces[0], 50) == 50
    world.check()
    assert world.free(spaces[0], roots * 110) == roots * 110 - 50
    assert world.residency.accounts.used(0) == 0
    assert world.free(spaces[0], roots * 110, tier=1) == roots * 110
    assert world.index.block_count == 0
    world.check()


def some_blocks(rng: random.Random, shards: int, tiers: int) -> Blocks:
    """Random chains with gaps, copies too many, forged keys and shards that cannot be."""
    stems: list[list[bytes]] = [[]]
    blocks: Blocks = []
    for _ in range(rng.randrange(1, 12)):
        stem = rng.choice(stems)
        stem = stem[: rng.randrange(len(stem) + 1)]
        width = rng.choice((4, 4, 4, 8))
        stems.append([*stem, *(rng.randbytes(width) for _ in range(rng.randrange(1, 9)))])
        for tier in range(tiers):
            blocks += chain_blocks(stems[-1], tier, rng.randrange(1 << 40), shards)
    blocks = [b for b in blocks if rng.random() < 0.95]
    for block in rng.sample(blocks, min(len(blocks), 4)):
        forged = {"key": rng.randbytes(16), "symbol": rng.randbytes(4), "shard": 7}
        name = rng.choice(list(forged))
        blocks.append(block._replace(place=rng.randrange(1 << 40), **{name: forged[name]}))
    rng.shuffle(blocks)
    return blocks


@pytest.mark.parametrize("tiers", [1, 2])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_graft_over_columns_is_the_plain_one(
    new_world: type[Any],
    new_space: Callable[..., Space],
    monkeypatch: pytest.MonkeyPatch,
    shards: int,
    tiers: int,
) -> None:
    """I13: many blocks at a time or one by one, the tree and what is refused are the same."""
    monkeypatch.setattr(graft_module, "MAX_RUN_BLOCKS", 5)
    monkeypatch.setattr("plain_graft.MAX_RUN_BLOCKS", 5)
    for seed in range(150):
        rng, space = random.Random(seed), new_space(shards=shards)
        blocks = some_blocks(rng, shards, tiers)
        limit = rng.choice((3, 20, 1 << 40))
        fast, plain = new_world(tiers, limit + 1), new_world(tiers)
        grafted = graft(fast, space, blocks)
        expected = plain_graft(plain.index, plain.index.root(space, ROOT), blocks, limit)
        assert sorted(refused(grafted, blocks)) == sorted(expected.refused)
        assert grafted.block_count == expected.block_count == fast.index.block_count
        assert shape(fast) == shape(plain)
        fast.check()
        for run, parent_key, keys in grafted.runs:
            assert parent_key == fast.index.key_before(run, 0)
            assert keys == b"".join(fast.index.keys((run, 0, run.count)))


def test_keys_that_share_a_half_are_told_apart() -> None:
    """I1: parents are found by all 16 bytes of a key, whatever half of it others share."""
    keys = [bytes([n % 3]) * 8 + bytes([n]) * 8 for n in range(9)]
    wanted = [keys[4], keys[8], bytes(8) + b"x" * 8, b"y" * 16, keys[0], b"\xff" * 16]
    found = graft_module._find(np.array(wanted, "V16"), np.array(keys, "V16"))
    lost = graft_module._LOST
    assert found.tolist() == [4, 8, lost, lost, 0, lost]
