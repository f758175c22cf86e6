"""The world of `Simulation`: time, deaths and crashes, and what must hold whatever happens."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
from follower import ready_keys

from kvstore.core.errors import InvalidRequest, KVStoreError, LeaseLost
from kvstore.core.plan import Slots
from kvstore.testing import Fault, MemoryTier, SimulatedCrash
from kvstore.tiers.disk import DiskTier

POOLS = {"": 320 << 10, "b": 64 << 10}
DISK_BYTES = 640 << 10
SECTIONS = {
    "tenants": [{"name": "b", "isolated": True, "host_size": "1MiB"}],
    "tiers": {"host": {"size": "4MiB"}, "disk": {"endurance_dwpd": 0.0, "admission": "all"}},
    "limits": {"max_lease_ttl_seconds": 10.0, "events_kept": 1_000_000},
}
SPACES: list[dict[str, Any]] = [
    {"model": "a"},
    {"model": "wide", "num_layers": 3},
    {"model": "split", "shard_count": 2},
    {"model": "a", "tenant": "b"},
]
RATES = {
    Fault.LATENCY: 0.2, Fault.SHORT_WRITE: 0.05, Fault.FLIP_ON_WRITE: 0.05,
    Fault.WRITE_ERROR: 0.1, Fault.NO_SPACE: 0.2, Fault.CRASH_BEFORE_COMMIT: 0.02,
}  # fmt: skip
Prompt = tuple[int, ...]


class SimulatedWorld:
    """What happens by itself. `Simulation` adds the calls of engines."""

    desk: Any
    random: Any
    held: list[Any]
    puts: list[Any]
    engines: list[list[Any]]
    known: dict[Any, Any]
    happened: Counter[str]
    disk: Any
    pools = POOLS
    disk_bytes = DISK_BYTES
    sections = SECTIONS

    def time(self) -> None:
        self.pass_time(self.random.random() * 2)

    def long_time(self) -> None:
        self.pass_time(self.random.choice((5.0, 11.0, 31.0)))

    def pass_time(self, seconds: float) -> None:
        """Time passes; some sessions say nothing meanwhile."""
        self.desk.clock.advance(seconds)
        for session in self.sessions():
            if self.random.random() < 0.9:
                self.desk.kv.touch(session)
        self.desk.kv.tick()
        self.forget_closed()

    def forget_closed(self) -> None:
        open_ones, now = self.sessions(), self.desk.clock.now()
        self.held = [
            held for held in self.held if held.engine.session in open_ones and held.until > now
        ]
        self.puts = [put for put in self.puts if put.engine.session in open_ones]
        for n, ranks in enumerate(self.engines):
            if not all(engine.session in open_ones for engine in ranks):
                self.die(n)

    def die(self, n: int | None = None) -> None:
        n = self.random.randrange(len(SPACES)) if n is None else n
        gone = self.engines[n]
        for engine in gone:
            self.desk.kv.close_session(engine.session)
        self.held = [held for held in self.held if held.engine not in gone]
        self.puts = [put for put in self.puts if put.engine not in gone]
        self.engines[n] = self.new_engines(n)

    def clear(self) -> None:
        self.begin_clear(lambda space: self.desk.kv.clear(space.id))

    def bump(self) -> None:
        self.begin_clear(lambda space: self.desk.kv.bump_epoch(space.id))

    def begin_clear(self, call: Any) -> None:
        n = self.random.randrange(len(SPACES))
        space = self.engines[n][0].space
        with suppress(InvalidRequest):
            is_second = space.closing  # it answers for what the first one drops
            self.later(call(space), lambda _: is_second or self.forget_known(n))
            self.held = [held for held in self.held if held.engine.space is not space]

    def forget_known(self, n: int) -> None:
        """Nothing of a space may come back: called when its clear is answered; a crash may win."""
        self.known = {key: shards for key, shards in self.known.items() if key[0] != n}

    def restore(self) -> None:
        """Has blocks of a lease brought from disk; what comes is right, and stays while leased."""
        if not self.held:
            return
        held = self.random.choice(self.held)

        def came(answer: Any) -> None:
            if isinstance(answer, Slots):
                self.happened["restored"] += len(answer.places)
                self.check_bytes(held.engine, answer, held.tokens, held.epoch)
                held.restored.append(answer)
            else:
                self.happened[f"not restored: {answer.reason[:40]}"] += answer.block_count

        with suppress(LeaseLost):
            call = self.desk.kv.restore
            self.later(call(held.engine.session, held.found.lease_id, 0, 0, came), lambda _: None)

    def flush(self) -> None:
        if self.disk is not None:
            self.later(self.desk.kv.flush(), lambda _: None)

    def verify(self) -> None:
        def verified(result: Any) -> None:
            assert not result.corrupt_blocks or self.lies()
            self.happened["corrupt"] += result.corrupt_blocks
            self.held = [held for held in self.held if held.engine.is_intact(held.found)]

        self.later(self.desk.kv.verify(), verified)

    def report(self) -> None:
        """An engine tells what computing and copying took: not all is worth loading then."""
        engine, new = self.random.choice(self.engines)[0], self.random.choice((64, 256, 1024))
        self.desk.kv.costs.report_step(engine.attachment, 1e-3 + new * 3e-5, [(new, 0)])
        self.desk.kv.costs.report_transfer(engine.attachment, "host>hbm", 1 << 20, 1e-4)

    def pin(self) -> None:
        _, engine, _, tokens = self.draw()
        with suppress(KVStoreError):
            key = engine.keys(tokens)[-1]
            self.later(self.desk.kv.pin(engine.session, "", key, 20.0), lambda _: None)

    def quota(self) -> None:
        cap = self.random.choice((0, 0, 64 << 10, 200 << 10))
        self.desk.kv.set_quota("default", "host", cap, min(cap, self.random.choice((0, 16 << 10))))

    def crash(self) -> None:
        """The process dies; what it had committed to the tier is found again."""
        if self.kind == "memory":
            self.inner = self.inner.reopened()
        else:
            self.inner.close(keep=True)
            self.inner = self.new_inner()
        if isinstance(self.disk, MemoryTier):
            self.disk = self.disk.reopened()
        elif self.disk is not None:
            self.disk.close(keep=True)
            self.disk = self.new_disk()
        try:
            self.desk.store.restart(self.wrapped(self.inner), self.wrapped_disk())
        except SimulatedCrash:
            self.crash()
            return
        self.attach()

    def new_disk(self) -> Any:
        if self.disk_kind == "disk":
            (self.directory / "disk").mkdir(mode=0o700, exist_ok=True)
            return DiskTier(self.directory / "disk", self.disk_bytes * 8)
        return MemoryTier(self.disk_bytes, "disk") if self.disk_kind else None

    # ---- What always holds ----

    def check(self) -> None:
        if self.lies():
            # A check or a copy may have found lies of the memory: those leases are lost.
            lost = {n for _, kind, told in self.desk.notices if kind == "lost_leases" for n in told}
            self.held = [
                held for held in self.held
                if held.engine.is_intact(held.found) and held.found.lease_id not in lost
            ]  # fmt: skip
        for held in self.held[-4:]:
            for slots in (held.found.slots, *held.restored):
                self.check_bytes(held.engine, slots, held.tokens, held.epoch)
        if self.step % 4 == 0:
            self.desk.store.check_integrity()

    def end(self) -> None:
        """Faults stop, everything comes to rest: all that is left is READY, right and told."""
        self.budget.rates.clear()
        self.desk.settle()
        assert not self.open, "a call never got its answer"
        self.rest()
        parts, status = self.desk.kv.parts, self.desk.kv.status()
        held = (status.session_count, status.lease_count, status.reservation_count,
                status.pin_count, status.leased_bytes, status.reserved_bytes)  # fmt: skip
        assert held == (0,) * 6, held
        assert not parts.readers, parts.readers
        assert not parts.checksums, parts.checksums
        assert not parts.engines, parts.engines
        usage = self.inner.usage()
        assert usage.resting_bytes == 0, "slots rest for ever"
        ready = self.desk.wait(self.desk.kv.verify())
        assert not ready.corrupt_blocks or self.lies()
        self.desk.settle()
        usage = self.inner.usage()
        assert usage.block_count == self.check_all_ready(0, self.inner)
        self.rest()
        if self.disk is not None:
            assert self.disk.usage().resting_bytes == 0, "slots rest on disk for ever"
            on_disk = self.check_all_ready(1, self.disk)
            assert self.disk.usage().block_count == on_disk
            self.happened["blocks on disk in the end"] = on_disk
        assert self.follower.readable() == ready_keys(parts)
        self.happened["blocks in the end"] = usage.block_count
        self.happened.update({f"fault {f}": n for f, n in self.budget.happened.items()})

    def rest(self) -> None:
        """Time passes until everything that ends by time has."""
        for _ in range(3):
            self.desk.clock.advance(200.0)
            self.desk.kv.tick()
            self.desk.settle()

    def check_all_ready(self, number: int, tier: Any) -> int:
        """Every READY block of a tier holds its own bytes; answers with how many slots that are."""
        parts, engines, slots = self.desk.kv.parts, {}, 0
        for n in range(len(SPACES)):
            for engine in self.new_engines(n):
                engines[engine.space.id, engine.attachment.shard] = engine
        for run in parts.index.runs():
            for shard in range(run.root.space.shard_count):
                for place in parts.index.places([(run, 0, run.ready)], number, shard).tolist():
                    if place < 0:
                        continue
                    header = tier.header(place)
                    engine = engines[header.space, header.shard]
                    stored = np.empty(header.length, np.uint8)
                    tier.read(place, stored, header.length)
                    assert header.epoch == engine.space.epoch
                    assert np.array_equal(stored, engine.payload(header.key)), "foreign bytes"
                    slots += 1
        return slots
