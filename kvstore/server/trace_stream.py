"""TraceStart: a recording to one reader, as fast as it takes it; it ends when the reader leaves."""

from __future__ import annotations

from kvstore.core.completion import Completion
from kvstore.core.errors import InvalidRequest
from kvstore.core.spec import BLOCK_SIZE_MAX
from kvstore.policies.uses import UNKNOWN_TOKENS
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import translate
from kvstore.server.steps import Driver, Steps, error_of
from kvstore.server.streams import Done, Emit
from kvstore.store.tracing import Recording, TraceOptions, TraceRecord, TraceRecorder


class TraceStream:
    """Records as they are ready, and where the recording is; the last message says why it ended."""

    def __init__(
        self, tracer: TraceRecorder, request: pb.TraceStartRequest, emit: Emit, done: Done
    ) -> None:
        self._emit = emit
        self._waiting: Completion[None] | None = None
        self._recording = tracer.start(trace_options(request), self._wake)
        self._driver = Driver(self._steps())
        self._driver.completion.then(lambda ended: done(error_of(ended)))

    def cancel(self) -> None:
        self._driver.cancel()
        self._recording.end("its reader left")

    def _steps(self) -> Steps[None]:
        recording = self._recording
        while True:
            records = recording.take()
            is_over = bool(recording.ended) and not recording.ready_count
            yield self._emit(trace_response(recording, records, is_over))
            if is_over:
                return
            if not recording.ready_count:
                self._waiting = Completion()
                yield self._waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.resolve(None)


def trace_options(request: pb.TraceStartRequest) -> TraceOptions:
    if request.block_size > BLOCK_SIZE_MAX:
        raise InvalidRequest(
            f"block_size is {request.block_size} tokens; pass at most {BLOCK_SIZE_MAX}, or 0"
        )
    seconds = translate.seconds("seconds", request.seconds)
    return TraceOptions(request.block_size, seconds, request.requests)


def trace_response(
    recording: Recording, records: list[TraceRecord], is_over: bool
) -> pb.TraceStartResponse:
    return pb.TraceStartResponse(
        records=map(trace_record, records),
        block_size=recording.block_size,
        request_count=recording.request_count,
        held_count=recording.held_count,
        left_out_count=recording.left_out_count,
        ended=recording.ended if is_over else "",
    )


def trace_record(record: TraceRecord) -> pb.TraceRecord:
    known = record.output_tokens != UNKNOWN_TOKENS
    return pb.TraceRecord(
        seconds=record.seconds,
        input_tokens=record.input_tokens,
        output_tokens=record.output_tokens if known else None,
        blocks=record.words,
        tenant=record.tenant,
        session=record.session,
    )
