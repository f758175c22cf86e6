"""`StoreMachine`: drives a whole store by random rules and compares it with a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import xxhash
from desk import Desk, Engine, payload
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvstore.core.errors import LeaseLost, NotFound, StoreUnavailable
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


class StoreMachine(RuleBasedStateMachine):
    """Puts, lookups, clears, crashes and time, by hand and through clients.

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

    # ---- Puts ----

    @rule(space=spaces, root=roots, prefix=prefixes)
    def put(self, space: int, root: int, prefix: Prefix) -> None:
        for engine in self.engines[space]:
            tokens = tokens_of(prefix)
            self.note(space, root, prefix, engine, range(len(prefix)))
            engine.put(tokens, **ROOTS[root])

    def note(self, space: int, root: int, prefix: Prefix, engine: Engine, positions: Any) -> None:
        for n in positions:
            shards = self.known.setdefault((space, root, prefix[: n + 1]), set())
            shards.add(engine.attachment.shard)

    @rule(
        space=spaces,
        root=roots,
        prefix=prefixes,
        number=numbers,
        first=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def reserve(self, space: int, root: int, prefix: Prefix, number: int, first: int) -> None:
        ranks = self.engines[space]
        root, prefix = self.pick(space, root, prefix, number)
        engine, tokens = ranks[number % len(ranks)], tokens_of(prefix)
        first = min(first, len(prefix))
        answer = self.desk.kv.reserve(engine.attachment, engine.query(tokens, **ROOTS[root]), first)
        wanted = [answer.first_block + i for i, o in enumerate(answer.outcomes) if o == 1]
        if answer.reservation_id:
            self.reservations.append(
                (engine, answer.reservation_id, wanted, tokens, space, root, prefix)
            )

    @precondition(lambda self: self.reservations)
    @rule(number=numbers, count=st.integers(1, 4))
    def commit(self, number: int, count: int) -> None:
        engine, reservation, wanted, tokens, space, root, prefix = self.reservations[
            number % len(self.reservations)
        ]
        self.random.shuffle(wanted)
        chosen = [wanted.pop() for _ in range(min(count, len(wanted)))]
        if not chosen:
            return
        keys = engine.keys(tokens, **ROOTS[root])
        runs = [engine.run(keys, n, 1) for n in chosen]
        epoch = engine.space.epoch
        try:
            engine.commit_later(reservation, runs)
        except NotFound:
            return
        assert epoch == engine.space.epoch
        # The reservation of an older epoch or of cleared blocks is refused later: no note of it.
        if self.is_current(reservation):
            self.note(space, root, prefix, engine, chosen)

    def is_current(self, reservation_id: int) -> bool:
        reservation = self.desk.kv.reservations.get(reservation_id)
        return (
            reservation is not None
            and reservation.epoch == reservation.attachment.space.epoch
            and not reservation.attachment.space.closing
            and reservation.anchor.run is not None
        )

    @precondition(lambda self: self.reservations)
    @rule(number=numbers)
    def abort(self, number: int) -> None:
        engine, reservation, *_ = self.reservations.pop(number % len(self.reservations))
        self.desk.kv.abort(engine.session, reservation)

    # ---- Lookups ----

    @rule(space=spaces, root=roots, prefix=prefixes, number=numbers, local=st.integers(0, 9),
          request=st.sampled_from(["", "", "r1", "r2"]))  # fmt: skip
    def lookup(
        self, space: int, root: int, prefix: Prefix, number: int, local: int, request: str
    ) -> None:
        root, prefix = self.pick(space, root, prefix, number)
        ranks, tokens = self.engines[space], tokens_of(prefix)
        engine = ranks[number % len(ranks)]
        found = engine.lookup(tokens, local, request_id=request, **ROOTS[root])
        assert found.matched_tokens <= 4 * self.bound(space, root, prefix)
        engine.check(found, tokens, **ROOTS[root])
        if request:
            self.keep(
                lambda held: (
                    (held.request, held.engine.space) != (request, engine.space)
                    or held.found.lease_id == found.lease_id
                )
            )
        if found.lease_id:
            until = self.desk.clock.now() + found.lease_ttl_seconds
            for held in self.held:
                if held.found.lease_id == found.lease_id:
                    held.until = until
            held = Held(engine, found, tokens, root, until)
            held.request = request
            self.held.append(held)

    @precondition(lambda self: self.held)
    @rule(number=numbers)
    def release(self, number: int) -> None:
        held = self.held[number % len(self.held)]
        self.desk.kv.release(held.engine.session, [held.found.lease_id])
        self.keep(lambda other: other.found.lease_id != held.found.lease_id)

    @rule(space=spaces, request=st.sampled_from(["r1", "r2"]))
    def finish(self, space: int, request: str) -> None:
        engine = self.engines[space][0]
        self.desk.kv.finish_request(engine.attachment, request)
        self.keep(lambda held: (held.request, held.engine.space) != (request, engine.space))

    @precondition(lambda self: self.held)
    @rule(number=numbers)
    def renew(self, number: int) -> None:
        held = self.held[number % len(self.held)]
        lost, ttl = self.desk.kv.renew(held.engine.session, [held.found.lease_id])
        assert not lost
        for other in self.held:
            if other.found.lease_id == held.found.lease_id:
                other.until = self.desk.clock.now() + ttl

    @precondition(lambda self: self.held)
    @rule(number=numbers, block=st.integers(0, 7))
    def read(self, number: int, block: int) -> None:
        held = self.held[number % len(self.held)]
        keys = held.engine.keys(held.tokens, **ROOTS[held.root])
        block %= held.found.matched_tokens // 4
        later = self.desk.kv.read_block(held.engine.session, held.found.lease_id, block)
        right = bytes(held.engine.payload(keys[block], held.epoch))

        def check(done: Any) -> None:
            with suppress(LeaseLost):
                data, checksum = done.result()
                # Clients compare the two: a bit that flipped meanwhile is a miss.
                assert data == right or xxhash.xxh3_128_digest(data) != checksum

        later.then(check)

    # ---- Clients ----

    @precondition(lambda self: len(self.clients) < 4)
    @rule(space=spaces, shared=st.booleans())
    def connect(self, space: int, shared: bool) -> None:
        client = self.desk.store.client(shared_memory=shared)
        spec = dict(SPACES[space])
        engine = self.engines[space][0]
        shards = range(spec.get("shard_count", 1))
        attached = [
            client.attach(engine.space.spec, spec.get("tenant", "default"), shard)
            for shard in shards
        ]
        self.clients.append((space, client, attached))

    @precondition(lambda self: self.clients)
    @rule(number=numbers, root=roots, prefix=prefixes)
    def client_put(self, number: int, root: int, prefix: Prefix) -> None:
        space, client, attached = self.clients[number % len(self.clients)]
        root, prefix = self.pick(space, root, prefix, number)
        engine, tokens = self.engines[space][0], tokens_of(prefix)
        keys = engine.keys(tokens, **ROOTS[root])
        for shard, remote in enumerate(attached):
            data = [self.payload(engine, key, shard) for key in keys]
            try:
                remote.put(tokens, data, **client_root(root))
            except StoreUnavailable:
                client.keep()
                return
            self.note(space, root, prefix, self.engines[space][shard], range(len(prefix)))

    @precondition(lambda self: self.clients)
    @rule(number=numbers, root=roots, prefix=prefixes, views=st.booleans())
    def client_restore(self, number: int, root: int, prefix: Prefix, views: bool) -> None:
        space, client, attached = self.clients[number % len(self.clients)]
        root, prefix = self.pick(space, root, prefix, number)
        engine, tokens = self.engines[space][0], tokens_of(prefix)
        keys = engine.keys(tokens, **ROOTS[root])
        for shard, remote in enumerate(attached):
            try:
                with remote.lookup(tokens, **client_root(root)) as match:
                    assert match.matched_tokens <= 4 * self.bound(space, root, prefix)
                    if views:
                        got = [bytes(view) for view in remote.restore(match)]
                    else:
                        target = np.empty((match.block_count, engine.space.block_bytes), np.uint8)
                        remote.restore_into(match, target)
                        got = [row.tobytes() for row in target]
                    if got:
                        match.check()
            except StoreUnavailable:
                client.keep()
                return
            assert got == [self.payload(engine, key, shard).tobytes() for key in keys[: len(got)]]

    def payload(self, engine: Engine, key: bytes, shard: int) -> np.ndarray:
        space = engine.space
        return payload(space.id, space.epoch, key, shard, space.block_bytes)

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

    # ---- What always holds ----

    @invariant()
    def books_agree(self) -> None:
        """I3, I4, I22: the index, the tier, leases and accounts agree with each other."""
        self.quiet += 1
        if hasattr(self, "desk"):
            self.desk.store.check_integrity()
            usage = self.desk.usage()
            total = usage.used_bytes + usage.free_bytes + usage.resting_bytes
            assert total == usage.capacity_bytes

    @invariant()
    def leases_hold(self) -> None:
        """I1, I5, I6: what a live lease covers is there, and right."""
        for held in self.held:
            held.engine.check(held.found, held.tokens, held.epoch, **ROOTS[held.root])
        for held in self.ghosts:
            held.engine.check(held.found, held.tokens, held.epoch, True, **ROOTS[held.root])

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            self.desk.settle()
            for _, client, _ in self.clients:
                client.close()
            self.desk.store.close()
            self.desk.store.tier.close(keep=False)
        shutil.rmtree(self.directory)


def client_root(root: int) -> dict[str, str]:
    names = {"salt": "cache_salt", "adapter": "adapter"}
    return {names[name]: value for name, value in ROOTS[root].items()}
