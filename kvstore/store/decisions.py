"""Decisions: the last ones taken, for `kvstore explain`, and what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvstore.core.clock import Clock
from kvstore.core.keys import EMPTY_CHAIN, Chain
from kvstore.core.plan import LookupResult, Query, RestorePlan
from kvstore.core.recorder import Recorder
from kvstore.policies.planner import RECOMPUTE_ALL, Decision
from kvstore.store.sessions import Attachment

if TYPE_CHECKING:
    from kvstore.store.planning import Plan

SYMBOL_BYTES_MAX = 32 << 20  # of prompts that are kept so that decisions are found by block


class Outcome:
    """Seconds that a restore took, and those of the whole plan, as far as they can be known."""

    __slots__ = ("load_seconds", "regret_seconds", "seconds")

    def __init__(self, load_seconds: float, seconds: float, regret_seconds: float) -> None:
        self.load_seconds = load_seconds
        self.seconds = seconds
        self.regret_seconds = regret_seconds


class Computed:
    """The steps in which an engine computed a prompt, as `reporter`, one of its ranks, told them.

    `tokens` are there now; None once others than these steps had a part in it.
    """

    __slots__ = ("reporter", "seconds", "tokens")

    def __init__(self, reporter: int, tokens: int) -> None:
        self.reporter = reporter
        self.tokens: int | None = tokens
        self.seconds = 0.0

    def add(self, reporter: int, seconds: float, new: int, cached: int, slack: int) -> None:
        if reporter != self.reporter or self.tokens is None:
            return
        # Less than there was is a prompt that had to begin again, which took its time, too.
        self.tokens = cached + new if cached <= self.tokens + slack else None
        self.seconds += seconds


class Entry:
    """One lookup's decision and the numbers it was taken by."""

    __slots__ = (
        "began", "chain", "computed", "cut_reason", "ended", "failed_blocks", "identity",
        "kept_blocks", "matched_tokens", "pending_tokens", "plan", "reason", "request_id",
        "root_digest", "space", "symbol_bytes", "taken", "transfers", "wall_seconds",
    )  # fmt: skip

    def __init__(
        self, attachment: Attachment, query: Query, result: LookupResult, taken: Plan | None,
        wall_seconds: float,
    ) -> None:  # fmt: skip
        # Not the attachment itself, which would keep a session that has ended.
        self.space = attachment.space
        self.identity = attachment.recompute_identity
        self.request_id = query.request_id
        # To be found by block is for those that were planned: it costs the others too much.
        self.chain, self.root_digest, self.symbol_bytes = EMPTY_CHAIN, b"", 0
        if taken is not None and taken.decision is not None:
            self.chain = query.chain
            self.root_digest = attachment.root_digest(query.adapter, query.cache_salt)
            self.symbol_bytes = sum([len(part.symbols) for part in query.chain.segments])
        self.matched_tokens = result.matched_tokens
        self.pending_tokens = result.pending_tokens
        self.plan: RestorePlan = result.plan
        self.reason = result.reason
        self.taken = taken  # None where there was nothing to decide
        self.wall_seconds = wall_seconds
        self.began: float | None = None  # of its restores from disk
        self.ended: float | None = None
        self.failed_blocks = 0
        # Of a restore that was cut short because it was late: blocks that its client still uses.
        self.kept_blocks: int | None = None
        self.cut_reason = ""
        self.computed: Computed | None = None  # of a plan to recompute all
        self.transfers: dict[int, float] | None = None  # seconds of copies, by session

    @property
    def decision(self) -> Decision | None:
        """What the planner said; None while costs are not measured, or without a match."""
        return self.taken.decision if self.taken is not None else None

    def copied(self, session: int, seconds: float) -> None:
        """A rank has copied a part of the match to where it computes."""
        if self.transfers is None:
            self.transfers = {}
        self.transfers[session] = self.transfers.get(session, 0.0) + seconds

    def cut(self, kept_blocks: int, reason: str) -> None:
        """A restore of the match was late, and ends before its plan does."""
        self.kept_blocks, self.cut_reason = kept_blocks, reason

    @property
    def needs_disk(self) -> bool:
        return any(step.source == "disk" for step in self.plan.steps)

    def outcome(self) -> Outcome | None:
        """What was measured of a plan that was carried out; None where that is not known.

        Of plans that load, the loads: what is computed after them counts as predicted. Of one that
        recomputes all, the steps, if the engine told whose they were: what it waits for before
        them counts as predicted.
        """
        decision = self.decision
        if decision is None:
            return None
        if decision.kind == RECOMPUTE_ALL:
            seconds = self._computed_seconds(decision)
            return None if seconds is None else Outcome(0.0, seconds, decision.regret(seconds))
        load = self._load_seconds()
        if load is None or (self.failed_blocks and self.kept_blocks is None):
            return None
        seconds = self._whole_seconds(decision, load)
        return Outcome(load, seconds, decision.regret(seconds))

    def _computed_seconds(self, decision: Decision) -> float | None:
        done, situation = self.computed, decision.situation
        end = situation.local_tokens + situation.matched_tokens + situation.new_tokens
        if done is None or done.tokens is None or done.tokens < end:
            return None
        return decision.chosen.p50_seconds - decision.compute_seconds(0) + done.seconds

    def _load_seconds(self) -> float | None:
        load = max(self.transfers.values()) if self.transfers else 0.0
        if self.needs_disk:
            if self.began is None or self.ended is None:
                return None
            load += self.ended - self.began
        return load

    def _whole_seconds(self, decision: Decision, load: float) -> float:
        chosen, situation = decision.chosen, decision.situation
        if self.kept_blocks is not None:
            # What did not come is computed after that.
            kept = self.kept_blocks * situation.block_size - situation.local_tokens
            return load + decision.compute_seconds(max(0, kept))
        seconds = chosen.p50_seconds + load - decision.load_seconds[0]
        if chosen.cut.resume < situation.matched_tokens:
            # What is computed meanwhile may take longer than what is loaded.
            seconds = max(chosen.p50_seconds, seconds)
        return seconds


class DecisionLog:
    """A ring of the last `limit` decisions."""

    def __init__(self, limit: int, clock: Clock, recorder: Recorder) -> None:
        self._limit = limit
        self._clock = clock
        self._recorder = recorder
        self._entries: deque[Entry] = deque()
        self._with_symbols: deque[Entry] = deque()
        self._symbol_bytes = 0
        self._by_request: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """The last decision first."""
        return reversed(self._entries)

    def add(
        self, attachment: Attachment, query: Query, result: LookupResult, taken: Plan | None = None
    ) -> Entry:
        """Writes a lookup's answer down; `taken` is None where there was nothing to decide."""
        entry = Entry(attachment, query, result, taken, self._clock.wall())
        if len(self._entries) >= self._limit:
            self._forget(self._entries.popleft())
        self._entries.append(entry)
        if query.request_id:
            self._by_request[query.request_id] = entry
        decision = taken.decision if taken is not None else None
        self._recorder.planned(result.plan.kind, decision is not None)
        if decision is None:
            return entry
        self._with_symbols.append(entry)
        self._symbol_bytes += entry.symbol_bytes
        while self._symbol_bytes > SYMBOL_BYTES_MAX:
            self._drop_symbols(self._with_symbols.popleft())
        if decision.is_predicted_miss:
            self._recorder.deadline_missed(True)
        return entry

    def _forget(self, entry: Entry) -> None:
        if self._by_request.get(entry.request_id) is entry:
            del self._by_request[entry.request_id]
        if self._with_symbols and self._with_symbols[0] is entry:
            self._drop_symbols(self._with_symbols.popleft())

    def _drop_symbols(self, entry: Entry) -> None:
        self._symbol_bytes -= entry.symbol_bytes
        entry.chain = EMPTY_CHAIN

    def of_request(self, request_id: str) -> Entry | None:
        return self._by_request.get(request_id)

    def covering(self, space: Any, root_digest: bytes, symbols: bytes, block: int) -> Entry | None:
        """The last planned decision on a match that has block `block`, with these symbols up to it.

        Older ones, whose prompts are not kept any more, are not found.
        """
        for entry in self:
            if (
                entry.space is space
                and entry.matched_tokens > block * space.block_size
                and entry.root_digest == root_digest
                and _leading(entry.chain, block + 1) == symbols
            ):
                return entry
        return None

    def computed(
        self, attachment: Attachment, request_id: str, seconds: float, new: int, cached: int
    ) -> None:
        """A step of an engine computed a part of a request's prompt; the last one tells the rest.

        Counted once, for a decision to recompute all of it.
        """
        entry = self._by_request.get(request_id)
        decision = entry.decision if entry is not None else None
        if entry is None or decision is None or decision.kind != RECOMPUTE_ALL:
            return
        if entry.space is not attachment.space or entry.outcome() is not None:
            return
        situation, session = decision.situation, attachment.session.id
        if entry.computed is None:
            entry.computed = Computed(session, situation.local_tokens)
        entry.computed.add(session, seconds, new, cached, situation.block_size)
        self._count(entry)

    def restore_ended(self, entry: Entry, failed_blocks: int) -> None:
        """A restore of the decision's match is over; others of it may follow."""
        entry.ended = self._clock.now()
        entry.failed_blocks += failed_blocks

    def lease_ended(self, entry: Entry | None) -> None:
        """Nothing more will be heard of a decision that loads: counts what came of it."""
        if entry is not None:
            self._count(entry)

    def _count(self, entry: Entry) -> None:
        outcome, decision = entry.outcome(), entry.decision
        if outcome is None or decision is None:
            return
        self._recorder.plan_ended(
            decision.kind, decision.chosen.p50_seconds, outcome.seconds, outcome.regret_seconds
        )
        deadline = decision.situation.deadline_seconds
        if deadline is not None and outcome.seconds > deadline and not decision.is_predicted_miss:
            self._recorder.deadline_missed(False)


def _leading(chain: Chain, block_count: int) -> bytes:
    return b"".join(segment.symbols for segment in chain.cut(block_count).segments)
