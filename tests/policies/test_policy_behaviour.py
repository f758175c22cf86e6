"""What holds for every policy: closure, leases, quotas, causality, and a change while it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from kvstore.core.keys import Chain, Segment
from kvstore.core.space import Space
from kvstore.policies.actions import action_line
from kvstore.policies.base import policy_names
from kvstore.policies.leaf_scores import LeafScores
from kvstore.policies.uses import Request, prefix_digests
from kvstore.replay.cachesim import CacheSimulation
from kvstore.replay.cachesim_workload import Workload
from kvstore.replay.formats import BUNDLED, TraceRequest, load_trace
from kvstore.replay.generate import generate, scaled
from kvstore.replay.generate_preset import load_preset

POLICIES = policy_names(offline=True)
CAPACITY = 60
ROOT = bytes(32)

steps = st.lists(
    st.tuples(
        st.integers(0, 2),  # tenant
        st.integers(0, 7),  # conversation
        st.integers(1, 24),  # blocks of it
        st.sampled_from(["ask", "ask", "ask", "put only", "lease", "end lease", "clear"]),
    ),
    max_size=50,
)
quotas = st.lists(
    st.tuples(st.none() | st.integers(10, 50), st.integers(0, 10)), min_size=3, max_size=3
)


class Player:
    """Carries steps out in a world and checks what must hold after each."""

    def __init__(self, world: Any, spaces: list[Space], limits: list[tuple[int | None, int]]):
        self.world, self.spaces = world, spaces
        self.size = spaces[0].slot_bytes
        self.leases: list[tuple[Any, int]] = []
        self.clock = count()
        for space, (cap, floor) in zip(spaces, limits, strict=True):
            top = None if cap is None else cap * self.size
            world.residency.set_quota(space.tenant, 0, top, floor * self.size)
        self.floors = [floor * self.size for _, floor in limits]

    def step(self, tenant: int, chat: int, blocks: int, what: str) -> None:
        space, residency = self.spaces[tenant], self.world.residency
        symbols = [(1000 * chat + n).to_bytes(16, "little") for n in range(blocks)]
        if what == "end lease":
            if self.leases:
                self.world.index.unanchor(self.leases.pop(chat % len(self.leases))[0])
            return
        if what == "clear":
            if not self.leases and chat == 0:
                self.world.index.remove_space(space)
            return
        if what != "put only":
            self.ask(space, symbols)
        self.make_room(space, 0, 0)
        room = residency.room(0, "", space.tenant) // self.size
        free = CAPACITY - residency.accounts.used(0) // self.size
        known = self.world.look(space, symbols) if what == "put only" else self.found
        self.world.put(space, symbols[: known + max(0, min(room, free))])
        if what == "lease" and (found := self.world.walk(space, self.chain(symbols)).path):
            run, _, stop = found[-1]
            anchor = self.world.index.anchor(run, stop, 1)
            self.leases.append((anchor, anchor.block_count))
        missing = max(0, blocks - known - free)
        self.make_room(space, missing, max(0, blocks - known))

    def chain(self, symbols: list[bytes]) -> Chain:
        return Chain((Segment(b"".join(symbols), 16),))

    def ask(self, space: Space, symbols: list[bytes]) -> None:
        digests = prefix_digests(space, ROOT, self.chain(symbols))
        seconds = 7.0 * next(self.clock)
        hint = ("", "none", "likely", "certain")[len(symbols) % 4]
        request = Request(space.tenant, seconds, digests, 4 * len(symbols), 50, hint)
        self.world.residency.request(request)
        self.found = self.world.look(space, symbols)

    def make_room(self, space: Space, blocks: int, incoming: int) -> None:
        residency = self.world.residency
        used = residency.accounts.tenant_used
        for drop in residency.make_room(
            0, "", space.tenant, blocks * self.size, incoming * self.size
        ):
            victim = drop.run.root.space
            assert drop.run.is_leaf(0), "a victim has something below it"
            assert drop.keep >= drop.run.anchored_blocks(), "a leased block goes"
            self.world.index.drop(drop.run, drop.keep, 0)
            if victim is not space:
                assert used(0, victim.tenant) >= self.floors[victim.number]

    def check(self) -> None:
        residency = self.world.residency
        assert residency.accounts.used(0) <= CAPACITY * self.size
        for anchor, blocks in self.leases:
            assert anchor.block_count == blocks, "a leased block went"
        for space in self.spaces:
            assert residency.room(0, "", space.tenant) >= 0
        self.world.check()


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=25, deadline=None)
@given(limits=quotas, played=steps)
def test_closure_leases_floors_and_caps_hold(
    new_world: type[Any],
    new_space: Callable[..., Space],
    policy: str,
    limits: list[tuple[int | None, int]],
    played: list[tuple[int, int, int, str]],
) -> None:
    """Whatever a policy prefers: only leaves go, leases stay, no quota or capacity is broken."""
    spaces = [new_space(n, f"tenant{n}") for n in range(3)]
    player = Player(new_world(policy=policy), spaces, limits)
    for step in played:
        player.step(*step)
        player.check()


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return load_trace(BUNDLED, 900)


def simulate(requests: list[TraceRequest], policy: str, capacity: int) -> list[str]:
    """The action log, with a mark at each request."""
    simulation = CacheSimulation(Workload(requests), policy, (capacity,))
    log: list[str] = []
    simulation.residency.on_action = lambda action: log.append(action_line(action))
    for number in range(len(requests)):
        log.append(f"request {number}")
        simulation.request(number)
    return log


@pytest.mark.parametrize("policy", policy_names())
def test_actions_do_not_depend_on_what_comes_later(
    requests: list[TraceRequest], policy: str
) -> None:
    """Causality: the log of a trace's first half is the same without the second half."""
    half = simulate(requests[:450], policy, 1500)
    assert simulate(requests, policy, 1500)[: len(half)] == half
    assert any(line.startswith("drop") for line in half)


@pytest.mark.parametrize("policy", policy_names())
def test_recorded_events_told_again_give_the_same_actions(
    requests: list[TraceRequest], policy: str
) -> None:
    """What residency was told, requests included, is all that its actions depend on."""
    logs = []
    for _ in range(2):
        simulation = CacheSimulation(Workload(requests[:300]), policy, (800,))
        events: list[Any] = []
        actions: list[str] = []
        simulation.residency.on_event = events.append
        simulation.residency.on_action = lambda a, log=actions: log.append(action_line(a))
        simulation.run()
        logs.append((events, actions))
    assert logs[0] == logs[1]
    assert {"request", "access", "make_room"} == {event.name for event in logs[0][0]}


def test_a_policy_is_changed_while_it_runs(requests: list[TraceRequest]) -> None:
    """Through all policies in turn nothing resident is lost, and each goes on evicting."""
    simulation = CacheSimulation(Workload(requests), "lru", (1500,))
    names = policy_names()
    for number in range(len(requests)):
        if number % 80 == 79:
            before = simulation.index.block_count
            simulation.residency.set_policy(names[number // 80 % len(names)])
            assert simulation.index.block_count == before
        simulation.request(number)
        assert simulation.index.block_count <= 1500
    simulation.index.check_integrity()
    simulation.residency.check_integrity()


def test_what_was_learned_outlives_a_change_of_policy(requests: list[TraceRequest]) -> None:
    """After `saved_time` was put aside for a while, it goes on with its curves and directory."""
    simulation = CacheSimulation(Workload(requests), "saved_time", (1500,))
    for number in range(600):
        if number == 300:
            simulation.residency.set_policy("lru")
        simulation.request(number)
    simulation.residency.set_policy("saved_time")
    [model] = simulation.residency.context.models.values()
    assert model._requests == 600  # type: ignore[attr-defined]


def test_saved_time_without_requests_ranks_by_recency(
    new_world: type[Any], new_space: Callable[..., Space]
) -> None:
    """A store that tells of no requests still loses what was not used for longest."""
    world, space = new_world(policy="saved_time"), new_space()
    chains = [[(100 * n + i).to_bytes(16, "little") for i in range(4)] for n in range(30)]
    for chain in chains:
        world.put(space, chain)
    for _ in range(200):
        world.look(space, chains[0])
    for chain in chains[:15]:
        world.look(space, chain)
    world.free(space, 4 * 15)
    assert [bool(world.look(space, chain)) for chain in chains] == [True] * 15 + [False] * 15


def shifted(first: list[TraceRequest], second: list[TraceRequest]) -> list[TraceRequest]:
    """One workload after the other, without common blocks."""
    end = first[-1].timestamp + 1000
    return [
        *first,
        *(
            msgspec.structs.replace(
                request,
                timestamp=request.timestamp + end,
                hash_ids=[hash_id + (1 << 40) for hash_id in request.hash_ids],
                tenant="",
            )
            for request in second
        ),
    ]


def test_the_queue_of_victims_does_not_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the workload changes, what was worth much before goes, though fresh blocks of little
    worth would keep the queue full; without looking at all leaves now and then, it stays for good.
    """
    second = list(generate(scaled(load_preset("synthetic"), seconds=400), 1))
    both = Workload(shifted(load_trace(BUNDLED), second))
    alone = Workload([msgspec.structs.replace(request, tenant="") for request in second])
    capacity = alone.capacity(0.01)

    def hits(workload: Workload) -> int:
        simulation = CacheSimulation(workload, "saved_time", (capacity,))
        simulation.run()
        return sum(hit.blocks for hit in simulation.hits[-len(second) :])

    fresh, after = hits(alone), hits(both)
    assert after > 0.8 * fresh > 0
    monkeypatch.setattr(LeafScores, "gone", lambda self, blocks: None)
    assert hits(both) < 0.5 * fresh


def test_hints_that_are_mostly_true_help_and_noise_does_not_hurt(
    requests: list[TraceRequest],
) -> None:
    """The what-if of hints: seconds saved rise with their accuracy, and not below none at 0.5."""
    saved = {}
    trace = load_trace(BUNDLED)
    for accuracy in (None, 0.5, 0.9):
        workload = Workload(trace, hints=accuracy)
        capacity = workload.capacity(0.05)
        saved[accuracy] = CacheSimulation(workload, "saved_time", (capacity,)).run().saved_ratio
    assert saved[0.9] > saved[None] + 0.02
    assert saved[0.5] > saved[None] - 0.015


def test_every_policy_works_with_a_disk_tier_below() -> None:
    """Blocks are written to disk and hit there, and a disk saves seconds on top of host's."""
    trace = load_trace(BUNDLED, 500)
    workload = Workload(trace)
    alone = CacheSimulation(workload, "saved_time", (900,)).run()
    for policy in policy_names():
        simulation = CacheSimulation(workload, policy, (900, 2700))
        result = simulation.run()
        simulation.index.check_integrity()
        simulation.residency.check_integrity()
        assert result.tier_tokens[1] > 0, policy
        assert result.written_blocks > 0, policy
        if policy == "saved_time":
            assert result.saved_seconds > alone.saved_seconds


def test_python_random_is_not_drawn_from() -> None:
    """Two simulations of one trace agree, whatever the state of the global generator."""
    workload = Workload(load_trace(BUNDLED, 300))
    results = []
    for seed in (1, 2):
        random.seed(seed)
        results.append(CacheSimulation(workload, "saved_time", (700,)).run().hit_blocks)
    assert results[0] == results[1]
