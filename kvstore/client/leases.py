"""Leases as the client keeps them: until when bytes may be trusted, by the client's own clock."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakValueDictionary

from kvstore.core.errors import LeaseLost


class Lease:
    """A lease and how many matches use it.

    `expires` counts from before the call that granted or renewed it, so the daemon's own end of
    it is never earlier.
    """

    __slots__ = (
        "__weakref__", "expires", "id", "lost", "renewed", "request_id", "ttl", "users",
    )  # fmt: skip

    def __init__(self, lease_id: int, request_id: str) -> None:
        self.id = lease_id
        self.request_id = request_id
        self.users = 0
        self.lost = ""
        self.renewed = self.ttl = self.expires = 0.0

    def extend(self, since: float, ttl: float) -> None:
        self.renewed, self.ttl = since, ttl
        if since + ttl > self.expires:
            self.expires = since + ttl

    def check(self, now: float) -> None:
        """Raises LeaseLost unless the lease covers this moment."""
        if self.lost:
            raise LeaseLost(f"the lease is gone: {self.lost}; recompute the blocks")
        if now >= self.expires:
            raise LeaseLost(
                f"the lease ended {now - self.expires:.3g} s ago without being renewed; "
                "recompute the blocks"
            )


class LeaseTable:
    """The live leases of one session. Any thread may use it.

    It does not keep them alive: one that no match has any more, because an interrupt hit between
    two lines, is renewed no longer, and ends by its time.
    """

    def __init__(self) -> None:
        self._leases: WeakValueDictionary[int, Lease] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._leases

    def hold(self, lease_id: int, request_id: str, since: float, ttl: float) -> Lease:
        """One more user of a lease; repeats of a lookup answer with the same one."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                lease = self._leases[lease_id] = Lease(lease_id, request_id)
            lease.users += 1
            lease.extend(since, ttl)
            return lease

    def drop(self, lease: Lease) -> bool:
        """One user fewer; True when the lease is to be released."""
        with self._lock:
            lease.users -= 1
            if lease.users or self._leases.get(lease.id) is not lease:
                return False
            del self._leases[lease.id]
            lease.lost = "it was released"
        return True

    def due(self, now: float, part: float) -> list[int]:
        """Leases of whose time more than `part` is over; `part` 0 means all."""
        with self._lock:
            leases = self._leases.values()
            return [it.id for it in leases if now >= it.renewed + it.ttl * part]

    def renew(self, lease_ids: Iterable[int], since: float, ttl: float) -> None:
        with self._lock:
            for lease_id in lease_ids:
                lease = self._leases.get(lease_id)
                if lease is not None and not lease.lost:
                    lease.extend(since, ttl)

    def lose(self, lease_ids: Iterable[int], reason: str) -> None:
        with self._lock:
            for lease_id in lease_ids:
                lease = self._leases.pop(lease_id, None)
                if lease is not None:
                    lease.lost = reason

    def lose_all(self, reason: str) -> None:
        self.lose(list(self._leases.keys()), reason)

    def finish(self, request_id: str) -> None:
        """The leases of a finished request ended with it."""
        with self._lock:
            ended = [lease.id for lease in self._leases.values() if lease.request_id == request_id]
        self.lose(ended, f"request {request_id} is finished")
