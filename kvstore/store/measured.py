"""`MeasuredMover`: a mover whose transfers to and from disk, or a GPU, teach the cost book."""

from __future__ import annotations

from collections.abc import Hashable

from kvstore.core.clock import Clock
from kvstore.mover import READ_LINK, WRITE_LINK, Job, Moved, Mover
from kvstore.policies.cost import LinkIdentity
from kvstore.store.costs import CostBook, UnderWay


class MeasuredMover:
    """Passes jobs on, and measures each from its submission until its owner hears of it.

    So a measurement has everything in it that one waits for: the bytes queued ahead, the worker,
    and the owner's own turn. Jobs that are parts of a restore are measured with it, as a whole.
    """

    def __init__(self, mover: Mover, clock: Clock, book: CostBook) -> None:
        self._mover = mover
        self._clock = clock
        self._book = book
        self._identities = {READ_LINK: book.read_link, WRITE_LINK: book.write_link}

    def submit(self, job: Job) -> bool:
        identity = self._identities.get(job.link)
        if job.device:
            identity = LinkIdentity(job.link, job.device)
        if identity is None or not job.byte_count or not job.is_measured:
            return self._mover.submit(job)
        done = job.done
        queued = self._mover.bytes_ahead(job.link, job.tenant, job.session, job.byte_count)
        number = self._book.begin_transfer(
            UnderWay(identity, self._clock.now(), job.byte_count, queued)
        )

        def heard(moved: Moved) -> None:
            self._book.end_transfer(number, self._clock.now(), is_whole(moved))
            done(moved)

        job.done = heard
        if self._mover.submit(job):
            return True
        job.done = done
        self._book.end_transfer(number, 0.0, False)
        return False

    def queued_bytes(self, link: str) -> int:
        return self._mover.queued_bytes(link)

    def bytes_ahead(self, link: str, tenant: Hashable, session: Hashable, byte_count: int) -> int:
        return self._mover.bytes_ahead(link, tenant, session, byte_count)

    def close(self) -> None:
        self._mover.close()


def is_whole(moved: Moved) -> bool:
    """Whether all bytes moved: what failed half way says nothing about the time it takes."""
    value = moved.value
    if moved.error is not None or value is None:
        return False
    return not (isinstance(value, list) and None in value)
