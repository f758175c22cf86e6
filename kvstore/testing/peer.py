"""`Peer`: one client's connection to an in-process store, as a lane connection is to a daemon."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.client.pools import MappedPool
from kvstore.client.transport import DirectTransport, Disconnected
from kvstore.core.completion import Completion
from kvstore.core.errors import Unauthenticated
from kvstore.core.lane import METHOD_NUMBERS
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.access import Grant
from kvstore.server.service import STREAM
from kvstore.server.staging import Staging
from kvstore.server.translate import notice_message
from kvstore.store.sessions import Identity, Session

if TYPE_CHECKING:
    from kvstore.testing.store import InProcessStore


class Peer:
    """One connection to the store: its session, staging segment and notices."""

    def __init__(self, store: InProcessStore, grant: Grant, staging_bytes: int | None) -> None:
        if store.life < 0:
            raise Disconnected("the store is closed")
        self._store, self._grant, self._life = store, grant, store.life
        self._session: Session | None = None
        self._staging: Staging | None = None
        if staging_bytes is not None:
            self._staging = Staging(store.sessions.staging.take(staging_bytes))
        self.transport = DirectTransport(
            self.call, self._staging.view if self._staging else None, self._pools, self._close,
            self._check,
        )  # fmt: skip

    def call(self, method: str, request: Any) -> Any:
        store = self._store
        with store.lock:
            self._check()
            store.tick_if_due()
            try:
                return self._answer(method, request)
            finally:
                store.drain()

    def _check(self) -> None:
        if self._store.life != self._life:
            raise Disconnected("the store of this connection is gone")

    def _answer(self, method: str, request: Any) -> Any:
        store = self._store
        if method == "OpenSession":
            identity = Identity(uid=os.getuid(), gid=os.getgid(), pid=os.getpid())
            opened = store.sessions.open(
                identity, self._grant, request, self._staging, self._notify
            )
            self._session = opened.session
            return opened.response
        if self._session is None:
            raise Unauthenticated("the first call must be OpenSession")
        if method == "PutInline":
            return self._put_inline(self._session, request)
        if store.service.methods[METHOD_NUMBERS[method]].shape == STREAM:
            return self._stream(self._session, method, request)
        return store.wait(store.service.handle(self._session, method, request))

    def _stream(self, session: Session, method: str, request: Any) -> Iterator[Any]:
        """All that a stream answers; of Subscribe, what there is by now."""
        items: list[Any] = []
        ended: Completion[None] = Completion()

        def done(error: BaseException | None) -> None:
            if error is None:
                ended.resolve(None)
            else:
                ended.fail(error)

        cancel = self._store.service.stream(session, method, request, items.append, done)
        if method == "Subscribe":
            self._store.drain()
            cancel()
        else:
            self._store.wait(ended)
        return iter(items)

    def _put_inline(self, session: Session, requests: Iterable[Any]) -> Any:
        store = self._store
        put = store.service.put_inline(session, store.budget)
        try:
            for request in requests:
                store.wait(put.feed(request))
            return store.wait(put.finish())
        finally:
            put.abort()

    def _notify(self, kind: str, value: Any) -> None:
        # Later: a client may close its session when it hears of one.
        notice = notice_message(kind, value)
        self._store.defer(lambda: self.transport.on_notice(notice))

    def _pools(self, response: pb.AttachResponse) -> Sequence[MappedPool]:
        assert self._session is not None, "attach comes after open"
        attachment = self._session.attachments[response.attachment]
        return [
            MappedPool.map(
                pool.pool_id, pool.data_fd, pool.data_bytes, pool.generations_fd,
                pool.generation_bytes,
            )
            for pool in self._store.service.engine_calls.pools(attachment)
        ]  # fmt: skip

    def _close(self) -> None:
        with self._store.lock:
            if self._store.life != self._life:
                if self._staging is not None:
                    self._staging.close()  # whose store died cannot let go of it
            elif self._session is not None:
                self._store.sessions.close(self._session, "the client closed it")
                self._store.drain()
