"""A bounded queue that shares a link fairly: by tenant first, then by session."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

QUANTUM_BYTES = 4 << 20


class _Lane(Generic[T]):
    """One tenant's or session's share: what it has waiting, and what it may still send now."""

    __slots__ = ("deficit", "items", "lanes", "queued_bytes")

    def __init__(self) -> None:
        self.deficit = 0
        self.queued_bytes = 0
        self.items: deque[tuple[int, T]] = deque()
        self.lanes: OrderedDict[Hashable, _Lane[T]] = OrderedDict()


class FairQueue(Generic[T]):
    """Deficit round-robin (Shreedhar and Varghese, 1995) over tenants, then their sessions.

    Holds at most `limit_bytes`; a single item larger than that still fits into an empty queue, so
    that nothing is refused for ever. Not thread-safe: its owner locks.
    """

    def __init__(self, limit_bytes: int, quantum: int = QUANTUM_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.queued_bytes = 0
        self._quantum = quantum
        self._tenants: OrderedDict[Hashable, _Lane[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, tenant: Hashable, session: Hashable, size: int, item: T) -> bool:
        """Queues `item`; False when the queue is full."""
        if self._count and self.queued_bytes + size > self.limit_bytes:
            return False
        share = self._tenants.setdefault(tenant, _Lane())
        lane = share.lanes.setdefault(session, _Lane())
        lane.items.append((size, item))
        lane.queued_bytes += size
        share.queued_bytes += size
        self.queued_bytes += size
        self._count += 1
        return True

    def pop(self) -> T:
        """The next item in fair order; the queue must not be empty."""
        assert self._count, "pop from an empty queue"
        tenant = self._turn(self._tenants)
        session = self._turn(tenant.lanes)
        size, item = session.items.popleft()
        session.deficit -= size
        tenant.deficit -= size
        session.queued_bytes -= size
        tenant.queued_bytes -= size
        self.queued_bytes -= size
        self._count -= 1
        self._retire(tenant, session)
        return item

    def bytes_ahead(self, tenant: Hashable, session: Hashable, size: int) -> int:
        """Of what is queued, the bytes that go before the last of `size` bytes pushed now.

        Others get as much as we do until then, rounded up to a whole turn, or all they have.
        """
        own = self._tenants.get(tenant)
        lanes: OrderedDict[Hashable, _Lane[T]] = own.lanes if own is not None else OrderedDict()
        mine = lanes.get(session)
        before = mine.queued_bytes if mine is not None else 0
        ahead = before + self._shares(lanes, session, before + size)
        return ahead + self._shares(self._tenants, tenant, ahead + size)

    def _shares(self, lanes: OrderedDict[Hashable, _Lane[T]], own: Hashable, size: int) -> int:
        most = -(-size // self._quantum) * self._quantum
        return sum([min(lane.queued_bytes, most) for key, lane in lanes.items() if key != own])

    def _turn(self, lanes: OrderedDict[Hashable, _Lane[T]]) -> _Lane[T]:
        """The lane whose turn it is; lanes that spent their share go to the back with a new one."""
        while True:
            key, lane = next(iter(lanes.items()))
            if lane.deficit > 0:
                return lane
            lane.deficit += self._quantum
            lanes.move_to_end(key)

    def _retire(self, tenant: _Lane[T], session: _Lane[T]) -> None:
        if session.items:
            return
        _remove(tenant.lanes, session)
        if not tenant.lanes:
            _remove(self._tenants, tenant)


def _remove(lanes: OrderedDict[Hashable, _Lane[T]], gone: _Lane[T]) -> None:
    # The lane in turn is always the first, so this looks at one entry.
    for key, lane in lanes.items():
        if lane is gone:
            del lanes[key]
            return
