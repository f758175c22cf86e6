"""Recommendations: money by hand, limits kept, and how sure a step is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.core.prices import Prices, load_prices
from kvstore.policies.cost import LinkCost
from kvstore.replay.formats import BUNDLED, TraceRequest
from kvstore.replay.simulate import Bench, Setup
from kvstore.replay.simulate_pool import Workers
from kvstore.replay.tune import Limits, Resamples, Tuner, session_of

FREE = Prices(host_gib_month=0, disk_gib_month=0, disk_terabyte_written=0)
NO_LIMITS = Limits()


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(Setup(BUNDLED, limit=300))


def tune(
    bench: Bench, prices: Prices, limits: Limits = NO_LIMITS, *policies: str
) -> dict[str, Any]:
    with Workers(bench, 1) as workers:
        return Tuner(bench, prices, limits, workers).tune(policies or ("lru",))


def test_prices_by_hand() -> None:
    """A GiB of memory, 10 of disk, a terabyte written in a month, 2 on GPUs; half a GPU's time."""
    prices = Prices(gpu_hour=2, host_gib_month=3, disk_gib_month=0.1, disk_terabyte_written=0.05)
    written = 1e12 / (730 * 3600)
    assert prices.month(1 << 30, 10 << 30, written) == pytest.approx(3 + 1 + 0.05)
    assert prices.month(0, hbm_bytes=2 << 30) == pytest.approx(48)
    assert prices.worth(0.5) == pytest.approx(730)


def test_free_memory_is_worth_all_of_it(bench: Bench) -> None:
    """Where memory costs nothing, all that it can save is bought; where GPU time does, nothing."""
    found = tune(bench, FREE, Limits(disk_bytes=0))
    steps = found["steps"]
    assert steps[-1]["tiers"]["host"]["capacity_fraction"] == pytest.approx(1)
    assert found["recommended"]["saves_per_month"] == steps[-1]["saves_per_month"]
    assert steps[-1]["saves_per_month"] > steps[0]["saves_per_month"]
    assert tune(bench, Prices(gpu_hour=0))["recommended"] is None


def test_a_step_adds_what_it_says(bench: Bench) -> None:
    """Steps add up to the net worth; a step that only costs is not one to take."""
    found = tune(bench, Prices(), Limits(disk_bytes=0))
    steps = found["steps"]
    total = 0.0
    for step in steps:
        total += step["adds_net_per_month"]
        assert step["net_per_month"] == pytest.approx(total)
        low, high = step["adds_net_per_month_interval"]
        assert low <= high
        assert 0 <= step["confidence"] <= 1
    assert steps[-1]["confidence"] < 0.5
    best = max(steps, key=lambda step: step["net_per_month"])
    assert found["recommended"] is None or found["recommended"]["tiers"] == best["tiers"]


def test_memory_of_gpus_is_bought_where_it_pays(bench: Bench) -> None:
    """Under a slow link copies free GPU time: for nothing they are bought, up to the limit and to
    what host has, and at the usual price they are not; each step tells."""
    costs = bench.setup.costs._replace(host=LinkCost.of(1e-3, 2e9))
    slow = Bench(bench.setup._replace(costs=costs), bench.requests)
    free, limits = (
        msgspec.structs.replace(FREE, hbm_gib_month=0.0),
        Limits(60 << 30, 60 << 30, 0, 8 << 30),
    )
    found = tune(slow, free, limits)
    sizes = [step["tiers"].get("hbm", {"capacity_bytes": 0}) for step in found["steps"]]
    assert 0 < max(size["capacity_bytes"] for size in sizes) <= 8 << 30
    assert "hbm" in found["recommended"]["tiers"]
    dear = tune(slow, msgspec.structs.replace(FREE, hbm_gib_month=24.0), limits)
    assert "hbm" not in dear["recommended"]["tiers"]
    assert dear["steps"][-1]["adds_net_per_month"] < 0
    assert "hbm" in dear["steps"][-1]["tiers"]


def test_what_a_gib_buys_is_told_of_each_tier(bench: Bench) -> None:
    """From one size to the next a GiB costs its price, saves what the sizes differ by, and is told
    beyond the limits too, but not of a tier that is not wanted."""
    found = tune(bench, Prices(), Limits(host_bytes=60 << 30, disk_bytes=0, hbm_bytes=20 << 30))
    around = {(one["tier"], one["from_bytes"] > 0): one for one in found["around"]}
    assert {tier for tier, _ in around} == {"host", "hbm"}
    assert around["hbm", False]["costs_per_gib_month"] == pytest.approx(24)
    for one in found["around"]:
        if one["tier"] == "host":
            assert one["costs_per_gib_month"] == pytest.approx(2)
        assert one["from_bytes"] < one["to_bytes"]
        assert 0 <= one["confidence"] <= 1
        before, after = one["ttft_mean_seconds"]
        assert after <= before * 1.001
    only_host = tune(bench, Prices(), Limits(host_bytes=8 << 30, disk_bytes=0))["around"]
    assert {one["tier"] for one in only_host} == {"host"}
    assert only_host[-1]["to_bytes"] > 8 << 30


def test_a_given_tier_is_paid_for(bench: Bench) -> None:
    """With a size given it is in every step, at its price, but never more than host has."""
    blocks = bench.workload.capacity(0.02)
    given = Bench(bench.setup._replace(hbm_blocks=blocks), bench.requests)
    found = tune(given, Prices(), Limits(disk_bytes=0))
    for step in found["steps"]:
        host, hbm = (step["tiers"][name]["capacity_bytes"] / 2**30 for name in ("host", "hbm"))
        assert hbm <= host
        assert step["cost_per_month"] == pytest.approx(2 * host + 24 * hbm)
    assert found["steps"][-1]["tiers"]["hbm"]["capacity_blocks"] == blocks


def test_limits_hold(bench: Bench) -> None:
    """No step costs more than the budget or is larger than what there is."""
    found = tune(bench, Prices(host_gib_month=0.1), Limits(30, 200 << 30, 300 << 30))
    for step in found["steps"]:
        assert step["cost_per_month"] <= 30
        assert step["tiers"]["host"]["capacity_bytes"] <= 200 << 30
        assert step["tiers"].get("disk", {"capacity_bytes": 0})["capacity_bytes"] <= 300 << 30
    nothing = tune(bench, Prices(), Limits(budget=1e-6))
    assert (nothing["steps"], nothing["recommended"]) == ([], None)


def test_cheap_disk_is_bought(bench: Bench) -> None:
    """Where memory is dear and disk free, the disk grows; its writes are told."""
    prices = Prices(host_gib_month=50, disk_gib_month=0, disk_terabyte_written=0, gpu_hour=50)
    found = tune(bench, prices)
    assert "disk" in found["recommended"]["tiers"]
    assert found["recommended"]["drive_writes_per_day"] > 0


def test_endurance_bounds_wear(bench: Bench) -> None:
    """Held to few drive writes a day, a disk wears out no faster than that, and is worth less."""
    prices = Prices(host_gib_month=50, disk_gib_month=0, disk_terabyte_written=0, gpu_hour=50)
    held = Bench(bench.setup._replace(endurance_dwpd=0.01), bench.requests)
    free, bound = tune(bench, prices)["recommended"], tune(held, prices)["recommended"]
    assert bound["net_per_month"] < free["net_per_month"]


def test_policies_compete(bench: Bench) -> None:
    """All policies are compared at the sizes chosen, the recommended one first."""
    found = tune(bench, FREE, Limits(host_bytes=60 << 30, disk_bytes=0), "lru", "gdsf", "fifo")
    assert sorted(one["policy"] for one in found["policies"]) == ["fifo", "gdsf", "lru"]
    assert found["policies"][0]["policy"] == found["recommended"]["policy"]
    assert found["policies"][0]["recommended_at_least_as_good"] == 1


def test_sessions() -> None:
    """A session is what the trace says, else what a prompt begins with below its first block."""
    one = TraceRequest(timestamp=0, input_length=1500, output_length=1, hash_ids=[0, 5, 6])
    same = TraceRequest(timestamp=9, input_length=1500, output_length=1, hash_ids=[0, 5, 9])
    other = TraceRequest(timestamp=9, input_length=1500, output_length=1, hash_ids=[0, 7, 8])
    assert session_of(one) == session_of(same) != session_of(other)
    named = TraceRequest(
        timestamp=9, input_length=9, output_length=1, hash_ids=[0], tenant="a", session="s"
    )
    assert session_of(named) == ("a", "s")


def test_resamples_hold_sessions_together() -> None:
    """Shares of equal sessions do not vary; those of unequal ones do, around the true share."""
    requests = [
        TraceRequest(timestamp=i, input_length=600, output_length=1, hash_ids=[0, i // 2])
        for i in range(200)
    ]
    draws = Resamples(requests, seed=3)
    assert draws.session_count == 100
    even, whole = np.tile([1.0, 0.0], 100), np.ones(200)
    assert np.allclose(draws.shares(even, whole), 0.5)
    uneven = np.repeat([1.0, 0.0], 100)
    shares = draws.shares(uneven, whole)
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.std() == pytest.approx(0.05, abs=0.02)
    assert np.array_equal(shares, Resamples(requests, seed=3).shares(uneven, whole))


def test_price_files(tmp_path: Path) -> None:
    """[prices] of a configuration is read; wrong keys and values are refused by a sentence."""
    path = tmp_path / "kvstore.toml"
    path.write_text('[server]\nsocket = "x"\n[prices]\ngpu_hour = 4\n')
    assert load_prices(path) == Prices(gpu_hour=4)
    assert load_prices(None) == Prices()
    for text, message in (
        ("[prices]\ngpu = 4\n", "gpu"),
        ("[prices]\ngpu_hour = -1\n", "pass 0 or more"),
        ("[prices]\ngpu_hour = nan\n", "pass 0 or more"),
        ("[prices]\nhbm_gib_month = -2\n", "prices.hbm_gib_month is -2"),
        ('[prices]\nhbm_gib_month = "a lot"\n', "hbm_gib_month, each a number"),
        ("[prices\n", "no usable"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidRequest, match=message):
            load_prices(path)
