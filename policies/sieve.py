"""`sieve`: a hand goes round over the runs as they came, and takes what was not used meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kvstore.policies.base import Context, register
from kvstore.policies.histories import History, HistoryPolicy
from kvstore.policies.index import Run

# A place of the hand: its lap, and the number of the run it stands at.
Place = tuple[int, int]


class Visit(History):
    """A run's number, the lap in which it is first looked at, and where the hand was at its use."""

    __slots__ = ("lap", "number", "used")

    def __init__(self) -> None:
        super().__init__()
        self.number = self.lap = 0
        self.used: Place | None = None

    def divided(self) -> Visit:
        other = Visit()
        other.number, other.lap, other.used = self.number, self.lap, self.used
        return other

    def take(self, other: History) -> None:
        assert isinstance(other, Visit)
        if other.count > other.base and other.used is not None:
            self.used = max(self.used or other.used, other.used)


@register("sieve")
class Sieve(HistoryPolicy[Visit]):
    """SIEVE (Zhang et al., NSDI 2024), leaf-first, as a heap of when the hand takes each leaf.

    The hand passes a run once for each use since it last did, without regard to how many there
    were, and takes it the next time; a run with something below it is passed anyway.
    """

    kind = Visit

    def __init__(self, tier: int, context: Context):
        super().__init__(tier, context)
        self._hand: Place = (0, 0)
        self._offered: Place = (0, 0)
        self._arrivals = 0

    def on_new(self, run: Run, history: Visit) -> None:
        self._arrivals += 1
        history.number, history.lap = self._arrivals, self._hand[0]

    def on_access(self, run: Run) -> None:
        super().on_access(run)
        self.history(run).used = self._hand

    def key(self, run: Run) -> Place:
        visit = self.history(run)
        due = (visit.lap, visit.number)
        if visit.used is not None:
            due = max(due, (_next_lap(visit.used, visit.number) + 1, visit.number))
        if due < self._hand:
            due = (_next_lap(self._hand, visit.number), visit.number)
        return due

    def victims(self, tenants: Collection[str]) -> Iterator[Run]:
        for run in super().victims(tenants):
            self._offered = self.key(run)
            yield run

    def on_evicted(self, run: Run) -> None:
        super().on_evicted(run)
        self._hand = max(self._hand, self._offered)


def _next_lap(hand: Place, number: int) -> int:
    """The lap in which the hand next comes to a run."""
    return hand[0] if number > hand[1] else hand[0] + 1
