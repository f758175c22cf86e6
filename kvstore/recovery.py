"""Recovery: at start, takes back what an earlier daemon left in its tiers.

headers valid -> space known -> epoch and clear mark right -> chain whole over all tiers -> adopted.
Blocks in host are unverified at first, and what is not adopted there rests one maximum lease: old
readers may still be copying. On disk nobody else reads, and every read is checked anyway.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.core.block import POOL_SHIFT
from kvstore.core.space import Space
from kvstore.core.spec import space_id
from kvstore.policies.index import Grafted, GraftedRun
from kvstore.store.kvstore import KVStore
from kvstore.store.parts import HOST, Parts
from kvstore.store.record import FileRecord, KnownSpace
from kvstore.tiers.epochs import EpochsFile

SPACE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start found: blocks taken back, and shards that were dropped."""

    adopted_blocks: int
    dropped_shards: int


class _Found(NamedTuple):
    """Blocks of all tiers: `rows` as `StoredColumns` has them, and what each belongs to.

    `roots` are the (space, root digest) pairs that occur, packed, and `spaces` the spaces, in the
    order of the numbers that rows have.
    """

    rows: np.ndarray
    symbols: list[bytes]
    tiers: np.ndarray
    roots: list[bytes]
    root_numbers: np.ndarray
    spaces: list[bytes]
    space_numbers: np.ndarray


def recover(store: KVStore, record: FileRecord, epochs: EpochsFile) -> Recovered:
    """Re-adopts what the tiers have into an empty store, before it serves anybody."""
    with _no_collections():
        parts = store.parts
        spaces = _known_spaces(store, record)
        found = _find(parts)
        current = _current_rows(parts, found, spaces, epochs)
        adopted = np.zeros(len(found.rows), bool)
        runs: list[GraftedRun] = []
        counts = np.zeros(len(parts.tiers), np.int64)
        for space_key, rows in _by_space(found, current):
            space = spaces[space_key]
            grafted = _graft(parts, found, space, rows)
            adopted[rows] = grafted.adopted
            tiers = found.tiers[rows[grafted.adopted]]
            counts += np.bincount(tiers, minlength=len(counts)) // space.shard_count
            runs += grafted.runs
        _adopt(store, found, adopted)
        epochs.confirm_void()
        _keep_used_spaces(store, record)
        for grafted_run in runs:
            _tell(parts, grafted_run)
        parts.readopted_blocks = parts.index.block_count
        for name, count in zip(parts.tier_names, counts.tolist(), strict=True):
            parts.recorder.readopted(name, count)
        return Recovered(parts.readopted_blocks, len(adopted) - int(adopted.sum()))


@contextmanager
def _no_collections() -> Iterator[None]:
    """Holds the collector off: it would go through a million new objects, time and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _known_spaces(store: KVStore, record: FileRecord) -> dict[bytes, Space]:
    spaces: dict[bytes, Space] = {}
    for number, known in enumerate(record.known, 1):
        space = Space(number, known.spec, known.tenant, store.parts.pool_of(known.tenant))
        space.epoch = record.epoch_of(space.id)
        spaces[space.id] = space
    return spaces


def _find(parts: Parts) -> _Found:
    """Everything that the tiers have."""
    columns = [tier.recover_columns() for tier in parts.tiers]
    rows = np.concatenate([column.rows for column in columns])
    symbols = [symbol for column in columns for symbol in column.symbols]
    tiers = np.repeat(np.arange(len(columns)), [len(column.rows) for column in columns])
    pairs = np.stack([rows["space"], rows["root"]], axis=1).view(f"V{2 * SPACE_BYTES}")
    roots, root_numbers = _numbered(pairs[:, 0].tolist())
    spaces, space_numbers = _numbered([root[:SPACE_BYTES] for root in roots])
    return _Found(rows, symbols, tiers, roots, root_numbers, spaces, space_numbers[root_numbers])


def _numbered(keys: list[bytes]) -> tuple[list[bytes], np.ndarray]:
    """Distinct keys, and which of them each is."""
    numbers: dict[bytes, int] = {}
    found = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), np.array(found, np.int64)


def _current_rows(
    parts: Parts, found: _Found, spaces: dict[bytes, Space], epochs: EpochsFile
) -> np.ndarray:
    """Which rows may come back: of a space that is known, and not void."""
    rows = found.rows
    if epochs.created or epochs.all_void or not len(rows):
        return np.zeros(len(rows), bool)
    known = np.array([key in spaces for key in found.spaces])
    rules = np.zeros((len(found.spaces), 4), np.uint64)  # length, shards, epoch, clear mark
    for rule, key in zip(rules, found.spaces, strict=True):
        if key in spaces:
            rule[:2] = spaces[key].block_bytes, spaces[key].shard_count
            rule[2:] = epochs.mark(key)
    length, shards, epoch, clear_mark = rules[found.space_numbers].T
    return np.asarray(
        known[found.space_numbers]
        & (rows["length"] == length)
        & (rows["shard"] < shards)
        & (rows["epoch"] == epoch)
        & (rows["generation"] >= clear_mark)
        & _in_own_pool(parts, found, spaces)
    )


def _in_own_pool(parts: Parts, found: _Found, spaces: dict[bytes, Space]) -> np.ndarray:
    """Which rows lie where their tenant's blocks belong.

    A tenant may be isolated since, or not any more. Only host has pools, if it says which.
    """
    in_host = found.tiers == HOST
    pools, pool = np.unique(found.rows["place"][in_host] >> POOL_SHIFT, return_inverse=True)
    allowed = np.ones((len(found.spaces), len(pools)), bool)
    for number, key in enumerate(found.spaces):
        shared = parts.host.shared_pools(spaces[key].pool) if key in spaces else []
        if shared:
            allowed[number] = np.isin(pools, [each.pool_id for each in shared])
    right: np.ndarray = ~in_host
    right[in_host] = allowed[found.space_numbers[in_host], pool]
    return right


def _by_space(found: _Found, current: np.ndarray) -> Iterator[tuple[bytes, np.ndarray]]:
    """Spaces with the numbers of their current rows."""
    rows = np.flatnonzero(current)
    rows = rows[np.argsort(found.space_numbers[rows], kind="stable")]
    numbers, starts = np.unique(found.space_numbers[rows], return_index=True)
    for number, of_space in zip(numbers.tolist(), np.split(rows, starts[1:]), strict=False):
        yield found.spaces[number], of_space


def _graft(parts: Parts, found: _Found, space: Space, rows: np.ndarray) -> Grafted:
    """Builds the trees of a space, all tiers' rows at once."""
    numbers, root_numbers = np.unique(found.root_numbers[rows], return_inverse=True)
    return parts.index.graft_columns(
        space,
        [found.roots[number][SPACE_BYTES:] for number in numbers.tolist()],
        root_numbers,
        found.rows[rows],
        [found.symbols[row] for row in rows.tolist()],
        found.tiers[rows],
    )


def _adopt(store: KVStore, found: _Found, adopted: np.ndarray) -> None:
    """Tells the tiers which blocks live on, and lets go of the others."""
    parts = store.parts
    for number, tier in enumerate(parts.tiers):
        places = found.rows["place"][adopted & (found.tiers == number)]
        tier.adopt_many(places)
        resting = tier.finish_recovery()
        if number != HOST:
            tier.free(resting)
            continue
        rest_is_over = parts.clock.now() + parts.limits.max_lease_ttl_seconds
        parts.retired[HOST].rest(resting, rest_is_over)
        parts.retired[HOST].adopted(places.tolist(), rest_is_over)
        store.verifier.adopted(places.tolist())


def _keep_used_spaces(store: KVStore, record: FileRecord) -> None:
    """Spaces without a block are forgotten: an engine that comes back makes its own again."""
    parts, kept = store.parts, []
    used = {root.space.id: root.space for root in parts.index.roots()}
    for known in record.known:
        key = space_id(known.spec, known.tenant)
        space = used.get(key)
        if space is not None:
            parts.spaces[key] = space
            kept.append(KnownSpace(known.spec, known.tenant))
    record.forget_all_but(kept)


def _tell(parts: Parts, grafted: GraftedRun) -> None:
    """What was adopted is news, tier by tier: followers begin with the log of this life."""
    run, parent_key, keys = grafted
    space, slots = run.root.space, run.count * run.root.space.shard_count
    for tier, medium in enumerate(parts.tier_names):
        there = run.resident_in(tier)
        if there == slots:
            parts.events.stored(space, medium, keys, parent_key, run.symbols)
        elif there:
            _tell_parts(parts, grafted, tier)


def _tell_parts(parts: Parts, grafted: GraftedRun, tier: int) -> None:
    """Events of the stretches of a run that lie in a tier."""
    run, parent_key, keys = grafted
    there = parts.index.places_grid(run, 0, run.count)[:, tier, 0] >= 0
    edges = np.flatnonzero(np.diff(there, prepend=False, append=False)).tolist()
    key_bytes, chain = len(parent_key), parent_key + keys
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        parts.events.stored(
            run.root.space,
            parts.tier_names[tier],
            chain[(start + 1) * key_bytes : (stop + 1) * key_bytes],
            chain[start * key_bytes : (start + 1) * key_bytes],
            run.symbols[start * run.width : stop * run.width],
        )
