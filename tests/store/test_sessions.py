"""Sessions: what one holds, and that all of it is free again when it ends, however it ends."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.errors import Draining, InvalidRequest, LimitReached, PermissionDenied
from kvstore.store.kvstore import SESSION_TTL_SECONDS
from kvstore.store.sessions import Identity

TOKENS = list(range(32))


def test_death_frees_everything_at_once(desk: Any, engine: Any) -> None:
    """I15: a session's death ends its leases and reservations, and un-stages what it wrote."""
    engine.put(TOKENS)
    dying = desk.engine()
    dying.lookup(TOKENS, request_id="r")
    dying.lookup(TOKENS[:16])
    answer = dying.reserve([*TOKENS, *range(100, 132)])
    dying.commit(answer.reservation_id, [*TOKENS, *range(100, 132)], 12, 2)
    assert desk.kv.status().reserved_bytes
    desk.kv.close_session(dying.session)
    status = desk.kv.status()
    assert (status.lease_count, status.leased_bytes, status.reserved_bytes) == (0, 0, 0)
    assert status.reservation_count == 0
    assert desk.usage().used_bytes == 8 * 4096
    assert engine.put([*TOKENS, *range(100, 132)]) == "P" * 8 + "S" * 8


def test_death_waits_for_running_copies(make_desk: Any) -> None:
    """I4, I15: staging goes after the last running copy, and what it copied is never visible."""
    for seed in range(30):
        desk = make_desk(late=True, seed=seed)
        let_go: list[bool] = []
        session = desk.kv.open_session(
            Identity(uid=1), "engine", {"default"}, memoryview(bytearray(4096)),
            staging_release=lambda desk=desk, let_go=let_go: let_go.append(True),
        )  # fmt: skip
        engine, other = desk.engine(session=session), desk.engine()
        answer = engine.reserve(TOKENS)
        keys = engine.keys(TOKENS)
        later = engine.commit_later(answer.reservation_id, [engine.run(keys, 0, 4)])
        engine.commit_later(answer.reservation_id, [engine.run(keys, 4, 4)])
        for _ in range(seed % 4):
            desk.mover.step()
        copies = session.running_copies
        desk.kv.close_session(session)
        assert bool(let_go) == (not copies)
        desk.store.check_integrity()
        other.put([1] * 900)
        desk.settle()
        assert let_go == [True]
        assert later.done
        assert other.matched([1] * 900) == 225


def test_a_silent_session_ends_in_its_time(desk: Any) -> None:
    """I15: a session that says nothing for its time to live ends, and its slots serve again."""
    frozen, alive = desk.engine(), desk.engine()
    frozen.reserve(TOKENS)
    for _ in range(int(SESSION_TTL_SECONDS * 10) + 1):
        desk.clock.advance(0.1)
        desk.kv.touch(alive.session)
        desk.kv.tick()
    assert frozen.session.closed
    assert not alive.session.closed
    assert desk.kv.status().reservation_count == 0
    assert desk.usage().used_bytes == 0


def test_limits_of_sessions_and_attachments(make_desk: Any) -> None:
    """A limit that is reached is LimitReached and names its key."""
    desk = make_desk(sections={"limits": {"sessions": 2, "spaces": 2}})
    one = desk.session()
    desk.session()
    with pytest.raises(LimitReached, match=r"limits\.sessions"):
        desk.kv.open_session(Identity(uid=7), "engine", ["default"], None)
    desk.engine(session=one, model="a")
    desk.engine(session=one, model="b")
    with pytest.raises(LimitReached, match=r"limits\.spaces"):
        desk.engine(session=one, model="a")
    desk.kv.close_session(one)
    other = desk.session()
    with pytest.raises(LimitReached, match=r"limits\.spaces"):
        desk.engine(session=other, model="c")
    desk.engine(session=other, model="a")


def test_reserved_bytes_are_limited(make_desk: Any) -> None:
    """A session and a tenant reserve up to their limits; what is over is rejected, and says why."""
    desk = make_desk(
        sections={
            "limits": {
                "reserved_bytes_per_session": 6 * 4096, "reserved_bytes_per_tenant": 10 * 4096,
            }
        }
    )  # fmt: skip
    one, two = desk.engine(), desk.engine()
    answer = one.reserve(TOKENS)
    assert bytes(answer.outcomes).count(1) == 6
    assert "limits.reserved_bytes_per_session leaves room for 6" in answer.reason
    other = two.reserve([9] * 32)
    assert bytes(other.outcomes).count(1) == 4
    assert "limits.reserved_bytes_per_tenant" in other.reason
    one.commit(answer.reservation_id, TOKENS, 0, 6)
    assert one.put(TOKENS) == "PPPPPPSS"


def test_only_allowed_tenants(desk: Any) -> None:
    """I18: a session attaches to the tenants of its identity only."""
    session = desk.session(("default", "b"))
    desk.engine("b", session=session)
    with pytest.raises(PermissionDenied, match="'c'"):
        desk.engine("c", session=session)


def test_shards_exist(desk: Any) -> None:
    """A shard that the spec does not have is refused by name."""
    for shard in (-1, 2):
        with pytest.raises(InvalidRequest, match="shard is"):
            desk.engine(shard=shard, shard_count=2)


def test_draining_opens_for_operators_only(desk: Any) -> None:
    """While it drains, a store opens no sessions for engines, but operators may watch."""
    desk.kv.drain(5.0, False)
    with pytest.raises(Draining):
        desk.session(role="engine")
    assert desk.kv.status().state == "draining"
    desk.session(role="admin")


def test_a_lookup_that_outlives_its_session_leases_nothing(make_desk: Any) -> None:
    """I15: a long lookup that ends after its session did grants no lease that nobody would end."""
    desk = make_desk("16MiB")
    engine, other = desk.engine(), desk.engine()
    tokens = list(range(4 * 3000))
    other.put(tokens)
    later = desk.kv.lookup(engine.attachment, engine.query(tokens), 0)
    reserve = desk.kv.reserve(engine.attachment, engine.query([*tokens, 1, 2, 3, 4]), 2999)
    desk.kv.close_session(engine.session)
    assert desk.wait(later).lease_id == 0
    assert desk.wait(reserve).reservation_id == 0
    assert desk.kv.status().lease_count == 0
