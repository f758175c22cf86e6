"""`Guard`: has the store act by another policy while the one that learns saves less than it would.

`saved_time` believes that what was reused will be reused. Where that is wrong a plain policy does
better, and its shadow shows it. A window of requests decides, both halves of which must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

GUARDED = "saved_time"
# It acts again from a higher share of the best on than it stops acting at.
LEAVE_BELOW, RETURN_FROM = 0.98, 0.99
# So many standard errors of what the better one saves more, request by request.
SURE_ERRORS = 2.0

# Seconds saved at each request of one half of the window, by policy.
Saved = Mapping[str, Sequence[float]]


class Switch(NamedTuple):
    """Another policy acts from now on; `reason` is a sentence."""

    policy: str
    reason: str


class Guard:
    """What acts for a configured policy; only `saved_time` is guarded."""

    def __init__(self, configured: str) -> None:
        self.configured = configured
        self.acting = configured
        self.reason = ""

    def judge(self, first: Saved, second: Saved) -> Switch | None:
        """Who acts after a full window, if not who acts now."""
        if self.configured != GUARDED or GUARDED not in first:
            return None
        totals = {name: sum(first[name]) + sum(second[name]) for name in first}
        best = max(totals, key=lambda name: (totals[name], name == GUARDED))
        if self.acting != GUARDED and totals[GUARDED] >= RETURN_FROM * totals[best]:
            return self._switch(GUARDED, "")
        if best == GUARDED or best == self.acting or not self._is_worse(best, first, second):
            return None
        share = totals[self.acting] / totals[best]
        return self._switch(
            best,
            f"{self.acting} would save {share:.1%} of what {best} saves, by their shadows; "
            f"{GUARDED} acts again from {RETURN_FROM:.0%} on",
        )

    def _is_worse(self, best: str, first: Saved, second: Saved) -> bool:
        """Whether the acting policy is worse in both halves, and that not by chance."""
        for half in (first, second):
            if sum(half[self.acting]) >= LEAVE_BELOW * sum(half[best]):
                return False
        more = [
            theirs - mine
            for half in (first, second)
            for theirs, mine in zip(half[best], half[self.acting], strict=True)
        ]
        # With a mean of 0, the sum's standard error is the root of the sum of squares.
        return sum(more) > SURE_ERRORS * math.sqrt(sum(one * one for one in more))

    def _switch(self, policy: str, reason: str) -> Switch:
        self.acting, self.reason = policy, reason
        return Switch(policy, reason)
