"""Lookup: the longest stored prefix of a prompt, a lease on it, and where its blocks lie.

walk the index (in slices) -> check adopted bytes not yet verified -> limits -> plan -> lease
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec
import xxhash

from kvstore.core.completion import Completion
from kvstore.core.errors import Draining
from kvstore.core.lease import Lease
from kvstore.core.plan import Ask, LookupResult, Query, RestorePlan, Slots
from kvstore.policies.index import Span, Walk
from kvstore.store.parts import DISK, HOST, SLICE_BLOCKS, TIER_NAMES, Parts
from kvstore.store.planning import IN_HBM, Plan, Planner
from kvstore.store.promote import Promoter
from kvstore.store.sessions import Attachment
from kvstore.store.slices import SlicedWalk, settle
from kvstore.store.verify import Verifier

MISSED = RestorePlan("recompute_all")


class LookupFlow:
    """Answers lookups. Nothing changes but leases, recency, and statistics."""

    def __init__(self, parts: Parts, verifier: Verifier, promoter: Promoter) -> None:
        self._parts = parts
        self._verifier = verifier
        self._promoter = promoter
        self._planner = Planner(parts)

    def lookup(
        self, attachment: Attachment, query: Query, local_tokens: int, ask: Ask
    ) -> LookupResult | Completion[LookupResult]:
        """The match of `query`; later when it takes more than one slice, or bytes need a check."""
        parts = self._parts
        if parts.draining:
            raise Draining("the daemon is draining and grants no new leases; recompute")
        same = self._repeated(attachment, query, local_tokens)
        if same is not None:
            return same
        digest = attachment.root_digest(query.adapter, query.cache_salt)
        root = parts.index.find_root(attachment.space, digest)
        if root is None or attachment.space.closing:
            return self._answer(attachment, query, local_tokens, ask, None)
        walk = parts.index.walk(root, query.chain)
        if not walk.step(SLICE_BLOCKS):
            finish = partial(self._walked, attachment, query, local_tokens, ask, walk)
            return SlicedWalk(parts, walk, finish).answer
        return self._walked(attachment, query, local_tokens, ask, walk)

    def _walked(
        self, attachment: Attachment, query: Query, local_tokens: int, ask: Ask, walk: Walk
    ) -> LookupResult | Completion[LookupResult]:
        if not self._parts.unverified or not walk.ready_blocks:
            return self._answer(attachment, query, local_tokens, ask, walk)
        if self._verifier.checked_blocks(walk) == walk.ready_blocks:
            return self._answer(attachment, query, local_tokens, ask, walk)
        # Adopted bytes answer nobody before they were hashed again. One bounded part is checked
        # now; what lies beyond it counts as pending.
        answer: Completion[LookupResult] = Completion()

        def checked() -> None:
            settle(answer, lambda: self._answer(attachment, query, local_tokens, ask, walk))

        if not self._verifier.verify_first(walk, checked):
            return self._answer(attachment, query, local_tokens, ask, walk)
        return answer

    def _answer(
        self, attachment: Attachment, query: Query, local_tokens: int, ask: Ask, walk: Walk | None
    ) -> LookupResult:
        if walk is not None and (attachment.session.closed or attachment.space.closing):
            walk = None
        self._parts.requests.looked_up(attachment, query, ask)
        live = self._live(attachment, query, local_tokens)
        block_size = attachment.space.block_size
        wanted = query.chain.block_count
        ready = self._ready_blocks(walk)
        pending = (walk.known_blocks - ready) * block_size if walk is not None else 0
        planned = live.result.matched_tokens if live is not None else 0
        if live is not None and ready * block_size <= planned:
            return self._again(attachment, live)
        granted, limit = self._within_limits(attachment, ready, live)
        matched, local = granted * block_size, min(local_tokens, granted * block_size)
        found = "hit" if granted == wanted and granted else "partial" if granted else "miss"
        above = self._count_elsewhere(attachment, walk, granted) * block_size
        self._parts.recorder.lookup(found, wanted * block_size, matched - above)
        if not granted or walk is None:
            reason = limit or _miss_reason(wanted, pending)
            missed = LookupResult(0, 0, pending, MISSED, reason)
            self._parts.decisions.add(attachment, query, missed)
            return missed
        if live is not None and matched <= planned:
            return self._again(attachment, live)
        path: Sequence[Span] = walk.path
        if granted != walk.known_blocks:
            path = cut_path(path, granted)
        slots = self.slots(path, attachment.shard, local // block_size)
        if not ask.prompt_tokens:
            ask = msgspec.structs.replace(ask, prompt_tokens=wanted * block_size)
        plan = self._planner.plan(attachment, ask, slots, matched, local, pending)
        if live is not None and plan.lease_blocks <= live.block_count:
            return self._again(attachment, live)
        result = LookupResult(
            matched_tokens=matched,
            restore_tokens=plan.restore_tokens,
            pending_tokens=pending,
            plan=plan.plan,
            reason=limit or plan.reason,
        )
        if plan.lease_blocks:
            result = self._grant(attachment, query, local_tokens, live, path, slots, plan, result)
            return result
        self._parts.decisions.add(attachment, query, result, plan)
        attachment.engine.keep_unleased(
            self._key(attachment, query), result, _digest(query), local_tokens, self._expiry(),
            attachment.space.clear_count,
        )  # fmt: skip
        return result

    def _grant(
        self, attachment: Attachment, query: Query, local_tokens: int, lease: Lease | None,
        path: Sequence[Span], slots: Slots, plan: Plan, result: LookupResult,
    ) -> LookupResult:  # fmt: skip
        """Has a lease, a new one or one that grows, cover what the plan loads, and no more."""
        parts, space, count = self._parts, attachment.space, plan.lease_blocks
        if lease is None:
            lease = parts.leases.add(attachment, query.request_id, local_tokens)
            lease.symbols_digest = _digest(query) if query.request_id else b""
        if count * space.block_size < result.matched_tokens:
            path = cut_path(path, count)
            kept = count - slots.first_block
            slots = Slots(slots.first_block, slots.places[:kept], slots.generations[:kept])
        path = parts.residency.access(path)
        run, _, stop = path[-1]
        shorter, lease.anchor = lease.anchor, parts.index.anchor(run, stop, lease.id)
        if shorter is not None:
            parts.index.unanchor(shorter)
        parts.leases.cover(lease, count)
        lease.holders.add(attachment.session)
        for tier in (TIER_NAMES[HOST], IN_HBM):
            tokens = sum(step.token_count for step in plan.plan.steps if step.source == tier)
            size = -(-tokens // space.block_size) * space.block_bytes
            if size or tier != IN_HBM:
                parts.recorder.restored(tier, size)
        lease.result = result = msgspec.structs.replace(
            result, lease_id=lease.id, lease_ttl_seconds=parts.leases.ttl_seconds, slots=slots
        )
        lease.shard = attachment.shard
        lease.decision = parts.decisions.add(attachment, query, result, plan)
        return result

    def _live(self, attachment: Attachment, query: Query, local_tokens: int) -> Lease | None:
        """The lease that an identical lookup of this request got; one of other content ends."""
        if not query.request_id:
            return None
        lease = self._parts.leases.of_request(attachment, query.request_id)
        if lease is None or self._is_same(lease, query, local_tokens):
            return lease
        self._parts.leases.end(lease, "replaced")
        return None

    def _is_same(self, lease: Lease, query: Query, local_tokens: int) -> bool:
        return (
            lease.anchor.run is not None
            and not lease.attachment.space.closing
            and lease.local_tokens == local_tokens
            and lease.symbols_digest == _digest(query)
        )

    def _again(self, attachment: Attachment, lease: Lease) -> LookupResult:
        """A live lease's answer, renewed: with the slots of whichever rank's shard asks."""
        parts, result = self._parts, cast("LookupResult", lease.result)
        parts.leases.renew(lease)
        lease.holders.add(attachment.session)
        if lease.shard == attachment.shard:
            return result
        path = parts.index.path(lease.anchor)
        assert result.slots is not None, "a lease's answer has slots"
        slots = self.slots(path, attachment.shard, result.slots.first_block)
        return msgspec.structs.replace(result, slots=slots)

    def slots(self, path: Sequence[Span], shard: int, first_block: int) -> Slots:
        """Where a shard of the blocks of `path` from `first_block` on lies, and generations."""
        parts = self._parts
        places = parts.index.places(path, HOST, shard)
        if first_block:
            places = places[first_block - path[0][0].first - path[0][1] :]
        return Slots(first_block, places, parts.host.generations(places))

    def _ready_blocks(self, walk: Walk | None) -> int:
        if walk is None:
            return 0
        ready = walk.ready_blocks
        if self._parts.unverified:
            ready = self._verifier.checked_blocks(walk)
        return self._in_host_blocks(walk, ready) if self._promoter.stalled else ready

    def _in_host_blocks(self, walk: Walk, count: int) -> int:
        """How many of the leading `count` blocks need no disk."""
        if not count:
            return 0
        absent = self._parts.index.places(cut_path(walk.path, count), HOST, 0) < 0
        return int(absent.argmax()) if absent.any() else count

    def _disk_only(self, walk: Walk | None, count: int) -> int:
        """How many of the leading `count` blocks lie on disk only."""
        if walk is None or not count or self._parts.disk is None:
            return 0
        places = self._parts.index.places(cut_path(walk.path, count), HOST, 0)
        return int((places < 0).sum())

    def _count_elsewhere(self, attachment: Attachment, walk: Walk | None, count: int) -> int:
        """How many of the leading `count` blocks are hits in other tiers than host, counted so."""
        parts, by_tier = self._parts, {TIER_NAMES[DISK]: self._disk_only(walk, count)}
        if parts.hbm is not None and walk is not None and count:
            places = parts.index.places(cut_path(walk.path, count), HOST, attachment.shard)
            near = parts.hbm.near(attachment, places)
            by_tier[IN_HBM] = 0 if near is None else int(near.mask.sum())
        for tier, blocks in by_tier.items():
            if blocks:
                parts.recorder.hit(tier, blocks * attachment.space.block_size)
        return sum(by_tier.values())

    def _within_limits(
        self, attachment: Attachment, ready: int, live: Lease | None
    ) -> tuple[int, str]:
        """How many of `ready` blocks may be leased, and why not all; leases just released count
        no more.
        """
        fit, limit = self._fit(attachment, ready, live)
        if limit:
            self._parts.leases.flush()
            fit, limit = self._fit(attachment, ready, live)
        if not limit:
            return fit, ""
        self._parts.recorder.limit_rejected(limit)
        if limit == "leases_per_session":
            count = attachment.session.lease_count
            return 0, (
                f"the session holds {count} leases, the limit limits.leases_per_session; release "
                "or finish requests"
            )
        return fit, f"limits.{limit} allows {fit} of {ready} matched blocks to be leased now"

    def _fit(self, attachment: Attachment, ready: int, live: Lease | None) -> tuple[int, str]:
        """How many of `ready` blocks fit, and the limit that cut them.

        What the request's live lease holds counts as free.
        """
        if not ready:
            return 0, ""
        parts, session, space = self._parts, attachment.session, attachment.space
        limits, block = parts.limits, space.slot_bytes * space.shard_count
        if live is None and session.lease_count >= limits.leases_per_session:
            return 0, "leases_per_session"
        in_session, in_tenant = session.leased_bytes, parts.leases.by_tenant.get(space.tenant, 0)
        if live is not None:
            in_tenant -= live.leased_bytes
            if live.attachment.session is session:
                in_session -= live.leased_bytes
        session_left = limits.leased_bytes_per_session - in_session
        tenant_left = limits.leased_bytes_per_tenant - in_tenant
        fit = min(session_left, tenant_left) // block
        if fit >= ready:
            return ready, ""
        whose = "session" if session_left <= tenant_left else "tenant"
        return max(0, fit), f"leased_bytes_per_{whose}"

    def _repeated(
        self, attachment: Attachment, query: Query, local_tokens: int
    ) -> LookupResult | None:
        """The live answer of an identical lookup, its lease renewed; None when it differs."""
        if not query.request_id:
            return None
        lease = self._parts.leases.of_request(attachment, query.request_id)
        if lease is None:
            # Ranks of an engine must do the same; nothing is leased that could tell them.
            return attachment.engine.unleased_result(
                self._key(attachment, query), lambda: _digest(query), local_tokens,
                self._parts.clock.now(), attachment.space.clear_count,
            )  # fmt: skip
        if not self._is_same(lease, query, local_tokens):
            return None
        # Pending blocks may have become READY: then the lease grows.
        return None if lease.result.pending_tokens else self._again(attachment, lease)

    def _key(self, attachment: Attachment, query: Query) -> tuple[int, str]:
        return attachment.space.number, query.request_id

    def _expiry(self) -> float:
        return self._parts.clock.now() + self._parts.leases.ttl_seconds


def cut_path(path: Sequence[Span], block_count: int) -> list[Span]:
    """The first `block_count` blocks of a walk's path."""
    cut: list[Span] = []
    left = block_count
    for run, start, stop in path:
        take = min(left, stop - start)
        if take <= 0:
            break
        cut.append(Span(run, start, start + take))
        left -= take
    return cut


def _miss_reason(wanted: int, pending: int) -> str:
    if not wanted:
        return "the prompt has no full block"
    if pending:
        return f"{pending} tokens are being written by another request"
    return "no block of this prefix is stored"


def _digest(query: Query) -> bytes:
    digest = xxhash.xxh3_128()
    for text in (query.adapter, query.cache_salt):
        raw = text.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    for segment in query.chain.segments:
        digest.update(segment.width.to_bytes(4, "little"))
        digest.update(segment.symbols)
    return digest.digest()
