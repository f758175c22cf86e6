"""KV events: what became readable where and what left, in one numbered sequence.

Kinds and fields follow vLLM's KV event schema (BlockStored, BlockRemoved, AllBlocksCleared, with
`medium`), so that a router can rebuild each tier's index from them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from kvstore.core.space import Space


class KVEvent(NamedTuple):
    """One event. `keys` are packed 16-byte block keys; unused fields are empty."""

    sequence: int
    wall_seconds: float
    kind: str  # "stored", "removed" or "cleared"
    space_id: bytes
    tenant: str
    medium: str
    keys: bytes = b""
    parent_key: bytes = b""
    symbols: bytes = b""
    block_size: int = 0


Listener = Callable[[KVEvent], None]


class Subscription:
    """A listener of one tenant's events, or of everybody's when `tenant` is None."""

    def __init__(self, log: EventLog, tenant: str | None, listener: Listener) -> None:
        self.tenant = tenant
        self._log = log
        self._listener = listener

    def wants(self, event: KVEvent) -> bool:
        return self.tenant is None or event.tenant == self.tenant

    def deliver(self, event: KVEvent) -> None:
        self._listener(event)

    def close(self) -> None:
        self._log.drop(self)


class View:
    """What some tenants' subscribers may know of a log: these tenants' events, numbered by
    themselves from 1 without gaps. Others' events are neither in it nor counted by it.

    With `tenants` None it is the whole log, in the log's own numbers.
    """

    def __init__(self, log: EventLog, tenants: frozenset[str] | None) -> None:
        self._log, self._tenants = log, tenants

    def wants(self, event: KVEvent) -> bool:
        return self._tenants is None or event.tenant in self._tenants

    @property
    def sequence(self) -> int:
        """Number of the newest event."""
        if self._tenants is None:
            return self._log.sequence
        return sum(self._log.count_of(tenant) for tenant in self._tenants)

    @property
    def oldest(self) -> int:
        """Number of the oldest event still kept; the next one's when none is."""
        if self._tenants is None:
            return self._log.oldest
        kept = sum(len(self._log.kept_of(tenant)) for tenant in self._tenants)
        return self.sequence - kept + 1

    def place_before(self, number: int) -> tuple[int, int]:
        """A place in the log at or before event `number`, and the number of the event there."""
        if self._tenants is None:
            return number - 1, number - 1
        if len(self._tenants) == 1:
            (tenant,) = self._tenants
            kept, index = self._log.kept_of(tenant), number - self.oldest
            if 0 <= index < len(kept):
                return kept[index].sequence - 1, number - 1
        if number > self.sequence:
            return self._log.sequence, self.sequence
        return 0, self.oldest - 1

    def after(self, place: int, count: int) -> list[KVEvent]:
        """Kept events behind a place in the log, at most so many."""
        if self._tenants is None:
            return self._log.since(place + 1, count)
        found: list[KVEvent] = []
        for tenant in self._tenants:
            kept = self._log.kept_of(tenant)
            if kept and kept[-1].sequence > place:
                start = bisect_right(kept, place, key=_sequence_of)
                found += islice(kept, start, start + count)
        found.sort(key=_sequence_of)
        return found[:count]


class EventLog:
    """Numbers events, keeps the newest for late subscribers, and hands them on.

    Bounded by count and by bytes; what falls out is gone, and a subscriber that asks for it is
    told the oldest number still there.
    """

    def __init__(
        self, wall: Callable[[], float], kept_events: int, kept_bytes: int = 16 << 20
    ) -> None:
        self.sequence = 0
        self._wall = wall
        self._kept: deque[KVEvent] = deque()
        self._kept_of: dict[str, deque[KVEvent]] = {}
        self._counts: Counter[str] = Counter()
        self._kept_events = kept_events
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._subscriptions: list[Subscription] = []

    @property
    def oldest(self) -> int:
        """Number of the oldest event still kept; the next one's when none is."""
        return self._kept[0].sequence if self._kept else self.sequence + 1

    def view(self, tenants: frozenset[str] | None) -> View:
        """What subscribers of these tenants see; of all with None."""
        return View(self, tenants)

    def count_of(self, tenant: str) -> int:
        """Events that a tenant ever had."""
        return self._counts[tenant]

    def kept_of(self, tenant: str) -> Sequence[KVEvent]:
        """A tenant's events among those that are kept, in order."""
        return self._kept_of.get(tenant, ())

    @property
    def subscriber_count(self) -> int:
        return len(self._subscriptions)

    def subscribe(self, tenant: str | None, from_sequence: int, listener: Listener) -> Subscription:
        """Delivers kept events from `from_sequence` on (0: none), then every new one."""
        subscription = Subscription(self, tenant, listener)
        if from_sequence:
            for event in list(self._kept):
                if event.sequence >= from_sequence and subscription.wants(event):
                    listener(event)
        self._subscriptions.append(subscription)
        return subscription

    def since(self, sequence: int, count: int) -> list[KVEvent]:
        """Kept events from `sequence` on, at most so many."""
        start = max(sequence - self.oldest, 0)
        return list(islice(self._kept, start, start + count))

    def drop(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def stored(
        self, space: Space, medium: str, keys: bytes, parent_key: bytes, symbols: bytes
    ) -> None:
        self._add(
            "stored", space.id, space.tenant, medium, keys, parent_key, symbols, space.block_size
        )

    def removed(self, space: Space, medium: str, keys: bytes) -> None:
        self._add("removed", space.id, space.tenant, medium, keys)

    def cleared(self, space: Space, medium: str) -> None:
        self._add("cleared", space.id, space.tenant, medium)

    def _add(
        self, kind: str, space_id: bytes, tenant: str, medium: str, keys: bytes = b"",
        parent_key: bytes = b"", symbols: bytes = b"", block_size: int = 0,
    ) -> None:  # fmt: skip
        self.sequence += 1
        event = KVEvent(
            self.sequence, self._wall(), kind, space_id, tenant, medium, keys, parent_key,
            symbols, block_size,
        )  # fmt: skip
        self._keep(event)
        for subscription in list(self._subscriptions):
            if subscription.wants(event):
                subscription.deliver(event)

    def _keep(self, event: KVEvent) -> None:
        self._counts[event.tenant] += 1
        self._kept.append(event)
        self._kept_of.setdefault(event.tenant, deque()).append(event)
        self._bytes += _size(event)
        while len(self._kept) > self._kept_events or self._bytes > self._kept_bytes:
            oldest = self._kept.popleft()
            self._bytes -= _size(oldest)
            theirs = self._kept_of[oldest.tenant]
            theirs.popleft()
            if not theirs:
                del self._kept_of[oldest.tenant]


def _sequence_of(event: KVEvent) -> int:
    return event.sequence


def _size(event: KVEvent) -> int:
    return 256 + len(event.keys) + len(event.symbols)
