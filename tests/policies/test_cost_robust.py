"""Cost models against measurements that are wrong, change, or belong to something else."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore.policies.cost import (
    CallCost,
    LinkCost,
    LinkIdentity,
    PathModel,
    RecomputeIdentity,
    RecomputeModel,
)

COST = CallCost(10e-3, 32e-6, 1.3e-9)
NVME = LinkCost.of(100e-6, 6e9)
MIB = 1 << 20
ENGINE = RecomputeIdentity("llama-3-8b", "main", "engine-1.0", "H100", 1)
DISK = LinkIdentity("disk read", "nvme0n1")
WRONG = (0.0, -1.0, -1e-3, math.nan, math.inf, -math.inf, 1e300, 5e-324)
number = st.one_of(
    st.floats(), st.floats(1e-9, 1e3), st.integers(-(1 << 70), 1 << 70), st.sampled_from(WRONG)
)
count = st.one_of(st.integers(-(1 << 70), 1 << 70), st.integers(0, 200_000), st.floats())


def noise(rng: random.Random) -> float:
    return math.exp(rng.gauss(-0.02, 0.2))


def transfers(model: PathModel, rng: random.Random, truth: LinkCost, samples: int) -> None:
    for _ in range(samples):
        size = int(math.exp(rng.uniform(math.log(64 << 10), math.log(64 * MIB))))
        model.observe(truth.seconds(size) * noise(rng), size)


def calls(model: RecomputeModel, rng: random.Random, truth: CallCost, samples: int) -> None:
    for _ in range(samples):
        new, cached = rng.randrange(32, 8_192), rng.choice([0, rng.randrange(256, 65_536)])
        model.observe(truth.seconds(new, cached) * noise(rng), [(new, cached)])


def fitted_path(seed: int = 0, prior: LinkCost = NVME) -> PathModel:
    model = PathModel(DISK, prior)
    transfers(model, random.Random(seed), NVME, 300)
    return model


def fitted_recompute(seed: int = 0) -> RecomputeModel:
    model = RecomputeModel(ENGINE)
    calls(model, random.Random(seed), COST, 400)
    return model


@pytest.mark.parametrize("seconds", WRONG)
def test_impossible_seconds_change_nothing(seconds: float) -> None:
    """Zero, negative, infinite and absurd seconds are rejected and counted, and change nothing."""
    path, recompute = fitted_path(), fitted_recompute()
    before = path.cost(), recompute.cost(), path.sample_count
    for _ in range(100):
        assert not path.observe(seconds, MIB)
        assert not recompute.observe(seconds, [(512, 0)])
    assert (path.cost(), recompute.cost(), path.sample_count) == before
    rejected = {k: v for k, v in path.counters.items() if k not in ("clipped", "shifts")}
    assert sum(rejected.values()) == 100


def test_impossible_amounts_change_nothing() -> None:
    """Transfers of no or absurdly many bytes, and steps of no tokens, are rejected."""
    path, recompute = fitted_path(), fitted_recompute()
    before = path.cost(), recompute.cost()
    for size in (0, -1, 1 << 80, math.nan):
        assert not path.observe(1e-3, size)  # type: ignore[arg-type]
    assert not path.observe(1e-3, MIB, -1)
    for part in ((-5, 0), (5, -1), (1 << 80, 0)):
        recompute.observe(1e-3, [(512, 0), part])
    assert not recompute.observe(1e-3, [], calls=0)
    assert path.cost() == before[0]
    assert recompute.cost().token_seconds == pytest.approx(before[1].token_seconds, rel=0.2)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_outliers_are_clipped(factor: float) -> None:
    """5 % of measurements 100 x off move no prediction by more than a quarter."""
    rng, path, recompute = random.Random(9), fitted_path(), fitted_recompute()
    for _ in range(600):
        off = factor if rng.random() < 0.05 else 1.0
        size = rng.randrange(1, 64 * MIB)
        path.observe(NVME.seconds(size) * noise(rng) * off, size)
        new, cached = rng.randrange(32, 8_192), rng.choice([0, rng.randrange(256, 65_536)])
        recompute.observe(COST.seconds(new, cached) * noise(rng) * off, [(new, cached)])
        assert path.seconds(32 * MIB) == pytest.approx(NVME.seconds(32 * MIB), rel=0.35)
        assert recompute.seconds(2_048, 4_096) == pytest.approx(
            COST.seconds(2_048, 4_096), rel=0.35
        )
        assert path.seconds(32 * MIB, share=0.5) == pytest.approx(NVME.seconds(32 * MIB), rel=0.25)
    assert path.counters["clipped"] > 10
    assert path.counters["shifts"] == recompute.counters["shifts"] == 0


def test_a_disk_that_hangs_is_noticed_before_it_answers() -> None:
    """A transfer that is overdue tells something; one that is not tells nothing."""
    path = fitted_path()
    before = path.cost()
    for share in (0.5, 1.1, 2.9):
        assert not path.observe_overdue(share * path.seconds(MIB), MIB)
    assert not path.observe_overdue(math.nan, MIB)
    assert path.cost() == before
    assert path.observe_overdue(100 * NVME.seconds(MIB), MIB)
    for _ in range(7):
        path.observe_overdue(100 * NVME.seconds(MIB), MIB)
    assert path.seconds(64 * MIB) > 20 * NVME.seconds(64 * MIB)


def test_a_clock_step_is_one_outlier() -> None:
    """A clock that steps by an hour during a transfer moves the prediction by less than 15 %."""
    path = fitted_path()
    before = path.seconds(32 * MIB)
    assert path.observe(3_600.0, 32 * MIB)
    assert not path.observe(-3_600.0, 32 * MIB)
    assert path.seconds(32 * MIB) == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [10.0, 3.0, 0.1])
def test_a_slower_disk_is_followed_within_50_samples(seed: int, factor: float) -> None:
    """3 or 10 x slower (or faster) is predicted within 25 % after 50 transfers, and so is back."""
    rng, path = random.Random(seed), fitted_path(seed)
    slow = NVME.times(factor)
    for truth in (slow, NVME, slow):
        transfers(path, rng, truth, 50)
        for size in (MIB, 64 * MIB):
            predicted = path.seconds(size, share=0.5)
            assert predicted == pytest.approx(truth.seconds(size), rel=0.25)
        transfers(path, rng, truth, 100)
        assert path.seconds(MIB, share=0.99) <= 3 * path.seconds(MIB, share=0.5)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_prior_far_off_is_left_within_50_samples(factor: float) -> None:
    """A prior 100 x off either way is corrected by the first 50 measurements."""
    path = PathModel(DISK, NVME.times(factor))
    transfers(path, random.Random(1), NVME, 50)
    assert path.seconds(32 * MIB) == pytest.approx(NVME.seconds(32 * MIB), rel=0.25)
    recompute = RecomputeModel(ENGINE)
    calls(recompute, random.Random(1), COST.times(factor), 50)
    wanted = COST.times(factor).seconds(4_096, 8_192)
    assert recompute.seconds(4_096, 8_192) == pytest.approx(wanted, rel=0.25)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(number, count, count), max_size=60))
def test_whatever_is_fed_predictions_stay_sane(fed: list[tuple[Any, Any, Any]]) -> None:
    """Predictions are finite, not negative, and grow with tokens, depth, bytes and queue."""
    path, recompute = PathModel(DISK, NVME), RecomputeModel(ENGINE)
    for seconds, first, second in fed:
        path.observe(seconds, first, second)
        recompute.observe(seconds, [(first, second)], second, first)
    for share in (None, 0.5, 0.99):
        by_bytes = [path.seconds(size, 0, share) for size in (0, 1, MIB, 1 << 40)]
        by_queue = [path.seconds(MIB, size, share) for size in (0, 1, MIB, 1 << 40)]
        by_tokens = [recompute.seconds(n, 512, 0, share) for n in (0, 1, 512, 1 << 20)]
        by_depth = [recompute.seconds(512, p, 0, share) for p in (0, 1, 512, 1 << 20)]
        for values in (by_bytes, by_queue, by_tokens, by_depth):
            assert values == sorted(values)
            assert values[0] >= 0.0
            assert math.isfinite(values[-1])
    assert recompute.state.name in ("prior", "fitted")


def test_a_dump_is_taken_over_by_the_same_thing() -> None:
    """A model loaded from its dump, through JSON, predicts and goes on learning the same."""
    for model, twin in (
        (fitted_path(), PathModel(DISK, NVME.times(2.0))),
        (fitted_recompute(), RecomputeModel(ENGINE)),
    ):
        assert twin.load(json.loads(json.dumps(model.dump(), allow_nan=False)))
        assert twin.cost(0.99) == pytest.approx(model.cost(0.99), rel=1e-2)
        assert twin.state == model.state
    rng, again = random.Random(5), random.Random(5)
    model, twin = fitted_path(), PathModel(DISK, NVME)
    assert twin.load(model.dump())
    transfers(model, rng, NVME, 200)
    transfers(twin, again, NVME, 200)
    assert twin.cost(0.5) == pytest.approx(model.cost(0.5), rel=1e-6)


def test_a_model_of_decodes_only_is_dumped_too() -> None:
    """Without one prefill measured a dump is still JSON, and the prior says what is missing."""
    model, twin = RecomputeModel(ENGINE), RecomputeModel(ENGINE)
    for number in range(50):
        model.observe(0.02, [], 10 + number, 10_000)
    assert model.state == ("prior", "no chunk size was measured")
    assert twin.load(json.loads(json.dumps(model.dump(), allow_nan=False)))
    assert twin.state == model.state
    assert RecomputeModel(ENGINE).load(RecomputeModel(ENGINE).dump())


def test_costs_of_something_else_are_not_taken_over() -> None:
    """Another engine build, device or shard count starts from the prior and says why."""
    saved = fitted_recompute().dump()
    for other in (
        ENGINE._replace(engine_build="engine-1.1"),
        ENGINE._replace(device="A100"),
        ENGINE._replace(shard_count=2),
    ):
        model = RecomputeModel(other)
        assert not model.load(saved)
        assert model.state.name == "prior"
        assert model.cost() == pytest.approx(COST)
        assert "H100" in model.unread
    path = PathModel(DISK._replace(device="nvme1n1"), NVME)
    assert not path.load(fitted_path().dump())


def test_a_damaged_dump_is_not_taken_over() -> None:
    """Anything that no model dumps leaves the prior, and the model says it is damaged."""
    good = fitted_path().dump()
    wrongs: list[Any] = [None, {}, [], {"identity": list(DISK)}]
    for key, value in (
        ("gram", [[1.0, 0.0]]), ("gram", [[math.nan] * 2] * 2), ("gram", [[-1.0, 0], [0, -1.0]]),
        ("vector", [1.0]), ("vector", "ab"), ("weight", -1.0), ("weight", math.nan), ("held", [0]),
        ("held", "x"), ("ranges", []), ("ranges", [[-5, 1]]), ("ranges", [[1]]),
        ("ratios", [1.0]), ("ratios", None),
        ("count", -4), ("count", None),
    ):  # fmt: skip
        wrongs.append({**good, "fit": {**good["fit"], key: value}})
    for wrong in wrongs:
        path = PathModel(DISK, NVME)
        assert not path.load(wrong)
        assert path.unread
        assert path.cost() == NVME
