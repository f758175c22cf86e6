"""Histories: what a policy keeps of each run itself, through splits, merges and evictions."""

from __future__ import annotations

from typing import Generic, Self, TypeVar

from kvstore.policies.base import Context, HeapPolicy
from kvstore.policies.index import Run


class History:
    """How often a run was asked for; the first `base` of these are counted above it already."""

    __slots__ = ("base", "count")

    def __init__(self) -> None:
        # The request that brought a run in also came through what is above it.
        self.count = self.base = 1

    def divided(self) -> Self:
        """What the end of the run has of it: all is counted in its front."""
        other = type(self)()
        other.take(self)
        other.count = other.base = self.count
        return other

    def take(self, other: History) -> None:
        """Takes over what belongs to a use of `other`: it was one of this run, too."""


H = TypeVar("H", bound=History)


class HistoryPolicy(HeapPolicy, Generic[H]):
    """Base of policies with a history of each run of their tier; a subclass says of which kind."""

    kind: type[H]

    def __init__(self, tier: int, context: Context):
        super().__init__(tier, context)
        self._histories: dict[Run, H] = {}

    def history(self, run: Run) -> H:
        """The run's, a new one if it came to this tier unheard of."""
        found = self._histories.get(run)
        if found is None:
            found = self._histories[run] = self.kind()
            self.on_new(run, found)
        return found

    def on_new(self, run: Run, history: H) -> None:
        """`run` is in this tier for the first time since it was last evicted from it."""

    def on_insert(self, run: Run, start: int, stop: int) -> None:
        self.history(run)

    def on_access(self, run: Run) -> None:
        self.history(run).count += 1

    def on_split(self, run: Run, tail: Run) -> None:
        super().on_split(run, tail)
        found = self._histories.get(run)
        if found is not None:
            self._histories[tail] = found.divided()

    def on_merge(self, run: Run, tail: Run) -> None:
        super().on_merge(run, tail)
        self._leave(tail, run)

    def on_remove(self, run: Run) -> None:
        super().on_remove(run)
        self._leave(run, run.parent)

    def on_evicted(self, run: Run) -> None:
        if run.alive and not run.resident_in(self.tier):
            self._leave(run, run.parent)

    def on_leaf(self, run: Run) -> None:
        self.history(run)
        super().on_leaf(run)

    def _leave(self, run: Run, heir: Run | None) -> None:
        """What was asked of `run` was asked of its heir, the run above it."""
        found = self._histories.pop(run, None)
        if found is None or heir is None or not heir.resident_in(self.tier):
            return
        above = self.history(heir)
        above.count += found.count - found.base
        above.take(found)
