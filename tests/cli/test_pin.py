"""`kvstore pin` and `unpin`: what is kept, under which names, and when it ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvstore.core.keys import chain_keys, pack_tokens
from kvstore.core.spec import root_digest, space_id


@pytest.fixture(autouse=True)
def no_pins(daemon: Any) -> None:
    """Clearing, which comes before each test, ends all pins."""
    with daemon.client() as client:
        assert client.status().pin_count == 0


def test_by_request(kv: Any, engine: Any) -> None:
    """A request's id pins what it leases now; the pin outlives the lease."""
    match = engine.lease(engine.fill(4), request_id="chat-17")
    pinned = kv("pin", "chat-17", "--ttl", "1h30m", "--json").json
    assert pinned["block_count"] == 4
    assert pinned["pinned_bytes"] == 4 * 4096
    assert pinned["ttl_seconds"] == 5400.0
    match.release()
    assert kv("status", "--json").json["pin_count"] == 1
    assert kv("unpin", "chat-17").out == "1 pin ended\n"
    assert kv("status", "--json").json["pin_count"] == 0


def test_by_key(kv: Any, engine: Any) -> None:
    """A block's printed key pins the prefix up to it, also when it is typed in capitals."""
    space = engine.fill(4)
    key = key_of(space, engine.prompt(4), 2)
    assert "keeps 3 blocks (12 KiB) for 1h" in kv("pin", key).out
    assert kv("pin", key.upper(), "--json").json["block_count"] == 3
    assert kv("unpin", key.upper(), "--json").json == {"released_pins": 2}


def key_of(space: Any, tokens: list[int], position: int) -> str:
    """The printed key of a block, computed as the daemon does."""
    root, size = root_digest(space_id(space.spec, space.tenant), "", ""), space.spec.symbol_bytes
    packed = pack_tokens(tokens)
    symbols = [packed[at : at + size] for at in range(0, len(packed), size)]
    return chain_keys(root[:16], symbols)[position].hex()


def test_request_ids_may_look_like_keys(kv: Any, engine: Any) -> None:
    """Engines that name requests by 32 hex digits can pin them."""
    name = "0123456789abcdef0123456789abcdef"
    match = engine.lease(engine.fill(2), blocks=2, request_id=name)
    assert kv("pin", name, "--json").json["block_count"] == 2
    match.release()


def test_by_pin_id(kv: Any, engine: Any) -> None:
    """Every pin has an id of its own, which ends it alone."""
    match = engine.lease(engine.fill(2), blocks=2, request_id="r1")
    first, second = (kv("pin", "r1", "--json").json["pin_id"] for _ in range(2))
    assert first != second
    assert kv("unpin", first, "--json").json == {"released_pins": 1}
    assert kv("status", "--json").json["pin_count"] == 1
    match.release()


def test_pins_end_by_time(kv: Any, engine: Any) -> None:
    """A pin's time to live ends it without anybody doing anything."""
    match = engine.lease(engine.fill(1), blocks=1, request_id="r1")
    assert kv("pin", "r1", "--ttl", "100ms").code == 0
    end = time.monotonic() + 5
    while kv("status", "--json").json["pin_count"] and time.monotonic() < end:
        time.sleep(0.05)
    assert kv("status", "--json").json["pin_count"] == 0
    match.release()


def test_pinned_blocks_are_not_evicted(kv: Any, engine: Any) -> None:
    """A pinned prefix survives puts that need the whole pool."""
    space = engine.fill(4)
    match = engine.lease(space, request_id="r1")
    kv("pin", "r1")
    match.release()
    payload = bytes(4096)
    for first in range(100_000, 300_000, 20_000):
        space.put(list(range(first, first + 512 * 16)), [payload] * 512)
    match = space.lookup(engine.prompt(4))
    assert match.matched_tokens == 64
    match.release()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("pin", "nobody"), 1, "'nobody'"),
        (("pin", "00" * 16), 1, "neither a stored block's key nor a request"),
        (("pin", "r1", "--ttl", "soon"), 2, "'soon' is no duration"),
        (("pin", "r1", "--ttl", "-5s"), 2, "no duration"),
        (("pin", "r1", "--ttl", "0"), 1, "ttl_seconds"),
        (("pin", "r1", "--ttl", "400d"), 1, "max_pin_ttl_seconds"),
        (("pin",), 2, "KEY_OR_REQUEST_ID"),
        (("unpin", "nobody"), 1, "'nobody'"),
        (("unpin", "00" * 16), 1, "00000000"),
    ],
)
def test_bad_input(kv: Any, engine: Any, arguments: Any, code: int, words: str) -> None:
    """Names that stand for nothing and times that are none are said in one sentence."""
    match = engine.lease(engine.fill(1), blocks=1, request_id="r1")
    outcome = kv(*arguments)
    assert outcome.code == code
    assert words in outcome.sentence
    match.release()
