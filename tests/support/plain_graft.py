"""A graft in its plainest form, block by block: what the one over columns is compared with."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from kvstore.core.block import NO_PLACE
from kvstore.core.keys import block_key
from kvstore.policies.index.cells import count_resident
from kvstore.policies.index.places import PlacedTree
from kvstore.policies.index.run import MAX_RUN_BLOCKS, Root, Run


class GraftBlock(NamedTuple):
    """One shard of one block as a tier has it."""

    key: bytes
    parent_key: bytes
    symbol: bytes
    shard: int
    tier: int
    place: int


class _Record:
    """A block as all tiers have it; `cells` are places in the order [tier][shard]."""

    __slots__ = ("cells", "parent_key", "symbol")

    def __init__(self, parent_key: bytes, symbol: bytes, cells: list[int]):
        self.parent_key = parent_key
        self.symbol = symbol
        self.cells = cells


class Grafted(NamedTuple):
    """What a graft made of its blocks: how many live, and the places of what does not."""

    block_count: int
    refused: list[tuple[int, int]]  # (tier, place)


def graft(tree: PlacedTree, root: Root, blocks: Iterable[GraftBlock], limit: int) -> Grafted:
    """Builds the tree of an empty `root` from `blocks`, in any order, every tier's at once.

    Refused are blocks whose key is not the digest of their parent's and symbol, that lack a shard
    in every tier, or that lie under a block that is refused or missing; of two copies of a shard
    in one tier, the later one. At most `limit` blocks are taken, chain by chain.
    """
    assert root.head.children is None, "a graft needs an empty root"
    shards = root.space.shard_count
    found, refused = _gather(blocks, tree.tier_count, shards)
    _drop_incomplete(found, tree.tier_count, shards, refused)
    below: dict[bytes, list[bytes]] = {}
    for key, record in found.items():
        below.setdefault(record.parent_key, []).append(key)
    count = _build(tree, root, found, below, limit)
    for record in found.values():
        _refuse_cells(record.cells, shards, refused)
    return Grafted(count, refused)


def _gather(
    blocks: Iterable[GraftBlock], tier_count: int, shards: int
) -> tuple[dict[bytes, _Record], list[tuple[int, int]]]:
    """Records by key."""
    found: dict[bytes, _Record] = {}
    refused: list[tuple[int, int]] = []
    empty = [NO_PLACE] * (tier_count * shards)
    for key, parent_key, symbol, shard, tier, place in blocks:
        record = found.get(key)
        if block_key(parent_key, symbol) != key or shard >= shards:
            refused.append((tier, place))
            continue
        if record is None:
            record = found[key] = _Record(parent_key, symbol, empty.copy())
        cell = tier * shards + shard
        if (
            record.symbol != symbol
            or record.parent_key != parent_key
            or record.cells[cell] != NO_PLACE
        ):
            refused.append((tier, place))
        else:
            record.cells[cell] = place
    return found, refused


def _drop_incomplete(
    found: dict[bytes, _Record],
    tier_count: int,
    shards: int,
    refused: list[tuple[int, int]],
) -> None:
    """A block counts in a tier only with all its shards there."""
    if shards == 1:
        return
    for key, record in list(found.items()):
        cells = record.cells
        for start in range(0, tier_count * shards, shards):
            part = cells[start : start + shards]
            if NO_PLACE in part:
                refused.extend((start // shards, place) for place in part if place != NO_PLACE)
                cells[start : start + shards] = [NO_PLACE] * shards
        if all(place == NO_PLACE for place in cells):
            del found[key]


def _refuse_cells(cells: list[int], shards: int, refused: list[tuple[int, int]]) -> None:
    refused.extend((i // shards, place) for i, place in enumerate(cells) if place != NO_PLACE)


def _build(
    tree: PlacedTree,
    root: Root,
    found: dict[bytes, _Record],
    below: dict[bytes, list[bytes]],
    limit: int,
) -> int:
    """Moves what hangs together from `found` into the tree."""
    made = 0
    runs: list[Run] = []
    stack = [(root.head, key) for key in reversed(below.pop(root.key, []))]
    while stack and made < limit:
        parent, key = stack.pop()
        run, last = _build_run(parent, key, found, below, limit - made)
        run.resident = count_resident(run.places, tree.tier_count, root.space.shard_count)
        made += run.count
        runs.append(run)
        stack.extend((run, child) for child in reversed(below.pop(last, [])))
    if runs:
        tree.adopt(root.space, runs)
    return made


def _build_run(
    parent: Run,
    key: bytes,
    found: dict[bytes, _Record],
    below: dict[bytes, list[bytes]],
    limit: int,
) -> tuple[Run, bytes]:
    """Makes one run of the chain that begins with `key`; answers it and its last block's key."""
    record = found.pop(key)
    symbols, places, width = [record.symbol], record.cells, len(record.symbol)
    most = min(MAX_RUN_BLOCKS, limit)
    while len(symbols) < most:
        nexts = below.get(key)
        if nexts is None or len(nexts) != 1 or len(found[nexts[0]].symbol) != width:
            break
        del below[key]
        key = nexts[0]
        record = found.pop(key)
        symbols.append(record.symbol)
        places.extend(record.cells)
    run = Run(parent.root, parent, parent.first + parent.count, b"".join(symbols), width)
    run.places = struct.pack(f"<{len(places)}q", *places)
    run.ready = run.count
    return run, key
