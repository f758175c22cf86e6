"""`saved_time`: what saves the fewest seconds per second of keeping it goes first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from kvstore.policies.base import Context, register
from kvstore.policies.index import Run
from kvstore.policies.leaf_scores import LeafScores
from kvstore.policies.reuse_model import ReuseModel


@register("saved_time")
class SavedTime:
    """Leaf-first by index of reuse x seconds lost; what just came competes with all else.

    The index is the turn-reuse index of `reuse_curves`, learned by one `ReuseModel` for all tiers.
    """

    name = ""

    def __init__(self, tier: int, context: Context):
        self.tier = tier
        self.context = context
        self.model = context.model(ReuseModel)
        self._tenants: dict[str, LeafScores] = {}
        self._parked: set[Run] = set()
        self._offered: tuple[Run | None, int] = (None, 0)

    def _scores(self, run: Run) -> LeafScores:
        tenant = run.root.space.tenant
        scores = self._tenants.get(tenant)
        if scores is None:
            worth = self.context.worth
            scores = LeafScores(
                self.tier, self.model, self._loss, self.context.tick, lambda: worth.version
            )
            self._tenants[tenant] = scores
        return scores

    def _loss(self, run: Run) -> float:
        """Seconds lost per byte with the run's last block."""
        space = run.root.space
        return self.context.loss(run, self.tier) / (space.slot_bytes * space.shard_count)

    def on_insert(self, run: Run, start: int, stop: int) -> None:
        parent = run.parent
        if parent is not None and parent.count:
            self._scores(run).take_out(parent)

    def on_access(self, run: Run) -> None:
        if run not in self._parked and run.is_leaf(self.tier):
            self._scores(run).file(run)

    def on_split(self, run: Run, tail: Run) -> None:
        # The index tells next that the tail is a leaf, if it is.
        self._scores(run).take_out(run)
        self._parked.discard(run)

    def on_merge(self, run: Run, tail: Run) -> None:
        self._forget(tail)

    def on_cost(self, run: Run, seconds: float) -> None:
        pass

    def on_remove(self, run: Run) -> None:
        self._forget(run)

    def on_evicted(self, run: Run) -> None:
        offered, before = self._offered
        if run is offered:
            after = run.resident_in(self.tier) if run.alive else 0
            self._scores(run).gone((before - after) // run.root.space.shard_count)
            self._offered = (run, after)

    def first_to_go(self, run: Run) -> int:
        use = run.policy
        if use is None or not run.first < use.known < run.first + run.ready:
            return 0
        known: int = use.known
        return known - run.first

    def on_leaf(self, run: Run) -> None:
        if run in self._parked:
            return
        scores = self._scores(run)
        scores.file(run)
        parent = run.parent
        if parent is not None and parent.count:
            scores.take_out(parent)

    def on_adopt(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if run.is_leaf(self.tier):
                self._scores(run).file(run)

    def _forget(self, run: Run) -> None:
        self._scores(run).take_out(run)
        self._parked.discard(run)

    def park(self, run: Run) -> None:
        self._scores(run).take_out(run)
        self._parked.add(run)

    def unpark(self, run: Run) -> None:
        if run in self._parked:
            self._parked.discard(run)
            if run.is_leaf(self.tier):
                self._scores(run).file(run)

    def victims(self, tenants: Collection[str]) -> Iterator[Run]:
        while (run := self._first(tenants)) is not None:
            self._offered = (run, run.resident_in(self.tier))
            yield run

    def _first(self, tenants: Collection[str]) -> Run | None:
        best: tuple[float, Run] | None = None
        for tenant in tenants:
            scores = self._tenants.get(tenant)
            if scores is not None and len(scores):
                found = scores.first(partial(self._blocks, tenant))
                if found is not None and (best is None or found < best):
                    best = found
        return None if best is None else best[1]

    def _blocks(self, tenant: str) -> int:
        """Blocks of a tenant in this tier."""
        scores = self._tenants[tenant]
        space = next(scores.runs()).root.space
        used = self.context.accounts.tenant_used(self.tier, tenant)
        return used // (space.slot_bytes * space.shard_count)
