"""The whole store against a dictionary: it may miss, it may never lie."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from store_machine import StoreMachine


def check(kind: str, examples: int, steps: int, same: bool = False) -> None:
    """Runs the machine; `same` draws the same examples every time."""
    run_state_machine_as_test(
        lambda: StoreMachine(kind),
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
            derandomize=same,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
        ),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["memory", "host"])
def test_may_miss_may_never_lie(kind: str) -> None:
    """I1, I3, I4, I5, I6, I10, I11, I22: whatever is called in whatever order, a hit is right."""
    check(kind, 80, 50, same=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["memory", "host"])
def test_may_miss_may_never_lie_for_long(kind: str) -> None:
    """I1, I3, I4, I5, I6, I10, I11, I22: the same, many times over."""
    check(kind, 300, 80)
