"""Corruption, recovery and relocation: a block that is not what was written is a miss."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import LeaseLost
from kvstore.testing import Fault, FaultyTier, MemoryTier

TOKENS = list(range(32))


def spoil(desk: Any, place: int) -> None:
    """Flips one bit of a stored payload, behind everybody's back."""
    tier = desk.store.tier
    pool = tier._pools[place >> 40]
    pool.data[(place & ((1 << 40) - 1)) << 12] ^= 1


def spoil_header(desk: Any, place: int) -> None:
    tier = desk.store.tier
    tier._pools[place >> 40]._header_at((place & ((1 << 40) - 1)) << 12)[40] ^= 1


def places_of(engine: Any, tokens: Any = TOKENS) -> list[int]:
    found = engine.lookup(tokens)
    engine.release(found)
    return list(found.slots.places.tolist())


def test_verify_finds_every_flipped_bit(desk: Any, engine: Any) -> None:
    """I11: a block with a flipped bit is found, named, dropped with its descendants; a miss."""
    engine.put(TOKENS)
    engine.put([7] * 32)
    spoil(desk, places_of(engine)[5])
    result = desk.wait(desk.kv.verify("host"))
    assert (result.verified_blocks, result.corrupt_blocks) == (16, 1)
    assert engine.keys(TOKENS)[5].hex() in result.findings[0]
    assert engine.matched(TOKENS) == 5
    assert engine.matched([7] * 32) == 8
    assert desk.wait(desk.kv.verify()).corrupt_blocks == 0
    assert engine.put(TOKENS) == "PPPPPSSS"


def test_quarantine_reaches_leased_blocks(desk: Any, engine: Any) -> None:
    """I5, I11: corrupt blocks lose their generation though leased; their slots rest till then."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    spoil(desk, found.slots.places.tolist()[2])
    desk.wait(desk.kv.verify())
    assert not engine.is_intact(found)
    with pytest.raises(LeaseLost):
        desk.kv.restore(engine.session, found.lease_id, 0, 0, lambda slots: None)
    assert desk.usage().resting_bytes == 6 * 4096
    engine.release(found)
    assert desk.usage().resting_bytes == 0


def test_every_shard_counts(desk: Any) -> None:
    """I11: a bit that flips in any shard takes the whole block."""
    ranks = [desk.engine(shard=shard, shard_count=2) for shard in range(2)]
    for rank in ranks:
        rank.put(TOKENS)
    spoil(desk, places_of(ranks[1])[4])
    assert desk.wait(desk.kv.verify()).corrupt_blocks == 1
    assert [rank.matched(TOKENS) for rank in ranks] == [4, 4]


def test_verify_while_everything_moves(make_desk: Any) -> None:
    """I11: a check of a slot that was reused meanwhile says nothing about the new block."""
    for seed in range(20):
        desk = make_desk(late=True, seed=seed)
        engine, other = desk.engine(), desk.engine(model="other")
        engine.put(TOKENS)
        later = desk.kv.verify()
        desk.store.turn()
        for _ in range(seed % 3):
            desk.mover.step()
        other.put([1] * 1024)
        desk.settle()
        assert later.result().corrupt_blocks == 0
        assert other.matched([1] * 1024) == 256


def test_verify_sees_what_is_split_off_meanwhile(desk: Any, engine: Any) -> None:
    """I11: a run that a lookup splits while a verify is on its way is hashed whole."""
    engine.put(TOKENS)
    for n in range(100, 120):
        engine.put([n] * 8)
    places = places_of(engine)
    spoil(desk, places[7])
    later = desk.kv.verify()
    for blocks in (2, 4, 6):
        engine.desk.kv.lookup(engine.attachment, engine.query(TOKENS[: 4 * blocks]), 0)
    result = desk.wait(later)
    assert (result.verified_blocks, result.corrupt_blocks) == (48, 1)
    for _ in range(2):
        later = desk.kv.pin(engine.session, "", engine.keys(TOKENS)[6], 10.0)
        engine.desk.kv.lookup(engine.attachment, engine.query(TOKENS[:4]), 0)
        assert desk.wait(later).block_count == 7


def test_a_damaged_header_is_a_miss(desk: Any, engine: Any) -> None:
    """I11: header memory that was damaged fails no call: the block goes, by whatever way."""
    engine.put(TOKENS)
    places = places_of(engine)
    found = engine.lookup(TOKENS)
    spoil_header(desk, places[6])
    with pytest.raises(LeaseLost):
        desk.wait(desk.kv.read_block(engine.session, found.lease_id, 6))
    assert engine.matched(TOKENS) == 6
    spoil_header(desk, places[4])
    assert desk.wait(desk.kv.verify()).corrupt_blocks == 1
    assert engine.matched(TOKENS) == 4
    spoil_header(desk, places[3])
    pinned = desk.wait(desk.kv.pin(engine.session, "", engine.keys(TOKENS)[3], 5.0))
    assert pinned.block_count == 4
    assert desk.kv.unpin(pinned.pin_id) == 1
    assert engine.put([*TOKENS[:16], *[99] * 16]) == "PPPPSSSS"
    engine.release(found)
    desk.engine(model="other").put([1] * 1024)
    assert engine.matched(TOKENS) == 0


def test_adopted_bytes_are_checked_before_they_are_served(
    make_desk: Any, shm_directory: Path
) -> None:
    """I10, I11: after a restart each block is hashed before the first answer that uses it."""
    desk = make_desk(directory=shm_directory)
    engine = desk.engine()
    prompts = [[n] * 32 for n in range(8)]
    for tokens in prompts:
        engine.put(tokens)
    for n, tokens in enumerate(prompts):
        if n % 2:
            spoil(desk, places_of(engine, tokens)[n])
    desk.store.restart()
    engine = desk.engine()
    assert desk.kv.status().readopted_blocks == 64
    for n, tokens in enumerate(prompts):
        assert engine.matched(tokens) == (n if n % 2 else 8)
    desk.settle()
    assert not desk.kv.parts.unverified


def test_lookups_wait_only_for_their_own_checks(make_desk: Any, shm_directory: Path) -> None:
    """I10: right after a restart a lookup is answered once its own blocks are hashed."""
    desk = make_desk("4MiB", directory=shm_directory, late=True)
    engine = desk.engine()
    for n in range(6):
        engine.put([n] * 512)
    desk.store.restart()
    engine = desk.engine()
    assert engine.lookup([9] * 32).matched_tokens == 0
    for n in (5, 0, 3):
        assert engine.matched([n] * 512) == 128
    desk.settle()


def test_restart_keeps_blocks_and_ends_leases(make_desk: Any, shm_directory: Path) -> None:
    """I10: blocks outlive a kill with all shards, tenants and roots; leases and puts do not."""
    desk = make_desk(directory=shm_directory, sections={"tenants": [{"name": "b"}]})
    ranks = [desk.engine(shard=shard, shard_count=2) for shard in range(2)]
    for rank in ranks:
        rank.put(TOKENS, adapter="lora")
    ranks[0].put([8] * 32)
    b = desk.engine("b")
    b.put(TOKENS)
    b.reserve([3] * 32)
    lease = b.lookup(TOKENS)
    desk.store.restart()
    ranks = [desk.engine(shard=shard, shard_count=2) for shard in range(2)]
    b = desk.engine("b")
    assert [rank.matched(TOKENS, adapter="lora") for rank in ranks] == [8, 8]
    assert [rank.lookup([8] * 32).pending_tokens for rank in ranks] == [0, 0]
    assert b.matched(TOKENS) == 8
    assert desk.kv.renew(b.session, [lease.lease_id])[0] == [lease.lease_id]
    with pytest.raises(LeaseLost):
        desk.kv.restore(b.session, lease.lease_id, 0, 0, lambda slots: None)


def test_slots_of_before_rest_after_a_restart(make_desk: Any, shm_directory: Path) -> None:
    """I5, I6: what readers of before a kill may be copying rests for the longest lease."""
    desk = make_desk(directory=shm_directory)
    engine = desk.engine()
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    engine.reserve([5] * 32)
    old = desk.store.tier.view(found.slots.places.tolist()[0], 4096)
    before = bytes(old)
    desk.store.restart()
    other = desk.engine(model="other")
    assert desk.usage().resting_bytes > 0
    stored = [other.put([n] * 400).count("S") for n in range(10)]
    assert bytes(old) == before
    assert sum(stored) + 8 >= 100, "no more is given up than comes free"
    desk.advance(desk.store.config.limits.max_lease_ttl_seconds + 1)
    assert desk.usage().resting_bytes == 0
    for n in range(10, 20):
        other.put([n] * 400)
    assert other.matched([19] * 400) == 100
    assert bytes(old) != before


def test_a_crash_between_copy_and_release_leaves_one(make_desk: Any, shm_directory: Path) -> None:
    """I10, I22: a block that was just moved when the process died is there once, its other slot
    is free again later."""
    desk = make_desk(directory=shm_directory)
    engine, tier = desk.engine(), desk.store.tier
    engine.put(TOKENS)
    old = places_of(engine)[3]
    (new,) = tier.reserve(4096, 64, 1)
    tier.commit([(new, tier.header(old), tier.copy(old, new, 4096))])
    desk.store.restart()
    assert desk.kv.status().readopted_blocks == 8
    assert desk.engine().matched(TOKENS) == 8
    desk.advance(desk.store.config.limits.max_lease_ttl_seconds + 1)
    assert desk.usage().used_bytes == 8 * 4096
    assert desk.usage().resting_bytes == 0


def test_shards_of_a_block_torn_by_a_crash(make_desk: Any, shm_directory: Path) -> None:
    """I3, I10: a block whose shards did not all get their headers before a crash is not there,
    nor is what hangs below it; what is whole is."""
    desk = make_desk(directory=shm_directory)
    ranks = [desk.engine(shard=shard, shard_count=2) for shard in range(2)]
    for rank in ranks:
        rank.put(TOKENS)
    torn = places_of(ranks[1])[5]
    desk.store.tier._pools[torn >> 40]._header_at((torn & ((1 << 40) - 1)) << 12)[:8] = bytes(8)
    desk.store.restart()
    ranks = [desk.engine(shard=shard, shard_count=2) for shard in range(2)]
    assert [rank.matched(TOKENS) for rank in ranks] == [5, 5]
    assert [rank.put(TOKENS) for rank in ranks] == ["PPPPPOOO", "PPPPPSSS"]


def test_memory_that_lies_is_found(make_desk: Any, shm_directory: Path) -> None:
    """I11: short writes and flipped bits of a lying tier are misses after a check, never hits."""
    for seed in range(10):
        tier = FaultyTier(MemoryTier(1 << 20), Random(seed))
        desk = make_desk(tier=tier)
        engine = desk.engine()
        tier.budget.rates.update({Fault.SHORT_WRITE: 0.2, Fault.FLIP_ON_WRITE: 0.2})
        engine.put(TOKENS)
        tier.budget.rates.clear()
        wrong = sum(tier.budget.happened.values())
        result = desk.wait(desk.kv.verify())
        assert bool(result.corrupt_blocks) == bool(wrong)
        assert engine.matched(TOKENS) + result.corrupt_blocks <= 8


def test_other_sizes_get_memory(make_desk: Any) -> None:
    """I6: blocks of another size find room though the pool is full of small ones, and unleased
    blocks that stay are moved, not spoiled."""
    desk = make_desk("4MiB")
    small = desk.engine()
    prompts = [[n] * 256 for n in range(16)]
    for tokens in prompts:
        small.put(tokens)
    held = small.lookup(prompts[3])
    large = desk.engine(model="large", num_layers=32)
    assert large.space.slot_bytes == 32 * 4096
    stored = 0
    for n in range(40):
        stored += large.put([n] * 8).count("S")
        desk.settle()
    assert stored > 10
    assert small.is_intact(held)
    assert small.check(held, prompts[3]) == 64
    for tokens in prompts:
        small.matched(tokens)
    assert any(large.matched([n] * 8) for n in range(40))


def test_relocation_races(make_desk: Any) -> None:
    """I5, I6: blocks leased, cleared or evicted while they are moved end up right or gone."""
    for seed in range(25):
        desk = make_desk("2MiB", late=True, seed=seed)
        random = Random(seed)
        small, large = desk.engine(), desk.engine(model="large", num_layers=32)
        prompts = [[n] * 64 for n in range(30)]
        for tokens in prompts:
            small.put(tokens)
        leases = []
        for n in range(12):
            large.reserve([n] * 4, request_id=f"r{n}")
            for _ in range(random.randrange(6)):
                desk.store.turn()
                desk.mover.step()
            tokens = prompts[random.randrange(30)]
            found = small.lookup(tokens)
            if found.lease_id:
                leases.append((found, tokens))
            if random.random() < 0.1:
                desk.kv.clear(small.space.id)
                leases.clear()
            desk.store.check_integrity()
        desk.settle()
        for found, tokens in leases:
            small.check(found, tokens)
        for tokens in prompts:
            small.matched(tokens)


def test_views_are_read_only(engine: Any) -> None:
    """I5: what the tier shows of a READY block cannot be written through."""
    engine.put(TOKENS)
    view = engine.desk.store.tier.view(places_of(engine)[0], 4096)
    assert view.readonly
    with pytest.raises(ValueError, match="read-only"):
        np.frombuffer(view, np.uint8)[0] = 1
