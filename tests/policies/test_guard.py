"""The guard: when another policy acts for saved_time, and when it comes back."""

from __future__ import annotations

import random

import pytest

from kvstore.policies.guard import GUARDED, LEAVE_BELOW, Guard, Switch


def half(seed: int = 0, **means: float) -> dict[str, list[float]]:
    """Seconds saved at 500 requests: every policy misses the same ones, and saves in proportion."""
    rng = random.Random(seed)
    draws = [rng.expovariate(1.0) * (rng.random() < 0.5) for _ in range(500)]
    return {name: [mean * draw for draw in draws] for name, mean in means.items()}


def test_a_worse_saved_time_gives_way_and_comes_back() -> None:
    """Below 98 % of the best another acts and the reason names both; from 99 % on it is back."""
    guard = Guard("saved_time")
    bad = half(saved_time=0.9, lru=1.0, gdsf=0.95)
    switch = guard.judge(bad, bad)
    assert switch is not None
    assert switch.policy == guard.acting == "lru"
    assert "saved_time would save 90.0% of what lru saves" in guard.reason
    assert guard.judge(bad, bad) is None
    almost = half(saved_time=0.985, lru=1.0, gdsf=0.9)
    assert guard.judge(almost, almost) is None
    good = half(saved_time=0.995, lru=1.0, gdsf=0.9)
    assert guard.judge(good, good) == Switch("saved_time", "")
    assert guard.acting == guard.configured == "saved_time"
    assert guard.reason == ""


def test_a_third_policy_takes_over_from_the_second() -> None:
    """While saved_time is worse, the best of all acts, also if that changes."""
    guard = Guard("saved_time")
    guard.judge(*[half(saved_time=0.5, lru=1.0, gdsf=0.9)] * 2)
    switch = guard.judge(*[half(saved_time=0.5, lru=0.8, gdsf=1.0)] * 2)
    assert switch is not None
    assert (switch.policy, guard.acting) == ("gdsf", "gdsf")


@pytest.mark.parametrize("share", [LEAVE_BELOW, 0.99, 1.0, 1.1])
def test_nothing_changes_within_the_margin(share: float) -> None:
    """At 98 % of the best and above, saved_time goes on."""
    guard = Guard("saved_time")
    assert guard.judge(*[half(saved_time=share, lru=1.0)] * 2) is None


def test_both_halves_have_to_agree() -> None:
    """One bad half, however bad, changes nothing."""
    guard = Guard("saved_time")
    bad, good = half(saved_time=0.1, lru=1.0), half(saved_time=1.0, lru=1.0)
    assert guard.judge(bad, good) is None
    assert guard.judge(good, bad) is None


@pytest.mark.parametrize("seed", range(20))
def test_noise_changes_nothing(seed: int) -> None:
    """Two policies that save the same on average, at other requests, are taken as equal."""
    rng = random.Random(seed)
    guard = Guard("saved_time")
    halves = [
        {name: [rng.expovariate(1.0) ** 3 for _ in range(500)] for name in ("saved_time", "lru")}
        for _ in range(2)
    ]
    assert guard.judge(*halves) is None


@pytest.mark.parametrize("configured", ["lru", "gdsf"])
def test_only_saved_time_is_guarded(configured: str) -> None:
    """Who configures another policy gets it, whatever would be better."""
    guard = Guard(configured)
    bad = half(saved_time=1.0, lru=0.1, gdsf=0.1)
    assert guard.judge(bad, bad) is None
    assert guard.acting == configured != GUARDED


def test_nothing_saved_is_no_reason() -> None:
    """Where nobody saves anything, or there is no rival, nothing is concluded."""
    assert Guard("saved_time").judge(*[half(saved_time=0.0, lru=0.0)] * 2) is None
    assert Guard("saved_time").judge(*[half(saved_time=0.0)] * 2) is None
