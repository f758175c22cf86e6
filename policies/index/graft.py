"""Recovery: READY blocks found in the tiers become runs, whole chains at a time.

Work on single blocks is numpy's or a list comprehension's: a start has a million of them.
"""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

import numpy as np

from kvstore.core.block import NO_PLACE
from kvstore.core.keys import are_block_keys
from kvstore.policies.index.places import PlacedTree
from kvstore.policies.index.run import COUNTER_BITS, MAX_RUN_BLOCKS, Root, Run

NO_ROW = -1
# What stands for a parent's number where the parent is the root, and where there is none.
_ROOT, _LOST = -1, -2


class GraftedRun(NamedTuple):
    """A run that was made, the key it begins under, and its blocks' keys, packed."""

    run: Run
    parent_key: bytes
    keys: bytes


class Grafted(NamedTuple):
    """What a graft made of its rows: how many blocks, which rows live in them, and the runs.

    `adopted` has one bool a row; rows that have no part in the tree are refused. Runs come parents
    first.
    """

    block_count: int
    adopted: np.ndarray
    runs: list[GraftedRun]


class _Blocks(NamedTuple):
    """Distinct blocks by number. `cells` are rows, NO_ROW where there is none: [n][tier][shard].

    `leaders` has the first row of each, `roots` its root's number, `parents` its parent's.
    """

    leaders: np.ndarray
    roots: np.ndarray
    parents: np.ndarray
    cells: np.ndarray


class _Chains(NamedTuple):
    """Runs to be: `order` has the numbers of their blocks back to back, parents first.

    For each run: where in `order` it starts, and which run it lies under, _ROOT for the top.
    """

    order: list[int]
    starts: list[int]
    above: list[int]


def graft(
    tree: PlacedTree,
    roots: list[Root],
    root_numbers: np.ndarray,
    rows: np.ndarray,
    symbols: list[bytes],
    tiers: np.ndarray,
    limit: int,
) -> Grafted:
    """Builds the trees of empty roots of one space from rows in any order, all tiers' at once.

    A row is one shard of one block as a tier has it: `key`, `parent_key` (16 bytes), `shard` and
    `place` are fields of `rows`; its root, symbol and tier stand beside it. Refused are rows whose
    key is not the digest of their parent's and symbol, of a block that lacks a shard in the row's
    tier, or that lie under a block that is refused or missing; of two copies of a shard in one
    tier, the later one. At most `limit` blocks and roots are taken, chain by chain.
    """
    assert all(root.head.children is None for root in roots), "a graft needs empty roots"
    blocks = _gather(rows, symbols, tiers, roots, root_numbers, tree.tier_count)
    chains = _cut(blocks, np.array(list(map(len, symbols)), np.int64), limit)
    order = np.array(chains.order, np.int64)
    cells = blocks.cells[order]
    adopted = np.zeros(len(rows), bool)
    adopted[cells[cells != NO_ROW]] = True
    heads = [roots[number].head for number in blocks.roots[order[chains.starts]].tolist()]
    runs = _make(tree, heads, rows, symbols, blocks.leaders[order], cells, chains)
    return Grafted(len(order), adopted, runs)


def _gather(
    rows: np.ndarray,
    symbols: list[bytes],
    tiers: np.ndarray,
    roots: list[Root],
    root_numbers: np.ndarray,
    tier_count: int,
) -> _Blocks:
    """Joins the rows of each block; only of whole copies, so that the others are refused."""
    shards = roots[0].space.shard_count
    keys, above = rows["key"].tolist(), rows["parent_key"].tolist()
    right = np.array(are_block_keys(keys, above, symbols), bool) & (rows["shard"] < shards)
    numbers: dict[bytes, int] = {}
    number = np.full(len(rows), NO_ROW)
    number[right] = [numbers.setdefault(k, len(numbers)) for k in compress(keys, right.tolist())]
    count = len(numbers)
    if count < len(rows):
        _refuse_collisions(number, count, above, symbols, root_numbers)
    used = np.flatnonzero(number != NO_ROW)
    at = (number[used] * tier_count + tiers[used]) * shards + rows["shard"][used]
    cells = np.full((count, tier_count, shards), NO_ROW)
    cells.reshape(-1)[at[::-1]] = used[::-1]
    cells[(cells == NO_ROW).any(axis=2)] = NO_ROW
    leaders = _first_rows(number, count)
    parents = _find(rows["parent_key"][leaders], rows["key"][leaders])
    root_of = root_numbers[leaders]
    parents[root_of[np.maximum(parents, 0)] != root_of] = _LOST
    root_keys = np.array([root.key for root in roots], rows["key"].dtype)
    parents[rows["parent_key"][leaders] == root_keys[root_of]] = _ROOT
    return _Blocks(leaders, root_of, parents, cells)


def _find(wanted: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where in `keys`, which are distinct, each of `wanted` stands; _LOST where it does not.

    Sorted searches: a dict would miss the processor's cache three times for each key.
    """
    found = np.full(len(wanted), _LOST)
    if not len(keys):
        return found
    words, wanted_words = keys.view("<u8").reshape(-1, 2), wanted.view("<u8").reshape(-1, 2)
    order, asking = np.argsort(words[:, 0]), np.argsort(wanted_words[:, 0])
    at = np.searchsorted(words[order, 0], wanted_words[asking, 0])
    nearest = order[np.minimum(at, len(keys) - 1)]
    alike = words[nearest] == wanted_words[asking]
    if (alike[:, 0] & ~alike[:, 1]).any():  # half a key is not enough to tell them apart
        numbers = {key: n for n, key in enumerate(keys.tolist())}
        return np.array([numbers.get(key, _LOST) for key in wanted.tolist()], np.int64)
    whole = alike.all(axis=1)
    found[asking[whole]] = nearest[whole]
    return found


def _first_rows(number: np.ndarray, count: int) -> np.ndarray:
    """The first row of each number."""
    first = np.empty(count, np.int64)
    used = np.flatnonzero(number != NO_ROW)[::-1]
    first[number[used]] = used
    return first


def _refuse_collisions(
    number: np.ndarray,
    count: int,
    above: list[bytes],
    symbols: list[bytes],
    root_numbers: np.ndarray,
) -> None:
    """A key that fits two blocks names the first: rows of the other lose their number."""
    if not count:
        return
    leaders = _first_rows(number, count)[number]
    number[(number != NO_ROW) & (root_numbers != root_numbers[leaders])] = NO_ROW
    rows = np.flatnonzero((number != NO_ROW) & (leaders != np.arange(len(number))))
    for row, leader in zip(rows.tolist(), leaders[rows].tolist(), strict=True):
        if symbols[row] != symbols[leader] or above[row] != above[leader]:
            number[row] = NO_ROW


def _cut(blocks: _Blocks, row_widths: np.ndarray, limit: int) -> _Chains:
    """Cuts what hangs together below the root into runs, depth first."""
    count = len(blocks.parents)
    alive = (blocks.cells != NO_ROW).any(axis=(1, 2))
    held = blocks.parents == _ROOT
    linked = blocks.parents >= 0
    held[linked] = alive[blocks.parents[linked]]
    held &= alive
    children = np.flatnonzero(held)
    children = children[np.argsort(blocks.parents[children], kind="stable")]
    child_counts = np.bincount(blocks.parents[children] + 1, minlength=count + 1)
    firsts = np.concatenate(([0], np.cumsum(child_counts)))
    widths = row_widths[blocks.leaders]
    nexts = np.full(count, NO_ROW)
    single = np.flatnonzero(child_counts[1:] == 1)
    only = children[firsts[single + 1]]
    alike = widths[only] == widths[single]
    nexts[single[alike]] = only[alike]
    roots = blocks.roots.tolist()
    return _follow(roots, children.tolist(), firsts.tolist(), nexts.tolist(), limit)


def _follow(
    roots: list[int], children: list[int], firsts: list[int], nexts: list[int], limit: int
) -> _Chains:
    """`nexts` has the block that continues a run; children of block n begin at `firsts[n + 1]`."""
    begun: set[int] = set()
    order: list[int] = []
    starts: list[int] = []
    above: list[int] = []
    stack = [(_ROOT, child) for child in children[: firsts[1]][::-1]]
    while stack and len(order) < limit:
        parent, block = stack.pop()
        if parent == _ROOT and roots[block] not in begun:
            begun.add(roots[block])
            limit -= 1
            if len(order) >= limit:
                break
        here, start = len(starts), len(order)
        starts.append(start)
        above.append(parent)
        order.append(block)
        after = nexts[block]
        if after != NO_ROW:
            for _ in range(min(limit - start, MAX_RUN_BLOCKS) - 1):
                block = after
                order.append(block)
                after = nexts[block]
                if after == NO_ROW:
                    break
        first, past = firsts[block + 1], firsts[block + 2]
        if first < past:
            stack.extend([(here, child) for child in children[first:past][::-1]])
    return _Chains(order, starts, above)


def _make(
    tree: PlacedTree,
    heads: list[Run],
    rows: np.ndarray,
    symbols: list[bytes],
    leaders: np.ndarray,
    cells: np.ndarray,
    chains: _Chains,
) -> list[GraftedRun]:
    """Makes the runs and hangs them into the tree.

    `heads` has the head of the root of each run, `leaders` and `cells` are in the blocks' order.
    """
    if not chains.order:
        return []
    places = np.where(cells == NO_ROW, NO_PLACE, rows["place"][cells])
    cell_bytes, key_bytes = places.tobytes(), rows["key"][leaders].tobytes()
    stride, key_stride = places[0].nbytes, rows["key"].dtype.itemsize
    in_order = [symbols[row] for row in leaders.tolist()]
    parent_keys = rows["parent_key"][leaders[chains.starts]].tolist()
    resident = _count_resident(places, chains.starts)
    stops = [*chains.starts[1:], len(in_order)]
    made: list[Run] = []
    grafted: list[GraftedRun] = []
    for head, above, start, stop, key, count in zip(
        heads, chains.above, chains.starts, stops, parent_keys, resident, strict=True
    ):
        parent = head if above == _ROOT else made[above]
        text = b"".join(in_order[start:stop])
        run = Run(head.root, parent, parent.first + parent.count, text, len(in_order[start]))
        run.places = cell_bytes[start * stride : stop * stride]
        run.ready, run.resident = stop - start, count
        made.append(run)
        keys = key_bytes[start * key_stride : stop * key_stride]
        grafted.append(GraftedRun(run, key, keys))
    tree.adopt(heads[0].root.space, made)
    return grafted


def _count_resident(places: np.ndarray, starts: list[int]) -> list[int]:
    """`Run.resident` of each run."""
    there = (places != NO_PLACE).sum(axis=2)
    counts = np.add.reduceat(there, starts, axis=0)
    resident: list[int] = counts[:, 0].tolist()
    for tier in range(1, counts.shape[1]):
        shift = COUNTER_BITS * tier
        more = counts[:, tier].tolist()
        resident = [a | b << shift for a, b in zip(resident, more, strict=True)]
    return resident
