"""`InProcessStore`: a daemon's store, service and clients in one process, without sockets."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.client import KVClient
from kvstore.client.link import Timeouts
from kvstore.client.transport import DirectTransport
from kvstore.core.clock import Clock, ManualClock, SystemClock
from kvstore.core.completion import Completion
from kvstore.core.config import Config, load
from kvstore.core.config_input import merge
from kvstore.core.config_rules import POOL_BYTES_MIN
from kvstore.core.entropy import random_token
from kvstore.core.errors import InvalidRequest
from kvstore.core.machine import FixedMachine
from kvstore.events import EventLog
from kvstore.mover import InlineMover, Mover
from kvstore.recovery import recover
from kvstore.server.access import Access, Grant
from kvstore.server.budget import MessageBudget
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions
from kvstore.server.staging import StagingBudget
from kvstore.store.assemble import assemble
from kvstore.store.kvstore import KVStore
from kvstore.store.record import FileRecord, MemoryRecord
from kvstore.testing.mover import SimulatedMover
from kvstore.testing.peer import Peer
from kvstore.tiers.base import AddressableTier, DeviceTier, Tier
from kvstore.tiers.epochs import EpochsFile
from kvstore.tiers.host import HostTier, PoolConfig
from kvstore.tiers.memory import MemoryTier

TICK_SECONDS = 0.05
RESTART_SECONDS = 1.0
STAGING_BYTES = 4 << 20
TURNS_MAX = 10_000


class InProcessStore:
    """A store without a daemon; any thread may use its clients.

    `size` is that of the host tier, or pass a `tier` of your own. With a `directory` in a memory
    file system blocks outlive `restart`, as they outlive a killed daemon. `disk` is a tier below,
    a MemoryTier or a DiskTier, `hbm` one above, an HbmTier, or several, each
    on a GPU of its own. `sections` are tables of the configuration file, such as
    `{"limits": {"lease_ttl_seconds": 2.0}}`. `kv` is the `KVStore` inside, for calls that no client
    has; it is not for several threads.
    """

    kv: KVStore

    def __init__(
        self,
        size: int | str = "64MiB",
        *,
        tier: AddressableTier | None = None,
        disk: Tier | None = None,
        hbm: DeviceTier | Sequence[DeviceTier] = (),
        directory: str | Path | None = None,
        clock: Clock | None = None,
        mover: SimulatedMover | None = None,
        sections: Mapping[str, Any] | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.clients: list[KVClient] = []
        self._directory = Path(directory) if directory is not None else None
        self._owns_tier = tier is None
        self.disk = disk
        self.hbm = tuple(hbm) if isinstance(hbm, Sequence) else (hbm,)
        if tier is not None:
            size = max(tier.usage().capacity_bytes, POOL_BYTES_MIN)
        self.config = _configure(size, self._directory, sections or {})
        self.lock = threading.RLock()
        self._deferred: deque[Callable[[], None]] = deque()
        self.defer = self._deferred.append
        self._simulated = mover
        self._begin(tier)

    def client(
        self,
        *,
        role: str = "admin",
        tenants: Iterable[str] | None = None,
        shared_memory: bool = True,
        staging_bytes: int = STAGING_BYTES,
        client_name: str = "",
        timeouts: Timeouts | None = None,
    ) -> KVClient:
        """A client of this store, with a session of its own; the store closes it at its end.

        Without `shared_memory` it works as a client on another host does: bytes travel in the
        messages. `tenants` default to all that the configuration names.
        """
        grant = Grant(role, frozenset(self._tenants() if tenants is None else tenants))
        manual = isinstance(self.clock, ManualClock)

        def connect(timeout: float) -> DirectTransport:
            with self.lock:
                peer = Peer(self, grant, staging_bytes if shared_memory else None)
            return peer.transport

        client = KVClient.over(
            connect, timeouts=timeouts, clock=self.clock, client_name=client_name,
            background=not manual, address="in process",
        )  # fmt: skip
        self.clients.append(client)
        return client

    def advance(self, seconds: float, keep: bool = True) -> None:
        """Moves a ManualClock on, in small steps, and does what falls due on the way.

        With `keep` the clients renew their leases meanwhile; without they are frozen.
        """
        clock = self.clock
        if not isinstance(clock, ManualClock):
            raise InvalidRequest("time passes by itself here; pass clock=ManualClock()")
        step = min(0.5, self.config.limits.lease_ttl_seconds / 8)
        end = clock.now() + seconds
        while (left := end - clock.now()) > 1e-9:
            clock.advance(min(left, step))
            with self.lock:
                self._tick()
                self.drain()
            for client in self.clients if keep else ():
                client.keep()

    def settle(self) -> None:
        """Runs everything that is deferred, queued or being moved."""
        with self.lock:
            for _ in range(TURNS_MAX):
                if not self.turn() and not self._step():
                    return
            raise AssertionError("the store does not come to rest")

    def wait(self, value: Any) -> Any:
        """`value`, or what it comes to if it is a Completion; raises its error."""
        with self.lock:
            self.drain()
            if not isinstance(value, Completion):
                return value
            while not value.done:
                assert self.turn() or self._step(), "nothing is left that could answer"
            return value.result()

    def turn(self) -> bool:
        """One turn of the owner: runs what is deferred now; False when there was nothing."""
        count = len(self._deferred)
        for _ in range(count):
            self._deferred.popleft()()
        return bool(count)

    def drain(self) -> None:
        """Turns until nothing is deferred, or what is left waits for the mover."""
        for _ in range(TURNS_MAX):
            if not self.turn():
                return

    def restart(self, tier: AddressableTier | None = None, disk: Tier | None = None) -> None:
        """As after kill -9 and a new start: sessions, leases and running copies are gone.

        Blocks are found again if the store has a `directory`. A MemoryTier is reopened; any
        other tier of the caller's own has to be passed anew, reopened or empty.
        """
        with self.lock:
            self._deferred.clear()
            if self._simulated is not None:
                self._simulated.forget()
            if isinstance(self.clock, ManualClock):
                self.clock.advance(RESTART_SECONDS)
            if tier is None and isinstance(self.tier, MemoryTier):
                tier = self.tier.reopened()
            if disk is None and isinstance(self.disk, MemoryTier):
                disk = self.disk.reopened()
            if (tier is None and not self._owns_tier) or (disk is None and self.disk is not None):
                raise InvalidRequest("pass the tiers that the new store shall have")
            if self._owns_tier:
                self.tier.close(keep=True)
            self.disk = disk
            self._begin(tier)

    def check_integrity(self) -> None:
        """Recounts everything; raises AssertionError where the books disagree."""
        with self.lock:
            self.kv.check_integrity()

    def close(self) -> None:
        """Closes the clients and lets go of the memory; what `directory` holds stays."""
        for client in self.clients:
            client.close()
        with self.lock:
            if self.life > 0:
                self.kv.costs.save()
            self.life = -1
            self._mover.close()
            if self._owns_tier:
                self.tier.close(keep=True)

    def __enter__(self) -> InProcessStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- Lives ----

    life = 0
    """Counts restarts; connections of an earlier life are dead. -1 once closed."""

    def _begin(self, tier: AddressableTier | None) -> None:
        limits, directory = self.config.limits, self._directory
        epochs = EpochsFile(directory) if directory is not None else None
        self.tier = tier or self._host_tier(max(1, epochs.generation_floor if epochs else 1))
        record: MemoryRecord | FileRecord = MemoryRecord()
        if directory is not None and epochs is not None:
            record = FileRecord(
                directory, epochs, self._next_generation, durable_slow=self.disk is not None
            )
        self._mover: Mover = self._simulated or InlineMover(self.defer)
        self.events = EventLog(self.clock.wall, limits.events_kept)
        self.kv = assemble(
            self.config, self.clock, self.tier, record, self._mover, self.events,
            self.defer, random_token(8).hex(), disk=self.disk, hbm=self.hbm,
        )  # fmt: skip
        if epochs is not None and isinstance(record, FileRecord):
            recover(self.kv, record, epochs)
        self.service = Service(self.kv)
        self.budget = MessageBudget(int(limits.inflight_message_bytes))
        session_bytes = int(limits.staging_bytes_per_session)
        staging = StagingBudget(session_bytes, session_bytes, int(limits.staging_bytes))
        self.sessions = Sessions(self.kv, Access((), os.getuid()), limits, staging)
        self.life += 1
        self._ticked = self.clock.now()

    def _next_generation(self) -> int:
        """Above every generation that either tier has handed out."""
        return max(t.next_generation() for t in (self.tier, self.disk) if t is not None)

    def _host_tier(self, first_generation: int) -> HostTier:
        return HostTier(
            [PoolConfig(*pool) for pool in self.config.host_pool_sizes],
            kind="sealed" if self._directory is None else "shm",
            directory=self._directory,
            first_generation=first_generation,
        )

    def _tenants(self) -> set[str]:
        return {"default", *(tenant.name for tenant in self.config.tenants)}

    def _tick(self) -> None:
        self._ticked = self.clock.now()
        self.kv.tick()

    def tick_if_due(self) -> None:
        """What a daemon's timer does, if it is time for it."""
        if self.clock.now() - self._ticked >= TICK_SECONDS:
            self._tick()

    def _step(self) -> bool:
        return self._simulated is not None and self._simulated.step()


def _configure(size: int | str, directory: Path | None, sections: Mapping[str, Any]) -> Config:
    """The configuration of a store of `size`, on a machine that is large enough for any."""
    host: dict[str, Any] = {"size": size, "pool": "sealed"}
    if directory is not None:
        host |= {"pool": "shm", "directory": str(directory)}
    tables = merge({"tiers": {"host": host}, "server": {"metrics": ""}}, sections)
    return load(None, {}, FixedMachine(1 << 50, 1 << 50, user=os.getuid()), tables)
