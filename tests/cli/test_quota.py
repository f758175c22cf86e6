"""`kvstore quota`: cap and floor of a tenant, shown and set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_quotas(daemon: Any) -> Iterator[None]:
    yield
    with daemon.client() as client:
        for tenant in ("default", "chat"):
            client.admin.set_quota(tenant, "host", cap_bytes=0, floor_bytes=0)


def host(outcome: Any) -> dict[str, Any]:
    (tenant,) = outcome.json["tenants"]
    quota: dict[str, Any] = tenant["tiers"]["host"]
    return quota


def test_set_then_get(kv: Any, engine: Any) -> None:
    """What was set is what is shown, beside what is used; what was not given stays."""
    engine.fill(4)
    set_both = kv("quota", "set", "default", "--cap", "8MiB", "--floor", "1MiB", "--json")
    expected = {"used_bytes": 4 * 4096, "cap_bytes": 8 << 20, "floor_bytes": 1 << 20}
    assert host(set_both) == expected
    assert host(kv("quota", "set", "default", "--cap", "4 MiB", "--json"))["floor_bytes"] == 1 << 20
    assert host(kv("quota", "get", "default", "--json")) == {**expected, "cap_bytes": 4 << 20}
    assert "4 MiB  1 MiB" in kv("quota", "get", "default").out


def test_none_takes_it_away(kv: Any, daemon: Any) -> None:
    """`none` ends a cap or a floor."""
    kv("quota", "set", "chat", "--cap", "8MiB", "--floor", "1MiB")
    assert host(kv("quota", "set", "chat", "--cap", "none", "--json"))["cap_bytes"] is None
    assert host(kv("quota", "get", "chat", "--json"))["floor_bytes"] == 1 << 20


def test_get_lists_all(kv: Any, daemon: Any) -> None:
    """Without a name every tenant is there, and who has a pool of its own."""
    tenants = kv("quota", "get", "--json").json["tenants"]
    assert {t["tenant"]: t["isolated"] for t in tenants} == {
        "chat": False, "default": False, "medical": True,
    }  # fmt: skip
    table = kv("quota", "get").out
    assert "its own" in table
    assert table.count("shared") == 2


def test_cap_holds(kv: Any, engine: Any) -> None:
    """I17: a tenant with a cap stores no more than that, whatever room there is."""
    kv("quota", "set", "default", "--cap", "64KiB")
    space = engine.client.attach(engine.fill(1).spec)
    space.put(engine.prompt(40), [bytes(4096)] * 40)
    assert host(kv("quota", "get", "default", "--json"))["used_bytes"] <= 64 << 10


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("set", "default"), 2, "--cap, --floor or both"),
        (("set", "default", "--cap", "much"), 2, "'much' is no size"),
        (("set", "default", "--cap", "-1GiB"), 2, "out of range"),
        (("set", "default", "--floor", "0"), 2, "out of range"),
        (("set", "default", "--cap", "1MiB", "--floor", "2MiB"), 1, "lower the floor"),
        (("set", "nobody", "--cap", "1MiB"), 1, "'nobody'"),
        (("set", "default", "--tier", "disk", "--cap", "1MiB"), 1, "'disk'"),
        (("set",), 2, "TENANT"),
        (("get", "nobody"), 1, "chat, default, medical"),
    ],
)
def test_bad_input(kv: Any, daemon: Any, arguments: Any, code: int, words: str) -> None:
    """Unknown tenants and tiers, sizes that are none: one sentence, and nothing changes."""
    before = kv("quota", "get", "--json").json
    outcome = kv("quota", *arguments)
    assert outcome.code == code
    assert words in outcome.sentence
    assert kv("quota", "get", "--json").json == before
