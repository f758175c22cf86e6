"""`Sessions`: opens sessions for identities, and finds them again by their token."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import kvstore
from kvstore.core.entropy import random_token
from kvstore.core.errors import Draining, PermissionDenied, Unauthenticated
from kvstore.core.lane import PROTOCOL_MINOR
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.server.access import Access, Grant, describe
from kvstore.server.staging import Staging, StagingBudget
from kvstore.store.kvstore import SESSION_TTL_SECONDS, KVStore
from kvstore.store.parts import RESERVE_BLOCKS_MAX
from kvstore.store.sessions import Identity, Session

TOKEN_BYTES = 32
CLIENT_NAME_MAX = 256

Notify = Callable[[str, Any], None]
_log = logging.getLogger("kvstore.server")


class SessionLimits(Protocol):
    """The part of the configured limits that a client is told."""

    @property
    def message_bytes(self) -> int: ...
    @property
    def leased_bytes_per_session(self) -> int: ...
    @property
    def reserved_bytes_per_session(self) -> int: ...
    @property
    def lease_ttl_seconds(self) -> float: ...
    @property
    def staging_ttl_seconds(self) -> float: ...


class Opened(NamedTuple):
    """A new session and the answer that its peer gets."""

    session: Session
    response: pb.OpenSessionResponse


class Sessions:
    """Tokens of open sessions. A token is kept as its digest only: looking one up leaks no time."""

    def __init__(
        self,
        store: KVStore,
        access: Access,
        limits: SessionLimits,
        staging: StagingBudget,
        session_ttl_seconds: float = SESSION_TTL_SECONDS,
    ) -> None:
        self.accepting = True
        self.staging = staging
        self._store = store
        self._access = access
        self._limits = limits
        self._session_ttl_seconds = session_ttl_seconds
        self._by_digest: dict[bytes, Session] = {}

    def take_over(self, access: Access, limits: SessionLimits) -> None:
        """New rules and limits; sessions that are open keep the role they have."""
        self._access, self._limits = access, limits

    def admit(self, identity: Identity, groups: Sequence[int] = ()) -> Grant:
        """What `identity` may do; raises Unauthenticated, or Draining before the daemon serves."""
        grant = self._access.grant(identity, groups)
        if not self.accepting:
            raise Draining("the daemon is starting; try again in a moment")
        return grant

    def open(
        self,
        identity: Identity,
        grant: Grant,
        request: pb.OpenSessionRequest,
        staging: Staging | None,
        notify: Notify,
    ) -> Opened:
        """Opens a session; the store owns `staging` from here on, also if this raises."""
        release = self.staging.releaser(staging) if staging is not None else None
        try:
            session = self._store.open_session(
                identity,
                grant.role,
                grant.tenants,
                staging.view if staging is not None else None,
                notify=notify,
                staging_release=release,
                client_name=request.client_name[:CLIENT_NAME_MAX],
            )
        except BaseException:
            if release is not None:
                release()
            raise
        token = random_token(TOKEN_BYTES)
        self._by_digest[_digest(token)] = session
        _log.info("session %d opened by %s", session.id, describe(identity))
        return Opened(session, self.response(session, token, staging))

    def join(self, identity: Identity, token: bytes) -> Opened:
        """The open session of `token`, for one more connection of the same user."""
        session = self.by_token(token)
        if session.identity.uid != identity.uid or identity.uid is None:
            raise PermissionDenied("join_token belongs to another user; open a session of your own")
        return Opened(session, self.response(session, token, None))

    def response(
        self, session: Session, token: bytes, staging: Staging | None
    ) -> pb.OpenSessionResponse:
        limits = self._limits
        return pb.OpenSessionResponse(
            token=token,
            boot_id=self._store.boot_id,
            daemon_version=kvstore.__version__,
            protocol_minor=PROTOCOL_MINOR,
            role=session.role,
            tenants=sorted(session.tenants),
            staging_bytes=staging.byte_count if staging is not None else 0,
            session_ttl_seconds=self._session_ttl_seconds,
            limits=pb.Limits(
                message_bytes=limits.message_bytes,
                reserve_blocks=RESERVE_BLOCKS_MAX,
                leased_bytes=limits.leased_bytes_per_session,
                reserved_bytes=limits.reserved_bytes_per_session,
                lease_ttl_seconds=limits.lease_ttl_seconds,
                staging_ttl_seconds=limits.staging_ttl_seconds,
            ),
        )

    def by_token(self, token: bytes) -> Session:
        """The live session of `token`; raises Unauthenticated."""
        digest = _digest(token)
        session = self._by_digest.get(digest)
        if session is None or session.closed:
            self._by_digest.pop(digest, None)
            raise Unauthenticated(NO_SESSION)
        return session

    def close(self, session: Session, reason: str) -> None:
        """Ends `session` if it is still open, and forgets its token."""
        if not session.closed:
            _log.info("session %d ended: %s", session.id, reason)
            self._store.close_session(session)
        self.prune()

    def prune(self) -> None:
        """Forgets the tokens of sessions that ended, however they did."""
        ended = [digest for digest, session in self._by_digest.items() if session.closed]
        for digest in ended:
            del self._by_digest[digest]


NO_SESSION = "this call needs the token of a live session; open one on the daemon's .lane socket"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
