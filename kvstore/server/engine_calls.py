"""Unary calls of the KVStore service: each checks its message, asks the store, answers."""

from __future__ import annotations

from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, InvalidRequest, NotFound
from kvstore.core.plan import CommitResult, LookupResult, ReserveResult
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import translate
from kvstore.server.steps import mapped
from kvstore.server.streams import Restores
from kvstore.store.kvstore import KVStore
from kvstore.store.parts import RESERVE_BLOCKS_MAX
from kvstore.store.sessions import Attachment, Session

CLOCKS = ("device", "cpu", "wall")
LINK_NAME_MAX = 64

_RELEASED = pb.ReleaseResponse()
_ABORTED = pb.AbortResponse()


class EngineCalls:
    """Handlers of an engine's unary calls, `(session, request) -> response or Completion`."""

    def __init__(self, store: KVStore, restores: Restores) -> None:
        self._store = store
        self._restores = restores

    def attach(self, session: Session, request: pb.AttachRequest) -> pb.AttachResponse:
        spec = translate.key_spec(request.spec)
        if request.shard >= spec.shard_count:
            raise InvalidRequest(
                f"shard is {request.shard}; the spec has shards 0 to {spec.shard_count - 1}"
            )
        if not request.tenant:
            raise InvalidRequest("tenant is empty; pass one that OpenSession answered with")
        attachment = self._store.attach(
            session,
            spec,
            translate.text("tenant", request.tenant),
            request.shard,
            translate.plan_shapes(request.plan_shapes),
            translate.overlap(request.overlap),
            translate.text("engine_id", request.engine_id),
            translate.text("engine_build", request.engine_build),
            translate.text("device", request.device),
            request.prefill_chunk_tokens,
        )
        space = attachment.space
        return pb.AttachResponse(
            attachment=attachment.number,
            space_id=space.id,
            epoch=space.epoch,
            block_bytes=space.block_bytes,
            slot_bytes=space.slot_bytes,
            pools=[
                pb.Pool(
                    pool_id=pool.pool_id,
                    name=pool.name,
                    data_bytes=pool.data_bytes,
                    generation_bytes=pool.generation_bytes,
                )
                for pool in self.pools(attachment)
            ],
        )

    def pools(self, attachment: Attachment) -> list[Any]:
        """Pools whose descriptors go with an Attach: none without shared memory."""
        return self._store.pools(attachment) if attachment.session.staging is not None else []

    def lookup(
        self, session: Session, request: pb.LookupRequest
    ) -> pb.LookupResponse | Completion[pb.LookupResponse]:
        attachment = session.attachments.get(request.attachment)
        if attachment is None:
            attachment = translate.attachment_of(session, request.attachment)
        space = attachment.space
        prompt = request.prompt
        reuse = request.reuse if request.HasField("reuse") else None
        query = translate.query(attachment, prompt, request.request_id, reuse)
        ask = translate.ask(request)
        local = translate.local_tokens(request.local_tokens, prompt, query, space.block_size)
        result = self._store.lookup(attachment, query, local, ask)
        if isinstance(result, LookupResult):
            return translate.lookup_response(result, space)
        return mapped(result, lambda found: translate.lookup_response(found, space))

    def cancel_restore(
        self, session: Session, request: pb.CancelRestoreRequest
    ) -> pb.CancelRestoreResponse:
        self._restores.cancel(session, request.lease_id)
        return pb.CancelRestoreResponse()

    def release(self, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        self._store.release(session, request.lease_ids)
        return _RELEASED

    def renew(self, session: Session, request: pb.RenewRequest) -> pb.RenewResponse:
        lost, ttl = self._store.renew(session, request.lease_ids)
        return pb.RenewResponse(lost_leases=lost, lease_ttl_seconds=ttl)

    def finish_request(
        self, session: Session, request: pb.FinishRequestRequest
    ) -> pb.FinishRequestResponse:
        attachment = translate.attachment_of(session, request.attachment)
        if not request.request_id:
            raise InvalidRequest("request_id is empty; pass the one that Lookup was given")
        translate.text("request_id", request.request_id)
        translate.text("finish_reason", request.finish_reason)
        released = self._store.finish_request(
            attachment, request.request_id, request.output_tokens, translate.hints(request.reuse)
        )
        return pb.FinishRequestResponse(released_leases=released)

    def reserve(
        self, session: Session, request: pb.ReserveRequest
    ) -> pb.ReserveResponse | Completion[pb.ReserveResponse]:
        result = self.reserve_blocks(session, request)
        if isinstance(result, ReserveResult):
            return reserve_response(result)
        return mapped(result, reserve_response)

    def reserve_blocks(
        self, session: Session, request: pb.ReserveRequest
    ) -> ReserveResult | Completion[ReserveResult]:
        """Checks a Reserve and hands it to the store; PutInline begins with one, too."""
        attachment = translate.attachment_of(session, request.attachment)
        query = translate.query(attachment, request.prompt, request.request_id, request.reuse)
        result: ReserveResult | Completion[ReserveResult] = self._store.reserve(
            attachment, query, request.first_block
        )
        return result

    def commit(
        self, session: Session, request: pb.CommitRequest
    ) -> pb.CommitResponse | Completion[pb.CommitResponse]:
        reservation = session.reservations.get(request.reservation_id)
        if reservation is None:
            raise NotFound(
                f"reservation {request.reservation_id} is not there: it was committed, aborted or "
                "its time ran out; reserve again"
            )
        if session.staging is None:
            raise FailedPrecondition("this session has no staging segment; use PutInline")
        runs = translate.commit_runs(
            request.runs, session.staging, reservation.attachment.space, RESERVE_BLOCKS_MAX
        )
        results = self._store.commit(session, request.reservation_id, runs)
        if isinstance(results, Completion):
            return mapped(results, commit_response)
        return commit_response(results)

    def abort(self, session: Session, request: pb.AbortRequest) -> pb.AbortResponse:
        self._store.abort(session, request.reservation_id)
        return _ABORTED

    def report_step(self, session: Session, request: pb.ReportStepRequest) -> pb.ReportStepResponse:
        attachment = translate.attachment_of(session, request.attachment)
        translate.seconds("seconds", request.seconds)
        prefill = translate.prefill(request.prefill)
        if request.clock not in CLOCKS:
            raise InvalidRequest(f"clock is {request.clock!r}; pass one of {', '.join(CLOCKS)}")
        self._store.costs.report_step(
            attachment, request.seconds, prefill, request.decode_tokens,
            request.decode_context_tokens,
            [translate.text("prefill.request_id", part.request_id) for part in request.prefill],
        )  # fmt: skip
        return pb.ReportStepResponse()

    def report_transfer(
        self, session: Session, request: pb.ReportTransferRequest
    ) -> pb.ReportTransferResponse:
        attachment = translate.attachment_of(session, request.attachment)
        translate.seconds("seconds", request.seconds)
        if not 0 < len(request.link) <= LINK_NAME_MAX:
            raise InvalidRequest("link is empty or too long; pass one such as 'host>hbm'")
        self._store.costs.report_transfer(
            attachment, request.link, request.bytes, request.seconds, request.lease_id
        )
        return pb.ReportTransferResponse()


def reserve_response(result: ReserveResult) -> pb.ReserveResponse:
    return pb.ReserveResponse(
        reservation_id=result.reservation_id,
        first_block=result.first_block,
        outcomes=result.outcomes,
        staging_ttl_seconds=result.staging_ttl_seconds,
        reason=result.reason,
    )


def commit_response(results: list[CommitResult]) -> pb.CommitResponse:
    return pb.CommitResponse(
        results=[
            pb.CommitResult(first_block=r.first_block, outcomes=r.outcomes, reason=r.reason)
            for r in results
        ]
    )
