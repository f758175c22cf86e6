"""`Session`: one session with one daemon, from its opening to its end."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from google.protobuf.message import Message

from kvstore.client.leases import Lease, LeaseTable
from kvstore.client.pools import MappedPool
from kvstore.client.staging import Staging
from kvstore.client.transport import (
    INTERRUPTED,
    CallTimeout,
    Disconnected,
    Pending,
    Transport,
    ignore_notice,
)
from kvstore.client.wire import MESSAGE_MARGIN_BYTES, spec_message
from kvstore.core.block import SLOT_SHIFT
from kvstore.core.clock import Clock
from kvstore.core.errors import (
    Draining,
    FailedPrecondition,
    KVStoreError,
    LeaseLost,
    NotFound,
    SpecMismatch,
    StoreUnavailable,
    Unauthenticated,
)
from kvstore.core.lane import PROTOCOL_MINOR
from kvstore.proto.v1 import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.client.space import Space

DEFAULT_MESSAGE_BYTES = 4 << 20
RENEW_PART = 1 / 3
HEARTBEAT_PART = 1 / 3
TOUCH_BYTES = 64 << 20  # a few milliseconds
Trouble = Callable[["Session", KVStoreError], None]


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """A space as one session knows it."""

    session: Session
    number: int
    space_id: bytes
    epoch: int
    block_bytes: int
    slot_bytes: int
    shard_count: int
    pools: dict[int, MappedPool]

    @property
    def place_step(self) -> int:
        """Distance of the places of neighbouring slots."""
        return self.slot_bytes >> SLOT_SHIFT


class Session:
    """Calls, leases, mapped memory and attachments that end together.

    `trouble(session, error)` hears of every error that says something about the daemon rather
    than about the call; it is called on the thread that met it.
    """

    def __init__(
        self, transport: Transport, clock: Clock, client_name: str, staging_bytes: int,
        timeout: float, trouble: Trouble,
    ) -> None:  # fmt: skip
        self.transport = transport
        self.clock = clock
        self.ended = ""
        self.is_torn = False
        """Whether an exception from outside left its books half written: it is to end soon."""
        self.leases = LeaseTable()
        self.pools: dict[int, MappedPool] = {}
        self.attachments: WeakKeyDictionary[Space, Attachment] = WeakKeyDictionary()
        self.refusals: WeakKeyDictionary[Space, KVStoreError] = WeakKeyDictionary()
        self._trouble = trouble
        self._dropped: deque[Lease] = deque()
        self._untouched: deque[tuple[MappedPool, int]] = deque()
        self._cells_touched: dict[int, int] = {}
        transport.on_notice = self._notice
        request = pb.OpenSessionRequest(
            client_name=client_name, protocol_minor=PROTOCOL_MINOR, staging_bytes=staging_bytes
        )
        self.last_heard = clock.now()
        try:
            self.info, segment = transport.open(request, timeout)
        except Draining as error:
            raise StoreUnavailable(str(error)) from error
        self.staging = None if segment is None else Staging(segment)
        self.message_bytes: int = self.info.limits.message_bytes or DEFAULT_MESSAGE_BYTES
        self.prompt_bytes = self.message_bytes - MESSAGE_MARGIN_BYTES
        self._spoke = self.last_heard

    def attach(self, space: Space, timeout: float) -> Attachment:
        request = pb.AttachRequest(
            spec=spec_message(space.spec),
            tenant=space.tenant,
            shard=space.shard,
            plan_shapes=space.plan_shapes,
            overlap=space.overlap,
            engine_id=space.engine_id,
            engine_build=space.engine_build,
            device=space.device,
            prefill_chunk_tokens=space.prefill_chunk_tokens,
        )
        try:
            response, pools = self.transport.attach(request, timeout)
        except FailedPrecondition as error:
            raise SpecMismatch(str(error)) from error
        except KVStoreError as error:
            raise self.judge(error) from error
        for pool in pools:
            self.pools.setdefault(pool.pool_id, pool)
        attachment = Attachment(
            self, response.attachment, response.space_id, response.epoch, response.block_bytes,
            response.slot_bytes, space.spec.shard_count, self.pools,
        )  # fmt: skip
        self.attachments[space] = space.attached = attachment
        return attachment

    # ---- Calls ----

    def call(
        self,
        method: str,
        request: Message,
        timeout: float,
        on_late: Callable[[Any], None] | None = None,
    ) -> Any:
        try:
            return self.transport.call(method, request, timeout, on_late)
        except KVStoreError as error:
            raise self.judge(error) from error

    def start(
        self,
        method: str,
        request: Message,
        timeout: float,
        on_late: Callable[[Any], None] | None = None,
    ) -> Pending:
        try:
            return self.transport.start(method, request, timeout, on_late)
        except KVStoreError as error:
            raise self.judge(error) from error

    def result(self, pending: Pending) -> Any:
        try:
            return pending.result()
        except KVStoreError as error:
            raise self.judge(error) from error

    def stream(self, method: str, request: Message, timeout: float) -> Iterator[Any]:
        """Answers to Restore or FetchInline: what they may not find is the lease."""
        try:
            yield from self.transport.stream(method, request, timeout)
        except NotFound as error:
            raise LeaseLost(str(error)) from error
        except KVStoreError as error:
            raise self.judge(error) from error

    def upload(self, method: str, requests: Iterable[Message], timeout: float) -> Any:
        try:
            return self.transport.upload(method, requests, timeout)
        except KVStoreError as error:
            raise self.judge(error) from error

    def judge(self, error: KVStoreError) -> KVStoreError:
        """Tells of an error that says the daemon is in trouble; answers with what to raise."""
        if isinstance(error, CallTimeout | Disconnected | Draining | Unauthenticated):
            self._trouble(self, error)
        if isinstance(error, Draining | Unauthenticated):
            return StoreUnavailable(str(error))
        return error

    def tear(self) -> None:
        """Ends the session at once, as `is_torn` does soon."""
        self.judge(Disconnected(f"{INTERRUPTED}; the client reconnects by itself"))

    def judge_slow(self, error: KVStoreError) -> KVStoreError:
        """As `judge` for calls that may take long: a time limit of theirs says nothing."""
        return error if isinstance(error, CallTimeout) else self.judge(error)

    # ---- Ends of leases and reservations ----

    def release(self, lease_id: int) -> None:
        """Ends a lease, without waiting."""
        try:
            self.transport.release(lease_id)
        except (StoreUnavailable, NotFound):
            return  # the session ended, and the lease with it

    def drop_soon(self, lease: Lease) -> None:
        """As a release, on the background thread: takes no lock, so destructors may call it."""
        self._dropped.append(lease)

    def late_lookup(self, answer: Any) -> None:
        """A Lookup that was given up answers: nobody knows its lease."""
        if not isinstance(answer, pb.LookupResponse) or not answer.lease_id:
            return
        if answer.lease_id not in self.leases:  # a repeat may have got the same one since
            self.release(answer.lease_id)

    def late_reserve(self, answer: Any) -> None:
        """A Reserve that was given up answers: nobody fills what it reserved."""
        if isinstance(answer, pb.ReserveResponse) and answer.reservation_id:
            self.abort(answer.reservation_id)

    def abort(self, reservation_id: int) -> None:
        """Gives a reservation up, without waiting."""
        self.send("Abort", pb.AbortRequest(reservation_id=reservation_id))

    def send(self, method: str, request: Message) -> None:
        # A daemon that is gone has ended the session, and with it what was to be ended.
        with contextlib.suppress(StoreUnavailable, NotFound):
            self.transport.send(method, request)

    def flush(self) -> None:
        """Releases what destructors left."""
        while self._dropped:
            lease = self._dropped.popleft()
            if self.leases.drop(lease):
                self.release(lease.id)

    # ---- Upkeep, on the background thread ----

    def upkeep(self, now: float, timeout: float) -> None:
        """Reads notices, sends what was put off, renews leases and says that it lives."""
        self.flush()
        self.poll()
        if due := self.leases.due(now, RENEW_PART):
            self.renew(due, timeout)
        elif now >= self._spoke + self.info.session_ttl_seconds * HEARTBEAT_PART:
            self.renew([], timeout)

    def touch_pools(self) -> None:
        """Goes on with bringing pools into this process's page tables, a part at a time.

        A restore that is the first to read its pages would take half as long again.
        """
        if not self._untouched:
            for pool in list(self.pools.values()):
                cells = pool.whole_cells
                if cells > self._cells_touched.get(pool.pool_id, 0):  # a new pool, or it has grown
                    self._untouched.append((pool, 0))
                self._cells_touched[pool.pool_id] = cells
        if self._untouched:
            pool, start = self._untouched.popleft()
            stop = pool.touch(start, TOUCH_BYTES)
            if stop < len(pool.data):
                self._untouched.append((pool, stop))

    def poll(self) -> None:
        try:
            if self.is_torn:
                raise Disconnected(f"{INTERRUPTED}; the client reconnects by itself")
            self.transport.poll()
        except Disconnected as error:
            raise self.judge(error) from error

    def renew(self, lease_ids: list[int], timeout: float) -> None:
        """Extends leases. With none it is a heartbeat that asks for a sign of life."""
        before = self._spoke = self.clock.now()
        response = self.call("Renew", pb.RenewRequest(lease_ids=lease_ids), timeout)
        self.last_heard = self.clock.now()
        self.leases.lose(response.lost_leases, "the daemon ended it")
        self.leases.renew(lease_ids, before, response.lease_ttl_seconds)

    def _notice(self, notice: pb.Notice) -> None:
        if notice.lost_leases:
            self.leases.lose(notice.lost_leases, "the daemon ended it")
        if notice.draining:
            self._trouble(
                self,
                Draining(f"the daemon is draining and leaves within {notice.drain_seconds:g} s"),
            )

    def end(self, reason: str) -> None:
        """Over: its leases are lost, its connection is closed."""
        self.ended = self.ended or reason
        self.leases.lose_all(reason)
        self.transport.close()
        # Without these circles the mapped memory goes with its last user, not with a collection.
        self.transport.on_notice = ignore_notice
        for space, attachment in list(self.attachments.items()):
            if space.attached is attachment:
                space.attached = None
        self.attachments.clear()
        self.refusals.clear()


def client_name() -> str:
    """What the daemon's logs call this client if it does not say."""
    return f"pid {os.getpid()}"
