"""Re-planning: a restore that falls behind is cut short or given up, and never without reason."""

from __future__ import annotations

import pytest

from kvstore.core.plan import LOAD_ALL
from kvstore.policies.cost import CallCost, LinkCost
from kvstore.policies.planner import RECOMPUTE_ALL, decide
from kvstore.policies.replanning import Progress, replan
from kvstore.policies.timing import Costs, Segment, Situation

KV_BYTES = 131_072
CALL = CallCost(10e-3, 32e-6, 1.3e-9)
BOTH = frozenset({"prefix", "split"})


def costs(factor: float = 1.0) -> Costs:
    links = {"host": LinkCost.of(20e-6, 50e9), "disk": LinkCost.of(100e-6, 6e9)}
    return Costs(CALL, {**links, "disk": links["disk"].times(factor)})


def segment(tokens: int, source: str) -> Segment:
    return Segment(tokens, tokens * KV_BYTES, source, (source,))


ONE = Situation((segment(8_192, "disk"),), 512)
TWO = Situation((segment(4_096, "host"), segment(8_192, "disk")), 1_024, shapes=BOTH)
P50, P99 = costs(), costs(1.5)


def test_a_restore_on_time_goes_on() -> None:
    """Up to the 99 % time of each block nothing is done, however often one looks."""
    decision = decide(ONE, P50, P99)
    assert decision.kind == LOAD_ALL
    for share in range(11):
        ready = 8_192 * share // 10
        elapsed = P99.links["disk"].seconds(ready * KV_BYTES)
        assert replan(decision, Progress(ready, elapsed), P50, P99) is None
    assert replan(decision, Progress(8_192, 100.0), P50, P99) is None


def test_a_restore_that_stalls_is_given_up() -> None:
    """10 x slower than predicted: what is left is recomputed, which takes less than waiting."""
    decision = decide(ONE, P50, P99)
    elapsed = 10 * P50.links["disk"].seconds(1_024 * KV_BYTES)
    again = replan(decision, Progress(1_024, elapsed), P50, P99)
    assert again is not None
    assert again.kind == RECOMPUTE_ALL
    assert again.situation.local_tokens == 1_024
    assert again.chosen.p50_seconds == pytest.approx(CALL.seconds(7_680, 1_024))
    assert again.reason.startswith("the restore is 9.8")
    assert "x slower than predicted: recompute all 7,168 matched tokens" in again.reason


def test_a_restore_that_never_began_is_given_up() -> None:
    """With not one block there after a while, all is recomputed."""
    decision = decide(ONE, P50, P99)
    again = replan(decision, Progress(0, 0.05), P50, P99)
    assert again is not None
    assert again.kind == RECOMPUTE_ALL
    assert again.plan.steps[0].token_count == 8_192


def test_nearly_done_is_not_given_up() -> None:
    """A late restore whose rest still takes less than computing it goes on."""
    decision = decide(ONE, P50, P99)
    elapsed = 1.8 * P50.links["disk"].seconds(8_000 * KV_BYTES)
    assert replan(decision, Progress(8_000, elapsed), P50, P99) is None


def test_a_split_meets_elsewhere() -> None:
    """When the rest of a split is late, more of the middle is computed instead."""
    decision = decide(TWO, P50, P99)
    assert decision.kind == "split"
    computed = decision.chosen.cut.resume
    again = replan(decision, Progress(computed, 0.4), P50, P99)
    assert again is not None
    assert again.situation.local_tokens == computed
    assert again.kind in ("split", RECOMPUTE_ALL)
    assert again.restore_tokens < decision.restore_tokens
    assert replan(decision, Progress(computed, 0.15), P50, P99) is None


def test_links_that_keep_up_are_not_blamed() -> None:
    """Only the link that is waited for counts as slower: host is still loaded from."""
    situation = Situation((segment(4_096, "disk"), segment(8_192, "host")), 512, shapes=BOTH)
    decision = decide(situation, P50, P99)
    again = replan(decision, Progress(0, 2.0), P50, P99)
    assert again is not None
    assert {step.source for step in again.plan.steps} == {"recompute", "host"}


def test_the_deadline_counts_from_the_start() -> None:
    """What has passed is taken off the deadline."""
    decision = decide(ONE._replace(deadline_seconds=1.0), P50, P99)
    again = replan(decision, Progress(1_024, 0.4), P50, P99)
    assert again is not None
    assert again.situation.deadline_seconds == pytest.approx(0.6)
