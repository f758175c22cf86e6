"""Recovery: at start, takes back what an earlier daemon left in its pools.

headers valid -> space known -> epoch and clear mark right -> chain whole -> adopted, unverified.
Everything else rests one maximum lease, and is free then: old readers may still be copying.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kvstore.core.block import place_pool
from kvstore.core.space import Space
from kvstore.core.spec import space_id
from kvstore.policies.index import GraftBlock, Span
from kvstore.store.kvstore import KVStore
from kvstore.store.parts import HOST, TIER_NAMES
from kvstore.store.record import FileRecord, KnownSpace
from kvstore.tiers.base import StoredBlock
from kvstore.tiers.epochs import EpochsFile


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a start found: blocks taken back, and shards that were dropped."""

    adopted_blocks: int
    dropped_shards: int


def recover(store: KVStore, record: FileRecord, epochs: EpochsFile) -> Recovered:
    """Re-adopts the host tier's blocks into an empty store, before it serves anybody."""
    parts = store.parts
    spaces = _known_spaces(store, record)
    pools = {key: _pool_numbers(store, space) for key, space in spaces.items()}
    found: dict[tuple[bytes, bytes], list[StoredBlock]] = defaultdict(list)
    dropped = 0
    for block in parts.host.recover():
        space = spaces.get(block.header.space)
        if space is None or not _is_current(space, block, epochs):
            dropped += 1
        elif place_pool(block.place) not in pools[space.id] and pools[space.id]:
            dropped += 1  # its tenant was isolated since, or is not any more
        else:
            found[block.header.space, block.header.root].append(block)
    adopted: list[int] = []
    for (space_key, root), blocks in found.items():
        refused = _graft(store, spaces[space_key], root, blocks)
        dropped += len(refused)
        adopted += [block.place for block in blocks if block.place not in refused]
    for place in adopted:
        parts.host.adopt(place)
    resting = parts.host.finish_recovery()
    rest_is_over = parts.clock.now() + parts.limits.max_lease_ttl_seconds
    parts.retired[HOST].rest(resting, rest_is_over)
    parts.retired[HOST].adopted(adopted, rest_is_over)
    epochs.confirm_void()
    _keep_used_spaces(store, record)
    _tell(store)
    store.verifier.adopted(adopted)
    parts.readopted_blocks = parts.index.block_count
    parts.recorder.readopted(TIER_NAMES[HOST], parts.readopted_blocks)
    return Recovered(parts.readopted_blocks, dropped)


def _known_spaces(store: KVStore, record: FileRecord) -> dict[bytes, Space]:
    spaces: dict[bytes, Space] = {}
    for number, known in enumerate(record.known, 1):
        space = Space(number, known.spec, known.tenant, store.parts.pool_of(known.tenant))
        space.epoch = record.epoch_of(space.id)
        spaces[space.id] = space
    return spaces


def _pool_numbers(store: KVStore, space: Space) -> set[int]:
    """Pools that a space's blocks may lie in; none where the tier does not say."""
    return {pool.pool_id for pool in store.parts.host.shared_pools(space.pool)}


def _tell(store: KVStore) -> None:
    """What was adopted is news: followers begin with the log of this life."""
    parts = store.parts
    for run in parts.index.runs():
        span = Span(run, 0, run.ready)
        keys, parent_key = parts.index.keys(span), parts.index.key_before(run, 0)
        parts.events.stored(
            run.root.space, TIER_NAMES[HOST], b"".join(keys), parent_key, run.symbols
        )


def _is_current(space: Space, block: StoredBlock, epochs: EpochsFile) -> bool:
    header = block.header
    return (
        header.length == space.block_bytes
        and header.shard < space.shard_count
        and not epochs.created
        and not epochs.is_void(space.id, header.epoch, block.generation)
    )


def _graft(store: KVStore, space: Space, root: bytes, blocks: list[StoredBlock]) -> set[int]:
    """Builds a root's chains; answers with the places that have no part in them."""
    grafted = store.parts.index.graft(
        space,
        root,
        [
            GraftBlock(
                b.header.key, b.header.parent_key, b.header.symbol, b.header.shard, HOST, b.place
            )
            for b in blocks
        ],
    )
    return {place for _, place in grafted.refused}


def _keep_used_spaces(store: KVStore, record: FileRecord) -> None:
    """Spaces without a block are forgotten: an engine that comes back makes its own again."""
    parts, kept = store.parts, []
    used = {root.space.id: root.space for root in parts.index.roots()}
    for known in record.known:
        key = space_id(known.spec, known.tenant)
        space = used.get(key)
        if space is not None:
            space.number = len(parts.spaces) + 1
            parts.spaces[key] = space
            kept.append(KnownSpace(known.spec, known.tenant))
    record.forget_all_but(kept)
