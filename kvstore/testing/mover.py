"""`SimulatedMover`: copies that end later, in an order that a seed draws."""

from __future__ import annotations

from collections.abc import Hashable
from random import Random

from kvstore.mover import Job, Moved, run


class SimulatedMover:
    """A mover whose jobs end later, in an order drawn from `random`: one `step` at a time.

    The bytes of a job move in one step and its owner hears of it in another, so that whatever can
    happen before, between and after the two does happen under some seed. Queues hold
    `queue_bytes` a link.
    """

    def __init__(self, random: Random, queue_bytes: int = 1 << 30) -> None:
        self._random = random
        self.queue_bytes = queue_bytes
        self._waiting: list[Job] = []
        self._moved: list[tuple[Job, Moved]] = []
        self._bytes: dict[str, int] = {}
        self._closed = False

    @property
    def pending(self) -> int:
        """Jobs whose owner has not heard of their end."""
        return len(self._waiting) + len(self._moved)

    def submit(self, job: Job) -> bool:
        queued = self._bytes.get(job.link, 0)
        if self._closed or (queued and queued + job.byte_count > self.queue_bytes):
            return False
        self._bytes[job.link] = queued + job.byte_count
        self._waiting.append(job)
        return True

    def queued_bytes(self, link: str) -> int:
        return self._bytes.get(link, 0)

    def bytes_ahead(self, link: str, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        return self.queued_bytes(link)

    def step(self) -> bool:
        """Moves the bytes of one job, or tells the owner of one that moved; False without any."""
        if not self.pending:
            return False
        at = self._random.randrange(self.pending)
        if at < len(self._waiting):
            job = self._waiting.pop(at)
            self._moved.append((job, run(job)))
        else:
            job, moved = self._moved.pop(at - len(self._waiting))
            self._bytes[job.link] -= job.byte_count
            job.done(moved)
        return True

    def forget(self) -> None:
        """The process died: nobody hears of what was under way."""
        self._waiting.clear()
        self._moved.clear()
        self._bytes.clear()

    def close(self) -> None:
        while self.step():
            pass
        self._closed = True
