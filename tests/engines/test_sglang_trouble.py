"""SGLang's HiCache over a daemon in trouble, and over settings that are wrong."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from daemons import eventually
from sglang_wheel import page_keys
from sglang_world import PAGE, SGLANG, World, config, pool, rows, tokens

from kvstore.client import LeaseLost, StoreUnavailable
from kvstore.core.errors import SpecError


class Failing:
    """A space of which one call raises."""

    def __init__(self, space: Any, name: str, error: Exception) -> None:
        self._space, self._name, self._error = space, name, error

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._space, name)

        def fail(*arguments: Any, **more: Any) -> Any:
            raise self._error

        return fail


@pytest.mark.parametrize("v1", [0, 1])
@pytest.mark.parametrize("call", ["lookup", "restore", "put"])
@pytest.mark.parametrize("error", [StoreUnavailable("gone"), LeaseLost("late")])
def test_trouble_is_a_miss(world: World, call: str, error: Exception, v1: int) -> None:
    """Whatever call fails, answers have their form: counts, and lists of False or None."""
    engine, keys = world.engine(seed=1, v1=v1), page_keys(tokens(3), None, PAGE)
    backend = engine.backend
    engine.backup(tokens(3), [0, 1, 2], prefix=[])
    backend._reach._space = Failing(backend._reach.space(), call, error)
    assert backend.batch_exists(keys) == (0 if call == "lookup" else 3)
    reads = [False] * 3 if call != "put" else [True] * 3
    assert backend.batch_get_v1(keys, rows([5, 6, 7])) == reads
    found = backend.batch_get(keys, [engine.pool.get_dummy_flat_data_page() for _ in keys])
    assert [page is not None for page in found] == reads
    assert backend.batch_set_v1(keys, rows([0, 1, 2])) == [call != "put"] * 3
    assert backend.batch_set(keys, [engine.page(n) for n in range(3)]) is (call != "put")
    assert backend.get(keys[0]) is None or call == "put"
    assert backend.exists(keys[0]) is (call != "lookup")


def test_bytes_that_may_be_others_are_no_hit(world: World, monkeypatch: Any) -> None:
    """A page is good only if its lease held until it was copied."""
    from kvstore.client.match import Match

    engine, keys = world.engine(seed=1), page_keys(tokens(3), None, PAGE)
    engine.backup(tokens(3), [0, 1, 2], prefix=[])

    check, calls = Match.check, itertools.count(1)

    def lost(match: Match) -> None:
        if next(calls) % 2 == 0:  # the first is the restore's own, before anything is copied
            raise LeaseLost("late")
        check(match)

    monkeypatch.setattr(Match, "check", lost)
    assert engine.backend.batch_get_v1(keys, rows([5, 6, 7])) == [False] * 3
    assert engine.backend.batch_get(keys) == [None] * 3


def test_a_daemon_that_dies_and_comes_back(lonely: World) -> None:
    """Without its daemon every call is a miss and soon over; with it back, pages are found."""
    engine, keys = lonely.engine(seed=1), page_keys(tokens(3), None, PAGE)
    engine.backup(tokens(3), [0, 1, 2], prefix=[])
    lonely.served.kill()
    began = time.monotonic()
    for _ in range(20):
        assert engine.backend.batch_exists(keys) == 0
        assert engine.backend.batch_get_v1(keys, rows([5, 6, 7])) == [False] * 3
        assert engine.backend.batch_set_v1(keys, rows([5, 6, 7])) == [False] * 3
    assert time.monotonic() - began < 2
    lonely.served.start()
    assert eventually(lambda: engine.backend.batch_exists(keys) == 3)
    assert engine.prefetch(tokens(3), [5, 6, 7], prefix=[]) == 3


def test_an_engine_that_starts_first(lonely: World) -> None:
    """Without a daemon an engine starts all the same, and uses the one that comes."""
    lonely.served.kill()
    engine = lonely.engine(seed=1, extra={"retry_seconds": 0.05})
    assert engine.backup(tokens(3), [0, 1, 2], prefix=[]) == 0
    lonely.served.start()
    assert eventually(lambda: engine.backup(tokens(3), [0, 1, 2], prefix=[]) == 3)


def test_what_is_refused(world: World) -> None:
    """Settings that would mix bytes, unknown ones and pools that are no plain KV are named."""
    with pytest.raises(SpecError, match="unknown setting 'adress'"):
        world.engine(extra={"adress": "unix:///nowhere"})
    with pytest.raises(SpecError, match="revision is not set"):
        world.engine(extra={"revision": ""})
    with pytest.raises(SpecError, match="names no model"):
        world.engine(model_name=None)
    with pytest.raises(SpecError, match="kv_cache_dtype"):
        world.engine(dtype=torch.uint8)
    fp8 = world.engine(dtype=torch.uint8, extra={"kv_cache_dtype": "float8_e5m2"})
    assert fp8.backend._reach.space().spec.dtype == "float8_e5m2"
    target, backend = pool("mha", "page_first"), world.engine().backend
    target.layout = "page_unified"
    with pytest.raises(SpecError, match="the host pool's layout is 'page_unified'"):
        world.add(config(world.settings()), target)
    with pytest.raises(SpecError, match="a pool 'mamba' beside its KV"):
        backend.register_mem_host_pool_v2(None, SGLANG.hicache_storage.PoolName.MAMBA)
    assert backend.clear() is False


def test_odd_calls_are_misses(world: World) -> None:
    """Indices that do not fit their keys, values of another size and no values store nothing."""
    engine, keys = world.engine(seed=1), page_keys(tokens(3), None, PAGE)
    assert engine.backend.batch_set_v1(keys, rows([0, 1])) == [False] * 3
    assert engine.backend.batch_get_v1(keys, rows([0, 1])) == [False] * 3
    assert engine.backend.batch_set(keys) is False
    assert engine.backend.batch_set(keys, [torch.zeros(3)] * 3) is False
    assert engine.backend.batch_exists([]) == 0
    assert engine.backend.batch_exists(keys) == 0
    assert engine.backend.set("not a digest", engine.page(0)) is True
    found = engine.backend.get("not a digest")
    assert torch.equal(found.view(torch.uint8), engine.page(0))
