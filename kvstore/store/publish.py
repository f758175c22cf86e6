"""Publish: COMMITTED blocks become READY, parents first, and their headers valid in the tier."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.core.errors import TierError
from kvstore.core.keys import chain_keys
from kvstore.policies.index import Run, Span
from kvstore.store.evict import Remover, block_before
from kvstore.store.parts import HOST, TIER_NAMES, Parts
from kvstore.tiers.base import BlockHeader


class Publisher:
    """Makes blocks visible, all at once for the owner thread: index, headers, events."""

    def __init__(self, parts: Parts, remover: Remover) -> None:
        self._parts = parts
        self._remover = remover

    def remember(self, places: list[int], checksums: list[bytes]) -> None:
        """Keeps the checksums of written slots until their blocks are READY."""
        self._parts.checksums.update(zip(places, checksums, strict=True))

    def publish(self, runs: Iterable[Run]) -> set[int]:
        """Publishes what may be of `runs` and below; answers with the places now READY.

        Blocks whose headers the tier cannot write are dropped again, with what depends on them.
        """
        index, ready = self._parts.index, set[int]()
        for run in runs:
            for span in index.publish(run):
                if not span.run.alive:
                    continue  # it went with a parent whose header could not be written
                try:
                    ready.update(self._commit(span))
                except TierError:
                    removed = index.remove(span.run, span.start)
                    self._remover.removed(span.run.root.space, removed, "lost_parent")
        return ready

    def _commit(self, span: Span) -> list[int]:
        parts, run = self._parts, span.run
        space = run.root.space
        shards = range(space.shard_count)
        parent_key = self._parent_key(span)
        symbols = [run.symbol(i) for i in range(span.start, span.stop)]
        keys = chain_keys(parent_key, symbols)
        columns = [parts.index.places([span], HOST, shard).tolist() for shard in shards]
        blocks, parents = [], [parent_key, *keys]
        for n, key in enumerate(keys):
            position = run.first + span.start + n
            for shard in shards:
                place = columns[shard][n]
                header = BlockHeader(
                    space.id, run.root.digest, key, parents[n], position, shard, space.epoch,
                    space.block_bytes, symbols[n],
                )  # fmt: skip
                blocks.append((place, header, parts.checksums[place]))
        parts.host.commit(blocks)
        for place, _, _ in blocks:
            del parts.checksums[place]
        parts.recorder.put_bytes(len(blocks) * space.block_bytes)
        parts.events.stored(space, TIER_NAMES[HOST], b"".join(keys), parent_key, b"".join(symbols))
        return [place for place, _, _ in blocks]

    def _parent_key(self, span: Span) -> bytes:
        """Key of the block before a span, from its header where it has one: no hashing."""
        index, root = self._parts.index, span.run.root
        run, start = block_before(span.run, span.start)
        if not start:
            return root.key
        place = index.place(run, start - 1, 0, HOST)
        if place >= 0 and self._parts.host.generation(place):
            header = self._parts.header(place)
            if header is not None:
                return header.key
        return index.key_before(run, start)
