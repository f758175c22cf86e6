"""`Background`: a thread that calls functions in order, with a bounded queue before it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """Calls what it is given, one after the other, so that an engine's step never waits.

    What does not fit into the queue is refused; what raises is logged and forgotten.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(limit)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> bool:
        """Whether there was room for it."""
        if self._closed.is_set():
            return False
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> None:
        """Finishes what is queued, for so many seconds at most."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return
        self._thread.join(timeout)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                logger.exception("a call to kvstore failed; the engine goes on without it")
            del call  # with the blocks that it was about: the next may be long in coming
