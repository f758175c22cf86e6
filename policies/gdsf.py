"""`gdsf`: GreedyDual-Size-Frequency, with the seconds that a block saves as its cost."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvstore.policies.base import Context, register
from kvstore.policies.histories import History, HistoryPolicy
from kvstore.policies.index import Run
from kvstore.policies.reference_counts import ReferenceCounts, count_of, first_counted_alike


class Credit(History):
    """The level at the run's last use."""

    __slots__ = ("level",)

    def __init__(self) -> None:
        super().__init__()
        self.level = 0.0

    def take(self, other: History) -> None:
        assert isinstance(other, Credit)
        self.level = max(self.level, other.level)


@register("gdsf")
class Gdsf(HistoryPolicy[Credit]):
    """Ranks by H = L + references x seconds, L the highest H that went (Cherkasova 1998).

    References count from the first time a block was asked for, also while it was not here. Blocks
    of a space have one size, so the size would only scale the seconds.
    """

    kind = Credit

    def __init__(self, tier: int, context: Context):
        super().__init__(tier, context)
        self._level = 0.0
        self._offered = 0.0
        context.model(ReferenceCounts)

    def on_new(self, run: Run, history: Credit) -> None:
        history.level = self._level

    def on_access(self, run: Run) -> None:
        super().on_access(run)
        self.history(run).level = self._level

    def key(self, run: Run) -> float:
        count = count_of(run, self.last_position(run))
        return self.history(run).level + count * self.loss(run)

    def first_to_go(self, run: Run) -> int:
        return first_counted_alike(run)

    def victims(self, tenants: Collection[str]) -> Iterator[Run]:
        for run in super().victims(tenants):
            self._offered = self.key(run)
            yield run

    def on_evicted(self, run: Run) -> None:
        super().on_evicted(run)
        # What lies above is worth less than what went: the level must not fall back with it.
        self._level = max(self._level, self._offered)
