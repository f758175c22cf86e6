"""Leases: time-limited promises that blocks stay readable where they are."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K")


class Deadlines(Generic[K]):
    """Keys by the time they fall due; a key set again moves, and dropping one costs nothing.

    The heap keeps stale entries until they surface, and is rebuilt when they outnumber the live
    ones, so 10^5 leases that are renewed for hours stay small.
    """

    __slots__ = ("_due", "_heap", "_sequence")

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._due)

    def set(self, key: K, due: float) -> None:
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._rebuild()

    def drop(self, key: K) -> None:
        self._due.pop(key, None)

    def pop_due(self, now: float, limit: int = 1024) -> Iterator[K]:
        """Up to `limit` keys whose time has come; each is dropped before it is given out."""
        while limit > 0 and self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                limit -= 1
                yield key

    def _rebuild(self) -> None:
        self._heap = [(due, i, key) for i, (key, due) in enumerate(self._due.items())]
        self._sequence = len(self._heap)
        heapq.heapify(self._heap)


class Lease:
    """One granted lease. `anchor` ties it to the index; blocks [0, block_count) are covered.

    Shared by all sessions of `engine` (the ranks of one engine); it ends by release, finish, its
    time, or the death of the engine's last session. `holders` are the sessions that looked it up:
    a release counts when the last of them has released. `result` has the slots of `shard`, and
    `decision` is why it is what it is. Of a lost lease, `remains` is the anchor on what is left of
    its blocks.
    """

    __slots__ = (
        "anchor", "attachment", "block_count", "decision", "engine", "expires", "holders", "id",
        "leased_bytes", "local_tokens", "remains", "request_id", "result", "shard",
        "symbols_digest",
    )  # fmt: skip

    def __init__(
        self, lease_id: int, engine: Any, attachment: Any, request_id: str, local_tokens: int
    ) -> None:
        self.id = lease_id
        self.engine = engine
        self.attachment = attachment
        self.request_id = request_id
        self.local_tokens = local_tokens
        self.anchor: Any = None
        self.remains: Any = None
        self.block_count = 0
        self.leased_bytes = 0
        self.expires = 0.0
        self.symbols_digest = b""
        self.holders: set[Any] = set()
        self.shard = 0
        self.result: Any = None
        self.decision: Any = None
