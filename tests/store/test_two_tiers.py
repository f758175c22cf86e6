"""Two tiers: blocks flow from host to disk and back, and are right or absent at every moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from desk import Desk

from kvstore.core.errors import FailedPrecondition
from kvstore.testing import MemoryTier

BLOCK = 4096
DISK_SECTION = {
    "demote_watermark": 0.5,
    "endurance_dwpd": 0.0,
    "admission": "all",
    "read_timeout_seconds": 2.0,
}


@pytest.fixture
def two_tiers(make_desk: Callable[..., Desk]) -> Callable[..., Desk]:
    """Makes a store of `host` blocks over a disk of `disk` blocks."""

    def make(host: int = 64, disk: int = 1024, **changes: Any) -> Desk:
        sections = changes.pop("sections", {})
        section = {**DISK_SECTION, **changes.pop("disk_section", {})}
        sections = {"policy": {"eviction": "lru"}, **sections}
        return make_desk(
            tier=MemoryTier(host * BLOCK), disk=MemoryTier(disk * BLOCK, "disk"),
            sections={**sections, "tiers": {"disk": section}}, **changes,
        )  # fmt: skip

    return make


def prompt(number: int, blocks: int) -> list[int]:
    return [number * 1000 + i for i in range(4 * blocks)]


def fill(desk: Desk, engine: Any, count: int, blocks: int = 8) -> list[list[int]]:
    """Puts prompts one after the other, as an engine does, with time to be written between."""
    prompts = [prompt(i, blocks) for i in range(count)]
    for tokens in prompts:
        assert engine.put(tokens) == "S" * blocks
        desk.kv.tick()
        desk.store.settle()
    return prompts


def test_what_leaves_host_lies_on_disk(two_tiers: Callable[..., Desk]) -> None:
    """With a disk that keeps up nothing is lost when host overflows three times over."""
    desk = two_tiers()
    engine = desk.engine()
    prompts = fill(desk, engine, 24)
    assert desk.usage().block_count <= 64
    assert [engine.matched(tokens) for tokens in prompts] == [8] * 24
    assert [engine.fetched(tokens) for tokens in prompts] == [8] * 24


def test_nothing_is_written_that_host_has_room_for(two_tiers: Callable[..., Desk]) -> None:
    """Below the watermark the disk is left alone."""
    desk = two_tiers()
    fill(desk, desk.engine(), 4)
    assert desk.store.disk.usage().used_bytes == 0


def test_an_answer_names_the_tiers(two_tiers: Callable[..., Desk]) -> None:
    """The plan says which tokens come from where, and blocks on disk have no slot yet."""
    desk = two_tiers()
    engine = desk.engine()
    first, *_ = fill(desk, engine, 24)
    found = engine.lookup(first)
    assert [step.source for step in found.plan.steps] == ["disk"]
    assert sum(step.token_count for step in found.plan.steps) == 32
    assert found.slots.places.tolist() == [-1] * 8
    assert "32 tokens from disk" in found.reason
    assert engine.restore(found, first) == (8, [])
    again = engine.lookup(first)
    assert [step.source for step in again.plan.steps] == ["host"]
    assert (again.slots.places >= 0).all()


def test_disk_serves_when_host_is_empty(two_tiers: Callable[..., Desk], shm_directory: Any) -> None:
    """What was flushed is there after a start with an empty host, all of it and right."""
    desk = two_tiers(directory=shm_directory)
    prompts = fill(desk, desk.engine(), 12)
    flushed = desk.wait(desk.kv.flush())
    assert (flushed.durable_blocks, flushed.left_out_blocks) == (96, 0)
    desk.store.restart(MemoryTier(64 * BLOCK))
    engine = desk.engine()
    assert [engine.fetched(tokens) for tokens in prompts] == [8] * 12


def test_flush_says_what_it_left_out(two_tiers: Callable[..., Desk]) -> None:
    """With a disk too small for all, the answer counts what is durable and what is not."""
    desk = two_tiers(host=64, disk=16)
    engine = desk.engine()
    for i in range(6):
        engine.put(prompt(i, 8))
    flushed = desk.wait(desk.kv.flush())
    assert 0 < flushed.durable_blocks <= 16
    assert flushed.durable_blocks + flushed.left_out_blocks == 48


def test_flush_needs_a_disk(desk: Desk) -> None:
    """Without a disk tier it is refused, with the fix."""
    with pytest.raises(FailedPrecondition, match=r"tiers\.disk\.path"):
        desk.kv.flush()


def test_a_restore_larger_than_host_comes_in_part(two_tiers: Callable[..., Desk]) -> None:
    """What finds no room in host is named, and can still be read block by block."""
    desk = two_tiers(host=64, disk=1024)
    engine = desk.engine()
    long = prompt(70, 48)
    assert engine.put(long) == "S" * 48
    fill(desk, engine, 24)
    held = [engine.lookup(prompt(i, 8)) for i in range(18, 24)]
    assert sum(found.matched_tokens for found in held) == 4 * 48
    found = engine.lookup(long)
    assert found.matched_tokens == 4 * 48
    came, failed = engine.restore(found, long)
    assert came + len(failed) == 48
    assert came >= 8
    assert failed
    assert set(failed) == {"there is no room in the host tier"}
    for block, key in enumerate(engine.keys(long)):
        bytes_, _ = desk.wait(desk.kv.read_block(engine.session, found.lease_id, block))
        assert bytes_ == engine.payload(key).tobytes()


def spoil(tier: MemoryTier, engine: Any, key: bytes) -> None:
    """Flips a bit of the copy that `tier` has of a block."""
    for place, slot in tier._slots.items():
        if slot.record is not None and slot.record.header.key == key:
            np.asarray(slot.data)[100] ^= 1
            assert not tier.verify(place, BLOCK, slot.record.checksum)
            return
    raise AssertionError("the block is not there")


def test_damage_on_disk_is_a_miss(two_tiers: Callable[..., Desk]) -> None:
    """A block whose bytes rotted on disk is never handed out, and is gone afterwards."""
    desk = two_tiers()
    engine = desk.engine()
    first, *_ = fill(desk, engine, 24)
    spoil(desk.store.disk, engine, engine.keys(first)[3])
    found = engine.lookup(first)
    came, failed = engine.restore(found, first)
    assert came == 3
    assert len(failed) == 5
    engine.release(found)
    desk.settle()
    assert engine.matched(first) == 3


def test_damage_on_disk_costs_nothing_that_host_has(two_tiers: Callable[..., Desk]) -> None:
    """A scrub that finds a bad copy drops that copy only; the block is written again."""
    desk = two_tiers()
    engine = desk.engine()
    first = prompt(0, 8)
    engine.put(first)
    desk.wait(desk.kv.flush())
    spoil(desk.store.disk, engine, engine.keys(first)[3])
    result = desk.wait(desk.kv.verify("disk"))
    assert (result.verified_blocks, result.corrupt_blocks) == (8, 1)
    assert engine.keys(first)[3].hex() in result.findings[0]
    assert engine.matched(first) == 8
    assert desk.wait(desk.kv.flush()).left_out_blocks == 0
    assert desk.wait(desk.kv.verify("disk")).corrupt_blocks == 0


def test_a_bad_block_in_host_is_not_written_to_disk(two_tiers: Callable[..., Desk]) -> None:
    """Memory that changed after the put is found when it is to be made durable, and dropped."""
    desk = two_tiers()
    engine = desk.engine()
    first = prompt(0, 8)
    engine.put(first)
    spoil(desk.store.tier, engine, engine.keys(first)[5])
    flushed = desk.wait(desk.kv.flush())
    assert flushed.durable_blocks == 5
    assert engine.matched(first) == 5


@pytest.mark.parametrize("how", ["clear", "bump"])
@pytest.mark.parametrize("seed", range(12))
def test_cleared_blocks_never_come_back_from_disk(
    two_tiers: Callable[..., Desk], shm_directory: Any, how: str, seed: int
) -> None:
    """Whatever was on its way to disk or back when a space was cleared: it is gone for good."""
    desk = two_tiers(late=True, seed=seed, directory=shm_directory)
    engine = desk.engine()
    prompts = [prompt(i, 8) for i in range(12)]
    for tokens in prompts:
        engine.put(tokens)
        desk.kv.tick()
    found = engine.lookup(prompts[0])
    if found.lease_id:
        desk.kv.restore(engine.session, found.lease_id, 0, 0, lambda answer: None)
    for _ in range(seed):
        desk.store.turn()
        desk.mover.step()
    space = engine.space.id
    call = desk.kv.clear if how == "clear" else desk.kv.bump_epoch
    desk.wait(call(space))
    if seed % 2:
        desk.settle()
    desk.store.restart(desk.store.tier.reopened())
    engine = desk.engine()
    assert [engine.matched(tokens) for tokens in prompts] == [0] * 12
    assert engine.put(prompts[0]) == "S" * 8
    desk.settle()


def test_ranks_are_promoted_together(two_tiers: Callable[..., Desk]) -> None:
    """All shards of a block come from disk at once, whichever rank asks."""
    desk = two_tiers()
    ranks = [desk.engine(shard=i, shard_count=2, engine_id="e") for i in range(2)]
    first = prompt(0, 8)
    for i in range(12):
        for rank in ranks:
            rank.put(prompt(i, 8))
        desk.kv.tick()
        desk.store.settle()
    found = ranks[0].lookup(first, request_id="r")
    assert found.slots.places.tolist() == [-1] * 8
    assert ranks[0].restore(found, first) == (8, [])
    again = ranks[1].lookup(first, request_id="r")
    assert (again.slots.places >= 0).all()
    assert ranks[1].check(again, first) == 8


def test_two_restores_read_once(two_tiers: Callable[..., Desk]) -> None:
    """Engines that restore the same blocks at a time share one read."""
    desk = two_tiers(late=True)
    one, two = desk.engine(), desk.engine()
    first, *_ = fill(desk, one, 24)
    disk, reads = desk.store.disk, []
    read_many = disk.read_many
    disk.read_many = lambda items, length: reads.extend(items) or read_many(items, length)
    answers: list[Any] = []
    for engine in (one, two):
        found = engine.lookup(first)
        desk.kv.restore(engine.session, found.lease_id, 0, 0, answers.append)
    desk.store.settle()
    assert len(reads) == 8
    assert sum(len(answer.places) for answer in answers) == 16


def test_a_disk_that_does_not_answer_is_not_waited_for(two_tiers: Callable[..., Desk]) -> None:
    """Restores end with a reason, host goes on, lookups leave the disk out until it answers."""
    desk = two_tiers(late=True)
    engine = desk.engine()
    prompts = fill(desk, engine, 24)
    found = engine.lookup(prompts[0])
    answers: list[Any] = []
    done = desk.kv.restore(engine.session, found.lease_id, 0, 0, answers.append)
    desk.advance(3.0)
    assert done.done
    assert "has not answered for 2.0 s" in answers[0].reason
    assert engine.matched(prompts[0]) == 0
    assert engine.matched(prompts[-1]) == 8
    engine.release(found)
    desk.settle()
    assert engine.matched(prompts[0]) == 8


def test_disk_evicts_coldest_first_and_leaves_what_is_leased(
    two_tiers: Callable[..., Desk],
) -> None:
    """A full disk gives up what was not used for longest; a leased block never goes."""
    desk = two_tiers(host=32, disk=64)
    engine = desk.engine()
    held = None
    prompts = []
    for i in range(40):
        prompts.append(prompt(i, 4))
        engine.put(prompts[-1])
        desk.kv.tick()
        desk.store.settle()
        if i == 9:
            held = engine.lookup(prompts[0])
            assert held.matched_tokens == 16
    assert engine.restore(held, prompts[0]) == (4, [])
    found = [engine.matched(tokens) for tokens in prompts]
    assert found[0] == 4
    assert found[1:9] == [0] * 8
    assert found[-8:] == [4] * 8
    assert desk.store.disk.usage().used_bytes <= 64 * BLOCK


def test_a_full_index_takes_new_blocks(two_tiers: Callable[..., Desk]) -> None:
    """I16: `index.max_blocks` counts blocks of both tiers once; those that come take the place of
    the coldest, wherever these lie, and host is not emptied for it."""
    desk = two_tiers(sections={"index": {"max_blocks": 160}})
    engine = desk.engine()
    prompts = fill(desk, engine, 40)
    assert desk.kv.status().block_count <= 160
    assert [engine.matched(tokens) for tokens in prompts[-12:]] == [8] * 12
    assert engine.matched(prompts[0]) < 8
    assert desk.usage().block_count >= 32


def test_a_tenant_stays_within_its_cap_on_disk(two_tiers: Callable[..., Desk]) -> None:
    """A cap on disk bounds what is written there, the tenant's own oldest blocks go first."""
    desk = two_tiers(sections={"tenants": [{"name": "default", "disk_cap": f"{32 * BLOCK}B"}]})
    engine = desk.engine()
    prompts = fill(desk, engine, 24)
    residency = desk.kv.parts.residency
    assert residency.accounts.tenant_used(1, "default") <= 32 * BLOCK
    assert engine.matched(prompts[-1]) == 8


def test_several_block_sizes_share_a_disk(two_tiers: Callable[..., Desk]) -> None:
    """A model that comes later gets room on a full disk whatever its block size is."""
    desk = two_tiers(host=64, disk=96)
    small = desk.engine()
    fill(desk, small, 24)
    large = desk.engine(model="wide", num_layers=4)
    for i in range(24):
        assert large.put(prompt(100 + i, 2)) == "SS"
        desk.kv.tick()
        desk.store.settle()
    accounts = desk.kv.parts.residency.accounts
    assert accounts.space_used(1, large.space) >= 32 * BLOCK
    assert [large.fetched(prompt(100 + i, 2)) for i in range(18, 24)] == [2] * 6


@pytest.mark.parametrize("seed", range(6))
def test_the_endurance_budget_holds(two_tiers: Callable[..., Desk], seed: int) -> None:
    """No more is written than a day's budget, but a Flush is."""
    desk = two_tiers(disk=64, disk_section={"endurance_dwpd": 0.5}, seed=seed)
    engine = desk.engine()
    for i in range(24):
        engine.put(prompt(i, 8))
        desk.kv.tick()
        desk.store.settle()
    written = sum(1 for _ in desk.store.disk.recover())
    assert written <= 32 + 32  # the budget, and the group that used it up
    assert desk.wait(desk.kv.flush()).durable_blocks > 0
