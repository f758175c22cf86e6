"""`kvstore bench predict` and the live form of `decide`: what their figures are made of."""

from __future__ import annotations

import pytest

from kvstore.bench import predict
from kvstore.bench.decide_live import COST, DOCUMENT_TOKENS, Served, live_figures
from kvstore.bench.predict import Restored


def restored(p50: float, p99: float, seconds: float) -> Restored:
    return Restored(1, 1, p50, p99, seconds)


def test_predictions_are_judged_one_by_one() -> None:
    """The error is relative to what was measured, of the middle restore; coverage counts those
    that ended within the 99 % time; the spread is the middle one's.
    """
    found = predict.figures(
        [
            restored(1.0, 2.0, 2.0),
            restored(1.0, 2.0, 1.25),
            restored(2.0, 6.0, 1.0),
            restored(1.0, 3.0, 4.0),
            restored(1.0, 2.0, 1.0),
        ]
    )
    assert found == {
        "median_abs_error_ratio": pytest.approx(0.5),
        "p99_coverage": pytest.approx(0.8),
        "p99_over_p50": pytest.approx(2.0),
    }


def test_live_figures_compare_the_same_requests() -> None:
    """Medians over medians and means over means; slower is by a tenth and by three milliseconds."""
    served = [
        Served("miss", 1, "recompute_all", 0.100, 0.100),
        Served("disk", 1, "load_all", 0.050, 0.200),
        Served("host", 1, "load_all", 0.340, 0.300),
        Served("host", 1, "load_all", 0.012, 0.010),
    ]
    found = live_figures(served)
    assert found["live_ttft_ratio_to_store_off"] == pytest.approx(0.075 / 0.150)
    assert found["live_ttft_mean_ratio_to_store_off"] == pytest.approx(0.502 / 0.610)
    assert found["live_share_slower_than_store_off"] == 0.25


def test_live_prompts_are_worth_a_decision() -> None:
    """Documents have 2,048 tokens or more, which take no less than 75 ms to compute."""
    assert DOCUMENT_TOKENS[0] >= 2_048
    assert COST.seconds(DOCUMENT_TOKENS[0], 0) >= 0.075
