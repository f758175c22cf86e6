"""Re-planning: a load that falls behind is cut short or given up, and never without reason."""

from __future__ import annotations

import pytest

from kvstore.core.plan import LOAD_ALL
from kvstore.policies.cost import CallCost, LinkCost
from kvstore.policies.planner import Decision, decide
from kvstore.policies.replanning import Progress, Shorter, replan
from kvstore.policies.timing import Costs, Segment, Situation

KV_BYTES = 131_072
CALL = CallCost(10e-3, 32e-6, 1.3e-9)
DISK = frozenset({"disk"})
STEP = 32  # tokens of 4 MiB


def costs(factor: float = 1.0) -> Costs:
    links = {"host": LinkCost.of(20e-6, 50e9), "disk": LinkCost.of(100e-6, 6e9)}
    return Costs(CALL, {**links, "disk": links["disk"].times(factor)})


def segment(tokens: int, source: str) -> Segment:
    return Segment(tokens, tokens * KV_BYTES, source, (source,))


ONE = Situation((segment(8_192, "disk"),), 512)
P50, P99 = costs(), costs(1.5)


def load_of(tokens: int) -> float:
    return P50.links["disk"].seconds(tokens * KV_BYTES)


def look(
    decision: Decision, ready: int, elapsed: float, keeps_part: bool = True,
    first: int = 0, stop: int = 8_192,
) -> Shorter | None:  # fmt: skip
    return replan(decision, Progress(first, stop, ready, STEP, elapsed, DISK, keeps_part))


@pytest.mark.parametrize("keeps_part", [False, True])
def test_a_load_on_time_goes_on(keeps_part: bool) -> None:
    """Up to the 99 % time of each part nothing is done, however often one looks."""
    decision = decide(ONE, P50, P99)
    assert decision.kind == LOAD_ALL
    for share in range(11):
        ready = 8_192 * share // 10
        elapsed = P99.links["disk"].seconds((ready + STEP) * KV_BYTES)
        assert look(decision, ready, elapsed, keeps_part) is None
    assert look(decision, 8_192, 100.0, keeps_part) is None


def test_a_load_that_stalls_is_given_up() -> None:
    """10 x slower than predicted: what is left is recomputed, which takes less than waiting."""
    decision = decide(ONE, P50, P99)
    found = look(decision, 1_024, 10 * load_of(1_024 + STEP))
    assert found is not None
    assert found.tokens == 1_024
    assert "x slower than predicted: recompute all 7,168 matched tokens takes" in found.reason


def test_who_keeps_nothing_weighs_all_against_the_rest() -> None:
    """Without use for a part, giving up means all anew, and pays only if that is still faster."""
    decision = decide(ONE, P50, P99)
    found = look(decision, 1_024, 10 * load_of(1_024 + STEP), keeps_part=False)
    assert found is not None
    assert found.tokens == 0
    assert "to recompute all takes 33" in found.reason
    # Half is there: the other half is worth computing, the whole is not.
    elapsed = 2.5 * load_of(6_144)
    assert look(decision, 6_144, elapsed, keeps_part=False) is None


def test_a_load_that_never_began_is_given_up_after_a_while() -> None:
    """With not one block there all is recomputed, but a hitch at the start changes nothing."""
    decision = decide(ONE, P50, P99)
    for keeps_part in (False, True):
        assert look(decision, 0, 0.012, keeps_part) is None
        found = look(decision, 0, 0.2, keeps_part)
        assert found is not None
        assert found.tokens == 0


def test_nearly_done_is_not_given_up() -> None:
    """A late load whose rest still takes less than computing it goes on."""
    decision = decide(ONE, P50, P99)
    elapsed = 1.8 * load_of(8_000)
    assert look(decision, 8_000, elapsed) is None
    assert look(decision, 8_000, elapsed, keeps_part=False) is None


def test_less_is_loaded_where_that_is_best() -> None:
    """The little that leads to what is in host is waited for, what is behind it is computed."""
    parts = (segment(512, "disk"), segment(4_096, "host"), segment(3_584, "disk"))
    decision = decide(Situation(parts, 512), P50, P99)
    assert decision.kind == LOAD_ALL
    found = look(decision, 480, 6 * load_of(512))
    assert found is not None
    # What the disk brings while host does its part costs nothing.
    assert 4_608 <= found.tokens <= 4_800
    assert "from disk and 4,096 from host, recompute 3," in found.reason
    # Where the load in question ends before that, it goes on.
    assert look(decision, 480, 6 * load_of(512), stop=512) is None


def test_a_part_of_a_split_is_all_or_nothing() -> None:
    """Whoever computes the middle meanwhile cannot be told to compute another one."""
    both = frozenset({"prefix", "split"})
    two = Situation((segment(4_096, "host"), segment(8_192, "disk")), 1_024, shapes=both)
    decision = decide(two, P50, P99)
    assert decision.kind == "split"
    first = decision.chosen.cut.resume
    found = look(decision, 0, 3.0, keeps_part=True, first=first, stop=12_288)
    assert found is not None
    assert found.tokens == 0
    assert look(decision, 0, 0.012, keeps_part=True, first=first, stop=12_288) is None


def test_links_that_keep_up_are_not_blamed() -> None:
    """What other links do takes no time of this one, and they are as fast as before."""
    chain = Segment(8_192, 8_192 * KV_BYTES, "disk", ("disk", "host"))
    decision = decide(Situation((chain,), 512), P50, P99)
    assert decision.kind == LOAD_ALL
    alone = look(decide(ONE, P50, P99), 1_024, 10 * load_of(1_024 + STEP))
    found = look(decision, 1_024, 10 * load_of(1_024 + STEP))
    assert found is not None
    assert alone is not None
    assert found.reason.split(":")[0] == alone.reason.split(":")[0]


def test_the_deadline_counts_from_the_start() -> None:
    """What has passed is taken off the deadline that decides about the rest."""
    decision = decide(ONE._replace(deadline_seconds=1.0), P50, P99)
    found = look(decision, 1_024, 0.4)
    assert found is not None
    assert "the deadline of 600.00 ms is met" in found.reason
