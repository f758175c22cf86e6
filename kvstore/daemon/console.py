"""What the console shows of a daemon, and who may look."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from itertools import islice
from typing import Any

from kvstore.console import Console
from kvstore.core.errors import KVStoreError, StoreUnavailable
from kvstore.metrics import Metrics
from kvstore.metrics.table import LINKS
from kvstore.proto.v1 import kvstore_pb2 as pb
from kvstore.replay.status import plain
from kvstore.server.sessions import Sessions
from kvstore.server.status_messages import space_message, status_response, tenant_message
from kvstore.store.decisions import Entry
from kvstore.store.kvstore import KVStore
from kvstore.store.sessions import Identity

DECISIONS_SHOWN, SPACES_SHOWN = 50, 200
OWNER_SECONDS = 2.0


class ConsoleDesk:
    """Answers the console's questions; `post` hands a call to the owner thread.

    Before the doors are open it refuses everybody.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None], metrics: Metrics) -> None:
        self._post, self._metrics = post, metrics
        self._store: KVStore | None = None
        self._sessions: Sessions | None = None
        self.console = Console(self.refusal, self.data)

    def open(self, store: KVStore, sessions: Sessions) -> None:
        self._store, self._sessions = store, sessions

    def refusal(self, uid: int) -> str | None:
        """Why a user may not look: it needs the role admin, as `kvstore status` does."""
        if self._sessions is None:
            return "the daemon is starting; try again in a moment"
        try:
            user = pwd.getpwuid(uid)
            groups = os.getgrouplist(user.pw_name, user.pw_gid)
        except KeyError:  # a user of another container
            groups = []
        try:
            identity = Identity(uid=uid, gid=groups[0] if groups else None)
            role = self._sessions.admit(identity, groups).role
        except KVStoreError as error:
            return str(error)
        if role == "admin":
            return None
        return f'uid {uid} is an engine; an [[access]] rule with role = "admin" lets it look'

    def data(self) -> bytes:
        """One document with everything the page shows. Raises StoreUnavailable."""
        taken: Future[tuple[pb.StatusResponse, list[dict[str, Any]]]] = Future()
        self._post(lambda: self._take(taken))
        try:
            message, decisions = taken.result(OWNER_SECONDS)
        except Late as error:
            raise StoreUnavailable("the owner thread is busy; try again") from error
        copied, queued = (
            {link: self._metrics.value(name, link) for link in LINKS}
            for name in ("kvstore_copied_bytes_total", "kvstore_queue_bytes")
        )
        hits = self._metrics.families["kvstore_hit_tokens_total"].children
        document = {
            "status": _flat(plain(message)),
            "decisions": decisions,
            "links": {
                link: {"copied_bytes": copied[link], "queued_bytes": queued[link]} for link in LINKS
            },
            "hit_tokens": {tier: getattr(number, "value", 0.0) for (tier,), number in hits.items()},
        }
        return json.dumps(document, allow_nan=False).encode()

    def _take(self, taken: Future[tuple[pb.StatusResponse, list[dict[str, Any]]]]) -> None:
        """On the owner thread; a daemon that is being put together has nothing to show yet."""
        try:
            store = self._store
            if store is None:
                raise StoreUnavailable("the daemon is starting; try again in a moment")
            message = status_response(store.status(), self._metrics.totals())
            message.spaces.extend(map(space_message, islice(store.spaces(), SPACES_SHOWN)))
            message.tenants.extend(map(tenant_message, store.tenants()))
            decisions = [_decision(e) for e in islice(store.parts.decisions, DECISIONS_SHOWN)]
            taken.set_result((message, decisions))
        except Exception as error:
            taken.set_exception(error)


def _decision(entry: Entry) -> dict[str, Any]:
    outcome, decision = entry.outcome(), entry.decision
    return {
        "request_id": entry.request_id,
        "wall_seconds": entry.wall_seconds,
        "model": entry.space.spec.model,
        "matched_tokens": entry.matched_tokens,
        "restore_tokens": entry.taken.restore_tokens if entry.taken is not None else 0,
        "kind": entry.plan.kind,
        "reason": entry.reason,
        "predicted_seconds": None if decision is None else decision.chosen.p50_seconds,
        "measured_seconds": None if outcome is None else outcome.seconds,
    }


def _flat(status: dict[str, Any]) -> dict[str, Any]:
    """Spaces without what no table shows."""
    status["spaces"] = [
        {
            "model": space["spec"]["model"], "revision": space["spec"]["revision"],
            **{key: space[key] for key in ("tenant", "block_count", "used_bytes")},
            "attachment_count": space["attachment_count"],
        }
        for space in status["spaces"]
    ]  # fmt: skip
    return status
