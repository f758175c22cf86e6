"""Admission: what is written is expected to save more than the write costs."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvstore.core.prices import Prices
from kvstore.core.space import Space
from kvstore.policies.admission import RATE_SECONDS, ShadowPrice, WriteRate, spare_rate
from kvstore.policies.demotion import SECOND_LOOKS
from kvstore.policies.uses import Request
from kvstore.replay.cachesim import CacheResult, CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import TraceRequest

NewSpace = Callable[..., Space]
HOST, DISK = 0, 1
TOKEN_BYTES = 131_072
BLOCK_BYTES = 512 * TOKEN_BYTES
USUAL, FREE_WEAR = Prices(), Prices(disk_terabyte_written=0)


def tokens(blocks: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(16 * blocks)
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def simulated(
    requests: list[TraceRequest],
    host: int,
    disk: int,
    policy: str = "lru",
    prices: Prices | None = USUAL,
    **disk_is: float,
) -> CacheResult:
    workload = Workload(requests, token_bytes=TOKEN_BYTES)
    made = CacheSimulation(workload, policy, (host, disk), prices=prices, **disk_is)
    result = made.run()
    made.index.check_integrity()
    made.residency.check_integrity()
    return result


def once(number: int, blocks: int = 8) -> Iterator[TraceRequest]:
    """Prompts that nobody ever sends again, one a second."""
    for n in range(number):
        yield TraceRequest(
            timestamp=1000 * n, input_length=512 * blocks, output_length=10,
            hash_ids=[blocks * n + i for i in range(blocks)],
        )  # fmt: skip


def visits(documents: int, rounds: int, blocks: int = 60) -> list[TraceRequest]:
    """Long documents, each asked about every five minutes, among prompts of the same length that
    come once: told apart by the length of their answers."""
    requests, period = [], 300_000
    for n in range(documents * rounds):
        document, when = n % documents, period * n // documents
        known = [-1 - blocks * document - i for i in range(blocks)]
        requests.append(
            TraceRequest(
                timestamp=when, input_length=512 * blocks, output_length=600, hash_ids=known
            )
        )
        fresh = [blocks * n + i for i in range(blocks)]
        requests.append(
            TraceRequest(
                timestamp=when + 1, input_length=512 * blocks, output_length=5, hash_ids=fresh
            )
        )
    return requests


@pytest.mark.parametrize("policy", ["lru", "saved_time"])
def test_what_never_comes_back_is_not_written(policy: str) -> None:
    """Without any reuse next to nothing is written, from the first block on."""
    requests = list(once(1200))
    all_blocks = 8 * len(requests)
    assert simulated(requests, 400, 4000, policy, None).written_blocks > 0.9 * all_blocks
    judged = simulated(requests, 400, 4000, policy)
    assert judged.written_blocks <= 0.01 * all_blocks
    assert judged.passed_blocks >= 0.9 * all_blocks


def test_what_comes_back_is_written_and_the_rest_is_not() -> None:
    """Where half of the blocks come back, as much is restored as if all were written."""
    requests = visits(documents=30, rounds=45)
    free = simulated(requests, 600, 6000, prices=None)
    judged = simulated(requests, 600, 6000)
    assert free.tier_tokens[DISK] > 0.4 * sum(request.input_length for request in requests)
    assert judged.tier_tokens[DISK] >= 0.95 * free.tier_tokens[DISK]
    assert judged.written_blocks <= 0.2 * free.written_blocks


def test_a_disk_as_slow_as_recomputing_gets_nothing() -> None:
    """Where bringing a block back takes as long as computing it, no copy is worth a write."""
    requests = visits(documents=20, rounds=6)
    deepest = Workload(requests).block_seconds
    slowest = float(deepest[60] - deepest[59])
    for seconds, is_written in ((slowest, False), (slowest / 2, True)):
        found = simulated(requests, 400, 6000, prices=FREE_WEAR, disk_seconds=seconds)
        assert (found.written_blocks > 0) == is_written


def test_without_wear_any_chance_is_enough() -> None:
    """Where writes cost nothing, what has a chance to come back is written, once that is known."""
    requests = visits(documents=20, rounds=8)
    free = simulated(requests, 400, 6000, prices=None)
    cheap = simulated(requests, 400, 6000, prices=FREE_WEAR)
    assert cheap.written_blocks >= 0.8 * free.written_blocks
    assert cheap.tier_tokens[DISK] >= 0.8 * free.tier_tokens[DISK]


def test_gpu_time_that_costs_nothing_saves_nothing() -> None:
    """At a price of 0 for GPU time, nothing is worth a write."""
    assert simulated(visits(20, 6), 400, 6000, prices=Prices(gpu_hour=0)).written_blocks == 0


def test_a_short_budget_goes_to_what_is_worth_most() -> None:
    """With a twentieth of the writes allowed, judged ones save more than first ones do, and the
    budget is kept."""
    requests = visits(documents=30, rounds=24)
    daily = 1000.0 * BLOCK_BYTES
    free = simulated(requests, 600, 6000, prices=None, disk_daily_bytes=daily)
    judged = simulated(requests, 600, 6000, disk_daily_bytes=daily)
    seconds = requests[-1].timestamp / 1000
    for result in (free, judged):
        assert result.written_blocks * BLOCK_BYTES <= daily * (1 + seconds / 86_400) + BLOCK_BYTES
    assert judged.saved_seconds > 1.2 * free.saved_seconds


# ---- Chains, by hand ----


class Pool:
    """A host pool of which all is the cold end, over a disk that writes at once."""

    def __init__(self, world: Any, space: Space) -> None:
        self.world, self.space = world, space
        self.residency = world.residency
        self.residency.demote_above("", 0)
        self.price()
        self._places = count()

    def price(self, gpu_second: float = 1.0, written_byte: float = 1e-12) -> None:
        self.residency.set_prices(gpu_second, written_byte, 1 << 40)

    def ask(self, symbols: list[bytes], seconds: float = 0.0) -> None:
        """A request comes, is looked up and stored."""
        prefixes = [b"".join(symbols[:n]) for n in range(1, len(symbols) + 1)]
        digests = b"".join(hashlib.sha256(prefix).digest()[:8] for prefix in prefixes)
        self.residency.request(Request("t", seconds, digests, 4 * len(symbols)))
        self.world.look(self.space, symbols)
        self.world.put(self.space, symbols)

    def write(self, busy: float = 0.0, spare: float = 0.0) -> list[tuple[int, int]]:
        """Writes what is due; answers with positions [start, stop), in order."""
        index, found = self.world.index, []
        for run, start, stop, _, _ in self.residency.demotions("", 1 << 40, busy, spare):
            index.begin_move(run, start, stop, DISK)
            places = [next(self._places) for _ in range(stop - start)]
            index.end_move(run, start, DISK, np.array(places, np.int64).reshape(-1, 1))
            found.append((run.first + start, run.first + stop))
        self.world.check()
        return found


@pytest.fixture
def pool(new_world: type[Any], new_space: NewSpace) -> Pool:
    return Pool(new_world(tiers=2), new_space(0))


def test_what_nothing_is_known_of_needs_a_second_request(pool: Pool) -> None:
    """Before anything was learned, blocks are written that were asked for twice."""
    pool.ask(tokens(6, 1))
    pool.ask(tokens(4, 2))
    assert pool.write() == []
    assert pool.residency.passed_blocks == 10
    pool.ask(tokens(6, 1), 5.0)
    assert pool.write() == [(0, 6)]


def test_blocks_that_nobody_tells_of_need_a_second_access(pool: Pool, new_world: type[Any]) -> None:
    """The same where no requests are told, such as of blocks found at a start."""
    pool.world.put(pool.space, tokens(6, 1))
    assert pool.write() == []
    pool.world.look(pool.space, tokens(6, 1))
    assert pool.write() == [(0, 6)]


def test_what_prompts_share_is_written_without_their_ends(pool: Pool) -> None:
    """Leaves that are not worth a write do not keep what is above them from it."""
    stem = tokens(8, 1)
    for seed in (2, 3, 4):
        pool.ask([*stem, *tokens(5, seed)])
    assert pool.write() == [(0, 8)]
    assert pool.residency.passed_blocks == 15


def test_new_blocks_of_a_known_prompt_wait(pool: Pool) -> None:
    """Of a run that a request made longer, what it had known is written first."""
    pool.ask(tokens(12, 1)[:8])
    pool.ask(tokens(12, 1), 5.0)
    assert pool.write() == [(0, 8)]


def test_nothing_is_passed_over_twice(pool: Pool) -> None:
    """A run that is judged again, for nothing has changed, counts once."""
    for seed in range(8):
        pool.ask(tokens(4, seed))
    for _ in range(20):
        assert pool.write() == []
    assert pool.residency.passed_blocks == 32


def test_other_costs_bring_what_was_passed_over_back(pool: Pool) -> None:
    """As soon as a write is worth it, a few runs get their second chance as others come in."""
    pool.residency.set_rates(None, 0.0, 0.0)
    for seed in range(10):
        pool.ask(tokens(4, seed))
        pool.ask(tokens(4, seed), 5.0)
    assert pool.write() == []
    assert pool.residency.passed_blocks == 40
    pool.residency.set_rates(None, 32e-6, 1.3e-9)
    rounds = []
    for seed in range(10, 20):
        pool.ask(tokens(1, seed), 6.0)
        rounds.append(len(pool.write()))
    assert sum(rounds) == 10
    assert max(rounds) <= SECOND_LOOKS


def test_shallow_blocks_are_paid_by_deep_ones(pool: Pool) -> None:
    """Where only deep blocks are slower to compute than to restore, a long chain is written whole
    and a short one not at all."""
    first, slope = pool.residency.context.worth.line(pool.space)
    pool.residency.set_restore(DISK, first + 20 * slope, 0.0)
    for _ in range(2):
        pool.ask(tokens(30, 1))
        pool.ask(tokens(60, 2))
    assert pool.write() == [(0, 60)]


rates = st.floats(0, 1e-2)
loads = st.tuples(st.floats(0, 1), st.floats(0, 1e6))
asks = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 12), st.booleans())
DEEPEST = 3 + 12


@settings(max_examples=80, deadline=None)
@given(
    costs=st.tuples(rates, rates, rates, st.floats(0, 10), st.floats(0, 1e-6)),
    policy=st.sampled_from(["lru", "saved_time", "s3fifo", "gdsf"]),
    steps=st.lists(st.tuples(asks, st.floats(0, 900), loads), max_size=60),
)
def test_nothing_is_written_that_is_slower_to_restore(
    new_world: type[Any],
    new_space: NewSpace,
    costs: tuple[float, ...],
    policy: str,
    steps: list[tuple[tuple[int, int, int, bool], float, tuple[float, float]]],
) -> None:
    """Whatever costs, prices and requests come: what is written is restored in less time than
    computed, parents first, and the books agree."""
    token, pair, restore, gpu, byte = costs
    pool = Pool(new_world(tiers=2, policy=policy), new_space(0))
    pool.price(gpu, byte)
    pool.residency.set_rates(None, token, pair)
    pool.residency.set_restore(DISK, restore, 0.0)
    now, worth = 0.0, pool.residency.context.worth
    for (stem, branch, length, evict), seconds, load in steps:
        now += seconds
        pool.ask([*tokens(stem, 99), *tokens(length, branch)], now)
        if pool.write(*load):
            assert worth.seconds(pool.space, DEEPEST) > restore
        if evict:
            pool.world.free(pool.space, length)
            pool.world.check()


# ---- Numbers ----


def test_the_shadow_price_parts_offers_by_the_share_that_must_wait() -> None:
    """A quarter of the bytes offered lie below the price at a scarcity of a quarter."""
    shadow = ShadowPrice()
    assert shadow.at(0.9) == 0.0
    values = list(range(1, 101))
    random.Random(1).shuffle(values)
    for value in values:
        shadow.offer(float(value), 10)
    assert shadow.at(0.0) == 0.0
    assert shadow.at(0.25) == 25.0
    assert shadow.at(1.0) == 100.0
    shadow.offer(1000.0, 100_000)
    assert shadow.at(0.25) == 1000.0


def test_the_write_rate_is_an_average_from_the_first_minute_on() -> None:
    """A steady stream is told as it is after a minute and after an hour; a pause takes it away."""
    rate = WriteRate()
    assert rate.at(0.0) == 0.0
    for second in range(3600):
        rate.add(1e6, float(second))
        if second in (60, 600, 3599):
            assert rate.at(float(second)) == pytest.approx(1e6, rel=0.05)
    assert rate.at(3600.0 + RATE_SECONDS) == pytest.approx(1e6 / math.e, rel=0.05)


def test_a_budget_is_what_is_left_and_what_is_gained() -> None:
    """A day's writes may be spent in a quarter of an hour, and then as they are gained again."""
    daily = 86_400.0
    assert spare_rate(daily, daily) == pytest.approx(96 + 1)
    assert spare_rate(0.0, daily) == spare_rate(-5.0, daily) == pytest.approx(1)
    assert spare_rate(0.0, 0.0) == 0.0
