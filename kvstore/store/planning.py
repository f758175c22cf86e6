"""Planning: what of a match to load and what to compute anew, by what was measured.

where its tokens lie -> are the costs known? -> planner -> steps, blocks to lease, the reason
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.core.plan import LOAD_ALL, RECOMPUTE, Ask, PlanStep, RestorePlan, Slots
from kvstore.mover import ARENA_OUT_LINK, READ_LINK
from kvstore.policies.cost import P50, P99, LinkCost, LinkIdentity, PathModel, RecomputeModel
from kvstore.policies.fitting import State
from kvstore.policies.planner import Decision, decide, gpu_price, link_price
from kvstore.policies.timing import Costs, Cut, Prices, Segment, Situation
from kvstore.store.costs import DEVICE_LINK, SAMPLES_MIN
from kvstore.store.parts import DISK, HOST, TIER_NAMES, Parts
from kvstore.store.sessions import Attachment

if TYPE_CHECKING:
    from kvstore.store.hbm import Near

IN_HOST, ON_DISK, IN_HBM = TIER_NAMES[HOST], TIER_NAMES[DISK], "hbm"
SOURCES, SLOWEST_LAST = (*TIER_NAMES, IN_HBM), (IN_HBM, IN_HOST, ON_DISK)
# Links that the daemon itself carries loads over, by the tier they begin at.
OWN_LINKS = {ON_DISK: READ_LINK, IN_HBM: ARENA_OUT_LINK}
SEGMENTS_MAX = 4  # that are planned one by one: a plan takes longer with each
FREE = Prices()

Models = dict[str, PathModel | None]  # by link
Span = tuple[int, int]  # first token, token after the last


class Plan(NamedTuple):
    """What a lookup answers with. Leading `lease_blocks` blocks are all that it loads."""

    plan: RestorePlan
    restore_tokens: int
    lease_blocks: int
    reason: str
    decision: Decision | None = None
    states: Mapping[str, State] = {}  # of the models that it was decided by


class Planner:
    """Chooses plans; until everything that matters is measured, all is loaded."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def plan(
        self, attachment: Attachment, ask: Ask, slots: Slots, matched: int, local: int,
        pending: int,
    ) -> Plan:  # fmt: skip
        """The plan for a match of `matched` tokens, of which the engine has `local` already."""
        parts, block_size = self._parts, attachment.space.block_size
        near = None if parts.hbm is None else parts.hbm.near(attachment, slots.places)
        loads = stretches(slots, matched, local, block_size, near)
        if not loads:
            reason = f"the engine already has all {local} matched tokens"
            return load_all(loads, matched, local, pending, block_size, reason)
        upward = parts.costs.upward(attachment.device)
        if upward is None and len(loads) == 1 and loads[0].source == IN_HOST:
            # Nothing beats what costs nothing, as far as anybody has said.
            reason = (
                f"load all {matched - local} tokens from host; the engine's copies from host are "
                "not measured yet"
            )
            return load_all(loads, matched, local, pending, block_size, reason)
        engine = self._parts.costs.engine(attachment.recompute_identity)
        paths = self._paths(loads, upward, near, attachment)
        links = {name: model for path in paths.values() for name, model in path.items()}
        missing = _missing(engine, links)
        if missing or engine is None:
            reason = f"{_loads(loads)}; not measured yet: {missing}"
            return load_all(loads, matched, local, pending, block_size, reason)
        p50, p99 = [
            Costs(engine.cost(share), _link_costs(links, share, attachment)) for share in (P50, P99)
        ]
        situation = self._situation(attachment, ask, loads, matched, local, paths, links, p50)
        decision = decide(situation, p50, p99)
        states = {"recompute": engine.state}
        states.update((name, model.state) for name, model in links.items() if model is not None)
        return _planned(decision, loads, matched, pending, block_size)._replace(states=states)

    def _paths(
        self, loads: Sequence[PlanStep], upward: PathModel | None, near: Near | None,
        attachment: Attachment,
    ) -> dict[str, Models]:  # fmt: skip
        """The links that bytes of each tier cross, in order, by the tier's name."""
        costs, sources = self._parts.costs, {step.source for step in loads}
        up: Models = {} if upward is None else {upward.identity[0]: upward}
        paths: dict[str, Models] = {}
        if ON_DISK in sources:
            paths[ON_DISK] = {READ_LINK: costs.link(costs.read_link), **up}
        if IN_HOST in sources:
            paths[IN_HOST] = up
        if near is not None and IN_HBM in sources:
            staged = LinkIdentity(ARENA_OUT_LINK, near.device)
            own = LinkIdentity(DEVICE_LINK, attachment.device)
            paths[IN_HBM] = {} if near.in_place else {ARENA_OUT_LINK: costs.link(staged)}
            paths[IN_HBM][DEVICE_LINK] = costs.link(own)
        return paths

    def _situation(
        self, attachment: Attachment, ask: Ask, loads: Sequence[PlanStep], matched: int,
        local: int, paths: Mapping[str, Models], links: Models, costs: Costs,
    ) -> Situation:  # fmt: skip
        space = attachment.space
        token_bytes = space.block_bytes * space.shard_count / space.block_size
        busy, waiting = ask.gpu_busy_ratio, ask.queued_prefill_tokens
        queued = {}
        sizes = {
            link: round(token_bytes * sum(s.token_count for s in loads if s.source == source))
            for source, link in OWN_LINKS.items()
        }
        for link, size in sizes.items():
            if link in links:
                queued[link] = self._parts.mover.bytes_ahead(
                    link, space.tenant, attachment.session.id, size
                )
        taken = self._byte_prices(links, sizes, queued, costs)
        gpu = gpu_price(busy, waiting) if busy or waiting else 0.0
        aligned = local - local % space.block_size
        return Situation(
            tuple(_segments(loads, aligned, token_bytes, paths)),
            new_tokens=max(1, ask.prompt_tokens - matched),
            local_tokens=aligned,
            block_size=space.block_size,
            shapes=attachment.shapes,
            overlap=attachment.overlap,
            deadline_seconds=ask.deadline_seconds,
            prices=Prices(gpu, taken) if gpu or taken else FREE,
            queued_bytes=queued,
            queued_prefill_tokens=waiting,
            prefill_chunk_tokens=attachment.prefill_chunk_tokens,
        )

    def _byte_prices(
        self, links: Models, sizes: Mapping[str, int], queued: Mapping[str, int], costs: Costs
    ) -> dict[str, float]:
        """What a byte on each link costs others: its seconds, times what each of them costs.

        By the link's use of late, and what is under way.
        """
        now, book, prices = self._parts.clock.now(), self._parts.costs, {}
        for name, model in links.items():
            if model is not None:
                waiting = book.waiting(model.identity, now)
                size = sizes.get(name, sizes[READ_LINK])
                price = link_price(waiting, size, queued.get(name, 0))
                if price:
                    prices[name] = price * costs.links[name].byte_seconds
        return prices


def stretches(
    slots: Slots, matched: int, local: int, block_size: int, near: Near | None
) -> list[PlanStep]:
    """Where the tokens from `local` to `matched` lie, by tier."""
    if matched == local:
        return []
    if near is None and slots.places.min() >= 0:
        return [PlanStep(local, matched - local, IN_HOST)]
    lies = (slots.places < 0).astype(np.int8)  # by number: IN_HOST or ON_DISK
    if near is not None:
        lies[near.mask] = SOURCES.index(IN_HBM)
    edges = [0, *(np.flatnonzero(np.diff(lies)) + 1).tolist(), len(lies)]
    tokens = [max(local, (slots.first_block + edge) * block_size) for edge in edges]
    return [
        PlanStep(tokens[n], tokens[n + 1] - tokens[n], SOURCES[source])
        for n, source in enumerate(lies[edges[:-1]].tolist())
    ]


def load_all(
    loads: list[PlanStep], matched: int, local: int, pending: int, block_size: int, reason: str
) -> Plan:
    """Everything that is there, without a prediction."""
    steps = [*loads, PlanStep(matched, pending, RECOMPUTE)] if pending else loads
    return Plan(RestorePlan(LOAD_ALL, tuple(steps)), matched - local, matched // block_size, reason)


def _planned(
    decision: Decision, loads: Sequence[PlanStep], matched: int, pending: int, block_size: int
) -> Plan:
    chosen = decision.chosen
    computed = computed_span(decision, chosen.cut)
    steps = list(cut_steps(loads, computed, matched + pending))
    kept = [step for step in steps if step.source != RECOMPUTE]
    last = kept[-1].first_token + kept[-1].token_count if kept else 0
    return Plan(
        RestorePlan(chosen.kind, tuple(steps), chosen.p50_seconds, chosen.p99_seconds),
        sum(step.token_count for step in kept),
        -(-last // block_size),
        decision.reason,
        decision,
    )


def computed_span(decision: Decision, cut: Cut) -> Span:
    """The matched tokens that a cut computes anew, as positions in the prompt."""
    base = decision.situation.local_tokens
    return base + cut.start, base + cut.resume


def cut_steps(loads: Sequence[PlanStep], computed: Span, end: int) -> Iterator[PlanStep]:
    """The loads without `computed`, which is recomputed, as is all from their end to `end`."""
    start, resume = computed
    stop = loads[-1].first_token + loads[-1].token_count
    start = max(start, loads[0].first_token)
    for step in loads:
        last = min(step.first_token + step.token_count, start)
        if step.first_token < last:
            yield PlanStep(step.first_token, last - step.first_token, step.source)
    if start < resume:
        # What comes after the match is computed in the same go if nothing is loaded in between.
        yield PlanStep(start, (resume if resume < stop else end) - start, RECOMPUTE)
    for step in loads:
        first = max(step.first_token, resume)
        left = step.first_token + step.token_count - first
        if left > 0:
            yield PlanStep(first, left, step.source)
    if end > stop and (start >= resume or resume < stop):
        yield PlanStep(stop, end - stop, RECOMPUTE)


def _segments(
    loads: Sequence[PlanStep], aligned: int, token_bytes: float, paths: Mapping[str, Models]
) -> Iterator[Segment]:
    """The loads as the planner sees them, from a block's edge on; the last of many as one.

    Of a last one of several tiers the slowest counts, as if it brought the others' for nothing.
    """
    first = aligned
    for step in loads[: SEGMENTS_MAX - 1] if len(loads) > SEGMENTS_MAX else loads:
        tokens = step.first_token + step.token_count - first
        links = tuple(paths[step.source])
        yield Segment(tokens, round(tokens * token_bytes), step.source, links)
        first += tokens
    rest = loads[SEGMENTS_MAX - 1 :] if len(loads) > SEGMENTS_MAX else ()
    if rest:
        tokens = rest[-1].first_token + rest[-1].token_count - first
        slowest = max((step.source for step in rest), key=SLOWEST_LAST.index)
        counted = sum(step.token_count for step in rest if step.source == slowest)
        yield Segment(tokens, round(counted * token_bytes), slowest, tuple(paths[slowest]))


def _link_costs(
    links: Mapping[str, PathModel | None], share: float, attachment: Attachment
) -> dict[str, LinkCost]:
    """Costs of links for all shards' bytes: ranks copy over links of their own, side by side."""
    shards = attachment.space.shard_count
    costs = {}
    for name, model in links.items():
        if model is not None:
            cost = model.cost(share)
            if shards > 1 and name != READ_LINK:
                cost = LinkCost(cost.latency_seconds, cost.byte_seconds / shards)
            costs[name] = cost
    return costs


def _missing(engine: RecomputeModel | None, links: Mapping[str, PathModel | None]) -> str:
    """What has to be measured before anything can be decided; empty if nothing has."""
    found = []
    steps = engine.sample_count if engine is not None else 0
    if steps < SAMPLES_MIN:
        found.append(f"the engine's steps ({steps} of {SAMPLES_MIN})")
    for name, model in links.items():
        count = model.sample_count if model is not None else 0
        if count < SAMPLES_MIN:
            found.append(f"{name} ({count} of {SAMPLES_MIN})")
    return ", ".join(found)


def _loads(loads: Sequence[PlanStep]) -> str:
    amounts: dict[str, int] = {}
    for step in loads:
        amounts[step.source] = amounts.get(step.source, 0) + step.token_count
    if len(amounts) == 1:
        (source,) = amounts
        return f"load all {amounts[source]} tokens from {source}"
    where = " and ".join(f"{amounts[source]} from {source}" for source in sorted(amounts)[::-1])
    return f"load all {sum(amounts.values())} tokens, {where}"
