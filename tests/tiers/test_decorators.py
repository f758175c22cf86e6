"""Tiers that are slow or break on purpose: exactly as much as they are told."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import xxhash

from kvstore.core.clock import ManualClock
from kvstore.core.errors import TierError
from kvstore.tiers.faulty import Fault, FaultBudget, FaultyTier, SimulatedCrash
from kvstore.tiers.memory import MemoryTier
from kvstore.tiers.throttle import ThrottledTier

SIZE = 10_000
PAYLOAD = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
DIGEST = xxhash.xxh3_128_digest(PAYLOAD)


def faulty(fault, left=1, **options):
    budget = FaultBudget({fault: 1.0}, {fault: left})
    return FaultyTier(MemoryTier(1 << 20), Random(5), budget, **options)


def test_throttle_takes_latency_and_bytes_over_bandwidth():
    """A copy of V bytes takes latency + V / bandwidth, by the clock it was given."""
    clock = ManualClock(0.0)
    tier = ThrottledTier(MemoryTier(1 << 20), 1e6, 0.5, clock, clock.advance)
    place = tier.reserve(SIZE, 16, 1)[0]
    assert tier.write(place, PAYLOAD) == DIGEST
    assert clock.now() == pytest.approx(0.51)
    tier.read(place, np.empty(SIZE, np.uint8), SIZE)
    assert clock.now() == pytest.approx(1.02)
    assert tier.verify(place, SIZE, DIGEST)
    assert clock.now() == pytest.approx(1.53)


def test_throttle_is_one_link():
    """Copies that come at the same moment wait for each other's bytes, not for their latency."""
    clock, waits = ManualClock(0.0), []
    tier = ThrottledTier(MemoryTier(1 << 20), 1e6, 0.5, clock, waits.append)
    for place in tier.reserve(SIZE, 16, 3):
        tier.write(place, PAYLOAD)
    assert waits == pytest.approx([0.51, 0.52, 0.53])


def test_throttle_lets_many_blocks_pass_as_one_transfer():
    """What a tier reads or writes together stays together, for the time of all its bytes."""
    clock = ManualClock(0.0)
    tier = ThrottledTier(MemoryTier(1 << 20), 1e6, 0.5, clock, clock.advance)
    places = tier.reserve(SIZE, 16, 3)
    assert tier.write_many([(place, PAYLOAD) for place in places]) == [DIGEST] * 3
    assert clock.now() == pytest.approx(0.53)
    targets = [np.empty(SIZE, np.uint8) for _ in places]
    found = tier.read_many(list(zip(places, targets, strict=True)), SIZE)
    assert found == [DIGEST] * 3
    assert clock.now() == pytest.approx(1.06)


@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.FLIP_ON_WRITE])
def test_lying_writes_show_by_the_checksum(fault):
    """A short write or flipped bit answers as if all was well; the checksum tells, once."""
    tier = faulty(fault)
    bad, good = tier.reserve(SIZE, 16, 2)
    assert tier.write(bad, PAYLOAD) == DIGEST
    assert not tier.verify(bad, SIZE, DIGEST)
    assert tier.write(good, PAYLOAD) == DIGEST
    assert tier.verify(good, SIZE, DIGEST)
    assert tier.budget.happened == {fault: 1}


def test_flip_at_rest_stays_until_the_block_goes():
    """A bit that flips at rest shows in every reading of the block, and in no other block."""
    tier = faulty(Fault.FLIP_AT_REST)
    place, other = tier.reserve(SIZE, 16, 2)
    tier.write(place, PAYLOAD)
    tier.write(other, PAYLOAD)
    assert not tier.verify(place, SIZE, DIGEST)
    assert not tier.verify(place, SIZE, DIGEST)
    target = np.empty(SIZE, np.uint8)
    tier.read(place, target, SIZE)
    assert np.count_nonzero(target != PAYLOAD) == 1
    assert tier.view(place, SIZE).readonly
    assert tier.verify(other, SIZE, DIGEST)
    tier.discard([place])
    tier.free([place])
    place = tier.reserve(SIZE, 16, 1)[0]
    tier.write(place, PAYLOAD)
    assert tier.verify(place, SIZE, DIGEST)


def test_write_errors_leave_the_slot_to_be_discarded():
    """A write that fails raises TierError; the slot can be given up as usual."""
    tier = faulty(Fault.WRITE_ERROR)
    place = tier.reserve(SIZE, 16, 1)[0]
    with pytest.raises(TierError, match="injected"):
        tier.write(place, PAYLOAD)
    tier.discard([place])
    tier.free([place])
    tier.check_integrity()


def test_no_space_grants_less():
    """A pool that is out of space grants fewer slots than it has."""
    tier = faulty(Fault.NO_SPACE, left=1)
    assert len(tier.reserve(SIZE, 16, 8)) < 8
    assert len(tier.reserve(SIZE, 16, 8)) == 8


def test_latency_is_slept():
    """A slow operation sleeps as long as it was told."""
    waits = []
    tier = faulty(Fault.LATENCY, left=2, latency_seconds=0.25, sleep=waits.append)
    for place in tier.reserve(SIZE, 16, 4):
        tier.write(place, PAYLOAD)
    assert waits == [0.25, 0.25]


def test_crash_commits_a_part_and_no_handler_stops_it(make_header):
    """I4, I10: a crash in a commit leaves a prefix of it; what was not committed is not there."""
    tier = faulty(Fault.CRASH_BEFORE_COMMIT)
    places = tier.reserve(SIZE, 16, 8)
    blocks = [(p, make_header(i, SIZE), tier.write(p, PAYLOAD)) for i, p in enumerate(places)]
    assert not issubclass(SimulatedCrash, Exception)
    with pytest.raises(SimulatedCrash):
        tier.commit(blocks)
    found = [block.place for block in tier.inner.reopened().recover()]
    assert found == places[: len(found)]
    assert len(found) < 8


def run(seed):
    budget = FaultBudget(dict.fromkeys(Fault, 0.2), {Fault.CRASH_BEFORE_COMMIT: 0})
    tier = FaultyTier(MemoryTier(1 << 20), Random(seed), budget, sleep=lambda seconds: None)
    log = []
    for _ in range(60):
        for place in tier.reserve(SIZE, 16, 3):
            try:
                log.append(tier.verify(place, SIZE, tier.write(place, PAYLOAD)))
            except TierError:
                log.append(None)
            tier.discard([place])
            tier.free([place])
    return log, budget.happened


def test_a_seed_gives_one_run():
    """The same seed breaks the same things, another seed others; limits are kept."""
    assert run(1) == run(1)
    assert run(1) != run(2)
    happened = run(1)[1]
    assert Fault.CRASH_BEFORE_COMMIT not in happened
    assert {Fault.SHORT_WRITE, Fault.WRITE_ERROR, Fault.NO_SPACE} <= set(happened)
