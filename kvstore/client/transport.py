"""How calls reach a store: one small interface, and the transport within one process.

`LaneTransport` (lane.py) talks to the daemon of this host, `GrpcTransport` (grpc_transport.py) to
one on another host, `DirectTransport` to a store in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from kvstore.client.pools import MappedPool
from kvstore.core.errors import KVStoreError, StoreUnavailable
from kvstore.proto.v1 import kvstore_pb2 as pb

NoticeHandler = Callable[[pb.Notice], None]
LateHandler = Callable[[Any], None]


INTERRUPTED = "a call was interrupted in the middle of a message"


def ignore_notice(notice: pb.Notice) -> None:
    """What `on_notice` is before and after a session."""


class CallTimeout(StoreUnavailable):
    """No answer in time: the daemon may be frozen, slow or gone; the connection is still there."""


class Disconnected(StoreUnavailable):
    """The connection is gone, and the session with it."""


class Pending(Protocol):
    """A call that was sent."""

    def result(self) -> Any:
        """Waits for the answer until the call's time limit; raises what `Transport.call` does."""
        ...


class Transport(Protocol):
    """One connection to a store. Any thread may call; errors are those of kvstore.core.errors.

    CallTimeout and Disconnected say that there was no answer. Notices are given to `on_notice`,
    on whichever thread reads them.
    """

    on_notice: NoticeHandler

    def open(
        self, request: pb.OpenSessionRequest, timeout: float
    ) -> tuple[pb.OpenSessionResponse, memoryview | None]:
        """Opens the session; the memory is its staging segment, None without shared memory."""
        ...

    def attach(
        self, request: pb.AttachRequest, timeout: float
    ) -> tuple[pb.AttachResponse, list[MappedPool]]:
        """Attaches; no pools without shared memory."""
        ...

    def call(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> Any:
        """The answer. One that comes after CallTimeout was raised goes to `on_late`."""
        ...

    def start(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> Pending:
        """Sends a call whose answer is fetched later."""
        ...

    def send(self, method: str, request: Message) -> None:
        """Sends a message that has no answer, before the next call and at the next `poll`.

        Never waits and takes no lock that another call holds for long.
        """
        ...

    def release(self, lease_id: int) -> None:
        """As `send` of a Release of one lease."""
        ...

    def stream(self, method: str, request: Message, timeout: float) -> Iterator[Any]:
        """Answers one by one; `timeout` is for each."""
        ...

    def upload(self, method: str, requests: Iterable[Message], timeout: float) -> Any:
        """One answer to a stream of requests."""
        ...

    def poll(self) -> None:
        """Sends what `send` put off and takes in what has arrived, without waiting.

        Raises Disconnected.
        """
        ...

    def close(self) -> None: ...


class Done:
    """A call whose outcome is known already."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    def result(self) -> Any:
        if isinstance(self._outcome, KVStoreError):
            raise self._outcome
        return self._outcome


class DirectTransport:
    """Calls of a store in the same process.

    `call(method, request)` answers with the response message, or an iterable of them where the
    method streams; it must stand calls from several threads. `staging` is the memory that Commit
    reads, `pools(attach_response)` the pools that slots point into; without them bytes travel in
    the messages. `poll` raises Disconnected once the store is gone.
    """

    def __init__(
        self,
        call: Callable[[str, Any], Any],
        staging: memoryview | None = None,
        pools: Callable[[pb.AttachResponse], Sequence[MappedPool]] | None = None,
        close: Callable[[], None] | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        self.on_notice: NoticeHandler = ignore_notice
        self._call = call
        self._staging = staging
        self._pools = pools
        self._close = close
        self._poll = poll

    def open(
        self, request: pb.OpenSessionRequest, timeout: float
    ) -> tuple[pb.OpenSessionResponse, memoryview | None]:
        return self._call("OpenSession", request), self._staging

    def attach(
        self, request: pb.AttachRequest, timeout: float
    ) -> tuple[pb.AttachResponse, list[MappedPool]]:
        response = self._call("Attach", request)
        return response, list(self._pools(response)) if self._pools else []

    def call(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> Any:
        return self._call(method, request)

    def start(
        self, method: str, request: Message, timeout: float, on_late: LateHandler | None = None
    ) -> Pending:
        try:
            return Done(self._call(method, request))
        except KVStoreError as error:
            return Done(error)

    def send(self, method: str, request: Message) -> None:
        try:
            self._call(method, request)
        except StoreUnavailable:
            raise
        except KVStoreError:
            pass  # nobody asked for the answer

    def release(self, lease_id: int) -> None:
        self.send("Release", pb.ReleaseRequest(lease_ids=[lease_id]))

    def stream(self, method: str, request: Message, timeout: float) -> Iterator[Any]:
        return iter(self._call(method, request))

    def upload(self, method: str, requests: Iterable[Message], timeout: float) -> Any:
        return self._call(method, requests)

    def poll(self) -> None:
        if self._poll is not None:
            self._poll()

    def close(self) -> None:
        if self._close is not None:
            self._close()
