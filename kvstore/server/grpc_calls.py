"""`Gate`: every gRPC call passes here; it finds the session, then hands on to the Service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvstore.core.completion import Completion
from kvstore.core.errors import (
    FailedPrecondition,
    KVStoreError,
    LimitReached,
    Unauthenticated,
)
from kvstore.core.lane import ADMIN_METHODS, METHOD_NUMBERS, METHODS
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.budget import MessageBudget
from kvstore.server.service import STREAM, UNARY, Method, Service, unreadable
from kvstore.server.sessions import NO_SESSION, Sessions
from kvstore.server.status import status_of
from kvstore.server.translate import notice_message
from kvstore.store.sessions import Identity, Session

TOKEN_KEY = "x-kv-session-bin"
SERVICE_NAMES = ("kvstore.v1.KVStore", "kvstore.v1.Admin")
HEALTH_PREFIX = "/grpc.health.v1.Health/"
OPEN_SESSION = "/kvstore.v1.KVStore/OpenSession"
QUEUE_MESSAGES = 8
NOTICES_MAX = 256
SESSION_CHECK_SECONDS = 1.0

_METHOD_OF_PATH = {
    f"/{SERVICE_NAMES[name in ADMIN_METHODS]}/{name}": number
    for name, number in METHOD_NUMBERS.items()
}
T = TypeVar("T")
_log = logging.getLogger("kvstore.server")


class Gate(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers UNAUTHENTICATED to whoever has no session, whatever the method is called.

    `with_certificates` is the TCP side: sessions open here, for the certificate's name, and each
    is bound to it. On the Unix socket sessions come from the local lane, and health checks are
    open.
    """

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        budget: MessageBudget,
        with_certificates: bool,
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._budget = budget
        self._with_certificates = with_certificates
        self._notices: dict[Session, asyncio.Queue[pb.Notice | None]] = {}

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path = call.method
        if path == OPEN_SESSION:
            return grpc.unary_unary_rpc_method_handler(self._open_session)
        if path.startswith(HEALTH_PREFIX) and not self._with_certificates:
            return None
        try:
            session = self._sessions.by_token(_token(call.invocation_metadata))
        except Unauthenticated as error:
            return _refusal(error)
        if bool(session.identity.certificate) != self._with_certificates:
            return _refusal(Unauthenticated(NO_SESSION))
        number = _METHOD_OF_PATH.get(path)
        if number is None:
            return None
        return self._handler(session, self._service.methods[number], number)

    def _handler(self, session: Session, method: Method, number: int) -> grpc.RpcMethodHandler:
        if method.shape == UNARY:
            return grpc.unary_unary_rpc_method_handler(partial(self._unary, session, number))
        if method.shape == STREAM:
            return grpc.unary_stream_rpc_method_handler(partial(self._stream, session, method))
        if method.name == "PutInline":
            return grpc.stream_unary_rpc_method_handler(partial(self._put_inline, session))
        assert method.name == "Session", method.name
        return grpc.stream_stream_rpc_method_handler(partial(self._session, session))

    # ---- Calls ----

    async def _unary(self, session: Session, number: int, payload: bytes, context: Any) -> bytes:
        size = len(payload)
        try:
            self._check_certificate(session, context)
            self._charge(size)
        except KVStoreError as error:
            await _abort(context, error, METHODS[number])
        try:
            result = self._service.call(session, number, payload)
            return result if isinstance(result, bytes) else await _result(result)
        except Exception as error:
            await _abort(context, error, METHODS[number])
        finally:
            self._budget.give_back(size)

    async def _open_session(self, payload: bytes, context: Any) -> bytes:
        try:
            response = self._open(payload, context)
        except Exception as error:
            self._service.recorder.rpc("OpenSession", getattr(error, "code", "INTERNAL"))
            await _abort(context, error, "OpenSession")
        self._service.recorder.rpc("OpenSession", "OK")
        return response

    def _open(self, payload: bytes, context: Any) -> bytes:
        if not self._with_certificates:
            raise Unauthenticated(
                "sessions of this host open on the side socket, <socket>.lane, not over gRPC"
            )
        identity = Identity(certificate=_common_name(context))
        grant = self._sessions.admit(identity)
        request = _parse(self._service.methods[METHOD_NUMBERS["OpenSession"]], payload)
        if request.join_token:
            raise FailedPrecondition("join_token is for the side socket; send the token instead")
        self._forget_ended()
        notices: asyncio.Queue[pb.Notice | None] = asyncio.Queue(NOTICES_MAX)
        opened = self._sessions.open(identity, grant, request, None, partial(_notify, notices))
        self._notices[opened.session] = notices
        response: bytes = opened.response.SerializeToString()
        return response

    def _forget_ended(self) -> None:
        for session in [session for session in self._notices if session.closed]:
            del self._notices[session]

    async def _stream(
        self, session: Session, method: Method, payload: bytes, context: Any
    ) -> AsyncIterator[bytes]:
        outbox = _Outbox()
        cancel: Callable[[], None] | None = None
        try:
            self._check_certificate(session, context)
            request = self._service.parse(session, method, payload)
            cancel = self._service.stream(session, method.name, request, outbox.emit, outbox.finish)
            async for message in outbox.messages(session):
                yield message
        except KVStoreError as error:
            await _abort(context, error, method.name)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:
            await _abort(context, error, method.name)
        finally:
            if cancel is not None:
                cancel()

    async def _put_inline(
        self, session: Session, requests: AsyncIterator[bytes], context: Any
    ) -> bytes:
        entry = self._service.methods[METHOD_NUMBERS["PutInline"]]
        put = None
        try:
            self._check_certificate(session, context)
            put = self._service.put_inline(session, self._budget)
            async for payload in requests:
                self._charge(len(payload))
                try:
                    await _result(put.feed(self._service.parse(session, entry, payload)))
                finally:
                    self._budget.give_back(len(payload))
            response: bytes = (await _result(put.finish())).SerializeToString()
        except Exception as error:
            self._service.recorder.rpc("PutInline", getattr(error, "code", "INTERNAL"))
            await _abort(context, error, "PutInline")
        finally:
            if put is not None:
                put.abort()
        self._service.recorder.rpc("PutInline", "OK")
        return response

    async def _session(
        self, session: Session, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Heartbeats up, notices down. The end of a TCP client's stream ends its session."""
        try:
            self._check_certificate(session, context)
        except KVStoreError as error:
            await _abort(context, error, "Session")
        notices = self._notices.get(session)
        if notices is None:
            notices = asyncio.Queue(NOTICES_MAX)
        listening = asyncio.ensure_future(self._heartbeats(session, requests, notices))
        try:
            while (notice := await _next(notices, session)) is not None:
                yield notice.SerializeToString()
        finally:
            listening.cancel()
            if self._with_certificates:
                self._notices.pop(session, None)
                self._sessions.close(session, "its session stream ended")

    async def _heartbeats(
        self,
        session: Session,
        requests: AsyncIterator[bytes],
        notices: asyncio.Queue[pb.Notice | None],
    ) -> None:
        try:
            async for _ in requests:
                self._service.heartbeat(session)
        except KVStoreError as error:
            _log.info("session %d: %s", session.id, error)
        finally:
            _put(notices, None)

    # ---- Checks ----

    def _check_certificate(self, session: Session, context: Any) -> None:
        if self._with_certificates and _common_name(context) != session.identity.certificate:
            raise Unauthenticated(NO_SESSION)

    def _charge(self, byte_count: int) -> None:
        if not self._budget.take(byte_count):
            raise LimitReached(
                "limits.inflight_message_bytes is used up by messages under way; try again"
            )


class _Outbox:
    """Messages of one stream on their way out; a slow reader makes the source wait."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._error: BaseException | None = None
        self._waiting: Completion[None] | None = None

    def emit(self, message: Any) -> Completion[None] | None:
        self._messages.put_nowait(message.SerializeToString())
        if self._messages.qsize() < QUEUE_MESSAGES:
            return None
        if self._waiting is None:
            self._waiting = Completion()
        return self._waiting

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._messages.put_nowait(None)

    async def messages(self, session: Session) -> AsyncIterator[bytes]:
        """Messages as they come; raises the stream's error, or Unauthenticated with the session."""
        while (message := await _next(self._messages, session)) is not None:
            yield message
            if self._waiting is not None and self._messages.empty():
                waiting, self._waiting = self._waiting, None
                waiting.resolve(None)
        if session.closed:
            raise Unauthenticated(NO_SESSION)
        if self._error is not None:
            raise self._error


def _notify(notices: asyncio.Queue[pb.Notice | None], kind: str, value: Any) -> None:
    _put(notices, notice_message(kind, value))


def _put(notices: asyncio.Queue[pb.Notice | None], notice: pb.Notice | None) -> None:
    """Queues a notice; of a reader who takes none, the oldest are forgotten."""
    if notices.full():
        notices.get_nowait()
    notices.put_nowait(notice)


async def _next(queue: asyncio.Queue[T | None], session: Session) -> T | None:
    """The next of `queue`; None when the stream or the session is over."""
    while not session.closed:
        if not queue.empty():
            return queue.get_nowait()
        try:
            return await asyncio.wait_for(queue.get(), SESSION_CHECK_SECONDS)
        except TimeoutError:
            continue
    return None


def _token(metadata: Iterable[tuple[str, str | bytes]] | None) -> bytes:
    for key, value in metadata or ():
        if key == TOKEN_KEY and isinstance(value, bytes):
            return value
    return b""


def _common_name(context: Any) -> str:
    """Name on the peer's certificate; the handshake has checked who signed it."""
    names = context.auth_context().get("x509_common_name", ())
    return names[0].decode("utf-8", "replace") if names else ""


def _parse(method: Method, payload: bytes) -> Any:
    try:
        return method.parse(payload)
    except DecodeError:
        raise unreadable(method) from None


async def _result(completion: Completion[Any]) -> Any:
    """Waits for a completion without a thread in between."""
    if not completion.done:
        done = asyncio.Event()
        completion.then(lambda _: done.set())
        await done.wait()
    return completion.result()


async def _abort(context: Any, error: BaseException, method: str) -> NoReturn:
    code, message = status_of(error, method)
    await context.abort(grpc.StatusCode[code], message)
    raise AssertionError("abort returned")


def _refusal(error: KVStoreError) -> grpc.RpcMethodHandler:
    """Answers any method, of whatever shape, with `error`."""

    async def refuse(_: bytes, context: Any) -> bytes:
        await _abort(context, error, "the call")

    handler: Callable[[bytes, Any], Awaitable[bytes]] = refuse
    return grpc.unary_unary_rpc_method_handler(handler)
