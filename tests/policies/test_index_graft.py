"""Grafts: what recovery finds becomes a tree again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.keys import Chain, Segment, chain_keys
from kvstore.core.space import Space
from kvstore.policies.index import GraftBlock

ROOT = bytes(32)


def tokens(blocks: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(16 * blocks)
    return [data[i : i + 16] for i in range(0, len(data), 16)]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_graft_rebuilds_the_tree(
    new_world: type[Any], new_space: Callable[..., Space], shards: int
) -> None:
    """I13: from headers in any order comes the same tree; what hangs on nothing is refused."""
    space, rng = new_space(shards=shards), random.Random(5)
    stem = tokens(2000, 1)
    chains = [stem, stem[:700] + tokens(30, 2), stem[:1500] + tokens(900, 3), tokens(4, 4)]
    blocks: dict[bytes, list[GraftBlock]] = {}
    place = 0
    for chain in chains:
        keys = [ROOT[:16], *chain_keys(ROOT[:16], chain)]
        for n, symbol in enumerate(chain):
            if keys[n + 1] not in blocks:
                made = [GraftBlock(keys[n + 1], keys[n], symbol, s, 0, place + s)
                        for s in range(shards)]  # fmt: skip
                blocks[keys[n + 1]] = made
                place += shards
    lost = chain_keys(ROOT[:16], chains[1])[710]
    records = [b for key, made in blocks.items() for b in made if key != lost]
    forged = records[0]._replace(key=b"f" * 16, place=10**6)
    records.append(forged)
    rng.shuffle(records)
    world = new_world()
    grafted = world.index.graft(space, ROOT, records)
    world.check()
    found = [world.look(space, chain) for chain in chains]
    assert found == [2000, 710, 2400, 4]
    assert grafted.block_count == len(blocks) - 20
    assert len(grafted.refused) == 19 * shards + 1
    assert (0, 10**6) in grafted.refused
    for chain in chains[2:]:
        walk = world.index.walk(
            world.index.root(space, ROOT), Chain((Segment(b"".join(chain), 16),))
        )
        walk.step(5000)
        keys = chain_keys(ROOT[:16], chain)
        for shard in range(shards):
            places = world.index.places(walk.path, 0, shard).tolist()
            assert places == [blocks[key][shard].place for key in keys]


def test_a_graft_is_cut_at_max_blocks(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """I16: recovery keeps to `max_blocks` as well, and what is left over is refused."""
    chain = tokens(60, 1)
    keys = [ROOT[:16], *chain_keys(ROOT[:16], chain)]
    records = [GraftBlock(keys[n + 1], keys[n], s, 0, 0, n) for n, s in enumerate(chain)]
    world, space = new_world(max_blocks=50), new_space()
    grafted = world.index.graft(space, ROOT, records)
    assert grafted.block_count == 49
    assert sorted(place for _, place in grafted.refused) == list(range(49, 60))
    assert world.look(space, chain) == 49
    world.check()
