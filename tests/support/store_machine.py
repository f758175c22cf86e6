"""`StoreMachine`: drives a whole store by random rules and compares it with a dictionary."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import numpy as np
import xxhash
from desk import Engine, payload
from hypothesis.stateful import invariant, precondition, rule
from store_world import (
    ROOTS,
    SPACES,
    Held,
    Prefix,
    StoreWorld,
    numbers,
    prefixes,
    roots,
    spaces,
    tokens_of,
)

from kvstore.core.errors import LeaseLost, NotFound, StoreUnavailable


class StoreMachine(StoreWorld):
    """Puts and lookups, by hand and through clients, in the world of `StoreWorld`."""

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
