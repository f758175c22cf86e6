"""`Ghost`: a cache without bytes, on the daemon's own index, residency and policies.

What is asked for is stored at once, then the tiers are evicted to their capacities. Simulations
of traces and the shadows beside a live store are both made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore.core.keys import Chain
from kvstore.core.space import Space
from kvstore.policies.accounts import pool_in
from kvstore.policies.base import Model
from kvstore.policies.ghost_disk import DISK, HOST, DiskTier, Places
from kvstore.policies.ghost_hbm import HbmTier
from kvstore.policies.index import PrefixIndex
from kvstore.policies.residency import Residency


class Hit(NamedTuple):
    """What a request found: leading blocks in all; of these on disk only, with copies in hbm.

    Of several tiers hbm that are tried `with_copies` has each one's.
    """

    blocks: int
    disk_blocks: int = 0
    with_copies: tuple[int, ...] = ()

    @property
    def hbm_blocks(self) -> int:
        """Those with copies in the first tier hbm."""
        return self.with_copies[0] if self.with_copies else 0


class Ghost:
    """One cache under one policy; its spaces have one shard.

    `host_bytes` are the capacities of the host pools; without `disk_bytes` there is no disk tier.
    At most `daily_bytes` are written to it in a day, 0 without a limit. What `residency` is told of
    requests is the caller's to tell; `models` are told by others. A tier `hbm` has copies of host
    blocks. It changes nothing below it, so that several can be tried at once.
    """

    def __init__(
        self,
        policy: str,
        host_bytes: Mapping[str, int],
        disk_bytes: int | None = None,
        daily_bytes: float = 0.0,
        models: Iterable[Model] = (),
        hbm: Sequence[HbmTier] = (),
    ) -> None:
        self.host_bytes = dict(host_bytes)
        self.disk_bytes = disk_bytes
        self.residency = Residency(policy)
        for model in models:
            self.residency.context.borrow(model)
        self.index = PrefixIndex(1 if disk_bytes is None else 2)
        self.residency.attach(self.index)
        self._places = Places()
        self.hbm = hbm
        self._found: list[int] = []  # host places of what was last found
        self._disk: DiskTier | None = None
        if disk_bytes is not None:
            self._disk = DiskTier(self.residency, self.host_bytes, daily_bytes)

    @property
    def written_blocks(self) -> int:
        """Blocks written to disk."""
        return 0 if self._disk is None else self._disk.written_blocks

    def serve(self, space: Space, root: bytes, chain: Chain, seconds: float = 0.0) -> Hit:
        """Looks a chain up and stores it, whole; `seconds` is when."""
        hit = self.store(space, root, chain)
        with_copies = tuple(self.load(space, seconds))
        for _ in self.make_room(space, seconds):
            pass
        return hit._replace(with_copies=with_copies)

    def store(self, space: Space, root: bytes, chain: Chain) -> Hit:
        """The same, but what is found is the caller's to load, and room to make, in this order,
        before anything else comes."""
        index = self.index
        walk = index.walk(index.root(space, root), chain)
        walk.finish()
        found = walk.ready_blocks
        on_disk = 0
        if found:
            path = self.residency.access(walk.path)
            if self._disk is not None:
                on_disk = self._disk.promote(path, self._places)
            if self.hbm:
                self._found = index.places(path, HOST, 0).tolist()
        missing = chain.block_count - found
        if missing:
            index.extend(walk, HOST, self._places.take(missing))
        return Hit(found, on_disk)

    def load(self, space: Space, seconds: float) -> Iterator[int]:
        """Blocks with copies of what was last found, in each tier hbm; each is a step."""
        found, self._found = self._found, []
        for tier in self.hbm:
            yield tier.load(space, found, seconds) if found else 0

    def make_room(self, space: Space, seconds: float) -> Iterator[None]:
        """Writes what is due on disk, then evicts to the capacities; a step is one run."""
        if self._disk is not None:
            yield from self._disk.write(space, self._places, seconds)
        yield from self._evict(space, HOST, self.host_bytes[space.pool])
        if self.disk_bytes is not None:
            yield from self._evict(space, DISK, self.disk_bytes)

    def _evict(self, space: Space, tier: int, capacity_bytes: int) -> Iterator[None]:
        residency, pool = self.residency, pool_in(tier, space.pool)
        over = residency.accounts.used(tier, pool) - capacity_bytes
        if over > 0 or residency.room(tier, pool, space.tenant) < 0:
            for drop in residency.make_room(tier, pool, space.tenant, max(0, over)):
                removed = self.index.drop(drop.run, drop.keep, tier)
                for copies in self.hbm:
                    copies.gone(removed.places[HOST])
                yield

    def empty(self) -> Iterator[None]:
        """Drops everything, children first; a step is one run."""
        for run in reversed(list(self.index.runs())):
            self.index.remove(run)
            yield
