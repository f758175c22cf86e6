"""Shadows against the full simulation: equal if they follow everything, close to it by a sample."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.policies import shadow
from kvstore.policies.accounts import Quota
from kvstore.policies.base import Model
from kvstore.policies.ghost_disk import DISK
from kvstore.policies.reuse_model import ReuseModel
from kvstore.policies.sampling import (
    HOST_BLOCKS,
    SHARED_KEPT,
    GhostSpace,
    SharedBlocks,
    fitting_share,
    is_followed,
)
from kvstore.policies.shadow import Job, Setup, Shadows, Variant
from kvstore.policies.uses import Use
from kvstore.replay.cachesim import DISK_BLOCK_SECONDS, CacheSimulation
from kvstore.replay.cachesim_workload import Workload, trace_space
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace

POLICIES = ("lru", "gdsf", "saved_time")
SALTS = (0, 0x0123456789ABCDEF, 0xFEDCBA9876543210)


def chats(seed: int, count: int, system_blocks: int, open_chats: int = 60) -> list[TraceRequest]:
    """Chats that go on turn by turn, each under one of six system prompts."""
    rng, fresh = random.Random(seed), iter(range(10**6, 10**9))
    systems = [[1000 * n + i for i in range(system_blocks)] for n in range(6)]
    going: list[list[int]] = []
    requests = []
    for number in range(count):
        if not going or rng.random() < 0.3:
            chat = list(systems[min(int(rng.expovariate(0.6)), 5)])
            going = [*going[-open_chats:], chat]
        else:
            chat = going.pop(int(len(going) * rng.random() ** 0.5))
            going.append(chat)
        chat.extend(next(fresh) for _ in range(rng.randrange(1, 6)))
        requests.append(
            TraceRequest(
                timestamp=1000 * number, input_length=512 * len(chat), output_length=100,
                hash_ids=list(chat),
            )
        )  # fmt: skip
    return requests


def follow(workload: Workload, setup: Setup, share: float = 1.0, salt: int = 0) -> Shadows:
    """Tells a live model of all requests, and shadows of a share of the conversations."""
    model = ReuseModel()
    models: list[Model] = [model]
    shadows = Shadows(setup, share, models)
    shadows.worth.set_restore(DISK, DISK_BLOCK_SECONDS, 0.0)
    space = GhostSpace(next(iter(workload.spaces.values())))
    for number, told in enumerate(workload.told):
        use = Use(number, told)
        model.on_request(use, told)
        shadows.pass_by(told.seconds, shadows.prefill_seconds(space, told.input_tokens))
        if is_followed(told, use, share, salt):
            for _ in shadows.serve(Job(space, told, use)):
                pass
    return shadows


def setup_of(workload: Workload, host: int, disk: int | None = None) -> Setup:
    """The usual shadows of a store with so many blocks."""
    size = next(iter(workload.spaces.values())).slot_bytes
    disk_bytes = None if disk is None else disk * size
    return Setup("saved_time", {"": host * size}, disk_bytes, 0.0, POLICIES, (0.5, 2.0))


@pytest.fixture(autouse=True)
def one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates are of all requests, as results of simulations are."""
    monkeypatch.setattr(shadow, "HALF_REQUESTS", 1 << 30)


@pytest.mark.parametrize("disk", [None, 2000])
def test_following_everything_is_the_simulation(disk: int | None) -> None:
    """At a share of 1 every shadow hits, request by request, what its full simulation hits."""
    workload = Workload(load_trace(BUNDLED)[:500])
    host = 600
    shadows = follow(workload, setup_of(workload, host, disk))
    assert shadows.requests == sum(bool(chain.segments) for chain in workload.chains)
    for number, (variant, estimate) in enumerate(
        zip(shadows.setup.variants, shadows.estimates(), strict=True)
    ):
        sizes = [
            int(size * (variant.capacity if variant.tier == tier else 1))
            for tier, size in (("host", host), ("disk", disk))
            if size is not None
        ]
        simulation = CacheSimulation(workload, variant.policy, tuple(sizes))
        result = simulation.run()
        assert shadows.current.hit_tokens[number] == 512 * result.hit_blocks, variant
        if disk is None:
            # Prompts without a full block are not followed.
            assert estimate.saved_ratio == pytest.approx(result.saved_ratio, rel=0.01)


def errors(requests: Sequence[TraceRequest], part: float, share: float) -> list[float]:
    """How far estimated token hit ratios are off, for each salt and variant."""
    workload = Workload(requests)
    host = workload.capacity(part)
    setup = setup_of(workload, host)
    truth = [
        CacheSimulation(workload, v.policy, (int(host * v.capacity),)).run().token_hit_ratio
        for v in setup.variants
    ]
    return [
        estimate.token_hit_ratio - true
        for salt in SALTS
        for estimate, true in zip(
            follow(workload, setup, share, salt).estimates(), truth, strict=True
        )
    ]


@pytest.mark.long
def test_a_sample_is_close_to_all() -> None:
    """Half of the conversations tell the hits of all within 3 points, 1.5 on average."""
    found = errors(load_trace(BUNDLED), 0.25, 0.5)
    assert max(map(abs, found)) < 0.03
    assert sum(map(abs, found)) / len(found) < 0.015


@pytest.mark.long
def test_common_beginnings_do_not_crowd_a_sample_out() -> None:
    """Under long system prompts a quarter of the chats tells within 8 points, not 40."""
    found = errors(chats(1, 2500, 60), 0.1, 0.25)
    assert max(map(abs, found)) < 0.08


def test_conversations_are_followed_whole() -> None:
    """All turns of a chat are in or out, whichever system prompt it shares; the share is kept."""
    model = ReuseModel()
    decided: dict[int, set[bool]] = {}
    taken = []
    for number, told in enumerate(Workload(chats(2, 3000, 5)).told):
        use = Use(number, told)
        model.on_request(use, told)
        taken.append(is_followed(told, use, 0.25))
        if use.shared >= 5:  # its system prompt is known to be one
            own = int.from_bytes(told.digests[8 * use.shared : 8 * use.shared + 8], "little")
            decided.setdefault(own, set()).add(taken[-1])
    assert len(decided) > 500
    assert all(len(answers) == 1 for answers in decided.values())
    assert 0.2 < sum(taken[200:]) / len(taken[200:]) < 0.3


def test_smaller_shares_are_parts_of_larger_ones() -> None:
    """Who is followed at a share is followed at any larger one; at 1 everybody is."""
    told = Workload(chats(3, 300, 2)).told
    for request in told:
        answers = [is_followed(request, Use(0, request), 0.5**n) for n in range(8)]
        assert answers == sorted(answers, reverse=True)
        assert answers[0]


def test_the_share_follows_from_the_blocks() -> None:
    """A small store is followed whole; a large one so that its ghosts stay small."""
    block = 1 << 24
    assert fitting_share({"": 1000 * block}, 10_000 * block, block) == 1
    share = fitting_share({"": 10**6 * block}, 10**7 * block, block)
    assert share * 10**6 <= HOST_BLOCKS < 2 * share * 10**6
    by_all = fitting_share({"": 8000 * block}, 10**6 * block, block)
    assert by_all == 0.25


def test_ghosts_stay_within_their_capacities() -> None:
    """However much passes by, no ghost holds more than its part, and the books are right."""
    workload = Workload(chats(4, 1500, 10))
    setup = setup_of(workload, 400, 800)
    shadows = follow(workload, setup, 0.5)
    size = next(iter(workload.spaces.values())).slot_bytes
    extra = 60 * size  # six system prompts of ten blocks
    for one in shadows.shadows:
        variant, accounts = one.variant, one.ghost.residency.accounts
        host = variant.capacity if variant.tier == "host" else 1
        disk = variant.capacity if variant.tier == "disk" else 1
        assert accounts.used(0) <= 0.5 * host * 400 * size + extra
        assert accounts.used(1) <= 0.5 * disk * 800 * size + extra
        assert len(one._uses) <= shadow.USES_KEPT
        one.ghost.index.check_integrity()
        one.ghost.residency.check_integrity()
    for _ in shadows.empty():
        pass
    assert all(not one.ghost.index.block_count for one in shadows.shadows)
    assert all(not one.ghost.residency.accounts.used(0) for one in shadows.shadows)


def test_quotas_hold_in_ghosts() -> None:
    """A tenant's cap, scaled to the share, holds; taken away, it is gone."""
    workload = Workload(chats(5, 400, 3))
    setup = setup_of(workload, 400)
    size = next(iter(workload.spaces.values())).slot_bytes
    tenant = workload.requests[0].tenant
    shadows = Shadows(setup, 0.5, [ReuseModel()])
    shadows.take_quotas({(0, tenant): Quota(100 * size, 10 * size), (1, tenant): Quota(1, 1)})
    space = GhostSpace(next(iter(workload.spaces.values())))
    for number, told in enumerate(workload.told):
        for _ in shadows.serve(Job(space, told, Use(number, told))):
            pass
    for one in shadows.shadows:
        assert 0 < one.ghost.residency.accounts.tenant_used(0, tenant) <= 50 * size
    shadows.take_quotas({})
    assert all(one.ghost.residency.quota(tenant, 0) == Quota() for one in shadows.shadows)


def test_grains_of_small_blocks() -> None:
    """A ghost's block is what has one digest: several of the live space's, all shards together."""
    live = trace_space(3, "a", 16, 1000)
    ghost = GhostSpace(live)
    assert (ghost.block_size, ghost.shard_count) == (128, 1)
    assert ghost.slot_bytes == 8 * live.slot_bytes * live.shard_count
    assert (ghost.id, ghost.pool, ghost.tenant) == (live.id, live.pool, live.tenant)


def test_beginnings_that_nobody_came_through_are_forgotten() -> None:
    """What is shared counts once, as long as somebody comes through it."""
    space = GhostSpace(trace_space(0, "a", 512))
    shared = SharedBlocks()
    for _ in range(3):
        shared.saw(space, bytes(range(16)))
    assert shared.byte_count("") == 2 * space.slot_bytes
    for _ in range(SHARED_KEPT):
        shared.saw(space, b"")
    assert shared.byte_count("") == 0


def test_variants() -> None:
    """The live store's own comes first, each other once; without a disk there is none to change."""
    setup = Setup("lru", {"": 1}, None, 0.0, ("gdsf", "lru", "gdsf"), (2.0, 1.0, 0.5))
    assert setup.variants == [
        Variant("lru"), Variant("gdsf"), Variant("lru", "host", 2.0), Variant("lru", "host", 0.5),
    ]  # fmt: skip
    assert Variant("lru", "disk", 0.5) in setup._replace(disk_bytes=10).variants
    assert setup.all_bytes == 1 + 1 + 2 + 0.5
