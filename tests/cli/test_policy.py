"""`kvstore policy`: the eviction policy, shown and set."""

from __future__ import annotations

from typing import Any


def test_get(kv: Any, daemon: Any) -> None:
    """The name alone, so that a script can read it."""
    assert kv("policy", "get").out == "saved_time\n"
    assert kv("policy", "get", "--json").json == {"policy": "saved_time"}


def test_set_keeps_what_is_stored(kv: Any, engine: Any) -> None:
    """Setting a policy drops nothing; the answer says what it was."""
    space = engine.fill(4)
    assert "saved_time already" in kv("policy", "set", "saved_time").out
    answer = kv("policy", "set", "lru", "--json").json
    assert answer == {"policy": "lru", "policy_before": "saved_time"}
    kv("policy", "set", "saved_time")
    engine.lease(space).release()


def test_unknown_name_answers_with_the_list(kv: Any, daemon: Any) -> None:
    """A name that is no policy is refused with those that are, and the old one stays."""
    outcome = kv("policy", "set", "clairvoyant")
    assert outcome.code == 1
    assert "clairvoyant" in outcome.sentence
    assert "lru" in outcome.sentence
    assert kv("policy", "get").out == "saved_time\n"


def test_name_is_required(kv: Any) -> None:
    """Mistyping is exit 2."""
    assert kv("policy", "set").code == 2
    assert kv("policy", "list").code == 2
