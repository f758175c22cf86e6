"""`AdminCalls`: the operator's calls, one method each; answers are the protobuf messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from google.protobuf.message import Message

from kvstore.client.link import Link
from kvstore.core.errors import KVStoreError
from kvstore.proto.v1 import kvstore_pb2 as pb

LONG_SECONDS = 600.0  # calls that go through every block


class AdminCalls:
    """Calls that need the admin role."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def status(self, with_spaces: bool = False, with_tenants: bool = False) -> pb.StatusResponse:
        request = pb.StatusRequest(with_spaces=with_spaces, with_tenants=with_tenants)
        response: pb.StatusResponse = self._call("Status", request)
        return response

    def set_policy(self, eviction: str) -> pb.SetPolicyResponse:
        response: pb.SetPolicyResponse = self._call(
            "SetPolicy", pb.SetPolicyRequest(eviction=eviction)
        )
        return response

    def set_quota(
        self, tenant: str, tier: str, cap_bytes: int | None = None, floor_bytes: int | None = None
    ) -> pb.SetQuotaResponse:
        """Cap and floor of a tenant in a tier; 0 takes it away, None leaves it."""
        response: pb.SetQuotaResponse = self._call(
            "SetQuota",
            pb.SetQuotaRequest(
                tenant=tenant, tier=tier, cap_bytes=cap_bytes, floor_bytes=floor_bytes
            ),
        )
        return response

    def pin(
        self, request_id: str = "", block_key: bytes = b"", ttl_seconds: float = 3600.0
    ) -> pb.PinResponse:
        """Keeps what a request's live lease covers, or the prefix up to a block."""
        response: pb.PinResponse = self._call(
            "Pin",
            pb.PinRequest(request_id=request_id, block_key=block_key, ttl_seconds=ttl_seconds),
        )
        return response

    def unpin(
        self, pin_id: str = "", request_id: str = "", block_key: bytes = b""
    ) -> pb.UnpinResponse:
        response: pb.UnpinResponse = self._call(
            "Unpin", pb.UnpinRequest(pin_id=pin_id, request_id=request_id, block_key=block_key)
        )
        return response

    def clear(self, space_id: bytes = b"", tenant: str = "", all: bool = False) -> pb.ClearResponse:
        """Drops the blocks of a space, a tenant, or everything; exactly one of the three."""
        response: pb.ClearResponse = self._call(
            "Clear", pb.ClearRequest(space_id=space_id, tenant=tenant, all=all), LONG_SECONDS
        )
        return response

    def bump_epoch(self, space_id: bytes) -> pb.BumpEpochResponse:
        """Invalidates a space at once and durably."""
        response: pb.BumpEpochResponse = self._call(
            "BumpEpoch", pb.BumpEpochRequest(space_id=space_id), LONG_SECONDS
        )
        return response

    def explain(self, request_id: str = "", block_key: bytes = b"") -> pb.ExplainResponse:
        response: pb.ExplainResponse = self._call(
            "Explain", pb.ExplainRequest(request_id=request_id, block_key=block_key)
        )
        return response

    def flush(self, space_id: bytes = b"") -> pb.FlushResponse:
        """Has blocks of a space, or of all, be on disk before it answers."""
        response: pb.FlushResponse = self._call(
            "Flush", pb.FlushRequest(space_id=space_id), LONG_SECONDS
        )
        return response

    def drain(self, deadline_seconds: float = 0.0, free: bool = False) -> pb.DrainResponse:
        """Has the daemon leave; with `free` it gives its host pool up."""
        response: pb.DrainResponse = self._call(
            "Drain", pb.DrainRequest(deadline_seconds=deadline_seconds, free=free)
        )
        return response

    def verify(self, tier: str = "") -> pb.VerifyResponse:
        """Hashes every stored block again."""
        response: pb.VerifyResponse = self._call(
            "Verify", pb.VerifyRequest(tier=tier), LONG_SECONDS
        )
        return response

    def trace_start(
        self, block_size: int = 0, seconds: float = 0.0, requests: int = 0
    ) -> Iterator[pb.TraceStartResponse]:
        """Records the requests that come from now on; closing the iterator ends it, too.

        The blocks of the trace are `block_size` tokens, or as large as the first request's.
        """
        request = pb.TraceStartRequest(block_size=block_size, seconds=seconds, requests=requests)
        limit = self._link.timeouts.admin_seconds
        self._link.start_background()  # says that the session lives
        stream = self._link.session_for_admin().transport.stream("TraceStart", request, limit)
        try:
            yield from stream
        except GeneratorExit:
            with suppress(KVStoreError):  # it may just have ended
                self.trace_stop()
            raise

    def trace_stop(self) -> pb.TraceStopResponse:
        """Ends the recording, whoever began it."""
        response: pb.TraceStopResponse = self._call("TraceStop", pb.TraceStopRequest())
        return response

    def _call(self, method: str, request: Message, timeout: float | None = None) -> Any:
        session = self._link.session_for_admin()
        limit = self._link.timeouts.admin_seconds if timeout is None else timeout
        try:
            return session.transport.call(method, request, limit)
        except KVStoreError as error:
            # A slow answer here says nothing about lookups: the circuit stays as it is.
            raise session.judge_slow(error) from error
