"""`Service`: one handler for every call, whichever transport it came by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError, Message

from kvstore.core.clock import perf_seconds
from kvstore.core.completion import Completion
from kvstore.core.errors import (
    InvalidRequest,
    NotImplementedYet,
    PermissionDenied,
    Unauthenticated,
)
from kvstore.core.lane import ADMIN_METHODS, METHOD_NUMBERS, METHODS
from kvstore.core.recorder import NO_RECORDER, Recorder
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.admin_calls import AdminCalls, Counters
from kvstore.server.budget import MessageBudget
from kvstore.server.device_calls import DeviceCalls
from kvstore.server.engine_calls import EngineCalls
from kvstore.server.inline_put import InlinePut
from kvstore.server.status import status_of
from kvstore.server.steps import mapped
from kvstore.server.streams import Cancel, Done, Emit, Restores, start_fetch
from kvstore.server.subscription import Subscribers
from kvstore.server.trace_stream import TraceStream
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Session

UNARY, STREAM, OTHER = "unary", "stream", "other"

Call = Callable[[Session, Any], Any]


class Method(NamedTuple):
    """One RPC: how to read its request, and what answers it. `call` is None outside UNARY."""

    name: str
    shape: str
    request_type: type[Message]
    parse: Callable[[bytes | memoryview], Any]
    needs_admin: bool
    call: Call | None


class Service:
    """Dispatches calls of open sessions. Only the owner thread calls it.

    Unary calls return their response or a Completion of it and raise KVStoreError. Opening
    sessions is `Sessions`' part. `counters` are metrics by name, for Status.
    """

    def __init__(
        self,
        store: KVStore,
        recorder: Recorder = NO_RECORDER,
        counters: Counters = dict,
    ) -> None:
        self.store = store
        self._counters = counters
        self.recorder = recorder
        self._restores = Restores(store)
        self._subscribers = Subscribers(store)
        self.engine_calls = EngineCalls(store, self._restores)
        self.methods = tuple(
            _method(name, call) for name, call in zip(METHODS, self._unary_calls(), strict=True)
        )

    def _unary_calls(self) -> list[Call | None]:
        """A handler for each name in METHODS; None where the call is no unary one."""
        e, a = self.engine_calls, AdminCalls(self.store, self._counters)
        d = DeviceCalls(self.store)
        return [
            None, e.attach, e.lookup, None, e.cancel_restore, e.release, e.renew,
            e.finish_request, e.reserve, e.commit, e.abort, e.report_step, e.report_transfer,
            None, None, None, None,
            a.status, a.set_policy, a.set_quota, a.pin, a.unpin, a.clear, a.bump_epoch, a.explain,
            a.flush, a.drain, a.verify, None, a.trace_stop,
            d.attach, d.load,
        ]  # fmt: skip

    def handle(self, session: Session, method: str, request: Any) -> Any:
        """Response to one unary call, or a Completion of it."""
        entry = self.methods[METHOD_NUMBERS[method]]
        started = perf_seconds()
        try:
            response = self._dispatch(session, entry, request)
        except Exception as error:
            self._count_error(entry.name, error)
            raise
        return self._counted(entry.name, response, perf_seconds() - started)

    def call(
        self, session: Session, number: int, payload: bytes | memoryview
    ) -> bytes | Completion[bytes]:
        """`handle` for a serialised request and response; `number` counts in METHODS."""
        entry = self.methods[number]
        name = entry.name
        started = perf_seconds()
        try:
            response = self._dispatch(session, entry, self.parse(session, entry, payload))
        except Exception as error:
            self._count_error(name, error)
            raise
        if isinstance(response, Completion):
            return mapped(self._counted(name, response, perf_seconds() - started), _serialise)
        payload_out: bytes = response.SerializeToString()
        self.recorder.rpc(name, "OK", perf_seconds() - started)
        return payload_out

    def parse(self, session: Session, entry: Method, payload: bytes | memoryview) -> Any:
        """The request in `payload`; who may not make it hears that alone, whatever it is."""
        try:
            return entry.parse(payload)
        except DecodeError:
            self._check(session, entry)
            raise unreadable(entry) from None

    def stream(self, session: Session, method: str, request: Any, emit: Emit, done: Done) -> Cancel:
        """Starts a call that answers in a stream; returns what cancels it.

        `done(error or None)` follows the last `emit`, and may come before this returns. After
        cancelling, neither is called. Raises KVStoreError for a request that cannot start.
        """
        entry = self.methods[METHOD_NUMBERS[method]]

        def counted(error: BaseException | None) -> None:
            if error is None:
                self.recorder.rpc(method, "OK")
            else:
                self._count_error(method, error)
            done(error)

        try:
            self._check(session, entry)
            return self._start(session, method, request, emit, counted)
        except Exception as error:
            self._count_error(method, error)
            raise

    def _start(self, session: Session, method: str, request: Any, emit: Emit, done: Done) -> Cancel:
        if method == "Restore":
            return self._restores.start(session, request, emit, done)
        if method == "FetchInline":
            return start_fetch(self.store, session, request, emit, done)
        if method == "Subscribe":
            return self._subscribers.start(session, request, emit, done)
        if method == "TraceStart":
            return TraceStream(self.store.tracer, request, emit, done).cancel
        raise NotImplementedYet(f"{method} does not answer in a stream on this transport")

    def put_inline(self, session: Session, budget: MessageBudget) -> InlinePut:
        """Starts a PutInline call, whose one block in memory counts in `budget`."""
        self._check(session, self.methods[METHOD_NUMBERS["PutInline"]])
        return InlinePut(self.store, self.engine_calls, session, budget)

    def heartbeat(self, session: Session) -> None:
        """The peer lives; raises Unauthenticated when its session has ended."""
        self._check(session, self.methods[METHOD_NUMBERS["Session"]])

    def _dispatch(self, session: Session, entry: Method, request: Any) -> Any:
        self._check(session, entry)
        if entry.call is None:
            raise InvalidRequest(f"{entry.name} is no unary call; see docs/protocol.md")
        return entry.call(session, request)

    def _check(self, session: Session, entry: Method) -> None:
        if session.closed:
            raise Unauthenticated("the session has ended; open a new one")
        if entry.needs_admin and session.role != "admin":
            raise PermissionDenied(f"{entry.name} needs the admin role; this session is an engine")
        self.store.touch(session)

    def _counted(self, name: str, response: Any, seconds: float) -> Any:
        """Counts a call and the `seconds` it took of the owner thread, copies left out."""
        if isinstance(response, Completion):
            response.then(lambda ended: self._count_end(name, ended, seconds))
        else:
            self.recorder.rpc(name, "OK", seconds)
        return response

    def _count_end(self, name: str, ended: Completion[Any], seconds: float) -> None:
        try:
            ended.result()
        except Exception as error:
            self._count_error(name, error)
        else:
            self.recorder.rpc(name, "OK", seconds)

    def _count_error(self, name: str, error: BaseException) -> None:
        self.recorder.rpc(name, getattr(error, "code", "INTERNAL"))


def unreadable(entry: Method) -> InvalidRequest:
    return InvalidRequest(f"the request is no {entry.request_type.__name__}; check its encoding")


def _serialise(response: Message) -> bytes:
    payload: bytes = response.SerializeToString()
    return payload


_STREAMS = ("Restore", "FetchInline", "Subscribe", "TraceStart")


def _method(name: str, call: Call | None) -> Method:
    request_type = pb.Heartbeat if name == "Session" else getattr(pb, f"{name}Request")
    shape = UNARY if call is not None else STREAM if name in _STREAMS else OTHER
    return Method(name, shape, request_type, request_type.FromString, name in ADMIN_METHODS, call)


def error_payload(error: BaseException, method: str) -> bytes:
    """What a lane client gets for `error`: a serialised LaneError."""
    code, message = status_of(error, method)
    payload: bytes = pb.LaneError(code=code, message=message).SerializeToString()
    return payload
