"""A small world to put blocks into: an index, a residency that listens, places that count up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count, islice

import pytest

from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec
from kvstore.policies.index import PrefixIndex, Span, StageAnswer, Staged, Walk
from kvstore.policies.residency import Residency

ROOT = bytes(32)
Symbols = list[bytes]


def make_space(number: int = 0, tenant: str = "t", shards: int = 1, pool: str = "") -> Space:
    spec = KVSpec(
        model=f"model-{number}", revision="r", num_layers=1, num_kv_heads=1, head_dim=8,
        dtype="int8", block_size=4, shard_count=shards,
    )  # fmt: skip
    return Space(number, spec, tenant, pool)


def make_chain(symbols: Iterable[bytes]) -> Chain:
    """Chain of symbols of any widths."""
    segments: list[Segment] = []
    for symbol in symbols:
        if segments and segments[-1].width == len(symbol):
            last = segments.pop()
            segments.append(Segment(last.symbols + symbol, last.width))
        else:
            segments.append(Segment(symbol, len(symbol)))
    return Chain(tuple(segments))


class World:
    """Index and residency with the store's part played in a few lines."""

    def __init__(self, tiers: int = 1, max_blocks: int = 1 << 40, policy: str = "lru"):
        self.residency = Residency(policy)
        self.index = PrefixIndex(tiers, None, max_blocks)
        self.residency.attach(self.index)
        self._places = count()
        self._owners = count(1)

    def walk(self, space: Space, chain: Chain, root: bytes = ROOT) -> Walk:
        walk = self.index.walk(self.index.root(space, root), chain)
        while not walk.step():
            pass
        return walk

    def stage(
        self, space: Space, chain: Chain, shard: int = 0, limit: int = 1 << 40, root: bytes = ROOT
    ) -> Staged:
        walk = self.walk(space, chain, root)
        return self.index.stage(walk, chain, shard, next(self._owners), limit)

    def commit(self, staged: Staged, shard: int = 0) -> list[Span]:
        """Commits and publishes what `staged` wanted, and lets its anchor go."""
        if staged.anchor is None:
            return []
        spans = self.index.path(staged.anchor)
        position = 0
        for run, start, stop in spans:
            answers = staged.answers[position : position + stop - start]
            if answers == bytes([StageAnswer.WANTED]) * len(answers):
                places = list(islice(self._places, len(answers)))
                self.index.commit_span(run, start, shard, 0, places)
            else:
                for i, answer in enumerate(answers, start):
                    if answer == StageAnswer.WANTED:
                        self.index.commit(run, i, shard, 0, next(self._places))
            position += stop - start
        ready = [span for run, _, _ in spans if run.alive for span in self.index.publish(run)]
        self.index.unanchor(staged.anchor)
        return ready

    def put(self, space: Space, symbols: Symbols | Chain, root: bytes = ROOT) -> list[Span]:
        """All shards of a chain, in one go."""
        chain = symbols if isinstance(symbols, Chain) else make_chain(symbols)
        ready: list[Span] = []
        for shard in range(space.shard_count):
            ready += self.commit(self.stage(space, chain, shard, root=root), shard)
        return ready

    def look(self, space: Space, symbols: Symbols | Chain, root: bytes = ROOT) -> int:
        """An access: how many leading blocks are READY."""
        chain = symbols if isinstance(symbols, Chain) else make_chain(symbols)
        walk = self.walk(space, chain, root)
        self.residency.access(walk.path)
        return walk.ready_blocks

    def free(self, space: Space, blocks: int, tier: int = 0) -> int:
        """Makes room for `blocks` of the space's tenant; answers how many were freed."""
        before = self.residency.accounts.used(tier, space.pool)
        size = space.slot_bytes * space.shard_count
        for drop in self.residency.make_room(tier, space.pool, space.tenant, blocks * size):
            self.index.drop(drop.run, drop.keep, tier)
        return (before - self.residency.accounts.used(tier, space.pool)) // size

    def check(self) -> None:
        self.index.check_integrity()
        self.residency.check_integrity()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def new_world() -> type[World]:
    return World


@pytest.fixture(scope="session")
def new_space() -> Callable[..., Space]:
    return make_space


@pytest.fixture(scope="session")
def new_chain() -> Callable[[Iterable[bytes]], Chain]:
    return make_chain
