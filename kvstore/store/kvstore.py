"""`KVStore`: the owner's desk. Every call of engines and operators comes through here.

One thread calls it, and no call waits: what takes longer answers through a Completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import (
    Draining,
    InvalidRequest,
    LimitReached,
    PermissionDenied,
)
from kvstore.core.lease import Lease
from kvstore.core.plan import (
    NO_ASK,
    NO_HINTS,
    Ask,
    CommitResult,
    CommitRun,
    FailedBlocks,
    FlushResult,
    LookupResult,
    Query,
    ReserveResult,
    ReuseHints,
    Slots,
)
from kvstore.core.space import Space
from kvstore.core.spec import KVSpec, space_id
from kvstore.core.views import StatusView
from kvstore.store.commit import CommitFlow
from kvstore.store.costs import CostKeeper
from kvstore.store.demote import begin_conveyors
from kvstore.store.evict import Remover
from kvstore.store.flush import FlushFlow
from kvstore.store.hbm import HbmCopies
from kvstore.store.integrity import check_integrity
from kvstore.store.leases import join_engine
from kvstore.store.lookup import LookupFlow
from kvstore.store.operators import OperatorCalls
from kvstore.store.parts import Parts
from kvstore.store.probe import DiskProbe
from kvstore.store.promote import Promoter
from kvstore.store.publish import Publisher
from kvstore.store.rates import RateKeeper
from kvstore.store.recording import SpaceRecorder
from kvstore.store.relocate import Relocator
from kvstore.store.reservations import ReservationTable
from kvstore.store.reserve import ReserveFlow
from kvstore.store.restore import RestoreFlow
from kvstore.store.room import HostRoom
from kvstore.store.sessions import Attachment, Identity, Session
from kvstore.store.shadowing import Shadowing
from kvstore.store.tracing import TraceRecorder
from kvstore.store.verify import Verifier
from kvstore.store.views import status_view
from kvstore.tiers.base import DeviceTier, SharedPool

SESSION_TTL_SECONDS = 10.0
ADMIN_PLACES = 16


class KVStore(OperatorCalls):
    """Index, leases, reservations and sessions of one daemon, over its tiers."""

    def __init__(self, parts: Parts, boot_id: str, hbm: Sequence[DeviceTier] = ()) -> None:
        remover = Remover(parts, self._lost)
        super().__init__(parts, remover, Verifier(parts, remover))
        self.boot_id = boot_id
        self.started = parts.clock.now()
        self.costs = CostKeeper(parts)
        self._rates = RateKeeper(parts)
        self.tracer = TraceRecorder(parts)
        self.on_drain: Callable[[float, bool], None] | None = None
        self.reservations = ReservationTable(parts, self.remover)
        room = HostRoom(parts, self.remover, Relocator(parts, self.remover))
        self.promoter = Promoter(parts, self.remover, room, self.behind.poke)
        self._lookups = LookupFlow(parts, self.verifier, self.promoter)
        self._restores = RestoreFlow(parts, self._lookups, self.remover, self.promoter)
        if hbm:
            parts.hbm = HbmCopies(parts, self.remover, self._restores, hbm)
        self._probe = DiskProbe(parts, self.remover, self.promoter)
        self._reserves = ReserveFlow(parts, self.reservations, self.remover, room)
        self._commits = CommitFlow(
            parts,
            self.reservations,
            Publisher(parts, self.remover),
            lambda space: self.behind.poke(space.pool),
        )
        self._recording = SpaceRecorder(parts)
        self._flushes = FlushFlow(parts, self.behind, self._recording)
        self._last_flush: Completion[FlushResult] | None = None
        if parts.disk is not None:
            begin_conveyors(parts, parts.disk)
        self.shadowing = Shadowing(parts)

    @property
    def events(self) -> Any:
        return self.parts.events

    # ---- Sessions ----

    def open_session(
        self,
        identity: Identity,
        role: str,
        tenants: Iterable[str],
        staging: memoryview | None,
        notify: Callable[[str, Any], None] | None = None,
        staging_release: Callable[[], None] | None = None,
        client_name: str = "",
    ) -> Session:
        """A new session; raises LimitReached, or Draining.

        `staging_release` is called once nothing reads staging any more after the session ended.
        """
        parts = self.parts
        if parts.draining and role != "admin":
            raise Draining("the daemon is draining and opens no new sessions")
        # Operators must get in when engines have taken every place.
        places = parts.limits.sessions + (ADMIN_PLACES if role == "admin" else 0)
        if len(parts.sessions) >= places:
            parts.recorder.limit_rejected("sessions")
            raise LimitReached(
                f"{len(parts.sessions)} sessions are open, the limit limits.sessions; "
                "close some or raise it"
            )
        session = Session(
            parts.next_id(), identity, role, frozenset(tenants), staging, notify,
            staging_release, client_name,
        )  # fmt: skip
        session.last_seen = parts.clock.now()
        parts.sessions[session.id] = session
        return session

    def close_session(self, session: Session, reason: str = "death") -> None:
        """Ends what the session holds; running copies finish first, then staging is let go."""
        if session.closed:
            return
        parts = self.parts
        session.closed = True
        del parts.sessions[session.id]
        for reservation in list(session.reservations.values()):
            self.reservations.end(reservation, reason)
        for key, engine in list(session.engines.items()):
            engine.sessions.discard(session)
            if not engine.sessions:
                parts.engines.pop(key, None)
                parts.leases.end_all(engine.leases.values(), "death")
        session.let_staging_go()
        if parts.hbm is not None:
            parts.hbm.session_closed(session)

    def touch(self, session: Session) -> None:
        """The session lives."""
        session.last_seen = self.parts.clock.now()

    def attach(
        self,
        session: Session,
        spec: KVSpec,
        tenant: str,
        shard: int = 0,
        plan_shapes: tuple[str, ...] = ("prefix",),
        overlap: str = "none",
        engine_id: str = "",
        engine_build: str = "",
        device: str = "",
        prefill_chunk_tokens: int = 0,
    ) -> Attachment:
        """Binds a spec and shard to the session; the space is made when it is new."""
        if tenant not in session.tenants:
            raise PermissionDenied(
                f"this identity may not use tenant {tenant!r}; an [[access]] rule allows it"
            )
        if not 0 <= shard < spec.shard_count:
            raise InvalidRequest(f"shard is {shard}; pass 0 to {spec.shard_count - 1}")
        if len(session.attachments) >= self.parts.limits.spaces:
            raise LimitReached("the session has limits.spaces attachments; reuse them")
        space = self._space(spec, tenant)
        key: Any = (session.id, session.next_attachment)
        if engine_id:
            key = (session.identity.uid, session.identity.certificate, tenant, engine_id)
        engine = join_engine(self.parts.engines, key, session)
        attachment = Attachment(
            session.next_attachment, session, space, shard, engine, plan_shapes, overlap,
            engine_build, device, prefill_chunk_tokens,
        )  # fmt: skip
        session.attachments[attachment.number] = attachment
        session.next_attachment += 1
        return attachment

    def _space(self, spec: KVSpec, tenant: str) -> Space:
        parts = self.parts
        space = parts.spaces.get(space_id(spec, tenant))
        if space is not None:
            return space
        if len(parts.spaces) >= parts.limits.spaces:
            parts.recorder.limit_rejected("spaces")
            raise LimitReached(
                f"{len(parts.spaces)} spaces exist, the limit limits.spaces; raise it"
            )
        number = 1 + max((known.number for known in parts.spaces.values()), default=0)
        space = Space(number, spec, tenant, parts.pool_of(tenant))
        space.epoch = parts.record.epoch_of(space.id)
        self._recording.remember(space)
        parts.spaces[space.id] = space
        return space

    def pools(self, attachment: Attachment) -> list[SharedPool]:
        """Pools that the attachment's client may map, read-only."""
        return self.parts.host.shared_pools(attachment.space.pool)

    # ---- Engines' calls ----

    def lookup(
        self,
        attachment: Attachment,
        query: Query,
        local_tokens: int = 0,
        ask: Ask = NO_ASK,
    ) -> LookupResult | Completion[LookupResult]:
        """Longest stored prefix, what of it is worth loading, and a lease on that."""
        return self._lookups.lookup(attachment, query, local_tokens, ask)

    def restore(
        self,
        session: Session,
        lease_id: int,
        first_block: int,
        block_count: int,
        emit: Callable[[Slots | FailedBlocks], None],
        keeps_part: bool = False,
    ) -> Completion[None]:
        self.parts.leases.flush()
        return self._restores.restore(session, lease_id, first_block, block_count, emit, keeps_part)

    def read_block(
        self, session: Session, lease_id: int, block: int
    ) -> Completion[tuple[bytes, bytes]]:
        self.parts.leases.flush()
        return self._restores.read_block(session, lease_id, block)

    def release(self, session: Session, lease_ids: Iterable[int]) -> None:
        """Ends leases of the session's engines, soon; unknown ids are ignored.

        One of a named request ends now: the next lookup may be of that very request.
        """
        leases = self.parts.leases
        for lease_id in lease_ids:
            lease = self._own(session, lease_id)
            if lease is None:
                continue
            if lease.request_id:
                leases.release(lease, session)
            elif leases.release_soon(lease, session):
                self.parts.defer(leases.flush)

    def renew(self, session: Session, lease_ids: Iterable[int]) -> tuple[list[int], float]:
        """Extends leases; answers with those that no longer live, and the time to live."""
        self.parts.leases.flush()
        lost = []
        for lease_id in lease_ids:
            lease = self._own(session, lease_id)
            if lease is None or lease.anchor.run is None:
                lost.append(lease_id)
            else:
                self.parts.leases.renew(lease)
        return lost, self.parts.leases.ttl_seconds

    def _own(self, session: Session, lease_id: int) -> Lease | None:
        lease = self.parts.leases.get(lease_id)
        return lease if lease and session.engines.get(lease.engine.key) is lease.engine else None

    def finish_request(
        self,
        attachment: Attachment,
        request_id: str,
        output_tokens: int = 0,
        reuse: ReuseHints = NO_HINTS,
    ) -> int:
        """Ends a request's leases; answers with how many."""
        attachment.engine.unleased.pop((attachment.space.number, request_id), None)
        self.parts.requests.finish(attachment, request_id, output_tokens, reuse)
        lease = self.parts.leases.of_request(attachment, request_id)
        if lease is None:
            return 0
        self.parts.leases.end(lease, "finish")
        return 1

    def reserve(
        self, attachment: Attachment, query: Query, first_block: int
    ) -> ReserveResult | Completion[ReserveResult]:
        return self._reserves.reserve(attachment, query, first_block)

    def commit(
        self, session: Session, reservation_id: int, runs: list[CommitRun]
    ) -> Completion[list[CommitResult]]:
        return self._commits.commit(session, reservation_id, runs)

    def flush(self, space_id: bytes | None = None) -> Completion[FlushResult]:
        """Writes what disk lacks of a space, or of all; answers when it is durable."""
        return self._flushes.flush(space_id)

    def abort(self, session: Session, reservation_id: int) -> None:
        """Gives up what of a reservation is not committed; unknown ids are ignored."""
        reservation = self.reservations.get(reservation_id)
        if reservation is not None and reservation.session is session:
            self.reservations.end(reservation, "aborted")

    def set_policy(self, eviction: str) -> None:
        super().set_policy(eviction)
        self.shadowing.policy_set(eviction)

    def resized(self, byte_count: int) -> None:
        """The shared host pool has another ceiling: what follows from its size does, too."""
        self.resizer.resized(byte_count)
        self.shadowing.resized(byte_count)

    def clear(self, space_id: bytes | None = None, tenant: str | None = None) -> Completion[int]:
        answer = super().clear(space_id, tenant)
        self.shadowing.cleared()
        return answer

    def bump_epoch(self, space_id: bytes) -> Completion[tuple[int, int]]:
        answer = super().bump_epoch(space_id)
        self.shadowing.cleared()
        return answer

    # ---- Life ----

    def status(self) -> StatusView:
        self.parts.leases.flush()
        return status_view(self)

    def drain(self, deadline_seconds: float, free: bool) -> None:
        """Grants nothing new, tells every session, and lets the daemon stop when all is quiet.

        A deadline of 0 takes the configured one, `server.drain_seconds`. Where host blocks do not
        outlive the daemon they are written to disk first, if there is one.
        """
        deadline_seconds = deadline_seconds or self.parts.config.server.drain_seconds
        self.parts.draining = True
        for session in list(self.parts.sessions.values()):
            if session.notify is not None:
                session.notify("draining", deadline_seconds)
        if self.parts.disk is not None and (free or self.parts.config.tiers.host.pool == "sealed"):
            self._last_flush = self._flushes.flush()
        if self.on_drain is not None:
            self.on_drain(deadline_seconds, free)

    @property
    def is_quiet(self) -> bool:
        """Whether a daemon that drains may go: nobody reads or writes, and nothing is flushed."""
        flushed = self._last_flush is None or self._last_flush.done
        return flushed and not len(self.parts.leases) and not len(self.reservations)

    def tick(self) -> None:
        """Ends what is over by time; the daemon calls it every 50 ms."""
        parts, now = self.parts, self.parts.clock.now()
        for lease in parts.leases.tick(now):
            session = lease.attachment.session
            if session.notify is not None and not session.closed:
                session.notify("lost_leases", [lease.id])
        self.reservations.tick(now)
        self.pins.tick(now)
        for retired in parts.retired:
            retired.tick(now)
        self._recording.tick(now)
        self.promoter.tick()
        self._restores.tick(now)
        self.resizer.tick()
        self._probe.tick(now)
        self.behind.tick(now)
        self.costs.tick(now)
        self._rates.tick(now)
        self.shadowing.tick()
        self.tracer.tick(now)
        for session in list(parts.sessions.values()):
            if now - session.last_seen > SESSION_TTL_SECONDS:
                self.close_session(session, "silent")

    def check_integrity(self) -> None:
        """Recounts everything everywhere; raises AssertionError. For tests and doubts."""
        check_integrity(self)

    def _lost(self, owner: int) -> None:
        """Blocks of a reservation or pin are gone."""
        reservation = self.reservations.get(owner)
        if reservation is not None:
            reservation.lost = True
            self.reservations.end(reservation, "lost")
        self.pins.lost(owner)
