"""What connectors share: reaching a daemon late, and knowing what comes before a page."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvstore.core.errors import SpecMismatch, StoreUnavailable
from kvstore.engines.page_chains import KEY_BYTES, Chain, PageChains, key_bytes
from kvstore.engines.reach import Reach


class Daemon:
    """What `connect` and `attach` find: nobody, somebody, or somebody who refuses."""

    def __init__(self) -> None:
        self.error: Exception | None = StoreUnavailable("nobody")
        self.tries = 0
        self.now = 0.0
        self.is_closed = False

    def connect(self) -> Any:
        self.tries += 1
        if isinstance(self.error, StoreUnavailable):
            raise self.error
        return self

    def attach(self, client: Any) -> Any:
        if self.error is not None:
            raise self.error
        return "space"

    def close(self) -> None:
        self.is_closed = True

    def reach(self) -> Reach:
        return Reach(self.connect, self.attach, lambda: self.now, retry_seconds=5.0)


def test_a_daemon_is_tried_now_and_then() -> None:
    """Calls between two tries fail at once; the first after the daemon came gets the space."""
    daemon = Daemon()
    reach = daemon.reach()
    for now in (0.0, 1.0, 4.9, 5.0, 9.0):
        daemon.now = now
        with pytest.raises(StoreUnavailable):
            reach.space()
    assert daemon.tries == 2
    daemon.error, daemon.now = None, 10.0
    assert reach.space() == "space"
    assert reach.space() == "space"
    assert daemon.tries == 3


def test_wrong_settings_go_through() -> None:
    """A daemon that refuses is not taken for one that is away, and no second connection is made."""
    daemon = Daemon()
    daemon.error = SpecMismatch("other layout")
    reach = daemon.reach()
    with pytest.raises(SpecMismatch):
        reach.space()
    daemon.error, daemon.now = None, 5.0
    assert reach.space() == "space"
    assert daemon.tries == 1


def test_closed_is_closed() -> None:
    """After close there is no space, whoever answers."""
    daemon = Daemon()
    daemon.error = None
    reach = daemon.reach()
    reach.space()
    reach.close()
    assert daemon.is_closed
    daemon.now = 100.0
    with pytest.raises(StoreUnavailable):
        reach.space()


A, B, C, D, E = (bytes([n]) * KEY_BYTES for n in range(1, 6))


def test_what_the_engine_says_comes_before() -> None:
    """Pages are looked for after those before them, then as a beginning of their own."""
    chains = PageChains()
    assert chains.candidates([C, D], (A, B)) == [Chain((A, B, C, D), 2), Chain((C, D), 0)]
    assert chains.candidates([A], ()) == [Chain((A,), 0)]


def test_what_was_found_comes_first() -> None:
    """A chain that the store was seen to have is tried before the one the engine names."""
    chains = PageChains()
    chains.settle([C, D])
    assert chains.candidates([E], (A, B, C, D))[0] == Chain((C, D, E), 2)
    assert chains.candidates([E], ())[0] == Chain((C, D, E), 2)


def test_unknown_keys_are_no_chain() -> None:
    """Nothing is made up for keys of which nobody said what comes before, nor for circles."""
    chains = PageChains()
    assert chains.candidates([B], ()) == [Chain((B,), 0)]
    chains.candidates([A, B], ())
    chains.candidates([B, A], ())
    assert chains.candidates([B], ()) == [Chain((B,), 0)]


def test_memory_is_bounded() -> None:
    """However many keys pass, only so many are remembered, the last ones."""
    chains = PageChains(keys_kept=100)
    rng = random.Random(0)
    keys = [rng.randbytes(KEY_BYTES) for _ in range(1000)]
    for start in range(0, 1000, 10):
        chains.settle(keys[start : start + 10])
    assert len(chains) == 100
    assert chains.candidates([E], keys[990:1000])[0].offset == 10


def test_keys_become_digests() -> None:
    """Hex digests stand for themselves; any other key is hashed, to the same length."""
    assert key_bytes("ab" * KEY_BYTES) == b"\xab" * KEY_BYTES
    others = [key_bytes(key) for key in ("", "x", "zz" * KEY_BYTES, "ab" * 31)]
    assert {len(key) for key in others} == {KEY_BYTES}
    assert len(set(others)) == 4
