"""The lease table: grants, renewals, and every way a lease ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvstore.core.clock import Clock
from kvstore.core.lease import Deadlines, Lease
from kvstore.store.sessions import Attachment, Engine, Session


class LeaseTable:
    """All live leases. `on_end(lease, reason)` hears of each end: release, finish, expired, death.

    A lease whose blocks were cleared lives on, dead (its anchor has no run), until it ends: the
    slots it covered rest until then.
    """

    def __init__(
        self,
        clock: Clock,
        ttl_seconds: float,
        next_id: Callable[[], int],
        on_end: Callable[[Lease, str], None],
    ) -> None:
        self.ttl_seconds = ttl_seconds
        self.leased_bytes = 0
        self.by_tenant: dict[str, int] = {}
        self._clock = clock
        self._on_end = on_end
        self._leases: dict[int, Lease] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._next_id = next_id
        self._releasing: list[tuple[Lease, Session]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def add(self, attachment: Attachment, request_id: str, local_tokens: int) -> Lease:
        """A new lease of `attachment`'s engine; it covers nothing until `cover`."""
        lease = Lease(self._next_id(), attachment.engine, attachment, request_id, local_tokens)
        self._leases[lease.id] = lease
        attachment.engine.leases[lease.id] = lease
        if request_id:
            attachment.engine.by_request[attachment.space.number, request_id] = lease
        attachment.session.lease_count += 1
        return lease

    def cover(self, lease: Lease, block_count: int) -> None:
        """A lease covers so many blocks from now on; the caller has checked the limits."""
        space = lease.attachment.space
        before, lease.block_count = lease.leased_bytes, block_count
        lease.leased_bytes = block_count * space.slot_bytes * space.shard_count
        self._count(lease, lease.leased_bytes - before)
        self.renew(lease)

    def of_request(self, attachment: Attachment, request_id: str) -> Lease | None:
        return attachment.engine.by_request.get((attachment.space.number, request_id))

    def renew(self, lease: Lease) -> None:
        lease.expires = self._clock.now() + self.ttl_seconds
        self._deadlines.set(lease.id, lease.expires)

    def end(self, lease: Lease, reason: str) -> None:
        if self._leases.pop(lease.id, None) is None:
            return
        self._deadlines.drop(lease.id)
        engine = lease.engine
        engine.leases.pop(lease.id, None)
        key = (lease.attachment.space.number, lease.request_id)
        if engine.by_request.get(key) is lease:
            del engine.by_request[key]
        lease.attachment.session.lease_count -= 1
        self._count(lease, -lease.leased_bytes)
        self._on_end(lease, reason)

    def release(self, lease: Lease, session: Session) -> None:
        """A session is done with a lease: it ends with the last of those that looked it up.

        A session that got the lease's id from another rank ends it at once.
        """
        if session in lease.holders and len(lease.holders) > 1:
            lease.holders.discard(session)
        else:
            self.end(lease, "release")

    def release_soon(self, lease: Lease, session: Session) -> bool:
        """Releases at the next `flush`; True if that has to be arranged for.

        A release rides in front of the next lookup, which then does not wait for it.
        """
        self._releasing.append((lease, session))
        return len(self._releasing) == 1

    def flush(self) -> None:
        """Carries out what `release_soon` put off."""
        releasing, self._releasing = self._releasing, []
        for lease, session in releasing:
            if lease.id in self._leases:
                self.release(lease, session)

    def end_all(self, leases: Iterable[Lease], reason: str) -> int:
        ended = list(leases)
        for lease in ended:
            self.end(lease, reason)
        return len(ended)

    def tick(self, now: float) -> list[Lease]:
        """Ends expired leases, a bounded number a turn, and answers with them."""
        expired = [self._leases[i] for i in self._deadlines.pop_due(now)]
        for lease in expired:
            self.end(lease, "expiry")
        return expired

    def all(self) -> Iterable[Lease]:
        return self._leases.values()

    def check_integrity(self) -> None:
        """Recounts what the table keeps; raises AssertionError."""
        total = sum(lease.leased_bytes for lease in self._leases.values())
        assert total == self.leased_bytes, f"leased {total}, counted {self.leased_bytes}"
        assert sum(self.by_tenant.values()) == total
        assert len(self._deadlines) == len(self._leases)
        for lease in self._leases.values():
            assert lease.engine.leases[lease.id] is lease

    def _count(self, lease: Lease, amount: int) -> None:
        session: Session = lease.attachment.session
        session.leased_bytes += amount
        self.leased_bytes += amount
        tenant = lease.attachment.space.tenant
        left = self.by_tenant.get(tenant, 0) + amount
        if left:
            self.by_tenant[tenant] = left
        else:
            self.by_tenant.pop(tenant, None)


def join_engine(engines: dict[Any, Engine], key: Any, session: Session) -> Engine:
    """The engine named `key`, made when it is new, with `session` in it."""
    engine = engines.get(key)
    if engine is None:
        engine = engines[key] = Engine(key)
    engine.sessions.add(session)
    session.engines[key] = engine
    return engine
