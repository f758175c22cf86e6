"""A daemon's server parts on a loop of their own thread, for tests."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvstore.core.clock import SystemClock
from kvstore.core.completion import Completion
from kvstore.core.config import (
    AccessRule,
    Config,
    HostSection,
    LimitsSection,
    TenantSection,
    TiersSection,
)
from kvstore.core.sizes import AutoSize, Size
from kvstore.events import EventLog
from kvstore.mover import LINKS, ThreadMover
from kvstore.server.access import Access
from kvstore.server.budget import MessageBudget
from kvstore.server.grpc_server import GrpcServer
from kvstore.server.lane import LaneServer
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions
from kvstore.server.staging import StagingBudget
from kvstore.store.assemble import assemble
from kvstore.store.kvstore import KVStore
from kvstore.store.record import MemoryRecord
from kvstore.tiers.host import HostTier, PoolConfig

MIB = 1 << 20
TIMEOUT = 20.0


def config_for_tests(**changes: Any) -> Config:
    limits = LimitsSection(
        sessions=64,
        leased_bytes_per_session=Size(64 * MIB),
        leased_bytes_per_tenant=Size(64 * MIB),
        pinned_bytes_per_session=Size(8 * MIB),
        pinned_bytes_per_tenant=Size(8 * MIB),
        reserved_bytes_per_session=Size(32 * MIB),
        reserved_bytes_per_tenant=Size(32 * MIB),
        staging_bytes_per_session=Size(4 * MIB),
        staging_bytes=Size(64 * MIB),
    )
    access = (AccessRule(uid=os.getuid(), role="admin"), AccessRule(uid=os.getuid(), tenant="b"))
    config = Config(
        access=access,
        tenants=(TenantSection(name="b"),),
        limits=msgspec.structs.replace(limits, **changes.pop("limits", {})),
    )
    config = msgspec.structs.replace(config, **changes)
    own = sum(int(t.host_size or 0) for t in config.tenants if t.isolated)
    host = HostSection(size=AutoSize(32 * MIB + own))
    return msgspec.structs.replace(config, tiers=TiersSection(host=host))


class ServedStore:
    """Store, lane and gRPC servers on one loop thread, as the daemon has them on its main one."""

    def __init__(self, directory: Path, config: Config, tcp: Any = None) -> None:
        self.config = config
        self.socket = directory / "kvstore.sock"
        self.lane_path = directory / "kvstore.sock.lane"
        self.failures: list[str] = []
        self._tcp = tcp
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="daemon under test")
        self._thread.start()
        self._ready.wait(TIMEOUT)
        if self._error is not None:
            self._thread.join()
            raise self._error

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except BaseException as error:
            self._error = error
            self._ready.set()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _main(self) -> None:
        self._loop.set_exception_handler(lambda _, context: self.failures.append(str(context)))
        self.store = self._build_store()
        limits = self.config.limits
        self.budget = MessageBudget(limits.inflight_message_bytes)
        self.staging = StagingBudget(MIB, limits.staging_bytes_per_session, limits.staging_bytes)
        access = Access(self.config.access, os.getuid())
        self.sessions = Sessions(self.store, access, limits, self.staging)
        self.service = Service(self.store)
        common = {"budget": self.budget, "message_bytes": limits.message_bytes}
        self.lane = LaneServer(
            self.service, self.sessions, self.lane_path, connections_max=80, **common
        )
        self.grpc = GrpcServer(self.service, self.sessions, self.socket, tcp=self._tcp, **common)
        self._stop = asyncio.Event()
        try:
            self.lane.start()
            await self.grpc.start()
            await self.grpc.set_serving(True)
        except BaseException:
            await self._close()
            raise
        self._ready.set()
        while not self._stop.is_set():
            self.store.tick()
            try:
                await asyncio.wait_for(self._stop.wait(), 0.05)
            except TimeoutError:
                continue
        await self._close()

    async def _close(self) -> None:
        await self.lane.close()
        await self.grpc.stop(0.2)
        self.sessions.prune()
        self._mover.close()
        await asyncio.sleep(0.02)
        self.store.check_integrity()
        self._tier.close(keep=False)

    def _build_store(self) -> KVStore:
        post = self._loop.call_soon_threadsafe
        self._mover = ThreadMover(post, dict.fromkeys(LINKS, 1), 64 * MIB)
        pools = [PoolConfig(name, size) for name, size in self.config.host_pools.items()]
        self._tier = HostTier(pools, kind="sealed")
        clock = SystemClock()
        return assemble(
            self.config,
            clock,
            host=self._tier,
            record=MemoryRecord(),
            mover=self._mover,
            events=EventLog(clock.wall, self.config.limits.events_kept),
            defer=self._loop.call_soon,
            boot_id="boot-under-test",
        )

    def on_owner(self, function: Callable[[], Any]) -> Any:
        """Runs `function` on the owner thread; waits for a Completion that it returns."""

        async def run() -> Any:
            value = function()
            if isinstance(value, Completion):
                done = asyncio.Event()
                value.then(lambda _: done.set())
                await asyncio.wait_for(done.wait(), TIMEOUT)
                return value.result()
            return value

        return self.await_(run())

    def await_(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT)

    def eventually(self, condition: Callable[[], bool], seconds: float = 5.0) -> bool:
        """Whether `condition` becomes true on the owner thread within `seconds`."""
        waiting = threading.Event()
        for _ in range(int(seconds / 0.02)):
            if self.on_owner(condition):
                return True
            waiting.wait(0.02)
        return False

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the daemon under test did not stop"
        assert not self.failures, self.failures
        if self._error is not None:
            raise self._error
        assert self.budget.used_bytes == 0, "message bytes leaked"
        assert self.staging.used_bytes == 0, "staging bytes leaked"


@contextmanager
def serving(directory: Path, config: Config, tcp: Any = None) -> Iterator[ServedStore]:
    """A served store that is closed, and checked for leaks, at the end."""
    daemon = ServedStore(directory, config, tcp)
    try:
        yield daemon
    finally:
        daemon.close()
