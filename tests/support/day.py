"""`Day`: 24 hours of the simulation in minutes, on a store that turns over again and again.

    PYTHONPATH=tests/support python -m day 1000000 24      so many calls and hours; prints JSON

Chats begin, grow and are forgotten, so that prompts are ever new; sessions, requests and leases
come and go, blocks are cleared, tiers fail, and early in the day the process dies three times. What
it adds to `Simulation` is what only shows after a long time: whether memory stays as it is.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
from desk import Engine
from simulated_world import SPACES, Prompt
from simulation import Simulation

from kvstore.bench.measure import commit, machine
from kvstore.core.errors import KVStoreError
from kvstore.core.plan import Slots
from kvstore.testing import Fault

KIB = 1 << 10
SECTIONS = {
    "tenants": [{"name": "b", "isolated": True, "host_size": "1MiB"}],
    "tiers": {"host": {"size": "4MiB"}, "disk": {"endurance_dwpd": 0.0, "admission": "all"}},
    # Small enough that every book is full long before the part of the day that is measured.
    "limits": {"max_lease_ttl_seconds": 10.0, "events_kept": 4096, "decisions_kept": 512},
    "index": {"max_blocks": 20_000},
}
WEIGHTS = {
    "begin_put": 8, "commit": 12, "abort": 0.3, "lookup": 16, "release": 8, "renew": 2,
    "finish": 3, "read": 1, "restore": 6, "report": 1, "pin": 0.3, "quota": 0.1, "die": 0.1,
    "flush": 0.02, "verify": 0.005, "clear": 0.01, "bump": 0.01,
    "time": 4, "long_time": 0.02, "copy": 16, "turn": 16,
}  # fmt: skip
NO_CALLS = {"time", "long_time", "copy", "turn"}
NEEDS_LEASE, NEEDS_PUT = {"release", "renew", "read", "restore"}, {"commit", "abort"}
CRASHES = (0.08, 0.18, 0.3)  # parts of the day after which the process dies
MEASURED_FROM = 0.5
CHATS, BLOCKS_MAX, SYSTEMS, PUTS_MAX = 60, 24, 5, 40
SAMPLES, CHECK_STEPS, INTEGRITY_CHECKS, SWEEP_STEPS = 200, 64, 100, 5_000


class Day(Simulation):
    """So many calls over hours of a clock that is moved; `figures` has what came of it."""

    pools = {"": 1024 * KIB, "b": 256 * KIB}  # noqa: RUF012 - as of the class it goes on from
    disk_bytes = 512 * KIB
    sections = SECTIONS
    commit_blocks_max = 12

    def __init__(self, calls: int, hours: float = 24.0, seed: int = 1) -> None:
        super().__init__(seed, calls)
        self.seconds, self.is_stopped = 3600 * hours, False
        self.wanted, self.calls, self.step = calls, 0, 0
        self.kind, self.disk_kind, self.watermark, self.throttle = "host", "disk", 0.3, 0.0
        self.rates = {Fault.LATENCY: 0.02, Fault.WRITE_ERROR: 0.002, Fault.NO_SPACE: 0.02}
        self.budget.rates = dict(self.rates)
        self.weights = WEIGHTS
        self.entered: Counter[str] = Counter()
        """Bytes that became readable in each tier."""
        self.samples: list[tuple[int, float, int]] = []
        """Calls, hours and resident bytes, now and then."""
        self.chats: list[deque[list[int]]] = [deque(maxlen=CHATS) for _ in SPACES]
        self.newest = 0

    # ---- Running ----

    def go_on(self) -> None:
        self.began = self.desk.clock.now()
        self.sizes = {"host": sum(self.pools.values()), "disk": self.disk.usage().capacity_bytes}
        names, weights = list(self.weights), list(self.weights.values())
        crashes = [int(part * self.wanted) for part in CRASHES]
        while self.calls < self.wanted and not self.is_stopped:
            self.step += 1
            name = self.random.choices(names, weights)[0]
            self.calls += self.is_call(name)
            self.take_step(name)
            self.check()
            if crashes and self.calls >= crashes[0]:
                crashes.pop(0)
                self.happened["crash"] += 1
                self.crash()
        if not self.is_stopped:
            self.pass_time(max(0.0, self.began + self.seconds - self.desk.clock.now()))
        self.hours = (self.desk.clock.now() - self.began) / 3600

    def is_call(self, name: str) -> bool:
        if name in NO_CALLS or (name in NEEDS_PUT and not self.puts):
            return False
        return name not in NEEDS_LEASE or bool(self.held)

    def attach(self) -> None:
        super().attach()
        self.desk.store.events.subscribe(None, 0, self.hear)

    def hear(self, event: Any) -> None:
        if event.kind == "stored":
            space = self.desk.kv.parts.spaces[event.space_id]
            blocks = len(event.keys) // 16
            self.entered[event.medium] += blocks * space.slot_bytes * space.spec.shard_count

    def check(self) -> None:
        if self.step % CHECK_STEPS == 0:
            for held in self.held[-4:]:
                for slots in (held.found.slots, *held.restored):
                    self.check_bytes(held.engine, slots, held.tokens, held.epoch)
        if self.calls >= len(self.samples) * self.wanted // SAMPLES:
            hours = (self.desk.clock.now() - self.began) / 3600
            self.samples.append((self.calls, hours, resident_bytes()))
        if self.calls >= self.happened["integrity"] * self.wanted // INTEGRITY_CHECKS:
            self.happened["integrity"] += 1
            self.desk.store.check_integrity()
        if self.step % SWEEP_STEPS == 0:
            self.sweep()

    def sweep(self) -> None:
        """Forgets what only this test would remember: chats that are over, notices, parents."""
        oldest = self.newest - 4 * len(SPACES) * CHATS
        self.known = {
            (space, prompt): shards for (space, prompt), shards in self.known.items()
            if prompt[-1] < 2 * SYSTEMS or chat_of(prompt[-1]) >= oldest
        }  # fmt: skip
        self.desk.notices.clear()
        self.follower.parents.clear()

    def check_bytes(self, engine: Engine, slots: Any, tokens: list[int], epoch: int) -> None:
        """Three blocks of an answer, its last among them: all of all would be most of the work."""
        count = len(slots.places)
        for at in {count - 1, self.random.randrange(count), self.random.randrange(count)}:
            one = Slots(slots.first_block + at, slots.places[at:][:1], slots.generations[at:][:1])
            super().check_bytes(engine, one, tokens, epoch)

    # ---- Steps ----

    def draw(self) -> tuple[int, Engine, Prompt, list[int]]:
        """A space, one of its engines, and the next prompt of a new chat or of a late one."""
        random = self.random
        space = random.randrange(len(SPACES))
        chats = self.chats[space]
        if not chats or random.random() < 0.1:
            self.newest += 1
            chats.append([self.newest, 2])
        chat = chats[-1 - min(int(random.expovariate(0.1)), len(chats) - 1)]
        if random.random() < 0.4:
            chat[1] = min(chat[1] + random.randrange(1, 4), BLOCKS_MAX)
        prompt = prompt_of(*chat)
        tokens = [4 * symbol + i for symbol in prompt for i in range(4)]
        return space, random.choice(self.engines[space]), prompt, tokens

    def begin_put(self) -> None:
        if len(self.puts) >= PUTS_MAX:
            oldest = self.puts.pop(0)
            self.desk.kv.abort(oldest.engine.session, oldest.reservation)
        super().begin_put()

    def time(self) -> None:
        """Goes on to where the day should be by now; what slow tiers and long waits took counts."""
        due = self.began + self.seconds * self.calls / self.wanted - self.desk.clock.now()
        self.pass_time(min(max(due, 0.0) * 2 * self.random.random(), 60.0))

    def copy(self) -> None:
        for _ in range(6):
            self.desk.mover.step()

    def finish(self) -> None:
        engine = self.random.choice(self.engines)[0]
        name = f"r{self.random.randrange(self.calls + 1)}"
        self.desk.kv.finish_request(engine.attachment, name, self.random.randrange(500))

    def pin(self) -> None:
        try:
            super().pin()
        except KVStoreError:
            self.happened["not pinned"] += 1

    # ---- Figures ----

    def figures(self, cpu_seconds: float, wall_seconds: float) -> dict[str, Any]:
        late = [s for s in self.samples if s[0] >= MEASURED_FROM * self.calls]
        hours, resident = [s[1] for s in late], [s[2] for s in late]
        looked_up = self.happened["hit"] + self.happened["miss"]
        return {
            "calls": self.calls,
            "simulated_hours": round(self.hours, 2),
            "cpu_seconds": round(cpu_seconds, 1),
            "wall_seconds": round(wall_seconds, 1),
            "turnovers": {
                name: round(self.entered[name] / size, 1) for name, size in self.sizes.items()
            },
            "rss_slope_bytes_per_hour": round(float(np.polyfit(hours, resident, 1)[0])),
            "rss_growth_bytes": max(resident[-10:]) - max(resident[:10]),
            "rss_bytes": resident[-1],
            "hit_ratio": round(self.happened["hit"] / max(looked_up, 1), 3),
            "seed": self.seed,
            "happened": dict(sorted(self.happened.items())),
            "samples": [(calls, round(hour, 3), size) for calls, hour, size in self.samples],
            "machine": machine(),
            "commit": commit(),
        }


def prompt_of(chat: int, blocks: int) -> Prompt:
    """Two blocks of one of five system prompts, then the chat's own."""
    system = chat % SYSTEMS
    own = range(2 * SYSTEMS + chat * BLOCKS_MAX, 2 * SYSTEMS + chat * BLOCKS_MAX + blocks - 2)
    return (2 * system, 2 * system + 1, *own)


def chat_of(symbol: int) -> int:
    return (symbol - 2 * SYSTEMS) // BLOCKS_MAX


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    hours = float(sys.argv[2]) if len(sys.argv) > 2 else 24.0
    day = Day(calls, hours, int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    # Interrupted it ends as if it were over, and says how far it came.
    signal.signal(signal.SIGINT, lambda *_: setattr(day, "is_stopped", True))
    cpu, wall = time.process_time(), time.monotonic()
    try:
        day.run()
    except BaseException:
        print(f"seed {day.seed} failed after {day.calls} calls: {dict(day.happened)}")
        raise
    print(json.dumps(day.figures(time.process_time() - cpu, time.monotonic() - wall)))


if __name__ == "__main__":
    main()
