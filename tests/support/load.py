"""`Load`: a daemon under 64 client processes, many of which do what they should not.

alone -> full (what it can do) -> half of that -> half, with everything that is no good -> quiet
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
from daemons import DaemonProcess, eventually
from load_fleet import Fleet, Watch, seconds_until, segments_of
from load_roles import ABUSE, HELD_LEASES, HELD_RESERVATIONS, RESERVED_BLOCKS

from kvstore.bench.measure import commit, machine

FILL, ALONE, FULL, HALF, QUIET = 1, 2, 3, 5, 6
POLITE = 44
ROLES = {
    "polite": POLITE, "leases": 4, "reservations": 4, "sessions": 2, "subscribers": 2,
    "oversized": 3, "malformed": 3, "garbage": 2,
}  # fmt: skip
KILLED_SHARE = 0.2
LEASE_SECONDS, RESERVATION_SECONDS = 2.0, 5.0
FLOOR_BYTES = 8 << 20
CONFIG = f"""
tiers.host.prefault = false
tiers.host.mlock = false
tiers.disk.path = "{{directory}}/disk"
tiers.disk.size = "64MiB"
tiers.disk.reserve = "1MiB"
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
limits.lease_ttl_seconds = {LEASE_SECONDS}
limits.max_lease_ttl_seconds = {LEASE_SECONDS}
limits.staging_ttl_seconds = {RESERVATION_SECONDS}
limits.sessions = 80
limits.leases_per_session = {HELD_LEASES}
limits.leased_bytes_per_session = "8MiB"
limits.leased_bytes_per_tenant = "20MiB"
limits.reserved_bytes_per_session = "{HELD_RESERVATIONS * RESERVED_BLOCKS * 16}KiB"
limits.reserved_bytes_per_tenant = "12MiB"
limits.staging_bytes_per_session = "1MiB"
limits.staging_bytes = "32MiB"
limits.inflight_message_bytes = "32MiB"
limits.events_kept = 4096
limits.decisions_kept = 512
[[access]]
uid = {os.getuid()}
role = "admin"
[[access]]
uid = {os.getuid()}
tenant = "gold"
[[tenants]]
name = "gold"
host_floor = {FLOOR_BYTES}
"""
HOST_SIZE = "32MiB"


class Load:
    """One run: `seconds` of trouble, and as much time as it takes before and after."""

    def __init__(self, daemon: DaemonProcess, seconds: float, seed: int = 0) -> None:
        self.daemon, self.seconds = daemon, seconds
        self.random = Random(seed)
        self.calm = min(max(seconds / 6, 3.0), 20.0)
        self.freed: dict[str, list[float]] = defaultdict(list)
        self.killed: Counter[str] = Counter()
        self.rates: dict[int, float] = {}
        self.frozen: list[int] = []

    @contextmanager
    def _parts(self) -> Iterator[None]:
        with self.daemon.client(call_timeout_seconds=20.0, staging_bytes=4096) as client:
            self.fleet, self.watch = Fleet(self.daemon), Watch(self.daemon, client)
            try:
                yield
            finally:
                self.watch.close()
                self.fleet.close()

    def run(self) -> dict[str, Any]:
        with self._parts():
            for role, count in ROLES.items():
                for number in range(count):
                    self.fleet.fork(role, number)
            assert eventually(lambda: self.fleet.ready == POLITE, 60), self.fleet.said
            self._begin(FILL, POLITE, 0.0)
            full = lambda: self.watch.look().gold_bytes >= FLOOR_BYTES  # noqa: E731
            assert eventually(full, 60, 0.5), "the tenant does not get its floor"
            time.sleep(2.0)
            self._phase(QUIET, 0, 0.0, 1.0)
            self._phase(ALONE, 1, 0.0, self.calm)
            self._phase(FULL, POLITE, 0.0, self.calm)
            pause = POLITE / (self.rates[FULL] / 2)
            self._phase(HALF, POLITE, pause, self.calm)
            self._trouble(pause)
            self._phase(QUIET, 0, 0.0, 1.0)
            # Connections that were broken off are noticed one after the other.
            self.settled_seconds = seconds_until(self._is_settled, 20.0)
            self.after = self.watch.look()
        return self.figures()

    def _phase(self, phase: int, polite: int, pause: float, seconds: float) -> float:
        """Lookups a second of the polite in a phase."""
        self._begin(phase, polite, pause)
        began = time.monotonic()
        time.sleep(seconds)
        passed = time.monotonic() - began
        self.fleet.board.write(QUIET)
        time.sleep(0.3)  # they say what they have seen
        heard = [one for one in list(self.fleet.said) if one.get("phase") == phase]
        self.rates[phase] = sum(one["lookups"] for one in heard) / passed
        return self.rates[phase]

    def _begin(self, phase: int, polite: int, pause: float) -> None:
        self.watch.phase = phase
        self.fleet.board.write(phase, polite, pause)

    def _is_settled(self) -> bool:
        now = self.watch.look()
        is_held = now.leases or now.reservations
        return not is_held and now.connections <= self.before.connections

    # ---- Trouble ----

    def _trouble(self, pause: float) -> None:
        self.before = self.watch.look()
        self.watch.took.clear()
        self._begin(ABUSE, POLITE, pause)
        end = time.monotonic() + self.seconds
        self._freeze()
        kills = max(round(KILLED_SHARE * sum(ROLES.values())), round(self.seconds / 3))
        for n in range(kills):
            self._kill(n)
            time.sleep(max(end - time.monotonic(), 0.0) / (kills - n))
        for pid in self.frozen:
            os.kill(pid, signal.SIGCONT)
        self._begin(QUIET, 0, 0.0)

    def _freeze(self) -> None:
        """Three stop: one with leases, one with reservations, one in the middle of anything."""
        for role, ttl in (("leases", LEASE_SECONDS), ("reservations", RESERVATION_SECONDS)):
            pid, is_free = self._holder(role)
            os.kill(pid, signal.SIGSTOP)
            self.frozen.append(pid)
            self.freed[f"frozen {role}"].append(seconds_until(is_free, ttl + 10))
        self.frozen.append(self.random.choice(self.fleet.of("polite")))
        os.kill(self.frozen[-1], signal.SIGSTOP)

    def _kill(self, n: int) -> None:
        """Every third victim is one that holds leases or reservations."""
        role = {0: "leases", 3: "reservations"}.get(n % 6)
        if role is None:
            victims = [pid for pid in list(self.fleet.roles) if pid not in self.frozen]
            self._end(self.random.choice(victims))
            return
        pid, is_free = self._holder(role)
        segments = segments_of(pid)
        self._end(pid)
        began = time.monotonic()
        self.freed[f"dead {role}"].append(seconds_until(is_free, 10.0))
        gone = lambda: not segments & segments_of(self.daemon.pid)  # noqa: E731
        waited = time.monotonic() - began
        self.freed["dead staging"].append(waited + seconds_until(gone, 10.0))

    def _end(self, pid: int) -> None:
        self.killed[self.fleet.roles[pid][0]] += 1
        self.fleet.kill(pid)

    def _holder(self, role: str) -> tuple[int, Callable[[], bool]]:
        """A process of a role that holds what it may, and what tells that it does no more."""
        holding = self.fleet.holding if role == "leases" else self.fleet.reserved
        found: list[int] = []

        def look() -> bool:
            held = set(self.fleet.of(role)) & set(holding) - set(self.frozen)
            found[:] = sorted(held)
            return bool(found)

        assert eventually(look, 60), f"none of {role} holds what it may"
        pid = self.random.choice(found)
        if role == "leases":
            # The other holders keep theirs; the polite have few, for moments.
            least = min(self.watch.look().leases for _ in range(5))
            below = least - HELD_LEASES * 3 // 4
            return pid, lambda: self.watch.look().leases <= below
        tokens = [self.fleet.reserved[pid] + n for n in range(4 * RESERVED_BLOCKS)]
        assert self.watch.is_pending(tokens), "what was reserved just now is not pending"
        return pid, lambda: not self.watch.is_pending(tokens)

    # ---- Figures ----

    def _took(self, phase: int) -> list[int]:
        return [us for one in self.fleet.said if one.get("phase") == phase for us in one["took"]]

    def figures(self) -> dict[str, Any]:
        trouble = [s for s in self.watch.samples if s.phase == ABUSE]
        # Calls of one that was frozen fail when it thaws, as they should.
        polite = [
            one for one in self.fleet.said if "polite" in one and one["pid"] not in self.frozen
        ]
        sent: Counter[str] = Counter()
        for one in self.fleet.said:
            sent[one.get("sent", "")] += one.get("count", 0)
        total = {
            name: sum(one[name] for one in polite)
            for name in ("lookups", "checked", "wrong", "failed", "lost")
        }
        late = trouble[len(trouble) // 3 :]
        minutes = [s.seconds / 60 for s in late]
        alone, half, worst = (
            percentiles(self._took(phase)) for phase in (ALONE, HALF, ABUSE)
        )  # fmt: skip
        return {
            "lookup_p99_ratio_half_load": round(half[1] / alone[0], 2),
            "lookup_p99_ratio_in_trouble": round(worst[1] / alone[0], 2),
            "lookup_p50_us": {"alone": alone[0], "half": half[0], "trouble": worst[0]},
            "lookup_p99_us": {"alone": alone[1], "half": half[1], "trouble": worst[1]},
            "lookups_per_second": {
                "full": round(self.rates[FULL]), "half": round(self.rates[HALF])
            },
            "processes": sum(ROLES.values()),
            "roles": ROLES,
            "trouble_seconds": self.seconds,
            "killed": dict(self.killed),
            "frozen": len(self.frozen),
            "freed_seconds": {k: [round(s, 3) for s in v] for k, v in self.freed.items()},
            "look_p99_seconds": round(float(np.percentile(self.watch.took, 99)), 3),
            "settled_seconds": round(self.settled_seconds, 2),
            "lookups": total["lookups"],
            "checked_blocks": total["checked"],
            "wrong_bytes": total["wrong"],
            "failed_calls": total["failed"],
            "lost_leases": total["lost"],
            "sent": dict(+sent),
            "most_sessions": max(s.sessions for s in trouble),
            "most_leases": max(s.leases for s in trouble),
            "most_reservations": max(s.reservations for s in trouble),
            "floor_bytes": FLOOR_BYTES,
            "least_bytes_of_floor": min(s.gold_bytes for s in trouble),
            "private_bytes": {
                "before": self.before.private_bytes, "after": self.after.private_bytes,
                "most": max(s.private_bytes for s in trouble),
                "slope_per_minute": slope(minutes, [s.private_bytes for s in late]),
            },
            "most_resident_bytes": max(s.resident_bytes for s in trouble),
            "connections": {
                "before": self.before.connections, "after": self.after.connections,
                "most": max(s.connections for s in trouble),
            },
            "left": {"leases": self.after.leases, "reservations": self.after.reservations},
            "complaints": [one for one in self.fleet.said if "died" in one],
            "machine": machine(),
            "commit": commit(),
        }  # fmt: skip


def freed_part(count: int) -> int:
    """So many of what one process held must be gone; the polite take and give back meanwhile."""
    return count * 3 // 4


def percentiles(microseconds: list[int]) -> tuple[float, float]:
    return tuple(round(float(p), 1) for p in np.percentile(microseconds, (50, 99)))


def slope(minutes: list[float], values: list[int]) -> int:
    return round(float(np.polyfit(minutes, values, 1)[0])) if len(set(minutes)) > 2 else 0
