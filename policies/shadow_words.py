"""What the estimates of shadows come to, said in words for operators."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policies.shadow import Estimate

# Less than this share of what is saved now is not worth a word.
WORTH_SAYING = 0.02
_FACTORS = {0.25: "a quarter of", 0.5: "half", 2.0: "twice", 3.0: "three times", 4.0: "four times"}


def what_if(estimates: Sequence[Estimate]) -> str:
    """A sentence: the change that saves most, and whether less room would do."""
    now, *others = estimates
    said = [_best(now, others), _spare(now, others)]
    return "; ".join(filter(None, said)) or "nothing that is tried beside it would save 2 % more"


def _best(now: Estimate, others: Sequence[Estimate]) -> str:
    """The policy, and the larger tier, that save most, if they save more."""
    rivals = [one for one in others if one.variant.capacity == 1]
    larger = [one for one in others if one.variant.capacity > 1]
    found = []
    for group in (larger, rivals):
        best = max(group, key=lambda one: one.saved_ratio, default=now)
        if best.saved_ratio > (1 + WORTH_SAYING) * now.saved_ratio:
            more = best.saved_per_second - now.saved_per_second
            found.append(f"{_name(best, now)} would save {_seconds(more)} of prefill a second more")
    return "; ".join(found)


def _spare(now: Estimate, others: Sequence[Estimate]) -> str:
    """The smallest part of each tier that would do as well, the other tiers as they are."""
    least: dict[str, Estimate] = {}
    for one in sorted(others, key=lambda one: one.variant.capacity):
        as_good = one.saved_ratio >= (1 - WORTH_SAYING) * now.saved_ratio
        if one.variant.capacity < 1 and as_good:
            least.setdefault(one.variant.tier, one)
    if not least or not now.saved_ratio:
        return ""
    return f"{' or '.join(_name(one, now) for one in least.values())} would do as well"


def _name(one: Estimate, now: Estimate) -> str:
    policy, tier, capacity = one.variant
    if capacity == 1:
        return f"{policy} instead of {now.variant.policy}"
    return f"{_FACTORS.get(capacity, f'{capacity:g} times')} the {tier} tier"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"
