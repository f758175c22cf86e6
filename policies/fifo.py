"""`fifo`: the leaf that came first goes first."""

from __future__ import annotations

from kvstore.policies.base import register
from kvstore.policies.histories import History, HistoryPolicy
from kvstore.policies.index import Run


class Arrival(History):
    """When a run came."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def divided(self) -> Arrival:
        other = Arrival()
        other.number = self.number
        return other


@register("fifo")
class Fifo(HistoryPolicy[Arrival]):
    """Leaf-first in order of arrival, whatever is used."""

    kind = Arrival
    _arrivals = 0

    def on_new(self, run: Run, history: Arrival) -> None:
        self._arrivals += 1
        history.number = self._arrivals

    def key(self, run: Run) -> int:
        return self.history(run).number
