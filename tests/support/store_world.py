"""The world of `StoreMachine`: its spaces, prompts and leases, and what happens to it by itself."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
from desk import Desk, Engine
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvstore.core.errors import NotFound
from kvstore.testing import MemoryTier
from kvstore.tiers.host import HostTier, PoolConfig

POOLS = {"": 240 << 10, "b": 64 << 10}
SECTIONS = {
    "tenants": [{"name": "b", "isolated": True, "host_size": "1MiB"}],
    "tiers": {"host": {"size": "4MiB"}},
    "limits": {"max_lease_ttl_seconds": 10.0},
}
# Blocks of one slot, of three, of two shards; and a tenant with a pool of its own.
SPACES: list[dict[str, Any]] = [
    {"model": "a"},
    {"model": "wide", "num_layers": 3},
    {"model": "split", "shard_count": 2},
    {"model": "a", "tenant": "b"},
]
ROOTS = [{}, {"adapter": "lora"}, {"salt": "s"}]

Prefix = tuple[int, ...]
spaces = st.integers(0, len(SPACES) - 1)
roots = st.sampled_from([0, 0, 0, 1, 2])
prefixes = st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=1, max_size=8).map(tuple)
numbers = st.integers(0, 1 << 16)


def tokens_of(prefix: Prefix) -> list[int]:
    return [4 * symbol + i for symbol in prefix for i in range(4)]


class Held:
    """A lease as its holder knows it."""

    def __init__(self, engine: Engine, found: Any, tokens: list[int], root: int, until: float):
        self.engine, self.found, self.tokens, self.root = engine, found, tokens, root
        self.epoch, self.until = engine.space.epoch, until
        self.request = ""


class StoreWorld(RuleBasedStateMachine):
    """Time, clears, crashes, and whoever dies; what may be found meanwhile.

    `known` has the blocks that may be found: (space, root, prefix) with the shards whose commit
    was begun since the last clear or epoch. `held` are leases that must still be good, `ghosts`
    those whose blocks were un-published: their bytes must not change before they end.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.known: dict[tuple[int, int, Prefix], set[int]] = {}
        self.held: list[Held] = []
        self.ghosts: list[Held] = []
        self.reservations: list[tuple[Engine, int, Any, list[int], int, int, Prefix]] = []
        self.clients: list[tuple[int, Any, list[Any]]] = []
        self.numbers = self.quiet = 0
        self.spoiled = False

    @initialize(seed=numbers, late=st.booleans())
    def start(self, seed: int, late: bool) -> None:
        self.random = Random(seed)
        self.desk = Desk(
            tier=self.new_tier(), directory=self.directory, late=late, seed=seed, sections=SECTIONS
        )
        self.attach()
        for space in range(len(SPACES)):
            length = self.random.randrange(1, 8)
            self.put(space, 0, tuple(self.random.choice([0, 0, 1]) for _ in range(length)))

    def new_tier(self) -> Any:
        if self.kind == "memory":
            return MemoryTier(POOLS)
        pools = [PoolConfig(name, size) for name, size in POOLS.items()]
        return HostTier(pools, directory=self.directory)

    def attach(self) -> None:
        """New sessions for everybody: each space has one engine of as many ranks as shards."""
        self.engines = [
            [
                self.desk.engine(shard=shard, engine_id=f"e{n}", **spec)
                for shard in range(spec.get("shard_count", 1))
            ]
            for n, spec in enumerate(SPACES)
        ]
        self.held, self.ghosts, self.reservations = [], [], []
        self.quiet = 0

    # ---- What may be ----

    def bound(self, space: int, root: int, prefix: Prefix) -> int:
        """How many blocks of a prompt may be found."""
        shards = SPACES[space].get("shard_count", 1)
        n = 0
        while n < len(prefix):
            if len(self.known.get((space, root, prefix[: n + 1]), ())) < shards:
                break
            n += 1
        return n

    def forget(self, spaces: list[int]) -> None:
        """A clear or an epoch: nothing of before may be found or trusted."""
        self.quiet = 0
        self.known = {key: shards for key, shards in self.known.items() if key[0] not in spaces}
        ids = [self.engines[n][0].space.id for n in spaces]
        self.part_with(lambda held: held.engine.space.id in ids)

    def part_with(self, is_lost: Any) -> None:
        """Leases whose blocks were un-published under them: lost, but their slots rest."""
        self.ghosts += [held for held in self.held if is_lost(held)]
        self.held = [held for held in self.held if not is_lost(held)]

    def keep(self, is_kept: Any) -> None:
        """Ends the other leases."""
        self.held = [held for held in self.held if is_kept(held)]
        self.ghosts = [held for held in self.ghosts if is_kept(held)]

    def pick(self, space: int, root: int, prefix: Prefix, number: int) -> tuple[int, Prefix]:
        """Mostly a prompt that was put before, or one that goes on from it."""
        known = sorted((key[1], key[2]) for key in self.known if key[0] == space)
        if number % 4 == 0 or not known:
            return root, prefix
        root, start = known[number // 4 % len(known)]
        return root, (*start, *prefix[: number % 3])[:10]

    def is_time_for_an_accident(self) -> bool:
        return self.quiet >= 5

    # ---- Time, ends and accidents ----

    @precondition(lambda self: self.desk.mover is not None and self.desk.mover.pending)
    @rule(steps=st.integers(1, 6))
    def copy(self, steps: int) -> None:
        for _ in range(steps):
            self.desk.mover.step()
            self.desk.store.drain()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 11.0, 31.0, 61.0]), keep=st.booleans())
    def advance(self, seconds: float, keep: bool) -> None:
        self.desk.advance(seconds)
        for _, client, _ in self.clients if keep else ():
            client.keep()
        now = self.desk.clock.now()
        self.keep(lambda held: held.until > now)

    @precondition(is_time_for_an_accident)
    @rule(space=spaces)
    def clear(self, space: int) -> None:
        self.desk.wait(self.desk.kv.clear(self.engines[space][0].space.id))
        self.forget([space])

    @precondition(is_time_for_an_accident)
    @rule(space=spaces)
    def bump(self, space: int) -> None:
        self.desk.wait(self.desk.kv.bump_epoch(self.engines[space][0].space.id))
        self.forget([space])

    @rule(cap=st.sampled_from([0, 0, 24 << 10, 80 << 10]), floor=st.sampled_from([0, 0, 16 << 10]))
    def quota(self, cap: int, floor: int) -> None:
        self.desk.kv.set_quota("default", "host", cap, min(floor, cap) if cap else floor)

    @rule(space=spaces, prefix=prefixes, number=numbers, seconds=st.sampled_from([1.0, 50.0]))
    def pin(self, space: int, prefix: Prefix, number: int, seconds: float) -> None:
        engine = self.engines[space][0]
        root, prefix = self.pick(space, 0, prefix, number)
        key = engine.keys(tokens_of(prefix), **ROOTS[root])[-1]
        with suppress(NotFound):
            self.desk.wait(self.desk.kv.pin(engine.session, "", key, seconds))

    @precondition(is_time_for_an_accident)
    @rule(space=spaces)
    def die(self, space: int) -> None:
        """All sessions of an engine end; new ones take their place."""
        gone, self.quiet = self.engines[space], 0
        for engine in gone:
            self.desk.kv.close_session(engine.session)
        self.keep(lambda held: held.engine not in gone)
        self.reservations = [r for r in self.reservations if r[0] not in gone]
        self.numbers += 1
        spec = SPACES[space]
        self.engines[space] = [
            self.desk.engine(shard=shard, engine_id=f"e{space}-{self.numbers}", **spec)
            for shard in range(spec.get("shard_count", 1))
        ]

    @rule()
    def verify(self) -> None:
        corrupt = self.desk.wait(self.desk.kv.verify()).corrupt_blocks
        assert not corrupt or self.spoiled
        self.spoiled = False
        if corrupt:
            self.held = [held for held in self.held if held.engine.is_intact(held.found)]

    @precondition(lambda self: self.kind == "host" and self.is_time_for_an_accident())
    @rule(number=numbers, restart=st.booleans())
    def flip(self, number: int, restart: bool) -> None:
        """A bit flips at rest: it is found by the next verify, or by a restart's checks."""
        places = sorted(self.ready_places())
        if not places:
            return
        place = places[number % len(places)]
        self.keep(lambda held: place not in held.found.slots.places.tolist())
        pool = self.desk.store.tier._pools[place >> 40]
        pool.data[((place & ((1 << 40) - 1)) << 12) + number % 4096] ^= 1 << number % 8
        if restart:
            self.spoiled = True
            self.crash()
        else:
            tier, spoiled = self.desk.store.tier, self.spoiled
            generation, self.spoiled = tier.generation(place), True
            self.verify()
            # A second flip of the same bit would put it right again.
            assert tier.generation(place) != generation or spoiled
            self.held = [held for held in self.held if held.engine.is_intact(held.found)]

    @precondition(is_time_for_an_accident)
    @rule()
    def crash(self) -> None:
        """kill -9 and a new start: everything that was READY is there again, nothing else."""
        before = self.ready_keys()
        store = self.desk.store
        if self.kind == "memory":
            tier = store.tier.reopened()
        else:
            store.tier.close(keep=True)
            tier = self.new_tier()
        store.restart(tier)
        assert self.ready_keys() == before
        self.attach()

    def ready_places(self) -> set[int]:
        index = self.desk.kv.parts.index
        return {
            place
            for run in index.runs()
            for shard in range(run.root.space.shard_count)
            for place in index.places([(run, 0, run.ready)], 0, shard).tolist()
        }

    def ready_keys(self) -> set[tuple[bytes, bytes, int]]:
        host = self.desk.kv.parts.host
        headers = map(host.header, self.ready_places())
        return {(header.space, header.key, header.shard) for header in headers}
