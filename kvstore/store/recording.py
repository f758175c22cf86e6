"""Recording: has spaces written down, on a worker where that takes as long as a disk does."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvstore.core.space import Space
from kvstore.mover import RECORD_LINK, Job, Moved
from kvstore.store.parts import Parts

RETRY_SECONDS = 2.0


class SpaceRecorder:
    """Sees to it that each space is written down in the end: no block of others goes to disk."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._due: dict[Space, float] = {}  # those not written down yet: when to look again
        self._under_way = 0

    def remember(self, space: Space) -> None:
        """Has a new space written down; raises FailedPrecondition where that is known at once."""
        if self._parts.record.durable_slow:
            space.recorded = False
            self._write([space], lambda: None)
        else:
            self._parts.record.remember(space)

    def catch_up(self, spaces: Iterable[Space], then: Callable[[], None]) -> None:
        """Calls `then` once those of `spaces` that were not written down have been tried."""
        waiting = [space for space in spaces if not space.recorded and not space.closing]
        if waiting:
            self._write(waiting, then)
        else:
            then()

    def tick(self, now: float) -> None:
        due = [space for space, when in self._due.items() if when <= now]
        if due and not self._under_way:  # one that hangs must not have a queue grow behind it
            self._write(due, lambda: None)

    def _write(self, spaces: list[Space], then: Callable[[], None]) -> None:
        record, now = self._parts.record, self._parts.clock.now()
        self._due.update(dict.fromkeys(spaces, now + RETRY_SECONDS))

        def work() -> None:
            for space in spaces:
                record.remember(space)

        def done(moved: Moved) -> None:
            self._under_way -= 1
            for space in spaces if moved.error is None else ():
                space.recorded = True
                self._due.pop(space, None)
            then()

        if self._parts.mover.submit(Job(RECORD_LINK, "", 0, 0, work, done)):
            self._under_way += 1
        else:
            then()
