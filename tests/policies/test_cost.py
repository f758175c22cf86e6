"""Cost models: their formulas, what they learn, and what cannot mislead them."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvstore.policies.cost import (
    CallCost,
    LinkCost,
    LinkIdentity,
    PathModel,
    RecomputeIdentity,
    RecomputeModel,
    RecomputePrior,
    chain_fixed_seconds,
)
from kvstore.policies.planner import decide
from kvstore.policies.timing import Costs, Segment, Situation

COST = CallCost(10e-3, 32e-6, 1.3e-9)
NVME = LinkCost.of(100e-6, 6e9)
MIB = 1 << 20
ENGINE = RecomputeIdentity("llama-3-8b", "main", "engine-1.0", "H100", 1)
DISK = LinkIdentity("disk read", "nvme0n1")


def noise(rng: random.Random, ratio: float = 0.2) -> float:
    """A factor with mean 1 whose logarithm has the standard deviation `ratio`."""
    return math.exp(rng.gauss(-(ratio**2) / 2, ratio))


def steps(rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """(new, cached) tokens of forward calls: sizes and depths over three decades."""
    for _ in range(count):
        new = int(math.exp(rng.uniform(math.log(32), math.log(16_384))))
        yield new, rng.choice([0, int(math.exp(rng.uniform(math.log(256), math.log(131_072))))])


def fitted_model(seed: int, truth: CallCost = COST, count: int = 600) -> RecomputeModel:
    rng = random.Random(seed)
    model = RecomputeModel(ENGINE)
    for new, cached in steps(rng, count):
        model.observe(truth.seconds(new, cached) * noise(rng), [(new, cached)])
    return model


def path_model(rng: random.Random, truth: LinkCost, count: int = 200) -> PathModel:
    model = PathModel(DISK, LinkCost.of(1e-3, 1e9))
    transfers(model, rng, truth, count)
    return model


def transfers(model: PathModel, rng: random.Random, truth: LinkCost, count: int) -> None:
    for _ in range(count):
        size, queued = rng.randrange(1, 64 * MIB), rng.choice([0, 0, rng.randrange(256 * MIB)])
        model.observe(truth.seconds(size, queued) * noise(rng), size, queued)


@pytest.mark.parametrize(
    ("new", "cached", "chunk", "milliseconds"),
    [
        (512, 0, 0, 26.554),
        (8_192, 0, 0, 315.765),
        (8_192, 24_576, 0, 577.489),
        (32_768, 0, 0, 1_756.508),
        (32_768, 0, 2_048, 1_906.51),
        (131_072, 0, 0, 15_371.219),
        (0, 1_000, 0, 0.0),
    ],
)
def test_seconds_of_forward_calls(new: int, cached: int, chunk: int, milliseconds: float) -> None:
    """t(n, p) = a + b n + c n (p + n/2), and a chunked prefill sums its calls."""
    assert COST.seconds(new, cached, chunk) * 1e3 == pytest.approx(milliseconds, abs=2e-3)
    assert RecomputePrior().cost == COST


def test_block_values_sum_to_the_prompt() -> None:
    """64 blocks of 512 tokens are worth what computing all of them takes, less the call."""
    total = sum(COST.block_value(512 * i, 512) for i in range(64))
    assert total == pytest.approx(1.7465081856, abs=1e-12)
    assert total == pytest.approx(COST.seconds(32_768, 0) - 10e-3)
    values = [COST.block_value(depth, 512) * 1e3 for depth in (0, 8_192, 65_536)]
    assert values == pytest.approx([16.554, 22.007, 60.175], abs=1e-3)


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=20), st.integers(0, 100_000))
def test_chunks_only_add_calls(chunks: list[int], cached: int) -> None:
    """However a prefill is cut, its tokens and pairs cost the same; each call costs one a."""
    total, depth = 0.0, cached
    for chunk in chunks:
        total += COST.seconds(chunk, depth)
        depth += chunk
    whole = COST.seconds(sum(chunks), cached) + (len(chunks) - 1) * COST.call_seconds
    assert total == pytest.approx(whole, rel=1e-12)


def test_seconds_of_transfers() -> None:
    """64 MiB at L = 100 us and 6 GB/s take 11.285 ms, and what is queued goes first."""
    assert NVME.seconds(64 * MIB) * 1e3 == pytest.approx(11.285, abs=1e-3)
    assert NVME.seconds(64 * MIB, 64 * MIB) == pytest.approx(100e-6 + 2 * 64 * MIB / 6e9)


def test_links_in_a_row_are_pipelined() -> None:
    """T = sum L + V / min B + chunk / max B; one link alone has no chunk to add."""
    host, size = LinkCost.of(20e-6, 50e9), 64 * MIB
    seconds = chain_fixed_seconds((NVME, host), size, 4 * MIB) + size / 6e9
    assert seconds == pytest.approx(120e-6 + 64 * MIB / 6e9 + 4 * MIB / 50e9)
    alone = chain_fixed_seconds((NVME,), size, 4 * MIB) + size / 6e9
    assert alone == pytest.approx(NVME.seconds(size))
    chain = Segment(8_192, size, "disk", ("disk", "host"))
    links = {"disk": NVME, "host": host}
    planned = decide(Situation((chain,), 512, chunk_bytes=4 * MIB), Costs(COST, links))
    assert planned.load_seconds[0] == pytest.approx(seconds)


def test_roofline_of_a_usual_model() -> None:
    """8 billion parameters at 500 TFLOP/s: 32 us a token; 32 layers of 32 x 128: 1.31 ns a pair."""
    cost = RecomputePrior.roofline(8e9, 32, 32, 128, 500e12, 400e12).cost
    assert cost.token_seconds == pytest.approx(32e-6)
    assert cost.pair_seconds == pytest.approx(1.31e-9, rel=1e-3)


def test_nothing_measured_is_the_prior() -> None:
    """Without measurements a model predicts its prior, says so, and its p99 is above its p50."""
    model = RecomputeModel(ENGINE)
    assert model.state.name == "prior"
    assert model.cost() == pytest.approx(COST)
    assert model.seconds(512) < 1.5 * model.seconds(512, share=0.5) < model.seconds(512, share=0.99)
    path = PathModel(DISK, NVME)
    assert (path.state.name, path.cost()) == ("prior", pytest.approx(NVME))


@pytest.mark.parametrize("truth", [COST, CallCost(4e-3, 90e-6, 4e-9), CallCost(1.0, 1e-2, 2e-7)])
def test_fit_recovers_the_truth(truth: CallCost) -> None:
    """a, b and c come out within 5 % under 20 % noise, whatever the prior was."""
    rng, model = random.Random(7), RecomputeModel(ENGINE)
    seen: list[CallCost] = []
    for number, (new, cached) in enumerate(steps(rng, 4_000)):
        model.observe(truth.seconds(new, cached) * noise(rng), [(new, cached)])
        if number > 500:
            seen.append(model.cost())
            assert model.state.name == "fitted"
    for found, wanted in zip(zip(*seen, strict=True), truth, strict=True):
        assert statistics.median(found) == pytest.approx(wanted, rel=0.05)
    worst = max(
        abs(cost.seconds(new, cached) / truth.seconds(new, cached) - 1)
        for cost in seen[::100]
        for new, cached in steps(rng, 20)
    )
    assert worst < 0.25


def test_decode_in_the_same_step_leaks_into_nothing() -> None:
    """Co-batched decode has coefficients of its own; a, b and c stay what they are."""
    rng, model = random.Random(3), RecomputeModel(ENGINE)
    seen: list[CallCost] = []
    for new, cached in steps(rng, 3_000):
        decodes = rng.choice([0, rng.randrange(1, 200)])
        context = decodes * rng.randrange(100, 4_000)
        seconds = COST.seconds(new, cached) + decodes * 100e-6 + context * 20e-9
        model.observe(seconds * noise(rng, 0.05), [(new, cached)], decodes, context)
        seen.append(model.cost())
    for found, wanted in zip(zip(*seen[500:], strict=True), COST, strict=True):
        assert statistics.median(found) == pytest.approx(wanted, rel=0.05)


def test_one_chunk_size_stays_the_prior_and_says_why() -> None:
    """A model that saw one chunk size only keeps the prior's shape, at the scale it measured."""
    model = RecomputeModel(ENGINE)
    for number in range(500):
        model.observe(3 * COST.seconds(2_048, 512 * (number % 40)), [(2_048, 512 * (number % 40))])
    assert model.state.name == "prior"
    assert model.state.reason == "one chunk size only (2,048)"
    assert model.seconds(2_048, 8_192) == pytest.approx(3 * COST.seconds(2_048, 8_192), rel=0.1)
    _, b, c = model.cost()
    assert c / b == pytest.approx(1.3e-9 / 32e-6)
    for number in range(500):
        model.observe(COST.seconds(1_024 + number, 0), [(1_024 + number, 0)])
    assert "spans 1,024 to 2,048 only" in model.state.reason


def test_one_depth_stays_the_prior_and_says_why() -> None:
    """Without cached tokens ever, attention cannot be told apart: prior, and why."""
    model, rng = RecomputeModel(ENGINE), random.Random(1)
    for _ in range(300):
        new = rng.randrange(64, 8_192)
        model.observe(COST.seconds(new, 0) * noise(rng), [(new, 0)])
    assert model.state == ("prior", "one depth only (0)")


def test_measurements_in_a_line_are_too_alike() -> None:
    """Sizes and depths that always go together span a lot and tell nothing: prior, and why."""
    model = RecomputeModel(ENGINE)
    for number in range(400):
        new = 4_096 if number % 2 else 512
        cached = 16 * new
        model.observe(COST.seconds(new, cached), [(new, cached)])
    assert model.state.name == "prior"
    assert "too alike" in model.state.reason


def test_what_was_fitted_is_kept_when_measurements_become_alike() -> None:
    """A fitted model that then sees one shape only keeps its coefficients' proportions."""
    truth = CallCost(5e-3, 60e-6, 5e-9)
    model = fitted_model(5, truth)
    before = model.cost()
    for _ in range(1_000):
        model.observe(truth.seconds(2_048, 4_096), [(2_048, 4_096)])
    assert model.state.name == "fitted"
    assert "too alike" in model.state.reason
    assert model.seconds(2_048, 4_096) == pytest.approx(truth.seconds(2_048, 4_096), rel=0.02)
    assert model.cost().pair_seconds == pytest.approx(before.pair_seconds, rel=0.25)


def test_path_recovers_latency_and_bandwidth() -> None:
    """L within 20 % and 1/B within 5 % (their medians) under 20 % noise, from a far prior."""
    rng = random.Random(2)
    truth = LinkCost.of(2e-3, 6e9)
    model, seen = path_model(rng, truth), []
    for _ in range(2_000):
        transfers(model, rng, truth, 1)
        seen.append(model.cost())
    assert model.state.name == "fitted"
    latency, byte = (statistics.median(values) for values in zip(*seen, strict=True))
    assert byte == pytest.approx(truth.byte_seconds, rel=0.05)
    assert latency == pytest.approx(truth.latency_seconds, rel=0.2)


def test_quantiles_cover_what_comes() -> None:
    """97 to 100 % of measurements stay below the predicted p99, which is below 3 x the p50."""
    rng = random.Random(4)
    model, truth = path_model(rng, NVME), NVME
    covered, below = [], []
    for _ in range(3_000):
        size = rng.randrange(1, 64 * MIB)
        seconds = truth.seconds(size) * noise(rng)
        p50, p99 = model.seconds(size, share=0.5), model.seconds(size, share=0.99)
        assert p50 <= p99 <= 3 * p50
        covered.append(seconds <= p99)
        below.append(seconds <= p50)
        model.observe(seconds, size)
    assert 0.97 <= statistics.mean(covered) <= 1.0
    assert statistics.mean(below) == pytest.approx(0.5, abs=0.05)


def test_short_transfers_have_quantiles_of_their_own() -> None:
    """Hitches of milliseconds widen what short transfers may take, and long ones hardly."""
    rng, model = random.Random(5), PathModel(DISK, NVME)
    truth = LinkCost.of(1e-3, 1e9)
    sizes = [1 << rng.randint(20, 28) for _ in range(1_500)]
    for number, size in enumerate(sizes):
        hitch = 20e-3 if number % 20 == 0 else 0.0
        model.observe(truth.seconds(size) * noise(rng, 0.05) + hitch, size)
    spread = {size: model.seconds(size, share=0.99) / model.seconds(size) for size in sizes}
    assert spread[1 << 20] > 4
    assert spread[1 << 28] < 1.5
    assert model.seconds(1 << 28, share=0.5) == pytest.approx(truth.seconds(1 << 28), rel=0.1)
    saved = PathModel(DISK, NVME)
    assert saved.load(model.dump())
    assert saved.cost(0.99) == pytest.approx(model.cost(0.99))


def test_errors_of_the_prior_are_forgotten_with_it() -> None:
    """Once a model is fitted its quantiles are of its own errors, not of what it began from."""
    model = PathModel(DISK, LinkCost.of(100e-6, 60e9))
    for number in range(30):
        size = MIB << number % 8
        model.observe(NVME.seconds(size), size)
    assert model.state.name == "fitted"
    assert model.ratio(0.99) < 2.5
