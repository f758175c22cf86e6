"""Plans by measured costs: only what the engine can execute, and only where it is faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from desk import Desk, Engine
from planned import (
    BLOCK,
    BLOCKS,
    CALL,
    EVEN,
    FAST,
    SLOW,
    TOKENS,
    ask,
    attach,
    disk_desk,
    measure,
    to_disk,
)  # fmt: skip

from kvstore.core.plan import RECOMPUTE, BlockOutcome, FailedBlocks, LookupResult
from kvstore.store.probe import PROBE_SECONDS, RECENT_SECONDS
from kvstore.testing import MemoryTier
from kvstore.tiers.throttle import ThrottledTier


@pytest.fixture
def two_tiers(make_desk: Callable[..., Desk]) -> Callable[..., Desk]:
    return partial(disk_desk, make_desk)


def test_nothing_is_decided_before_it_is_measured(two_tiers: Callable[..., Desk]) -> None:
    """Until engine and disk were measured, all is loaded, and the reason says what is missing."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    found = ask(engine)
    assert (found.plan.kind, found.restore_tokens) == ("load_all", 160)
    assert found.plan.predicted_p50_seconds is None
    assert "not measured yet: the engine's steps (0 of 8)" in found.reason
    engine.release(found)
    measure(desk, engine, steps=5)
    reason = ask(engine).reason
    assert "the engine's steps (5 of 8)" in reason
    assert "disk>host (" in reason


def test_a_fast_disk_is_read(two_tiers: Callable[..., Desk]) -> None:
    """Where loading is faster all is loaded, with what it is predicted to take."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, FAST)
    found = ask(engine)
    assert (found.plan.kind, found.restore_tokens) == ("load_all", 160)
    assert found.plan.predicted_p50_seconds == pytest.approx(CALL.seconds(3, 160), rel=0.3)
    assert found.plan.predicted_p99_seconds >= found.plan.predicted_p50_seconds
    assert "against recompute all" in found.reason
    assert engine.restore(found, TOKENS) == (BLOCKS, [])


def test_a_slow_disk_is_left_alone(two_tiers: Callable[..., Desk]) -> None:
    """A prompt that is recomputed is neither leased nor read nor promoted, and is still found."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    found = ask(engine)
    assert (found.plan.kind, found.restore_tokens, found.matched_tokens) == (
        "recompute_all",
        0,
        160,
    )
    assert found.lease_id == 0
    assert [(step.source, step.token_count) for step in found.plan.steps] == [(RECOMPUTE, 160)]
    assert desk.leased_bytes() == 0
    assert desk.usage().block_count == 0
    assert found.plan.predicted_p50_seconds == pytest.approx(CALL.seconds(163, 0), rel=0.2)


def test_what_host_has_is_loaded_before_what_a_slow_disk_has(
    two_tiers: Callable[..., Desk],
) -> None:
    """The plan ends where the disk begins, and so does its lease."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine, keep=24)
    measure(desk, engine, SLOW)
    found = ask(engine)
    assert (found.plan.kind, found.restore_tokens) == ("prefix", 96)
    steps = [(step.source, step.first_token, step.token_count) for step in found.plan.steps]
    assert steps == [("host", 0, 96), (RECOMPUTE, 96, 64)]
    assert len(found.slots.places) == 24
    assert desk.leased_bytes() == 24 * BLOCK
    engine.check(found, TOKENS)


def test_only_who_can_split_is_told_to(two_tiers: Callable[..., Desk]) -> None:
    """Where the middle is best computed meanwhile, engines that can are told, others are not."""
    desk = two_tiers()
    plain = desk.engine()
    splits = attach(desk, plan_shapes=("prefix", "split"), overlap="layerwise")
    to_disk(desk, plain)
    measure(desk, plain, EVEN)
    found = ask(splits)
    assert found.plan.kind == "split"
    sources = [step.source for step in found.plan.steps]
    assert sources in (["disk", RECOMPUTE, "disk"], [RECOMPUTE, "disk"])
    assert sum(step.token_count for step in found.plan.steps) == 160
    assert found.plan.predicted_p50_seconds < ask(plain).plan.predicted_p50_seconds
    assert ask(plain).plan.kind in ("load_all", "recompute_all", "prefix")


def test_ranks_and_repeats_do_the_same(two_tiers: Callable[..., Desk]) -> None:
    """A named request that is recomputed stays so for all ranks, whatever is measured meanwhile,
    until it is finished.
    """
    desk = two_tiers()
    engine = desk.engine(engine_id="e")
    twin = desk.engine(engine_id="e")
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    assert ask(engine, request_id="r").plan.kind == "recompute_all"
    measure(desk, engine, FAST, steps=200)
    assert ask(twin, request_id="r").plan.kind == "recompute_all"
    assert ask(engine, request_id="other").plan.kind == "load_all"
    desk.kv.finish_request(engine.attachment, "r")
    assert ask(twin, request_id="r").plan.kind == "load_all"


@pytest.mark.parametrize("how", ["clear", "bump_epoch"])
def test_a_repeat_does_not_outlive_a_clear(two_tiers: Callable[..., Desk], how: str) -> None:
    """What was found and not worth loading is not found by a repeat once the space is cleared."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    assert ask(engine, request_id="r").matched_tokens == 160
    emptied = getattr(desk.kv, how)(engine.space.id)
    assert ask(engine, request_id="r").matched_tokens == 0
    desk.wait(emptied)
    assert ask(engine, request_id="r").matched_tokens == 0


def test_a_deadline_and_a_busy_gpu_count(two_tiers: Callable[..., Desk]) -> None:
    """A request that says how busy the engine is loads more; a hopeless deadline is told."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, 30e6)
    free = ask(engine, deadline_seconds=10.0)
    assert "met" in free.reason
    assert ask(engine, deadline_seconds=1e-4).reason.endswith("missed by every plan")
    busy = ask(engine, gpu_busy_ratio=0.9)
    assert busy.restore_tokens >= ask(engine).restore_tokens
    assert busy.restore_tokens > 0


@pytest.mark.parametrize("seed", range(6))
def test_every_plan_can_be_executed(two_tiers: Callable[..., Desk], seed: int) -> None:
    """Whatever was measured, steps cover the prompt's match in order, split only for engines that
    can, and what is to be loaded is leased and comes back right.
    """
    random = Random(seed)
    desk = two_tiers(seed=seed)
    engine = attach(
        desk, plan_shapes=random.choice([("prefix",), ("prefix", "split")]),
        overlap=random.choice(["none", "layerwise"]),
        prefill_chunk_tokens=random.choice([0, 64]),
    )  # fmt: skip
    to_disk(desk, engine, keep=random.randrange(0, 30))
    for _ in range(6):
        call = CALL.times(10 ** random.uniform(-1, 1))
        measure(desk, engine, 10 ** random.uniform(5.5, 8.5), call, steps=60)
        if random.random() < 0.5:
            for size in range(20):
                desk.kv.costs.report_transfer(
                    engine.attachment, "host>hbm", BLOCK << size % 6, 1e-3
                )
        local = random.choice([0, 0, 7, 40, 157])
        hints = {"gpu_busy_ratio": random.choice([0.0, 0.8])}
        if random.random() < 0.5:
            hints["deadline_seconds"] = 10 ** random.uniform(-3, -1)
        found = ask(engine, local=local, **hints)
        check_plan(found, engine, local)
        if found.lease_id:
            restore_all(desk, engine, found)
            engine.release(found)
        desk.settle()


def check_plan(found: LookupResult, engine: Engine, local: int) -> None:
    at, loads = local, []
    for step in found.plan.steps:
        assert step.first_token == at
        assert step.token_count > 0
        at += step.token_count
        if step.source != RECOMPUTE:
            loads.append(step)
    assert at == found.matched_tokens == 160
    assert sum(step.token_count for step in loads) == found.restore_tokens
    sources = [step.source == RECOMPUTE for step in found.plan.steps]
    holes = sum(1 for i in range(len(sources) - 1) if sources[i] and not sources[i + 1])
    assert holes <= ("split" in engine.attachment.plan_shapes)
    assert bool(found.lease_id) == bool(loads)
    if loads:
        last = loads[-1].first_token + loads[-1].token_count
        assert found.slots.first_block == local // 4
        assert found.slots.first_block + len(found.slots.places) == -(-last // 4)


def restore_all(desk: Desk, engine: Engine, found: LookupResult) -> None:
    for step in found.plan.steps:
        if step.source != RECOMPUTE:
            first = step.first_token // 4
            count = -(-(step.first_token + step.token_count) // 4) - first
            answers: list[Any] = []
            desk.wait(desk.kv.restore(engine.session, found.lease_id, first, count, answers.append))
            assert not any(isinstance(answer, FailedBlocks) for answer in answers)
            assert sum(len(answer.places) for answer in answers) == count


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize(("keep", "speed", "kind"), [(24, SLOW, "prefix"), (4, EVEN, "split")])
def test_clients_restore_what_a_plan_loads(
    make_desk: Callable[..., Desk], shared_memory: bool, keep: int, speed: float, kind: str
) -> None:
    """A client gets the blocks that its plan loads, in order, and those alone."""
    section = {"demote_watermark": 1.0, "endurance_dwpd": 0.0, "admission": "all"}
    desk = make_desk(
        "2MiB", disk=MemoryTier(4096 * BLOCK, "disk"), sections={"tiers": {"disk": section}}
    )
    engine = desk.engine()
    to_disk(desk, engine, keep=keep)
    measure(desk, engine, speed)
    client = desk.store.client(shared_memory=shared_memory)
    space = client.attach(engine.space.spec, plan_shapes=("prefix", "split"), overlap="layerwise")
    keys = engine.keys(TOKENS)
    with space.lookup([*TOKENS, 1, 2]) as match:
        assert match.plan.kind == kind, match.reason
        wanted = [i for blocks in match.ranges for i in blocks]
        assert 0 < len(wanted) == match.block_count < BLOCKS
        assert match.restore_tokens == 4 * len(wanted)
        restored = space.restore(match)
        assert [bytes(block) for block in restored] == [
            engine.payload(keys[i]).tobytes() for i in wanted
        ]


class DeskClock:
    """The clock of a desk that is made later."""

    desk: Desk

    def now(self) -> float:
        return self.desk.clock.now()

    def wall(self) -> float:
        return self.desk.clock.wall()

    def pass_by(self, seconds: float) -> None:
        self.desk.clock.advance(seconds)


@pytest.mark.parametrize(("speed", "kind"), [(SLOW, "recompute_all"), (FAST, "load_all")])
def test_the_daemon_measures_its_disk(
    make_desk: Callable[..., Desk], speed: float, kind: str
) -> None:
    """Reads of a throttled disk alone teach what it costs, and the next plan follows."""
    clock = DeskClock()
    disk = ThrottledTier(MemoryTier(4096 * BLOCK, "disk"), speed, clock=clock, sleep=clock.pass_by)
    section = {
        "demote_watermark": 0.5,
        "endurance_dwpd": 0.0,
        "admission": "all",
        "read_timeout_seconds": 60.0,
    }
    clock.desk = desk = make_desk(
        tier=MemoryTier(256 * BLOCK), disk=disk, late=True, sections={"tiers": {"disk": section}}
    )
    engine = desk.engine()
    prompts = [[1000 * (n + 1) + i for i in range(16 + 8 * n)] for n in range(10)]
    for tokens in prompts:
        to_disk(desk, engine, tokens)
    to_disk(desk, engine)
    for i in range(40):
        new, cached = 32 << i % 5, 512 * (i % 7)
        desk.kv.costs.report_step(engine.attachment, CALL.seconds(new, cached), [(new, cached)])
    for tokens in prompts:
        found = ask(engine, tokens)
        if not found.lease_id:  # enough is known to leave the disk alone
            break
        assert engine.restore(found, tokens)[0] == len(tokens) // 4
    found = ask(engine)
    assert found.plan.kind == kind, found.reason
    # A slow disk was found out after a handful of reads, long before its model is exact.
    read = desk.kv.parts.costs.link(desk.kv.parts.costs.read_link)
    assert read.sample_count <= 12
    assert 0.2 < read.seconds(40 * BLOCK) / (40 * BLOCK / speed) < 2.0


def test_a_disk_that_got_fast_is_found_out(make_desk: Callable[..., Desk]) -> None:
    """A disk believed to be slow is read a little now and then, for nobody, so that plans load
    from it again once it is fast; while nobody asks it is left alone.
    """
    clock = DeskClock()
    disk = ThrottledTier(MemoryTier(4096 * BLOCK, "disk"), FAST, clock=clock, sleep=clock.pass_by)
    section = {"demote_watermark": 0.5, "endurance_dwpd": 0.0, "read_timeout_seconds": 60.0}
    clock.desk = desk = make_desk(
        tier=MemoryTier(64 * BLOCK), disk=disk, late=True, sections={"tiers": {"disk": section}}
    )
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    read = desk.kv.parts.costs.link(desk.kv.parts.costs.read_link)
    count, asked = read.sample_count, 0
    assert ask(engine).plan.kind == "recompute_all"
    while ask(engine).plan.kind == "recompute_all":
        assert asked < 40
        asked += 1
        desk.advance(PROBE_SECONDS)
        desk.settle()
    assert 5 <= read.sample_count - count <= 40
    assert desk.usage().block_count == 0
    count = read.sample_count
    for _ in range(30):
        desk.advance(RECENT_SECONDS)
        desk.settle()
    assert read.sample_count <= count + RECENT_SECONDS / PROBE_SECONDS


def test_what_is_being_put_again_is_not_looked_for_on_disk(
    two_tiers: Callable[..., Desk],
) -> None:
    """The disk is not tried for a prompt that left it meanwhile and is being put anew."""
    desk = two_tiers()
    engine = desk.engine()
    to_disk(desk, engine)
    measure(desk, engine, SLOW)
    assert ask(engine).plan.kind == "recompute_all"
    desk.wait(desk.kv.clear(engine.space.id))
    assert engine.reserve(TOKENS).outcomes == bytes([BlockOutcome.WANTED] * BLOCKS)
    read = desk.kv.parts.costs.link(desk.kv.parts.costs.read_link)
    count = read.sample_count
    desk.advance(3 * PROBE_SECONDS)
    assert read.sample_count == count
