"""`Hearing`: what residency is told of requests, of what things cost, and of quotas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.core.space import Space
from kvstore.policies.accounts import Accounts, Quota
from kvstore.policies.actions import Event
from kvstore.policies.base import Context
from kvstore.policies.index import Run
from kvstore.policies.uses import NO_HINT, Hint, Request, Use


class Hearing:
    """The part of `Residency` that only notes what it hears, for its policies to rank by.

    `on_event` hears every event when it comes, for logs and replays.
    """

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.on_event: Callable[[Event], None] | None = None
        self.request_count = 0
        self.context = Context(self.accounts)

    def request(self, request: Request) -> Use:
        """A request comes: what is accessed and stored next is its, until another one is served."""
        self._record("request", request)
        use = Use(self.request_count, request)
        self.request_count += 1
        for model in self.context.models.values():
            model.on_request(use, request)
        self.context.use = use
        return use

    def serve(self, use: Use | None) -> None:
        """What is accessed and stored next belongs to an earlier request, or to none."""
        if use is not self.context.use:
            self._record("serve", None if use is None else use.number)
            self.context.use = use

    def extend(self, use: Use, digests: bytes) -> None:
        """A request came again with more blocks, or stores its output: these come after its own."""
        self._record("extend", use.number, digests)
        for model in self.context.models.values():
            model.on_extend(use, digests)

    def finish(self, use: Use, output_tokens: int, hint: Hint = NO_HINT) -> None:
        """A request ended: the length of its output, and what its client says of its reuse."""
        self._record("finish", use.number, output_tokens, hint)
        for model in self.context.models.values():
            model.on_finish(use, output_tokens, hint)
        run = use.leaf
        if run is not None and run.alive and run.policy is use:
            self.rank_anew(run)

    def set_rates(self, space: Space | None, token_seconds: float, pair_seconds: float) -> None:
        """Recomputing costs so much in `space`, or wherever nothing else is known."""
        self._record("set_rates", space and space.id, token_seconds, pair_seconds)
        self.context.worth.set_rates(space, token_seconds, pair_seconds)

    def set_restore(self, tier: int, latency_seconds: float, byte_seconds: float) -> None:
        """Getting a block back from `tier` takes so long."""
        self._record("set_restore", tier, latency_seconds, byte_seconds)
        self.context.worth.set_restore(tier, latency_seconds, byte_seconds)

    def set_quota(
        self,
        tenant: str,
        tier: int,
        cap_bytes: int | None = None,
        floor_bytes: int | None = None,
    ) -> None:
        """Limits `tenant` in `tier` to `cap_bytes` and protects its first `floor_bytes`.

        None is no cap, no floor. A cap below what is used takes effect by `make_room` with 0 bytes.
        """
        self.accounts.set_quota(tenant, tier, cap_bytes, floor_bytes)
        self._record("set_quota", tenant, tier, cap_bytes, floor_bytes)

    def quota(self, tenant: str, tier: int) -> Quota:
        return self.accounts.quota(tenant, tier)

    def rank_anew(self, run: Run) -> None:
        """What `run` is ranked by has changed."""
        raise NotImplementedError

    def _record(self, name: str, *values: Any) -> None:
        if self.on_event is not None:
            self.on_event(Event(name, values))
