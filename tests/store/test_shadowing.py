"""Shadows of a live store: what they cost, what they show, and the guard that acts on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from desk import Desk, Engine

from kvstore.core.clock import perf_seconds
from kvstore.metrics import Metrics
from kvstore.policies import base, shadow
from kvstore.policies.base import HeapPolicy
from kvstore.policies.index import Run
from kvstore.policies.reuse_model import ReuseModel
from kvstore.store import shadowing
from kvstore.store.shadowing import QUEUE_REQUESTS, Shadowing

# A block has 4 tokens, a digest is of 128: the host tier of 1 MiB holds eight of these.
GRAIN_TOKENS = 128
HOST_GRAINS = 8
MakeDesk = Callable[..., Desk]


class NewestFirst(HeapPolicy):
    """Evicts what was used last: good for loops that do not fit, bad for all else."""

    name = "saved_time"

    def key(self, run: Run) -> int:
        return -run.touched

    def on_access(self, run: Run) -> None:
        self._leaves.push(run)


@pytest.fixture
def bad_saved_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`saved_time` is `NewestFirst`, and windows are short."""
    monkeypatch.setitem(base._FACTORIES, "saved_time", NewestFirst)
    monkeypatch.setattr(shadow, "HALF_REQUESTS", 60)


def prompt(number: int, grains: int = 1) -> list[int]:
    return [number * 1000 + n for n in range(grains * GRAIN_TOKENS)]


def ask(desk: Desk, engine: Engine, number: int, grains: int = 1) -> None:
    """One lookup, and time for the shadows to follow."""
    found = engine.lookup(prompt(number, grains))
    if found.lease_id:
        engine.release(found)
    desk.advance(0.05)


def recent(desk: Desk, engine: Engine, count: int, seed: int = 0) -> None:
    """Prompts of which half are one of the last three again."""
    rng, last = random.Random(seed), [1]
    for number in range(100, 100 + count):
        last = [*last[-2:], number if rng.random() < 0.5 else rng.choice(last)]
        ask(desk, engine, last[-1])


def loop(desk: Desk, engine: Engine, count: int) -> None:
    """Twelve prompts round and round, which do not fit."""
    for number in range(count):
        ask(desk, engine, number % 12)


def test_the_guard_leaves_a_bad_saved_time_and_comes_back(
    make_desk: MakeDesk, bad_saved_time: None
) -> None:
    """Where saved_time saves less than lru, lru acts until that is over; status says why."""
    desk = make_desk()
    engine, parts = desk.engine(), desk.kv.parts
    parts.recorder = metrics = Metrics()
    assert parts.residency.policy_name == "saved_time"
    recent(desk, engine, 130)
    status = desk.kv.status()
    assert (status.policy, status.configured_policy) == ("lru", "saved_time")
    assert "of what lru saves" in status.policy_reason
    assert metrics.value("kvstore_policy_guarded") == 1
    assert metrics.value("kvstore_policy_switches_total", "guard") == 1
    recent(desk, engine, 130, seed=1)
    assert desk.kv.status().policy == "lru"
    loop(desk, engine, 260)
    status = desk.kv.status()
    assert (status.policy, status.configured_policy) == ("saved_time", "saved_time")
    assert status.policy_reason == ""
    assert metrics.value("kvstore_policy_guarded") == 0
    assert metrics.value("kvstore_policy_switches_total", "recovery") == 1


def test_nothing_stored_is_lost_when_the_guard_acts(
    make_desk: MakeDesk, bad_saved_time: None
) -> None:
    """A switch changes who goes next, not what is there."""
    desk = make_desk()
    engine = desk.engine()
    engine.put(prompt(7))
    recent(desk, engine, 130)
    assert desk.kv.status().policy == "lru"
    assert engine.matched(prompt(7)) == GRAIN_TOKENS // 4


def test_an_operator_overrules_the_guard(make_desk: MakeDesk, bad_saved_time: None) -> None:
    """A policy that is set acts at once; shadows start anew for it, and it is not guarded."""
    desk = make_desk()
    engine, parts = desk.engine(), desk.kv.parts
    parts.recorder = metrics = Metrics()
    recent(desk, engine, 130)
    desk.kv.set_policy("gdsf")
    status = desk.kv.status()
    assert (status.policy, status.configured_policy, status.policy_reason) == ("gdsf", "gdsf", "")
    assert metrics.value("kvstore_policy_guarded") == 0
    assert metrics.value("kvstore_policy_switches_total", "operator") == 1
    recent(desk, engine, 140, seed=2)
    status = desk.kv.status()
    assert status.policy == status.shadows[0].policy == "gdsf"
    assert metrics.value("kvstore_shadow_restarts_total", "policy") == 1


def test_status_says_what_other_sizes_would_do(make_desk: MakeDesk) -> None:
    """A loop that fits into twice the host tier: that is said, with the seconds it would save."""
    desk = make_desk()
    loop(desk, desk.engine(), 150)
    status = desk.kv.status()
    ratios = {(s.policy, s.tier, s.capacity_ratio): s.token_hit_ratio for s in status.shadows}
    assert ratios["saved_time", "host", 2.0] > 0.85 > ratios["saved_time", "host", 0.5]
    assert ratios["lru", "host", 1.0] < 0.05
    assert status.shadow_share == 1
    assert status.shadow_request_count == 150
    assert "twice the host tier would save" in status.what_if
    seconds = {s.capacity_ratio: s.saved_seconds_per_second for s in status.shadows}
    # 128 tokens at 32 us each, twenty times a second, and nearly all of them hit.
    assert 0.85 * 20 * 128 * 32e-6 < seconds[2.0] < 20 * 128 * 33e-6


def test_more_than_can_be_followed_makes_the_sample_smaller(make_desk: MakeDesk) -> None:
    """The queue has a limit; beyond it the share halves, ghosts start anew, and that is counted."""
    desk = make_desk()
    engine = desk.engine()
    desk.kv.parts.recorder = metrics = Metrics()
    for number in range(QUEUE_REQUESTS + 50):
        engine.lookup(prompt(number))
    assert len(desk.kv.shadowing._queue) == QUEUE_REQUESTS
    assert metrics.value("kvstore_shadow_requests_total", "skipped") == 49
    for _ in range(30):
        desk.advance(0.05)
    assert desk.kv.status().shadow_share == metrics.value("kvstore_shadow_share_ratio") == 0.5
    assert metrics.value("kvstore_shadow_restarts_total", "overflow") == 1
    assert not desk.kv.shadowing._queue
    for number in range(200):
        ask(desk, engine, 10_000 + number)
    assert 60 < desk.kv.status().shadow_request_count < 140
    # With time to spare the share grows again.
    desk.advance(2 * shadowing.LOOK_SECONDS)
    assert desk.kv.status().shadow_share == 1
    assert metrics.value("kvstore_shadow_restarts_total", "idle") == 1


def test_a_burst_is_worked_off_in_slices(make_desk: MakeDesk, monkeypatch: Any) -> None:
    """A tick does a bounded number of steps, and goes on with the same request at the next."""
    monkeypatch.setattr(shadowing, "STEPS_MAX", 3)
    desk = make_desk()
    engine, parts = desk.engine(), desk.kv.parts
    parts.recorder = metrics = Metrics()
    for number in range(5):
        engine.lookup(prompt(number))
    followed = []
    for _ in range(40):
        desk.kv.shadowing.tick()
        followed.append(metrics.value("kvstore_shadow_requests_total", "followed"))
    assert followed[0] == 0
    assert followed[-1] == 5
    assert all(after - before <= 1 for before, after in pairwise(followed))


def test_every_shadow_is_scraped_before_the_first_request(desk: Desk) -> None:
    """Metrics of all variants are there, at zero, once the store is."""
    parts = desk.kv.parts
    parts.recorder = metrics = Metrics()
    made = Shadowing(parts)
    assert made.shadows is not None
    labels = {(v.policy, v.tier, f"{v.capacity:g}") for v in made.shadows.setup.variants}
    assert ("lru", "host", "1") in labels
    assert ("saved_time", "host", "4") in labels
    for name in (
        "kvstore_shadow_token_hit_ratio", "kvstore_shadow_saved_seconds_per_second",
        "kvstore_shadow_hit_tokens_total", "kvstore_shadow_saved_seconds_total",
    ):  # fmt: skip
        children = metrics.families[name].children
        assert set(children) == labels
        assert all(child.value == 0 for child in children.values())
    assert metrics.value("kvstore_shadow_share_ratio") == 1


def test_without_shadows_there_are_none(make_desk: MakeDesk) -> None:
    """An empty list turns them off: nothing is heard, kept or shown."""
    desk = make_desk(sections={"policy": {"shadows": []}})
    loop(desk, desk.engine(), 20)
    status = desk.kv.status()
    assert (status.shadows, status.shadow_share, status.what_if) == ((), 0, "")
    assert desk.kv.shadowing.shadows is None
    assert not [one for one in desk.kv.parts.requests.listeners if "Shadowing" in repr(one)]


def test_saved_time_is_learned_beside_another_policy(make_desk: MakeDesk) -> None:
    """Where the live policy learns nothing, its shadows have a model of their own."""
    desk = make_desk(sections={"policy": {"eviction": "lru"}})
    engine = desk.engine()
    loop(desk, engine, 100)
    assert ReuseModel not in desk.kv.parts.residency.context.models
    assert {s.policy for s in desk.kv.status().shadows} == {"lru", "gdsf", "saved_time"}
    assert desk.kv.shadowing._own_model.block_count == 12
    desk.kv.set_policy("saved_time")
    loop(desk, engine, 10)
    assert desk.kv.shadowing._own_model is None
    assert desk.kv.status().shadows[0].policy == "saved_time"


def test_a_clear_starts_the_shadows_anew(make_desk: MakeDesk) -> None:
    """What was un-published is not found by shadows either."""
    desk = make_desk()
    engine = desk.engine()
    desk.kv.parts.recorder = metrics = Metrics()
    loop(desk, engine, 10)
    desk.wait(desk.kv.clear(engine.space.id))
    desk.advance(0.1)
    assert metrics.value("kvstore_shadow_restarts_total", "clear") == 1
    assert not desk.kv.shadowing.shadows.shadows[0].ghost.index.block_count


def test_ends_of_requests_reach_the_ghosts(make_desk: MakeDesk) -> None:
    """A request's output counts in every ghost that has it, as in the live store."""
    desk = make_desk()
    engine = desk.engine()
    engine.lookup(prompt(1), request_id="r1")
    desk.advance(0.05)
    [use] = desk.kv.shadowing.shadows.shadows[0]._uses.values()
    before = use.rows
    desk.kv.finish_request(engine.attachment, "r1", 4000)
    assert use.rows != before
    assert not desk.kv.shadowing.shadows.shadows[0]._uses


def test_a_lookup_pays_microseconds(make_desk: MakeDesk) -> None:
    """Hearing of a request takes less than 20 us (2 us on a quiet machine), long or short."""
    desk = make_desk()
    engine = desk.engine()
    heard: list[Any] = []
    desk.kv.parts.requests.listeners.append(lambda *request: heard.append(request))
    engine.lookup(prompt(1, grains=100))
    desk.kv.shadowing.shadows.share = 2.0**-40
    best = 1.0
    for _ in range(10):
        start = perf_seconds()
        for _ in range(200):
            desk.kv.shadowing._heard(*heard[0])
        best = min(best, (perf_seconds() - start) / 200)
    assert best < 20e-6
