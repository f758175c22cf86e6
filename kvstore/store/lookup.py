"""Lookup: the longest stored prefix of a prompt, a lease on it, and where its blocks lie.

walk the index (in slices) -> check adopted bytes not yet verified -> limits -> lease -> slots
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import msgspec
import numpy as np
import xxhash

from kvstore.core.completion import Completion
from kvstore.core.errors import Draining
from kvstore.core.lease import Lease
from kvstore.core.plan import RECOMPUTE, LookupResult, PlanStep, Query, RestorePlan, Slots
from kvstore.policies.index import Span, Walk
from kvstore.store.parts import DISK, HOST, SLICE_BLOCKS, TIER_NAMES, Parts
from kvstore.store.promote import Promoter
from kvstore.store.sessions import Attachment
from kvstore.store.slices import SlicedWalk, settle
from kvstore.store.verify import Verifier

RECOMPUTE_ALL = RestorePlan("recompute_all")


class LookupFlow:
    """Answers lookups. Nothing changes but leases, recency, and statistics."""

    def __init__(self, parts: Parts, verifier: Verifier, promoter: Promoter) -> None:
        self._parts = parts
        self._verifier = verifier
        self._promoter = promoter

    def lookup(
        self, attachment: Attachment, query: Query, local_tokens: int
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
            return self._answer(attachment, query, local_tokens, None)
        walk = parts.index.walk(root, query.chain)
        if not walk.step(SLICE_BLOCKS):
            finish = partial(self._walked, attachment, query, local_tokens, walk)
            return SlicedWalk(parts, walk, finish).answer
        return self._walked(attachment, query, local_tokens, walk)

    def _walked(
        self, attachment: Attachment, query: Query, local_tokens: int, walk: Walk
    ) -> LookupResult | Completion[LookupResult]:
        if not self._parts.unverified or not walk.ready_blocks:
            return self._answer(attachment, query, local_tokens, walk)
        if self._verifier.checked_blocks(walk) == walk.ready_blocks:
            return self._answer(attachment, query, local_tokens, walk)
        # Adopted bytes answer nobody before they were hashed again. One bounded part is checked
        # now; what lies beyond it counts as pending.
        answer: Completion[LookupResult] = Completion()

        def checked() -> None:
            settle(answer, lambda: self._answer(attachment, query, local_tokens, walk))

        if not self._verifier.verify_first(walk, checked):
            return self._answer(attachment, query, local_tokens, walk)
        return answer

    def _answer(
        self, attachment: Attachment, query: Query, local_tokens: int, walk: Walk | None
    ) -> LookupResult:
        if walk is not None and (attachment.session.closed or attachment.space.closing):
            walk = None
        live = self._live(attachment, query, local_tokens)
        block_size = attachment.space.block_size
        wanted = query.chain.block_count
        ready = self._ready_blocks(walk)
        pending = (walk.known_blocks - ready) * block_size if walk is not None else 0
        if live is not None and ready <= live.block_count:
            return self._again(attachment, live)
        granted, limit = self._within_limits(attachment, ready, live)
        matched, local = granted * block_size, min(local_tokens, granted * block_size)
        found = "hit" if granted == wanted and granted else "partial" if granted else "miss"
        on_disk = self._disk_only(walk, granted) * block_size
        self._parts.recorder.lookup(found, wanted * block_size, matched - on_disk)
        if on_disk:
            self._parts.recorder.hit(TIER_NAMES[DISK], on_disk)
        if not granted or walk is None:
            reason = limit or _miss_reason(wanted, pending)
            return LookupResult(0, 0, pending, RECOMPUTE_ALL, reason)
        if live is not None and granted <= live.block_count:
            return self._again(attachment, live)
        if live is None:
            live = self._parts.leases.add(attachment, query.request_id, local_tokens)
            live.symbols_digest = _digest(query) if query.request_id else b""
        return self._grant(attachment, live, walk, granted, pending, limit, local)

    def _grant(
        self, attachment: Attachment, lease: Lease, walk: Walk, granted: int, pending: int,
        limit: str, local: int,
    ) -> LookupResult:  # fmt: skip
        """Has `lease`, a new one or one that grows, cover `granted` blocks."""
        parts, space = self._parts, attachment.space
        matched = granted * space.block_size
        path: Sequence[Span] = walk.path
        if granted != walk.known_blocks:
            path = cut_path(path, granted)
        path = parts.residency.access(path)
        run, _, stop = path[-1]
        shorter, lease.anchor = lease.anchor, parts.index.anchor(run, stop, lease.id)
        if shorter is not None:
            parts.index.unanchor(shorter)
        parts.leases.cover(lease, granted)
        lease.holders.add(attachment.session)
        restored = matched - local
        restored_blocks = granted - local // space.block_size
        slots = self.slots(path, attachment.shard, local // space.block_size)
        steps = self._steps(slots, matched, local, space.block_size)
        from_disk = sum(step.token_count for step in steps if step.source != TIER_NAMES[HOST])
        in_host = restored_blocks - -(-from_disk // space.block_size)
        parts.recorder.restored(TIER_NAMES[HOST], in_host * space.block_bytes)
        lease.result = result = LookupResult(
            matched_tokens=matched,
            restore_tokens=restored,
            pending_tokens=pending,
            plan=load_all(steps, matched, pending),
            reason=limit or _load_reason(restored, local, from_disk),
            lease_id=lease.id,
            lease_ttl_seconds=parts.leases.ttl_seconds,
            slots=slots,
        )
        lease.shard = attachment.shard
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

    def _steps(self, slots: Slots, matched: int, local: int, block_size: int) -> list[PlanStep]:
        """Where the tokens from `local` to `matched` come from, by tier."""
        if matched == local:
            return []
        if self._parts.disk is None or slots.places.min() >= 0:
            return [PlanStep(local, matched - local, TIER_NAMES[HOST])]
        in_host = slots.places >= 0
        edges = [0, *(np.flatnonzero(np.diff(in_host)) + 1).tolist(), len(in_host)]
        tokens = [max(local, (slots.first_block + edge) * block_size) for edge in edges]
        return [
            PlanStep(tokens[n], tokens[n + 1] - tokens[n], TIER_NAMES[HOST if here else DISK])
            for n, here in enumerate(in_host[edges[:-1]].tolist())
        ]

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
        if lease is None or not self._is_same(lease, query, local_tokens):
            return None
        # Pending blocks may have become READY: then the lease grows.
        return None if lease.result.pending_tokens else self._again(attachment, lease)


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


def load_all(steps: list[PlanStep], matched: int, pending: int) -> RestorePlan:
    """Restore everything that is there: the only plan until costs are measured."""
    if pending:
        steps = [*steps, PlanStep(matched, pending, RECOMPUTE)]
    return RestorePlan("load_all", tuple(steps))


def _load_reason(restored: int, local: int, from_disk: int) -> str:
    if not restored:
        return f"the engine already has all {local} matched tokens"
    where = f"{restored} tokens from host"
    if from_disk == restored:
        where = f"{restored} tokens from disk"
    elif from_disk:
        where = f"{restored} tokens, {restored - from_disk} from host and {from_disk} from disk"
    return f"load all {where}; restore and recompute costs are not measured yet"


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
