"""The life of a daemon.

locks -> tiers -> recovery -> doors open -> serve -> drain -> doors closed -> tiers kept
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.clock import SystemClock
from kvstore.core.config import Config
from kvstore.core.config_rules import parse_address, parse_group
from kvstore.core.entropy import random_token
from kvstore.core.errors import ConfigError
from kvstore.daemon.clock_watch import ClockWatch
from kvstore.daemon.console import ConsoleDesk
from kvstore.daemon.events import publish_events
from kvstore.daemon.journal import JournalFile
from kvstore.daemon.reload import ConfigSource, Reloader
from kvstore.daemon.service_manager import ServiceManager
from kvstore.daemon.tiers import (
    ProblemLog,
    call_within,
    link_threads,
    lock_directories,
    open_tiers,
    paced,
)
from kvstore.events import EventLog
from kvstore.httpd import WatchServer, no_pages
from kvstore.locks import FileLock, private_directory
from kvstore.metrics import Metrics
from kvstore.mover import ThreadMover
from kvstore.recovery import recover
from kvstore.scheduling import take_short_turns
from kvstore.server.access import Access
from kvstore.server.budget import MessageBudget
from kvstore.server.grpc_server import GrpcServer
from kvstore.server.lane import LaneServer
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions
from kvstore.server.staging import StagingBudget
from kvstore.store.assemble import assemble
from kvstore.store.kvstore import SESSION_TTL_SECONDS, KVStore
from kvstore.store.record import FileRecord

if TYPE_CHECKING:
    from kvstore.event_publisher import EventPublisher

TICK_SECONDS = 0.05
STALL_PROBE_SECONDS = 0.01
GAUGE_TICKS = 10
DEAD_AFTER_SECONDS = 10.0
CLOSE_SECONDS = 10.0
PR_SET_DUMPABLE = 4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_MESSAGE_BYTES = 16 << 20
SWITCH_SECONDS = 0.001
GC_THRESHOLDS = (50_000, 20, 100)

_log = logging.getLogger("kvstore.daemon")


class Daemon:
    """One daemon: its tiers, its store, its doors. Lives in one asyncio loop.

    A `journal` is a new file that takes everything its decisions follow from.
    """

    def __init__(
        self,
        config: Config,
        source: ConfigSource | None = None,
        journal: Path | None = None,
    ) -> None:
        self.config = config
        self.clock = SystemClock()
        self.metrics = Metrics()
        self._clock_watch = ClockWatch(self.clock, self.metrics)
        self.state = "starting"
        self.store: KVStore | None = None
        self._source = source
        self._reloader: Reloader | None = None
        self._journal_path = journal
        self._journal: JournalFile | None = None
        self._publisher: EventPublisher | None = None
        self._desk: ConsoleDesk | None = None
        self._free_pool = False
        self._stop = asyncio.Event()
        self._drain_until: float | None = None
        self._last_tick = self.clock.now()
        self._ticks = 0
        self._locks: list[FileLock] = []
        self._problems = ProblemLog()
        self._manager = ServiceManager(os.environ)

    async def run(self) -> None:
        """Serves until drained or stopped. Raises ConfigError, TierError or AlreadyRunning."""
        self._loop = asyncio.get_running_loop()
        _harden()
        self._lock()
        watch = self._start_watch()
        try:
            self._open_store()
            await self._open_doors()
            take_short_turns()
            self._handle_signals()
            self.state = "serving"
            _log.info("serving on %s", self.config.server.socket)
            self._manager.ready(f"serving on {self.config.server.socket}")
            await self._stop.wait()
        finally:
            await self._close()
            if watch is not None:
                watch.stop()
            self._manager.close()

    def _lock(self) -> None:
        config = self.config
        socket = Path(config.server.socket)
        group = parse_group("server.socket_group", config.server.socket_group)
        private_directory(socket.parent, "server.socket", group)
        self._locks.append(FileLock(Path(f"{socket}.lock"), f"the socket {socket}"))
        self._locks += lock_directories(config)

    def _start_watch(self) -> WatchServer | None:
        address = self.config.server.metrics
        if not address:
            return None
        where = parse_address("server.metrics", address)
        pages = no_pages
        if self.config.server.console:
            self._desk = ConsoleDesk(self._post, self.metrics)
            pages = self._desk.console.answer
        return WatchServer(where, self.metrics.render, self._live, self._ready, pages)

    def _live(self) -> str | None:
        late = self.clock.now() - self._last_tick
        if self.state != "starting" and late > DEAD_AFTER_SECONDS:
            return f"the owner thread has not run for {late:.0f} s"
        return None

    def _ready(self) -> str | None:
        return None if self.state == "serving" else f"the daemon is {self.state}"

    # ---- Opening ----

    def _open_store(self) -> None:
        config = self.config
        tiers = self._tiers = open_tiers(config)
        for note in tiers.notes:
            _log.warning("%s", note)
        if self._journal_path is not None:
            self._journal = JournalFile(self._journal_path, int(config.limits.journal_bytes))
        threads = link_threads(config)
        self._links = tuple(threads)
        self._mover = ThreadMover(self._post, threads, int(config.limits.queue_bytes_per_link))
        log = EventLog(self.clock.wall, config.limits.events_kept)
        self.store = assemble(
            config, self.clock, tiers.host, tiers.record, self._mover, log, self._defer,
            random_token(8).hex(), self.metrics, paced(tiers.disk, config),
            None if self._journal is None else self._journal.journal, tiers.hbm,
        )  # fmt: skip
        self.store.on_drain = self.drain
        self._publisher = publish_events(config, log, self.store, self.metrics)
        if isinstance(tiers.record, FileRecord) and tiers.epochs is not None:
            found = recover(self.store, tiers.record, tiers.epochs)
            if found.adopted_blocks or found.dropped_shards:
                _log.info(
                    "took back %d blocks of an earlier daemon, dropped %d",
                    found.adopted_blocks, found.dropped_shards,
                )  # fmt: skip
        tiers.tell_keys()
        self.metrics.locked(tiers.locked_block_count)
        for note in self.store.parts.costs.notes:
            _log.warning("%s", note)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    async def _open_doors(self) -> None:
        config, limits = self.config, self.config.limits
        assert self.store is not None
        service = Service(self.store, self.metrics, self.metrics.totals)
        staging = StagingBudget(
            int(limits.staging_bytes_per_session), int(limits.staging_bytes_per_session),
            int(limits.staging_bytes),
            lambda close: self._loop.run_in_executor(None, close),
        )  # fmt: skip
        sessions = Sessions(
            self.store, Access(config.access, os.geteuid()), limits, staging, SESSION_TTL_SECONDS
        )
        if self._desk is not None:
            self._desk.open(self.store, sessions)
        if self._source is not None:
            self._reloader = Reloader(
                self.store, sessions, self.clock, config, self._source, self._tiers.host,
                self._tiers.take_keys, self._tiers.grown,
            )  # fmt: skip
        budget = MessageBudget(int(limits.inflight_message_bytes))
        group = parse_group("server.socket_group", config.server.socket_group)
        self._lane = LaneServer(
            service, sessions, Path(config.lane_socket), budget=budget,
            message_bytes=int(limits.message_bytes), connections_max=2 * limits.sessions,
            group=group,
        )  # fmt: skip
        self._grpc = GrpcServer(
            service, sessions, Path(config.server.socket), budget=budget,
            message_bytes=int(limits.message_bytes), group=group,
            tcp=config.server.tcp if config.server.tcp.listen else None,
        )  # fmt: skip
        await self._grpc.start()
        self._lane.start()
        await self._grpc.set_serving(True)
        self._tick()
        self._probe_stall(self._loop.time())

    def _post(self, call: Callable[[], None]) -> None:
        """Hands a call to the owner thread, from any other."""
        self._loop.call_soon_threadsafe(call)

    def _defer(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop_signal)
        self._loop.add_signal_handler(signal.SIGHUP, self.reload)

    # ---- Serving ----

    def _tick(self) -> None:
        """Every 50 ms: what is over by time ends, gauges follow, a drain may be over."""
        assert self.store is not None
        self._last_tick = self.clock.now()
        self._manager.beat(self._last_tick)
        self.store.tick()
        self._tiers.host.tick()
        if self._reloader is not None:
            self._reloader.tick()
        self._ticks += 1
        if self._ticks % GAUGE_TICKS == 0:
            self._set_gauges()
        if self._drain_until is not None and self._is_drained():
            self._stop.set()
        else:
            self._loop.call_later(TICK_SECONDS, self._tick)

    def _is_drained(self) -> bool:
        assert self.store is not None
        assert self._drain_until is not None
        return self.store.is_quiet or self.clock.now() >= self._drain_until

    def _probe_stall(self, due: float) -> None:
        now = self._loop.time()
        self.metrics.loop_stall(max(0.0, now - due))
        due = now + STALL_PROBE_SECONDS
        self._loop.call_at(due, self._probe_stall, due)

    def _set_gauges(self) -> None:
        assert self.store is not None
        self._clock_watch.look()
        view, parts = self.store.status(), self.store.parts
        self.metrics.set_sessions(view.session_count, view.space_count)
        self.metrics.set_leases(
            view.lease_count, view.leased_bytes, view.pinned_bytes, view.reserved_bytes
        )
        self.metrics.set_index(parts.index.block_count, parts.index.run_count)
        for name, tier in view.tiers.items():
            self.metrics.set_tier(
                name, tier.capacity_bytes, tier.used_bytes, tier.free_bytes, tier.resting_bytes,
                tier.block_count,
            )  # fmt: skip
            self.metrics.set_tier_degraded(name, bool(tier.problem))
            self._problems.tell(name, tier.problem)
        for cost in view.costs:
            self.metrics.set_cost(
                cost.label, cost.state == "fitted", cost.sample_count, cost.ratio_p50,
                cost.ratio_p99,
            )  # fmt: skip
        for tenant, hint, belief in parts.requests.hint_beliefs():
            self.metrics.set_hint(tenant, hint, belief)
        if self._journal is not None:
            self._journal.check()
        for shadow in view.shadows:
            self.metrics.set_shadow(
                shadow.policy, shadow.tier, f"{shadow.capacity_ratio:g}", shadow.token_hit_ratio,
                shadow.saved_seconds_per_second,
            )  # fmt: skip
        self._problems.tell_policy(view.policy, view.policy_reason)
        if self.state == "serving":
            self._manager.status(view.reason or f"serving on {self.config.server.socket}")
        for link in self._links:
            self.metrics.set_queue(link, self._mover.queued_bytes(link))

    def reload(self) -> None:
        """SIGHUP: takes from the configuration what needs no restart, and names what does."""
        if self._reloader is None:
            _log.warning("there is no configuration file to read again")
            return
        self._manager.reloading(self.clock.now())
        try:
            # Its own words as the message: others that repeat must not have it left out.
            _log.info(str(self._reloader.reload()))
            self.config = self._reloader.running
        except ConfigError as error:
            _log.error("the configuration was not reloaded: %s", error)
        self._manager.ready(f"serving on {self.config.server.socket}")

    # ---- Leaving ----

    def _on_stop_signal(self) -> None:
        if self._drain_until is not None:
            _log.warning("a second signal: leaving at once")
            self._stop.set()
            return
        assert self.store is not None
        self.store.drain(self.config.server.drain_seconds, False)

    def drain(self, deadline_seconds: float, free: bool) -> None:
        """Refuses new work and stops when leases and puts are over, or at the deadline."""
        self.state = "draining"
        self._free_pool = self._free_pool or free
        self._drain_until = self.clock.now() + deadline_seconds
        self._draining_task = self._loop.create_task(self._grpc.set_serving(False))
        self._manager.stopping(f"draining for at most {deadline_seconds:.1f} s")
        _log.info("draining for at most %.1f s", deadline_seconds)

    async def _close(self) -> None:
        served, self.state = self.state != "starting", "draining"
        self._manager.stopping("closing")
        if hasattr(self, "_lane"):
            await self._lane.close()
            await self._grpc.stop(0.5)
        if self.store is not None:
            self.store.costs.save()
        if hasattr(self, "_mover"):
            await self._loop.run_in_executor(None, self._mover.close)
            await asyncio.sleep(0)
        if self._journal is not None:
            self._journal.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._close_tiers():
            for lock in self._locks:
                lock.release()
        if served:
            _log.info("stopped")

    def _close_tiers(self) -> bool:
        """Closes the tiers; False when a disk does not answer, and all is left as in a crash.

        Then a worker may still be inside: locks stay until the kernel has ended the process.
        """
        if not hasattr(self, "_tiers"):
            return True
        host, disk, gpus = self._tiers.host, self._tiers.disk, self._tiers.gpus
        if hasattr(self, "_mover") and any(map(self._mover.queued_bytes, self._links)):
            _log.error("a disk does not answer; leaving without it, the next start looks through")
            return False
        if disk is not None and not call_within(CLOSE_SECONDS, disk.close):
            _log.error("the disk tier does not close in time; the next start looks through it")
            return False
        if gpus is not None and not call_within(CLOSE_SECONDS, gpus.close):
            _log.error("a GPU does not answer; leaving without it")
            return False
        host.close(keep=not self._free_pool)
        return True


def _harden() -> None:
    """No core dumps, no peeking by other processes of the user; files private from the start."""
    os.umask(0o077)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
        _log.warning("the daemon could not be made undumpable")
    # Memory of long messages is kept for the next one: fresh pages cost 3 us each, and a prompt of
    # a million tokens takes two thousand. Where libc has no such setting it goes on without.
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, KEPT_MESSAGE_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, 4 * KEPT_MESSAGE_BYTES)
    sys.setswitchinterval(SWITCH_SECONDS)


def serve(config: Config, source: ConfigSource | None = None, journal: Path | None = None) -> None:
    """Runs a daemon until it is drained or stopped."""

    async def main() -> None:
        await Daemon(config, source, journal).run()

    asyncio.run(main())
