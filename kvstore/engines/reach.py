"""`Reach`: a space of a daemon that may not be there yet, so that an engine starts without it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.client import KVClient, KVStoreError, Space, StoreUnavailable
from kvstore.core.clock import perf_seconds

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class Reach:
    """Connects and attaches when first asked, and again now and then until a daemon answers.

    Once attached, the client finds its way back by itself. Whatever else than StoreUnavailable
    `connect` or `attach` raise is a wrong setting and goes through.
    """

    def __init__(
        self,
        connect: Callable[[], KVClient],
        attach: Callable[[KVClient], Space],
        now: Callable[[], float] = perf_seconds,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._connect, self._attach = connect, attach
        self._now, self._retry_seconds = now, retry_seconds
        self._lock = threading.Lock()
        self._client: KVClient | None = None
        self._space: Space | None = None
        self._next_try = -float("inf")
        self._closed = False
        self._ended = threading.Event()

    def space(self) -> Space:
        """The space; raises StoreUnavailable, at once if it was tried a moment ago."""
        space = self._space
        if space is not None:
            return space
        if not self._lock.acquire(blocking=False):
            raise StoreUnavailable("another thread is connecting to the daemon; recompute")
        try:
            return self._space or self._try()
        finally:
            self._lock.release()

    def start(self, in_background: bool = False) -> None:
        """Attaches now, or on a thread as soon as a daemon answers; then `attached` is the space.

        A daemon that refuses is asked again, too: what it allows may change. `in_background`
        does not even wait for the first answer.
        """
        try:
            if not in_background:
                self.space()
                return
        except StoreUnavailable as error:
            logger.warning("kvstore is not used for now: %s", error)
        except KVStoreError as error:
            logger.error("kvstore is not used: %s", error)
        wait = 0.0 if in_background else self._retry_seconds
        threading.Thread(
            target=self._keep_trying, args=(wait,), name="kvstore-attach", daemon=True
        ).start()

    def _keep_trying(self, wait: float) -> None:
        before = ""
        while not self._ended.wait(wait):
            wait = self._retry_seconds
            try:
                self.space()
            except StoreUnavailable:
                continue
            except KVStoreError as error:
                if str(error) != before:
                    logger.error("kvstore is not used: %s", error)
                before = str(error)
            else:
                logger.info("kvstore is used from now on")
                return

    @property
    def attached(self) -> Space | None:
        """The space if calls on it go through at the moment; never waits."""
        space, client = self._space, self._client
        return space if space is not None and client is not None and client.available else None

    def _try(self) -> Space:
        if self._closed or self._now() < self._next_try:
            raise StoreUnavailable("no daemon answered a moment ago; start `kvstore serve`")
        try:
            if self._client is None:
                self._client = self._connect()
            self._space = self._attach(self._client)
        finally:
            self._next_try = self._now() + self._retry_seconds
        return self._space

    def close(self) -> None:
        """Ends the session; later calls find no daemon."""
        self._ended.set()
        with self._lock:
            self._closed, self._space = True, None
            client, self._client = self._client, None
        if client is not None:
            client.close()
