"""Caps, floors, pins and isolated pools: who may hold what, whatever the others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from desk import Desk

from kvstore.core.errors import InvalidRequest, LimitReached, NotFound

TOKENS = list(range(32))
BLOCK = 4096
TENANTS = {"tenants": [{"name": "a"}, {"name": "b"}]}
ISOLATED = {"tenants": [{"name": "a", "isolated": True, "host_size": "1MiB"}, {"name": "b"}]}


def used(desk: Any, tenant: str) -> int:
    """Bytes of a tenant, recounted from the views."""
    (view,) = [v for v in desk.kv.tenants() if v.tenant == tenant]
    return int(view.used_bytes["host"])


@pytest.fixture
def pair(make_desk: Any) -> tuple[Any, Any, Any]:
    """A desk of 256 slots, and engines of two tenants."""
    desk = make_desk(sections=TENANTS)
    return desk, desk.engine("a"), desk.engine("b")


def test_a_cap_holds_always(pair: tuple[Any, Any, Any]) -> None:
    """I17: a tenant never holds more than its cap, staged bytes included; its own blocks go."""
    desk, a, b = pair
    desk.kv.set_quota("a", "host", 20 * BLOCK, None)
    b.put([9] * 32)
    for n in range(12):
        answer = a.reserve([n] * 32)
        assert used(desk, "a") <= 20 * BLOCK
        a.commit(answer.reservation_id, [n] * 32, 0, 8)
        assert used(desk, "a") <= 20 * BLOCK
    assert a.matched([11] * 32) == 8
    assert a.matched([0] * 32) == 0
    assert b.matched([9] * 32) == 8
    assert bytes(a.reserve([70] * 200).outcomes).count(1) <= 20


def test_a_cap_over_leased_blocks_rejects(pair: tuple[Any, Any, Any]) -> None:
    """I6, I17: a tenant at its cap whose blocks are leased is told no, and loses nothing."""
    desk, a, _ = pair
    desk.kv.set_quota("a", "host", 10 * BLOCK, None)
    a.put(TOKENS)
    held = a.lookup(TOKENS)
    assert a.put([7] * 32) == "SS------"
    assert a.is_intact(held)
    a.release(held)
    assert a.put([7] * 32) == "PPSSSSSS"


def test_a_cap_below_what_is_there_takes_effect(pair: tuple[Any, Any, Any]) -> None:
    """I17: a cap lowered below what a tenant holds shrinks it with its next put."""
    desk, a, _ = pair
    for n in range(10):
        a.put([n] * 32)
    desk.kv.set_quota("a", "host", 16 * BLOCK, None)
    a.put([50] * 32)
    assert used(desk, "a") <= 16 * BLOCK
    desk.kv.set_quota("a", "host", 0, None)
    for n in range(10):
        a.put([n] * 32)
    assert used(desk, "a") == 88 * BLOCK


def test_a_floor_holds_against_a_flood(pair: tuple[Any, Any, Any]) -> None:
    """I17: whatever others store, a tenant keeps its floor; above it, its blocks may go."""
    desk, a, b = pair
    desk.kv.set_quota("a", "host", None, 16 * BLOCK)
    a.put([1] * 128)
    for n in range(2, 40):
        b.put([n] * 128)
        assert used(desk, "a") >= 16 * BLOCK
    assert used(desk, "a") == 16 * BLOCK
    assert a.matched([1] * 128) == 16
    assert used(desk, "b") == 240 * BLOCK


def test_floors_of_all_leave_the_rest_to_share(pair: tuple[Any, Any, Any]) -> None:
    """I17: with floors that fill the pool each tenant is sure of its own, nobody of more."""
    desk, a, b = pair
    desk.kv.set_quota("a", "host", None, 128 * BLOCK)
    desk.kv.set_quota("b", "host", None, 128 * BLOCK)
    for n in range(20):
        a.put([n] * 128)
    assert used(desk, "a") == 256 * BLOCK
    for n in range(20):
        b.put([n] * 128)
    assert used(desk, "a") == used(desk, "b") == 128 * BLOCK
    assert a.put([99] * 128) == "S" * 32


def test_quotas_are_checked(desk: Any) -> None:
    """A quota of an unknown tenant or tier, or a floor above the cap, is refused by name."""
    with pytest.raises(NotFound, match="'nobody'"):
        desk.kv.set_quota("nobody", "host", 1, None)
    with pytest.raises(InvalidRequest, match="'disk'"):
        desk.kv.set_quota("default", "disk", 1, None)
    with pytest.raises(InvalidRequest, match="floor_bytes"):
        desk.kv.set_quota("default", "host", 10, 20)
    desk.kv.set_quota("default", "host", 1 << 20, 1 << 19)
    view = desk.kv.set_quota("default", "host", None, 0)
    assert (view.cap_bytes, view.floor_bytes) == ({"host": 1 << 20}, {})


def test_unknown_policies_are_named(desk: Any, engine: Any) -> None:
    """Another policy takes over what is resident; an unknown one answers with the list."""
    engine.put(TOKENS)
    with pytest.raises(InvalidRequest, match="lru"):
        desk.kv.set_policy("nonsense")
    desk.kv.set_policy("lru")
    desk.engine(model="other").put([3] * 1024)
    assert engine.matched(TOKENS) == 0


# ---- Pins ----


def test_a_pinned_prefix_stays(desk: Any, engine: Any) -> None:
    """I6: a pinned prefix outlives its request, its session and every flood, for its time."""
    engine.put(TOKENS)
    engine.lookup(TOKENS[:16], request_id="r")
    admin = desk.session()
    pin = desk.wait(desk.kv.pin(admin, "r", b"", 100.0))
    assert (pin.block_count, pin.pinned_bytes) == (4, 4 * BLOCK)
    desk.kv.close_session(engine.session)
    desk.kv.close_session(admin)
    other = desk.engine()
    for n in range(100, 120):
        other.put([n] * 200)
    assert other.matched(TOKENS) == 4
    desk.advance(101)
    for n in range(100, 120):
        other.put([n] * 200)
    assert other.matched(TOKENS) == 0
    assert desk.kv.status().pinned_bytes == 0


def test_pins_by_key(desk: Any, engine: Any) -> None:
    """A printed key pins the prefix up to its block, and is unpinned by it; others are NotFound."""
    engine.put(TOKENS)
    engine.put([*TOKENS[:16], *range(100, 116)])
    keys = engine.keys(TOKENS)
    for n in (0, 3, 5, 7):
        pin = desk.wait(desk.kv.pin(engine.session, "", keys[n], 10.0))
        assert pin.block_count == n + 1
    with pytest.raises(NotFound):
        desk.wait(desk.kv.pin(engine.session, "", bytes(16), 10.0))
    with pytest.raises(NotFound):
        desk.kv.pin(engine.session, "no such request", b"", 10.0)
    with pytest.raises(NotFound):
        desk.kv.unpin("", "", keys[1])
    assert desk.kv.unpin("", "", keys[7]) == 1
    assert desk.kv.status().pin_count == 3
    assert desk.kv.unpin(pin.pin_id.replace("4", "1")) == 1


def test_pins_have_limits(make_desk: Any) -> None:
    """Pinned bytes and times have limits, which name themselves."""
    desk = make_desk(
        sections={
            "limits": {
                "pinned_bytes_per_session": 10 * BLOCK, "pinned_bytes_per_tenant": 12 * BLOCK,
                "max_pin_ttl_seconds": 50.0,
            }
        }
    )  # fmt: skip
    one, two = desk.engine(), desk.engine()
    one.put(TOKENS)
    key = one.keys(TOKENS)[7]
    for ttl in (0.0, -1.0, 51.0, float("nan")):
        with pytest.raises(InvalidRequest, match="ttl_seconds"):
            desk.wait(desk.kv.pin(one.session, "", key, ttl))
    desk.wait(desk.kv.pin(one.session, "", key, 50.0))
    with pytest.raises(LimitReached, match="pinned_bytes_per_session"):
        desk.wait(desk.kv.pin(one.session, "", key, 50.0))
    with pytest.raises(LimitReached, match="pinned_bytes_per_tenant"):
        desk.wait(desk.kv.pin(two.session, "", key, 50.0))


def test_cleared_pins_are_over(desk: Any, engine: Any) -> None:
    """A clear takes pinned blocks too, and their pins with them."""
    engine.put(TOKENS)
    desk.wait(desk.kv.pin(engine.session, "", engine.keys(TOKENS)[7], 50.0))
    desk.wait(desk.kv.clear(engine.space.id))
    desk.store.drain()
    status = desk.kv.status()
    assert (status.pin_count, status.pinned_bytes) == (0, 0)
    assert engine.session.pinned_bytes == 0


# ---- Isolated tenants ----


def test_isolated_tenants_have_their_own_pools(make_desk: Any) -> None:
    """I8: an isolated tenant's blocks lie in its pool only, which no other tenant is handed."""
    desk = make_desk("4MiB", sections=ISOLATED)
    a, b = desk.engine("a"), desk.engine("b")
    a.put(TOKENS)
    b.put(TOKENS)
    (pool_a,), (pool_b,) = desk.kv.pools(a.attachment), desk.kv.pools(b.attachment)
    assert (pool_a.name, pool_b.name) == ("a", "")
    assert pool_a.data_fd != pool_b.data_fd
    for engine, pool in ((a, pool_a), (b, pool_b)):
        found = engine.lookup(TOKENS)
        assert engine.check(found, TOKENS) == 8
        assert set((found.slots.places >> 40).tolist()) == {pool.pool_id}
        engine.release(found)


def test_isolated_tenants_do_not_evict_each_other(make_desk: Any) -> None:
    """I8, I17: a flood fills its own pool and no other, from either side."""
    desk = make_desk("4MiB", sections=ISOLATED)
    a, b = desk.engine("a"), desk.engine("b")
    b.put([1] * 2400)
    for n in range(10):
        a.put([n] * 400)
    assert b.matched([1] * 2400) == 600
    assert used(desk, "a") == 256 * BLOCK
    a.put([42] * 1024)
    for n in range(10):
        b.put([n] * 2000)
    assert a.matched([42] * 1024) == 256
    assert used(desk, "b") == 768 * BLOCK


def test_blocks_in_a_pool_that_is_no_longer_theirs_are_dropped(
    make_desk: Any, shm_directory: Path
) -> None:
    """I8: a tenant that is isolated since the last start brings nothing out of the shared pool."""
    desk = Desk("2MiB", directory=shm_directory, sections=TENANTS)
    a, b = desk.engine("a"), desk.engine("b")
    a.put(TOKENS)
    b.put(TOKENS)
    desk.store.close()
    again = make_desk("3MiB", directory=shm_directory, sections=ISOLATED)
    a, b = again.engine("a"), again.engine("b")
    assert (a.matched(TOKENS), b.matched(TOKENS)) == (0, 8)
    a.put(TOKENS)
    (pool,) = again.kv.pools(a.attachment)
    found = a.lookup(TOKENS)
    assert set((found.slots.places >> 40).tolist()) == {pool.pool_id}


def test_tenants_never_share_blocks(pair: tuple[Any, Any, Any]) -> None:
    """I1, I18: the same prompt of another tenant is a miss, and says nothing about the first."""
    _, a, b = pair
    unknown = b.lookup(TOKENS)
    a.put(TOKENS)
    assert b.lookup(TOKENS) == unknown
    a.reserve([5] * 32)
    assert b.lookup([5] * 32) == unknown


def test_a_new_policy_takes_over_in_turns(make_desk: Any) -> None:
    """Blocks enter another policy's order a few runs at a time, others have their turns between,
    and whatever has to make room meanwhile finds what may go."""
    desk = make_desk("8MiB")
    engine = desk.engine()
    prompts = [[n, *range(7)] for n in range(900)]
    for prompt in prompts:
        engine.put(prompt)
    turns: list[int] = []
    enter = desk.kv.parts.residency.enter_runs
    desk.kv.parts.residency.enter_runs = lambda count: turns.append(count) or enter(count)
    desk.kv.set_policy("lru")
    assert turns == [128]
    engine.put([5000, *range(4000)])  # nearly all of the pool: most of what is there has to go
    assert desk.kv.parts.index.block_count <= 2048
    desk.settle()
    assert len(turns) > 5
    assert engine.matched([5000, *range(4000)]) > 900
