"""Loads of the worker side: fetched on threads, taken by the step that copies them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvstore.client import Match, Space
from kvstore.core.errors import KVStoreError
from kvstore.engines.vllm.messages import LoadJob

logger = logging.getLogger(__name__)

LOAD_THREADS = 2


class Fetched(NamedTuple):
    """Blocks in the store's memory, and the lease that keeps them there."""

    space: Space
    match: Match
    views: list[memoryview]


class Leased(Protocol):
    """What a thread has fetched, whichever way it goes on."""

    @property
    def match(self) -> Match: ...


F = TypeVar("F", bound=Leased)


class Load:
    """A load under way."""

    def __init__(self, job: LoadJob) -> None:
        self.job = job
        self.is_cancelled = False


class Results:
    """Loads that ended: which requests, which of them in part, and blocks to compute after all."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.failed: set[str] = set()
        self.failed_blocks: set[int] = set()

    def add(self, job: LoadJob, count: int) -> None:
        """A load ended with so many leading blocks as they should be."""
        self.ended.add(job.request_id)
        if count < job.count:
            self.failed.add(job.request_id)
            for ids in job.block_ids:
                each = len(ids) // job.count
                self.failed_blocks.update(i for i in ids[count * each :] if i)


class Loads(Generic[F]):
    """Loads under way; each is taken once, whatever happens."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="kvstore-load")
        self._changed = threading.Condition()
        self._under_way: dict[str, Load] = {}
        self._fetched: list[tuple[Load, F | None]] = []

    def start(self, job: LoadJob, fetch: Callable[[LoadJob], F | None]) -> None:
        load = Load(job)
        with self._changed:
            self._under_way[job.request_id] = load
        try:
            self._threads.submit(self._run, load, fetch)
        except RuntimeError:  # closed
            self.put_back(load, None)

    def _run(self, load: Load, fetch: Callable[[LoadJob], F | None]) -> None:
        fetched = None
        try:
            if not load.is_cancelled:
                fetched = fetch(load.job)
        except KVStoreError as error:
            logger.info("%s computes what it was to load: %s", load.job.request_id, error)
        except Exception:
            logger.exception("%s computes what it was to load", load.job.request_id)
        finally:
            self.put_back(load, fetched)

    def put_back(self, load: Load, fetched: F | None) -> None:
        """This one is fetched, as far as it could be, and waits to be taken."""
        with self._changed:
            self._fetched.append((load, fetched))
            self._changed.notify_all()

    def cancel(self, requests: set[str]) -> None:
        """These are over: what is not copied yet need not be."""
        with self._changed:
            for request in requests & self._under_way.keys():
                self._under_way[request].is_cancelled = True

    def forbid(self) -> None:
        """Nothing that is under way may be used any more."""
        self.cancel(set(self._under_way))

    def take(self, wait_seconds: float) -> list[tuple[Load, F | None]]:
        """What was fetched since the last call."""
        with self._changed:
            if wait_seconds and self._under_way and not self._fetched:
                self._changed.wait(wait_seconds)
            taken, self._fetched = self._fetched, []
            return taken

    @property
    def is_empty(self) -> bool:
        """Whether none is under way."""
        return not self._under_way

    def ended(self, load: Load) -> None:
        """The last word on a load."""
        with self._changed:
            if self._under_way.get(load.job.request_id) is load:
                del self._under_way[load.job.request_id]

    def close(self) -> None:
        self.forbid()
        self._threads.shutdown(wait=True, cancel_futures=False)
        for _, fetched in self.take(0.0):
            if fetched is not None:
                fetched.match.release()
