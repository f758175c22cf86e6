"""Reuse hints: what clients say of the future, believed as far as each tenant was right."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.policies.reuse_curves import Curves
from kvstore.policies.reuse_units import Units
from kvstore.policies.uses import PRIORITY_MAX, REUSE_HINTS, Hint

# Ends, in seconds, of the classes of "it will be back after".
BACK_SECONDS = (30.0, 300.0)
KINDS = len(REUSE_HINTS) + len(BACK_SECONDS) + 1
# Multipliers that a hint of each kind starts with, before anything was seen of it.
FIRST_GUESS = (1.0, 0.3, 1.5, 3.0, 3.0, 3.0, 2.0)
TENANTS_MAX = 256


class Hints:
    """Kinds of hints, each with curves of its own, and a factor for each tenant's use of each.

    A hint that says nothing leads to the curves of everything, whoever gives it; one that is true
    of most tenants but not of one is taken back for that one by its factor.
    """

    def __init__(self, curves: Curves, units: Units) -> None:
        self._curves = curves
        # No hint is no evidence either way: code 0 stays what it is.
        self.factor = units.add_factor(1, neutral=True)
        self._codes: dict[tuple[str, int], int] = {}
        self._priorities: dict[str, float] = {}

    def kind(self, hint: Hint) -> int:
        """Number of the kind of hint; 0 for none."""
        kind = REUSE_HINTS.index(hint.expect_reuse)
        if kind > 1 and hint.expect_reuse_seconds > 0:
            later = sum(hint.expect_reuse_seconds > end for end in BACK_SECONDS)
            kind = len(REUSE_HINTS) + later
        if kind:
            self._curves.grow(kind + 1)
        return kind

    def code(self, tenant: str, kind: int) -> int:
        """Code of the factor by which a tenant's hints of a kind are believed."""
        if not kind:
            return 0
        code = self._codes.get((tenant, kind))
        if code is None:
            # Past so many tenants the others share one opinion.
            name = tenant if len(self._codes) < TENANTS_MAX * KINDS else ""
            code = self._codes.get((name, kind))
            if code is None:
                code = self._curves.factors.add_code(self.factor, FIRST_GUESS[kind])
                self._codes[name, kind] = code
        return code

    def belief(self, tenant: str, kind: int) -> float:
        """The factor itself: above 1 where the tenant's blocks are reused more than the curves
        say of such a hint."""
        return self._curves.factors.values[self.factor][self.code(tenant, kind)]

    def beliefs(self) -> Iterator[tuple[str, str, float]]:
        """(tenant, hint, factor) of all that were given; those past TENANTS_MAX are tenant ''."""
        for tenant, kind in self._codes:
            yield tenant, _name(kind), self.belief(tenant, kind)

    def weight(self, tenant: str, priority: int) -> float:
        """What a request's priority makes of its blocks' worth, among those of its tenant.

        A tenant that gives every request the highest priority has given none.
        """
        priority = min(max(priority, -PRIORITY_MAX), PRIORITY_MAX)
        mean = self._priorities.get(tenant)
        if mean is None and not priority:
            return 1.0
        weight = 2.0**priority
        mean = 1.0 if mean is None else mean
        self._priorities[tenant] = mean + 0.01 * (weight - mean)
        return weight / mean


def _name(kind: int) -> str:
    """What metrics call a kind: the hint, or when it said that the prompt is back."""
    if kind < len(REUSE_HINTS):
        return REUSE_HINTS[kind]
    later = kind - len(REUSE_HINTS)
    limit = f"within {BACK_SECONDS[later]:g} s" if later < len(BACK_SECONDS) else "later"
    return f"back {limit}"
