"""`Simulation`: the whole store in one thread, with faults, everything drawn from one seed.

    make simulate-faults SEED=7 STEPS=300     runs one seed and says what happened

Calls begin and end in any order: copies move when the seed says, turns of the owner come between,
the tier fails, time jumps, the process dies and comes back. Each seed leaves some of that out and
does others often. Whatever a lookup answers must be right, and in the end nothing may be left over.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import xxhash
from desk import Desk, Engine, outcomes
from follower import Follower
from simulated_world import RATES, SPACES, Prompt, SimulatedWorld

from kvstore.core.completion import Completion
from kvstore.core.errors import KVStoreError, LeaseLost, LimitReached, NotFound
from kvstore.testing import (
    Fault,
    FaultBudget,
    FaultyTier,
    MemoryTier,
    SimulatedCrash,
    ThrottledTier,
)
from kvstore.tiers.host import HostTier, PoolConfig


class Put:
    """A put under way: what its Reserve granted and is not committed yet."""

    def __init__(self, engine: Engine, space: int, prompt: Prompt, tokens: list[int]) -> None:
        self.engine, self.space, self.prompt, self.tokens = engine, space, prompt, tokens
        self.epoch = engine.space.epoch
        self.reservation = 0
        self.wanted: list[int] = []


class Held:
    """A lease and until when it certainly lives."""

    def __init__(self, engine: Engine, found: Any, tokens: list[int], until: float) -> None:
        self.engine, self.found, self.tokens, self.until = engine, found, tokens, until
        self.epoch = engine.space.epoch
        self.restored: list[Any] = []


class Simulation(SimulatedWorld):
    """One run of `steps` steps; `happened` counts what it did."""

    commit_blocks_max = 3

    def __init__(self, seed: int, steps: int = 300) -> None:
        self.seed, self.steps = seed, steps
        self.random = random = Random(seed)
        self.happened: Counter[str] = Counter()
        self.known: dict[tuple[int, Prompt], set[int]] = {}
        self.puts: list[Put] = []
        self.held: list[Held] = []
        self.open: list[Completion[Any]] = []
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.kind = random.choice(["memory", "memory", "host"])
        self.disk_kind = random.choice(["", "", "memory", "memory", "disk"])
        self.watermark = random.choice([0.0, 0.3, 0.7])
        rates = {fault: rate * random.random() for fault, rate in RATES.items()}
        self.rates = {fault: rate for fault, rate in rates.items() if random.random() < 0.4}
        self.budget = FaultBudget(dict(self.rates))
        self.throttle = random.choice([0.0, 0.0, 2e5])
        self.weights = {
            name: random.choice([0, 1, 1, 4]) * base
            for name, base in {
                "begin_put": 8, "commit": 12, "abort": 1, "lookup": 12, "release": 4, "renew": 2,
                "finish": 1, "read": 2, "time": 3, "long_time": 0.5, "clear": 0.3, "bump": 0.3,
                "verify": 0.5, "die": 0.5, "pin": 0.5, "quota": 0.5, "crash": 0.3, "restore": 6,
                "flush": 0.5, "report": 1,
            }.items()
        }  # fmt: skip
        self.weights |= {"begin_put": 8, "commit": 12, "lookup": 8, "copy": 20, "turn": 20}

    # ---- Running ----

    def run(self) -> Counter[str]:
        try:
            self.begin()
            self.go_on()
            self.end()
            return self.happened
        finally:
            with suppress(AttributeError):
                self.inner.close(keep=False)
                if self.disk is not None:
                    self.disk.close(keep=False)
            shutil.rmtree(self.directory)

    def go_on(self) -> None:
        names, weights = list(self.weights), list(self.weights.values())
        for step in range(self.steps):
            self.step = step
            self.take_step(self.random.choices(names, weights)[0])
            self.check()

    def take_step(self, name: str) -> None:
        self.happened[name] += 1
        try:
            getattr(self, name)()
        except SimulatedCrash:
            self.happened["died in a commit"] += 1
            self.crash()

    def begin(self) -> None:
        self.inner, self.disk = self.new_inner(), self.new_disk()
        disk = {**self.sections["tiers"]["disk"], "demote_watermark": self.watermark}
        if self.seed % 3 == 0:
            disk["admission"] = "measured"
        self.desk = Desk(
            tier=MemoryTier(self.pools), directory=self.directory, late=True,
            seed=self.random.randrange(1 << 30),
            sections={**self.sections, "tiers": {**self.sections["tiers"], "disk": disk}},
        )  # fmt: skip
        self.desk.store.restart(self.wrapped(self.inner), self.wrapped_disk())
        self.attach()

    def new_inner(self) -> Any:
        if self.kind == "memory":
            return MemoryTier(self.pools)
        pools = [PoolConfig(name, size) for name, size in self.pools.items()]
        return HostTier(pools, directory=self.directory)

    def wrapped(self, tier: Any) -> Any:
        """The tier as this seed has it: failing, and slow on the simulated clock."""
        clock = self.desk.clock
        tier = FaultyTier(tier, self.random, self.budget, 0.3, sleep=clock.advance)
        if self.throttle:
            tier = ThrottledTier(tier, self.throttle, 0.01, clock=clock, sleep=clock.advance)
        return tier

    def wrapped_disk(self) -> Any:
        return self.wrapped(self.disk) if isinstance(self.disk, MemoryTier) else self.disk

    def attach(self) -> None:
        self.lives = 0
        self.engines = [self.new_engines(n) for n in range(len(SPACES))]
        self.puts, self.held, self.open = [], [], []
        self.follower = Follower(self.desk.store.events)

    def new_engines(self, n: int) -> list[Engine]:
        self.lives += 1
        spec = SPACES[n]
        return [
            self.desk.engine(shard=shard, engine_id=f"e{n}-{self.lives}", **spec)
            for shard in range(spec.get("shard_count", 1))
        ]

    def later(self, value: Any, then: Any) -> None:
        """Has `then` take a call's answer, now or when it comes."""
        if not isinstance(value, Completion):
            then(value)
            return

        def done(completion: Completion[Any]) -> None:
            self.open.remove(value)
            with suppress(KVStoreError):
                then(completion.result())

        self.open.append(value)
        value.then(done)

    # ---- Prompts ----

    def draw(self) -> tuple[int, Engine, Prompt, list[int]]:
        """A space, one of its engines, and a prompt: mostly one that goes on from a known one."""
        random = self.random
        space = random.randrange(len(SPACES))
        known = [prompt for at, prompt in self.known if at == space]
        start: Prompt = random.choice(known) if known and random.random() < 0.7 else ()
        more = tuple(random.choice((0, 0, 1, 2)) for _ in range(random.randrange(4)))
        prompt = (*start, *more)[:10] or (0,)
        tokens = [4 * symbol + i for symbol in prompt for i in range(4)]
        return space, random.choice(self.engines[space]), prompt, tokens

    def bound(self, space: int, prompt: Prompt) -> int:
        shards = SPACES[space].get("shard_count", 1)
        n = 0
        while n < len(prompt) and len(self.known.get((space, prompt[: n + 1]), ())) == shards:
            n += 1
        return n

    # ---- Steps ----

    def begin_put(self) -> None:
        space, engine, prompt, tokens = self.draw()
        put = Put(engine, space, prompt, tokens)
        first = self.random.choice((0, 0, 0, len(prompt) // 2))

        def granted(answer: Any) -> None:
            if answer.reservation_id and not engine.session.closed:
                put.reservation = answer.reservation_id
                put.wanted = [first + i for i, o in enumerate(answer.outcomes) if o == 1]
                self.puts.append(put)

        self.later(self.desk.kv.reserve(engine.attachment, engine.query(tokens), first), granted)

    def sessions(self) -> list[Any]:
        return list(self.desk.kv.parts.sessions.values())

    def commit(self) -> None:
        if not self.puts:
            return
        put = self.random.choice(self.puts)
        if self.random.random() < 0.3:
            self.random.shuffle(put.wanted)
        count = self.random.randrange(1, self.commit_blocks_max + 1)
        chosen, put.wanted = put.wanted[:count], put.wanted[count:]
        if not put.wanted:
            self.puts.remove(put)
        keys = put.engine.keys(put.tokens)
        runs = [put.engine.run(keys, n, 1, put.epoch) for n in chosen]
        try:
            value = put.engine.commit_later(put.reservation, runs)
        except NotFound:
            self.puts = [other for other in self.puts if other is not put]
            return
        if put.epoch == put.engine.space.epoch and not put.engine.space.closing:
            for n in chosen:
                shards = self.known.setdefault((put.space, put.prompt[: n + 1]), set())
                shards.add(put.engine.attachment.shard)
        self.later(value, lambda results: self.count(outcomes(results)))

    def count(self, letters: str) -> None:
        for letter in letters:
            self.happened[f"outcome {letter}"] += 1

    def abort(self) -> None:
        if self.puts:
            put = self.puts.pop(self.random.randrange(len(self.puts)))
            self.desk.kv.abort(put.engine.session, put.reservation)

    def lookup(self) -> None:
        space, engine, prompt, tokens = self.draw()
        request = self.random.choice(("", "", "r1", "r2"))
        if request:
            self.held = [h for h in self.held if h.engine.space is not engine.space]
        value = self.desk.kv.lookup(engine.attachment, engine.query(tokens, request_id=request), 0)
        bound = self.bound(space, prompt)

        def found(answer: Any) -> None:
            most = max(bound, self.bound(space, prompt)) * (not engine.space.closing)
            self.found(engine, answer, tokens, most, request)

        self.later(value, found)

    def found(
        self, engine: Engine, found: Any, tokens: list[int], bound: int, request: str
    ) -> None:
        blocks = found.matched_tokens // 4
        assert blocks <= bound, f"{blocks} blocks were found of at most {bound}"
        self.happened["hit" if blocks else "miss"] += 1
        if found.lease_id:
            self.check_bytes(engine, found.slots, tokens, engine.space.epoch)
            if not request:
                until = self.desk.clock.now() + found.lease_ttl_seconds
                self.held.append(Held(engine, found, tokens, until))

    def check_bytes(self, engine: Engine, slots: Any, tokens: list[int], epoch: int) -> None:
        """Every leased slot holds its own block; what lying memory spoiled fits no checksum."""
        keys = engine.keys(tokens)
        for i, (place, generation) in enumerate(
            zip(slots.places.tolist(), slots.generations.tolist(), strict=True)
        ):
            if place < 0:
                continue  # on disk
            assert self.inner.generation(place) == generation, "a leased slot changed"
            stored = bytes(self.inner.view(place, engine.space.block_bytes))
            right = engine.payload(keys[slots.first_block + i], epoch).tobytes()
            if stored != right:
                assert self.lies(), "foreign bytes"
                checksum = self.inner.checksum(place)
                assert xxhash.xxh3_128_digest(stored) != checksum, "foreign bytes"

    def lies(self) -> bool:
        return Fault.SHORT_WRITE in self.rates or Fault.FLIP_ON_WRITE in self.rates

    def release(self) -> None:
        if self.held:
            held = self.held.pop(self.random.randrange(len(self.held)))
            self.desk.kv.release(held.engine.session, [held.found.lease_id])

    def renew(self) -> None:
        if self.held:
            held = self.random.choice(self.held)
            lost, ttl = self.desk.kv.renew(held.engine.session, [held.found.lease_id])
            assert not lost
            held.until = self.desk.clock.now() + ttl

    def finish(self) -> None:
        engine = self.random.choice(self.engines)[0]
        self.desk.kv.finish_request(engine.attachment, self.random.choice(("r1", "r2")))

    def read(self) -> None:
        if not self.held:
            return
        held = self.random.choice(self.held)
        slots = held.found.slots  # what is leased may end before what was matched
        block = slots.first_block + self.random.randrange(len(slots.places))
        right = held.engine.payload(held.engine.keys(held.tokens)[block], held.epoch).tobytes()

        def check(answer: Any) -> None:
            data, checksum = answer
            assert data == right or xxhash.xxh3_128_digest(data) != checksum

        with suppress(LeaseLost, LimitReached):
            self.later(
                self.desk.kv.read_block(held.engine.session, held.found.lease_id, block), check
            )

    def copy(self) -> None:
        self.desk.mover.step()

    def turn(self) -> None:
        self.desk.store.turn()


def main() -> None:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 300
    simulation = Simulation(seed, steps)
    print(f"seed {seed}: {simulation.kind} tier, faults {dict(simulation.rates)}")
    try:
        happened = simulation.run()
    except BaseException:
        print(f"seed {seed} failed in step {simulation.step}: {dict(simulation.happened)}")
        raise
    for name, count in sorted(happened.items()):
        print(f"  {count:6d} {name}")


if __name__ == "__main__":
    main()
