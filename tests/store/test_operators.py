"""What operators count on: they get in, quotas bite at once, drains have a sane default."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.core.errors import InvalidRequest, LimitReached
from kvstore.store.sessions import Identity

BLOCK = 4096
IDENTITY = Identity(uid=1)


def test_a_lowered_cap_evicts_at_once(make_desk: Any) -> None:
    """I17: blocks above a new cap go now, not with the tenant's next put, however many."""
    desk = make_desk(sections={"tenants": [{"name": "a"}]})
    a = desk.engine("a")
    for n in range(25):
        a.put([n] * 32)
    desk.kv.set_quota("a", "host", 6 * BLOCK, None)
    desk.settle()
    (view,) = [v for v in desk.kv.tenants() if v.tenant == "a"]
    assert view.used_bytes["host"] <= 6 * BLOCK
    assert a.matched([0] * 32) == 0


def test_floors_must_fit_the_pool_together(make_desk: Any) -> None:
    """A floor that cannot be kept beside the others' is refused, naming what is left."""
    desk = make_desk(sections={"tenants": [{"name": "a"}, {"name": "b"}]})
    desk.kv.set_quota("a", "host", None, 200 * BLOCK)
    with pytest.raises(InvalidRequest, match="other tenants' floors take"):
        desk.kv.set_quota("b", "host", None, 100 * BLOCK)
    desk.kv.set_quota("b", "host", None, 50 * BLOCK)


def test_an_operator_gets_in_when_engines_fill_the_house(make_desk: Any) -> None:
    """At limits.sessions engines are refused and an operator is not; operators have a limit too."""
    desk = make_desk(sections={"limits": {"sessions": 2}})
    opened = [desk.kv.open_session(IDENTITY, "engine", ["default"], None) for _ in range(2)]
    with pytest.raises(LimitReached, match=r"limits\.sessions"):
        desk.kv.open_session(IDENTITY, "engine", ["default"], None)
    opened += [desk.kv.open_session(IDENTITY, "admin", ["default"], None) for _ in range(16)]
    with pytest.raises(LimitReached):
        desk.kv.open_session(IDENTITY, "admin", ["default"], None)
    for session in opened:
        desk.kv.close_session(session)


def test_a_drain_without_a_deadline_takes_the_configured_one(make_desk: Any) -> None:
    """A deadline of 0 is the operator's default, not "at once"."""
    desk = make_desk(sections={"server": {"drain_seconds": 7.0}})
    heard: list[tuple[float, bool]] = []
    desk.kv.on_drain = lambda seconds, free: heard.append((seconds, free))
    desk.kv.drain(0.0, False)
    assert heard == [(7.0, False)]
