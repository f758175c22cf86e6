"""Sessions: who is attached, what they hold, and whose leases end when they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from kvstore.core.lease import Lease
from kvstore.core.plan import LookupResult
from kvstore.core.space import Space
from kvstore.core.spec import root_digest
from kvstore.policies.cost import RecomputeIdentity

UNLEASED_MAX = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """How a peer proved who it is: the kernel's word on a Unix socket, or a certificate."""

    uid: int | None = None
    gid: int | None = None
    pid: int | None = None
    certificate: str = ""


class Unleased(NamedTuple):
    """An answer to a named request of which nothing is worth loading."""

    result: LookupResult
    digest: bytes
    local_tokens: int
    until: float
    clear_count: int


class Engine:
    """Sessions that share request leases: the ranks of one engine, or a session by itself."""

    __slots__ = ("by_request", "key", "leases", "sessions", "unleased")

    def __init__(self, key: Any) -> None:
        self.key = key
        self.sessions: set[Session] = set()
        self.leases: dict[int, Lease] = {}
        self.by_request: dict[tuple[int, str], Lease] = {}
        self.unleased: dict[tuple[int, str], Unleased] = {}

    def keep_unleased(
        self, key: tuple[int, str], result: LookupResult, digest: bytes, local_tokens: int,
        until: float, clear_count: int,
    ) -> None:  # fmt: skip
        """Remembers an answer that leased nothing, for the other ranks and a repeat."""
        if not key[1]:
            return
        self.unleased.pop(key, None)
        if len(self.unleased) >= UNLEASED_MAX:
            del self.unleased[next(iter(self.unleased))]
        self.unleased[key] = Unleased(result, digest, local_tokens, until, clear_count)

    def unleased_result(
        self, key: tuple[int, str], digest: Callable[[], bytes], local_tokens: int, now: float,
        clear_count: int,
    ) -> LookupResult | None:  # fmt: skip
        """What an identical lookup was answered that leased nothing; None if there was none."""
        known = self.unleased.get(key)
        if known is None:
            return None
        asked = (known.clear_count, known.local_tokens, known.digest)
        if now < known.until and asked == (clear_count, local_tokens, digest()):
            return known.result
        del self.unleased[key]
        return None


class Session:
    """One attached peer. `staging` is its write segment; `notify(kind, value)` reaches it.

    Kinds of notice: "draining" with seconds, "lost_leases" with lease ids.
    """

    __slots__ = (
        "attachments",
        "client_name",
        "closed",
        "engines",
        "id",
        "identity",
        "last_seen",
        "lease_count",
        "leased_bytes",
        "next_attachment",
        "notify",
        "pinned_bytes",
        "reservations",
        "reserved_bytes",
        "role",
        "running_copies",
        "staging",
        "staging_release",
        "tenants",
    )  # fmt: skip

    def __init__(
        self,
        session_id: int,
        identity: Identity,
        role: str,
        tenants: frozenset[str],
        staging: memoryview | None,
        notify: Callable[[str, Any], None] | None = None,
        staging_release: Callable[[], None] | None = None,
        client_name: str = "",
    ) -> None:
        self.id = session_id
        self.identity = identity
        self.role = role
        self.tenants = tenants
        self.staging = staging
        self.notify = notify
        self.staging_release = staging_release
        self.client_name = client_name
        self.attachments: dict[int, Attachment] = {}
        self.engines: dict[Any, Engine] = {}
        self.reservations: dict[int, Any] = {}
        self.next_attachment = 1
        self.last_seen = 0.0
        self.lease_count = 0
        self.leased_bytes = 0
        self.reserved_bytes = 0
        self.pinned_bytes = 0
        self.running_copies = 0
        self.closed = False

    def copy_started(self) -> None:
        self.running_copies += 1

    def copy_ended(self) -> None:
        """A copy out of staging is over; the last one of a closed session lets staging go."""
        self.running_copies -= 1
        assert self.running_copies >= 0
        self.let_staging_go()

    def let_staging_go(self) -> None:
        if self.closed and not self.running_copies and self.staging_release is not None:
            release, self.staging_release = self.staging_release, None
            self.staging = None
            release()


@dataclass(frozen=True, eq=False)
class Attachment:
    """A spec and a shard that a session works with."""

    number: int
    session: Session
    space: Space
    shard: int
    engine: Engine
    plan_shapes: tuple[str, ...] = ("prefix",)
    overlap: str = "none"
    engine_build: str = ""
    device: str = ""
    prefill_chunk_tokens: int = 0

    @cached_property
    def recompute_identity(self) -> RecomputeIdentity:
        """What this engine's forward calls are measured as."""
        spec = self.space.spec
        return RecomputeIdentity(
            spec.model, spec.revision, self.engine_build, self.device, spec.shard_count
        )

    @cached_property
    def shapes(self) -> frozenset[str]:
        return frozenset(self.plan_shapes)

    @cached_property
    def _plain_root(self) -> bytes:
        return root_digest(self.space.id, "", "")

    def root_digest(self, adapter: str, cache_salt: str) -> bytes:
        """Identity of a root of this space; the plain one, which most prompts have, is kept."""
        if not adapter and not cache_salt:
            return self._plain_root
        return root_digest(self.space.id, adapter, cache_salt)
