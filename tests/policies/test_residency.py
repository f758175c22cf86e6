"""Residency: what goes, what may not, and what is counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore.core.errors import InvalidRequest
from kvstore.core.keys import Chain
from kvstore.core.space import Space
from kvstore.policies import base
from kvstore.policies.actions import action_line
from kvstore.policies.index import Run
from kvstore.policies.residency import Residency

NewSpace = Callable[..., Space]
CAPACITY = 60


def tokens(blocks: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(16 * blocks)
    return [data[i : i + 16] for i in range(0, len(data), 16)]


quotas = st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 25))
puts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, 6)), max_size=40)


@settings(max_examples=80, deadline=None)
@given(quotas=st.lists(quotas, min_size=3, max_size=3), puts=puts)
def test_quotas_hold(
    new_world: type[Any],
    new_space: NewSpace,
    quotas: list[tuple[int | None, int | None]],
    puts: list[tuple[int, int, int]],
) -> None:
    """I17: no tenant above its cap, none pressed below its floor by others; the pool is kept to."""
    world, spaces = new_world(), [new_space(n, f"tenant{n}") for n in range(3)]
    size, residency = spaces[0].slot_bytes, world.residency
    floors = {}
    for space, (cap, floor) in zip(spaces, quotas, strict=True):
        floor = None if floor is None or (cap is not None and floor > cap) else floor
        residency.set_quota(
            space.tenant, 0, None if cap is None else cap * size, (floor or 0) * size
        )
        floors[space.tenant] = (floor or 0) * size
    used = residency.accounts.tenant_used

    def make_room(space: Space, blocks: int, incoming: int) -> None:
        byte_count = blocks * size
        for drop in residency.make_room(0, "", space.tenant, byte_count, incoming * size):
            victim = drop.run.root.space.tenant
            assert drop.reason == "capacity" or victim == space.tenant
            before = used(0, victim)
            world.index.drop(drop.run, drop.keep, 0)
            assert used(0, victim) < before
            assert victim == space.tenant or used(0, victim) >= floors[victim]

    for tenant, blocks, seed in puts:
        space = spaces[tenant]
        chain = tokens(20, seed)[:blocks]
        missing = blocks - world.look(space, chain)
        free = CAPACITY - residency.accounts.used(0) // size
        make_room(space, max(0, missing - free), missing)
        free = CAPACITY - residency.accounts.used(0) // size
        room = residency.room(0, "", space.tenant) // size
        world.put(space, chain[: world.look(space, chain) + min(free, max(0, room))])
        assert residency.accounts.used(0) <= CAPACITY * size
        assert residency.room(0, "", space.tenant) >= 0
    world.check()


def test_a_cap_that_is_lowered_takes_effect_on_request(world: Any, new_space: NewSpace) -> None:
    """I17: a cap below what is used makes room from the tenant's own blocks only."""
    mine, other = new_space(0, "mine"), new_space(1, "other")
    world.put(other, tokens(10, 1))
    world.put(mine, tokens(10, 2))
    world.residency.set_quota("mine", 0, cap_bytes=4 * mine.slot_bytes)
    assert world.residency.room(0, "", "mine") == -6 * mine.slot_bytes
    world.free(mine, 0)
    assert world.residency.room(0, "", "mine") == 0
    assert world.look(other, tokens(10, 1)) == 10
    assert world.look(mine, tokens(10, 2)) == 4


@pytest.mark.parametrize("values", [(-1, None), (None, -5), (10, 11)])
def test_impossible_quotas_are_refused(values: tuple[int | None, int | None]) -> None:
    """A negative size or a floor above its cap is the caller's mistake, named."""
    with pytest.raises(InvalidRequest, match=r"cap_bytes|floor_bytes"):
        Residency().set_quota("t", 0, *values)


def test_leased_blocks_stay_and_what_follows_them_goes(world: Any, new_space: NewSpace) -> None:
    """I6: an anchored block and all above it are never dropped; the run's end may be."""
    space, index = new_space(), world.index
    [span] = world.put(space, tokens(10, 1))
    anchor = index.anchor(span.run, 6, 1)
    deep = index.anchor(span.run, 8, 2)
    assert world.free(space, 100) == 2
    index.unanchor(deep)
    assert world.free(space, 100) == 2
    assert (anchor.run, anchor.depth) == (span.run, 6)
    assert world.free(space, 100) == 0
    index.unanchor(anchor)
    assert world.free(space, 100) == 6
    world.check()


def test_blocks_being_written_are_never_dropped(
    world: Any, new_space: NewSpace, new_chain: Callable[..., Chain]
) -> None:
    """I3, closure: a STAGING block holds its ancestors, and is no victim itself."""
    space = new_space()
    chain = tokens(10, 1)
    world.put(space, chain[:4])
    staged = world.stage(space, new_chain(chain))
    world.index.unanchor(staged.anchor)
    assert world.free(space, 100) == 0
    assert world.residency.accounts.used(0) == 10 * space.slot_bytes
    world.check()


def test_leased_leaves_are_not_scanned_again(world: Any, new_space: NewSpace) -> None:
    """A thousand leased leaves are passed over once, not at every eviction."""
    space, index = new_space(), world.index
    anchors = []
    for n in range(1000):
        [span] = world.put(space, tokens(2, n))
        anchors.append(index.anchor(span.run, 2, n))
    parked: list[Run] = []
    policy = world.residency._policies[0, ""]
    park = policy.park
    policy.park = lambda run: (parked.append(run), park(run))
    assert world.free(space, 1) == 0
    assert len(parked) == 1000
    assert world.free(space, 1) == 0
    assert len(parked) == 1000
    index.unanchor(anchors[500])
    assert world.free(space, 2) == 2
    assert anchors[499].run is not None
    assert len(parked) == 1000


def test_an_access_makes_no_more_of_a_run_younger_than_was_asked_for(
    world: Any, new_space: NewSpace
) -> None:
    """A partial hit splits the run: the end that nobody asked for goes first."""
    space = new_space()
    old, other = tokens(10, 1), tokens(10, 2)
    world.put(space, old)
    world.put(space, other)
    assert world.look(space, old[:3]) == 3
    assert world.free(space, 7) == 7
    assert (world.look(space, old), world.look(space, other)) == (3, 10)


def test_pools_are_apart(world: Any, new_space: NewSpace) -> None:
    """I8: room in one pool is made from that pool alone."""
    shared, isolated = new_space(0, "a"), new_space(1, "b", pool="b")
    world.put(shared, tokens(5, 1))
    world.put(isolated, tokens(5, 1))
    assert world.free(isolated, 100) == 5
    assert world.look(shared, tokens(5, 1)) == 5
    accounts = world.residency.accounts
    assert accounts.used(0, "b") == accounts.space_used(0, isolated) == 0
    assert accounts.used(0) == accounts.used(0, "") == accounts.tenant_used(0, "a")
    assert accounts.tenant_used(0, "a") == 5 * shared.slot_bytes


def test_policies_change_without_losing_anything(
    world: Any, new_space: NewSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`set_policy` keeps what is resident and its history, and ranks it anew."""
    monkeypatch.setattr(base, "_FACTORIES", dict(base._FACTORIES))

    @base.register("mru")
    class Mru(base.HeapPolicy):
        def key(self, run: Run) -> int:
            return -run.touched

    space = new_space()
    chains = [tokens(4, n) for n in range(3)]
    for chain in chains:
        world.put(space, chain)
    world.residency.set_policy("mru")
    world.free(space, 4)
    assert [world.walk(space, Chain(())).known_blocks] == [0]
    assert [_stored(world, space, chain) for chain in chains] == [4, 4, 0]
    world.residency.set_policy("lru")
    world.free(space, 4)
    assert [_stored(world, space, chain) for chain in chains] == [0, 4, 0]
    assert world.residency.policy_name == "lru"
    world.check()


def _stored(world: Any, space: Space, chain: list[bytes]) -> int:
    walk = world.walk(space, Chain(()))
    child = world.index.find_root(space, walk.root.digest)
    return sum(
        run.ready for run in world.index.runs(child.head if child else None)
        if run.symbol(0) == chain[0]
    )  # fmt: skip


def test_unknown_policies_are_refused_with_the_known_ones(world: Any) -> None:
    """The error names what there is to choose from, and nothing changes."""
    with pytest.raises(InvalidRequest, match=r"'best' is unknown; choose one of: .*lru"):
        Residency("best")
    with pytest.raises(InvalidRequest, match="lru"):
        world.residency.set_policy("best")
    assert world.residency.policy_name == "lru"


def test_the_same_events_give_the_same_actions(new_world: type[Any], new_space: NewSpace) -> None:
    """Two runs of one history have the same action log, line by line, and the same event log."""
    logs = []
    for _ in range(2):
        world, rng, space = new_world(), random.Random(4), new_space()
        actions: list[str] = []
        events: list[Any] = []
        world.residency.on_action = lambda action, log=actions: log.append(action_line(action))
        world.residency.on_event = events.append
        for _ in range(300):
            chain = tokens(12, rng.randrange(20))[: rng.randrange(1, 13)]
            world.look(space, chain)
            world.put(space, chain + tokens(2, rng.randrange(40)))
            world.free(space, max(0, world.index.block_count - 50))
        logs.append((actions, events))
    assert logs[0] == logs[1]
    assert {line.split()[0] for line in logs[0][0]} == {"admit", "drop"}
    assert {event.name for event in logs[0][1]} == {"access", "make_room"}


def test_heaps_stay_as_small_as_their_leaves(world: Any, new_space: NewSpace) -> None:
    """I16: dead entries of a policy's heap are dropped before they outnumber the live ones."""
    space = new_space()
    stem = tokens(3, 0)
    for n in range(3000):
        world.put(space, stem + tokens(1, n + 1))
        world.free(space, max(0, world.index.block_count - 20))
    [heap] = world.residency._policies[0, ""]._leaves._heaps.values()
    assert len(heap) <= 128
