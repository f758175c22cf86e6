"""Calls of the Admin service; the dispatcher has checked the role."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kvstore.core.completion import Completion
from kvstore.core.errors import FailedPrecondition, InvalidRequest
from kvstore.core.keys import BLOCK_KEY_BYTES
from kvstore.core.plan import FlushResult, PinResult, VerifyResult
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server import translate
from kvstore.server.status_messages import space_message, status_response, tenant_message
from kvstore.server.steps import mapped
from kvstore.store.explain_text import explained
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Session

SPACE_ID_BYTES = 32
DRAIN_SECONDS_MAX = 3600.0

Counters = Callable[[], Mapping[str, float]]


class AdminCalls:
    """Handlers of operators' calls, `(session, request) -> response or Completion`."""

    def __init__(self, store: KVStore, counters: Counters) -> None:
        self._store = store
        self._counters = counters

    def status(self, session: Session, request: pb.StatusRequest) -> pb.StatusResponse:
        response = status_response(self._store.status(), self._counters())
        if request.with_spaces:
            response.spaces.extend(map(space_message, self._store.spaces()))
        if request.with_tenants:
            response.tenants.extend(map(tenant_message, self._store.tenants()))
        return response

    def set_policy(self, session: Session, request: pb.SetPolicyRequest) -> pb.SetPolicyResponse:
        self._store.set_policy(translate.text("eviction", request.eviction))
        return pb.SetPolicyResponse()

    def set_quota(self, session: Session, request: pb.SetQuotaRequest) -> pb.SetQuotaResponse:
        for name in ("tenant", "tier"):
            if not translate.text(name, getattr(request, name)):
                raise InvalidRequest(f"{name} is empty; say which {name} the quota is for")
        view = self._store.set_quota(
            request.tenant,
            request.tier,
            request.cap_bytes if request.HasField("cap_bytes") else None,
            request.floor_bytes if request.HasField("floor_bytes") else None,
        )
        return pb.SetQuotaResponse(tenant=tenant_message(view))

    def pin(
        self, session: Session, request: pb.PinRequest
    ) -> pb.PinResponse | Completion[pb.PinResponse]:
        _one_of(request_id=request.request_id, block_key=request.block_key)
        _check_target(request.request_id, request.block_key)
        translate.seconds("ttl_seconds", request.ttl_seconds)
        pinned = self._store.pin(
            session, request.request_id, request.block_key, request.ttl_seconds
        )
        if isinstance(pinned, Completion):
            return mapped(pinned, pin_response)
        return pin_response(pinned)

    def unpin(self, session: Session, request: pb.UnpinRequest) -> pb.UnpinResponse:
        _one_of(pin_id=request.pin_id, request_id=request.request_id, block_key=request.block_key)
        _check_target(request.request_id, request.block_key)
        released = self._store.unpin(
            translate.text("pin_id", request.pin_id), request.request_id, request.block_key
        )
        return pb.UnpinResponse(released_pins=released)

    def clear(self, session: Session, request: pb.ClearRequest) -> Completion[pb.ClearResponse]:
        _one_of(space_id=request.space_id, tenant=request.tenant, all=request.all)
        if request.space_id:
            translate.digest("space_id", request.space_id, SPACE_ID_BYTES)
        removed = self._store.clear(
            space_id=request.space_id or None,
            tenant=translate.text("tenant", request.tenant) or None,
        )
        return mapped(removed, lambda count: pb.ClearResponse(removed_blocks=count))

    def bump_epoch(
        self, session: Session, request: pb.BumpEpochRequest
    ) -> Completion[pb.BumpEpochResponse]:
        translate.digest("space_id", request.space_id, SPACE_ID_BYTES)
        bumped = self._store.bump_epoch(request.space_id)
        return mapped(bumped, lambda r: pb.BumpEpochResponse(epoch=r[0], removed_blocks=r[1]))

    def drain(self, session: Session, request: pb.DrainRequest) -> pb.DrainResponse:
        if translate.seconds("deadline_seconds", request.deadline_seconds) > DRAIN_SECONDS_MAX:
            raise InvalidRequest(
                f"deadline_seconds is {request.deadline_seconds}; pass at most {DRAIN_SECONDS_MAX}"
            )
        self._store.drain(request.deadline_seconds, request.free)
        return pb.DrainResponse()

    def verify(self, session: Session, request: pb.VerifyRequest) -> Completion[pb.VerifyResponse]:
        result = self._store.verify(translate.text("tier", request.tier))
        return mapped(result, verify_response)

    def flush(self, session: Session, request: pb.FlushRequest) -> Completion[pb.FlushResponse]:
        if self._store.parts.disk is None:
            raise FailedPrecondition(
                "there is no disk tier to flush to; set tiers.disk.path and tiers.disk.size"
            )
        if request.space_id:
            translate.digest("space_id", request.space_id, SPACE_ID_BYTES)
        return mapped(self._store.flush(request.space_id or None), flush_response)

    def explain(
        self, session: Session, request: pb.ExplainRequest
    ) -> pb.ExplainResponse | Completion[pb.ExplainResponse]:
        _one_of(request_id=request.request_id, block_key=request.block_key)
        _check_target(request.request_id, request.block_key)
        explainer = self._store.explainer
        if request.request_id:
            return explain_response(explainer.request(request.request_id))
        return mapped(explainer.block(request.block_key), explain_response)

    def trace_stop(self, session: Session, request: pb.TraceStopRequest) -> pb.TraceStopResponse:
        return pb.TraceStopResponse(request_count=self._store.tracer.stop())


def explain_response(document: dict[str, Any]) -> pb.ExplainResponse:
    return pb.ExplainResponse(
        text=explained(document), document=json.dumps(document, allow_nan=False).encode()
    )


def pin_response(result: PinResult) -> pb.PinResponse:
    return pb.PinResponse(
        pin_id=result.pin_id, block_count=result.block_count, pinned_bytes=result.pinned_bytes
    )


def flush_response(result: FlushResult) -> pb.FlushResponse:
    return pb.FlushResponse(
        durable_blocks=result.durable_blocks, left_out_blocks=result.left_out_blocks
    )


def verify_response(result: VerifyResult) -> pb.VerifyResponse:
    return pb.VerifyResponse(
        verified_blocks=result.verified_blocks,
        corrupt_blocks=result.corrupt_blocks,
        verified_bytes=result.verified_bytes,
        findings=result.findings,
    )


def _one_of(**fields: Any) -> None:
    if sum(map(bool, fields.values())) != 1:
        raise InvalidRequest(f"pass exactly one of {', '.join(fields)}")


def _check_target(request_id: str, block_key: bytes) -> None:
    translate.text("request_id", request_id)
    if block_key:
        translate.digest("block_key", block_key, BLOCK_KEY_BYTES)
