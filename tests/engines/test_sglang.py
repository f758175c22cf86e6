"""SGLang's HiCache over the daemon, driven by SGLang's own factory, pools and controller."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from daemons import eventually
from sglang_wheel import page_keys
from sglang_world import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE,
    SGLANG,
    Engine,
    World,
    config,
    pool,
    rows,
    tokens,
)

from kvstore.client import KVClient

KINDS = [("mha", layout) for layout in MHA_LAYOUTS] + [("mla", layout) for layout in MLA_LAYOUTS]


def block_count(world: World) -> int:
    count: int = world.served.status().tiers["host"].block_count
    return count


def same_pages(one: Engine, other: Engine, pages: list[int]) -> bool:
    return all(torch.equal(one.page(page), other.page(page)) for page in pages)


@pytest.mark.parametrize(("kind", "layout"), KINDS)
@pytest.mark.parametrize("v1", [0, 1])
def test_every_layout_comes_back(world: World, kind: str, layout: str, v1: int) -> None:
    """Pages of each host layout come back to the bit, by either interface, to other places."""
    writer = world.engine(kind, layout, seed=1, v1=v1)
    reader = world.engine(kind, layout, v1=v1)
    assert writer.backup(tokens(6), [9, 2, 3, 30, 5, 7], prefix=[]) == 6
    assert reader.prefetch(tokens(8), [0, 1, 2, 3, 4, 5, 6, 7], prefix=[]) == 6
    for place, page in enumerate([9, 2, 3, 30, 5, 7]):
        assert torch.equal(reader.page(place), writer.page(page))
    assert not reader.page(6).any()


@pytest.mark.parametrize(("kind", "layout"), [("mha", "layer_first"), ("mla", "page_first")])
def test_both_interfaces_are_one_store(world: World, kind: str, layout: str) -> None:
    """What one interface wrote the other reads."""
    writer, reader = world.engine(kind, layout, seed=1, v1=1), world.engine(kind, layout, v1=0)
    assert writer.backup(tokens(4), [0, 1, 2, 3], prefix=[]) == 4
    assert reader.prefetch(tokens(4), [0, 1, 2, 3]) == 4
    assert same_pages(writer, reader, [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_short_types(world: World, dtype: Any) -> None:
    """Values of two bytes and of one come back to the bit."""
    writer, reader = world.engine(seed=1, dtype=dtype), world.engine(dtype=dtype)
    assert writer.backup(tokens(3), [0, 1, 2], prefix=[]) == 3
    assert reader.prefetch(tokens(3), [0, 1, 2], prefix=[]) == 3
    assert same_pages(writer, reader, [0, 1, 2])


def test_no_method_is_left_out() -> None:
    """The backend is a HiCacheStorage of SGLang's, with nothing abstract."""
    from kvstore.engines.sglang import HiCacheKVStore

    assert issubclass(HiCacheKVStore, SGLANG.hicache_storage.HiCacheStorage)
    assert not HiCacheKVStore.__abstractmethods__


@pytest.mark.parametrize("prefix", [[], None])
@pytest.mark.parametrize("v1", [0, 1])
def test_long_prompts_go_in_batches(world: World, prefix: Any, v1: int) -> None:
    """More pages than SGLang hands over in one call are one chain, whether it names what comes
    before a batch or not."""
    count = 300
    pages = list(range(count))
    writer = world.engine(seed=1, v1=v1, pages=count)
    reader = world.engine(v1=v1, pages=count)
    assert writer.backup(tokens(count), pages, prefix=prefix) == count
    assert reader.prefetch(tokens(count), pages, prefix=prefix) == count
    assert same_pages(writer, reader, pages)


def test_conversations_share_their_beginning(world: World) -> None:
    """A prompt that parts from a stored one finds what both have, once."""
    before = block_count(world)
    writer, reader = world.engine(seed=1), world.engine()
    writer.backup(tokens(6), list(range(6)), prefix=[])
    other = [*tokens(4), *tokens(4, start=900)]
    assert reader.prefetch(other, list(range(8)), prefix=[]) == 4
    rest = page_keys(tokens(4), None, PAGE)
    assert writer.backup(tokens(4, start=900), [10, 11, 12, 13], prefix=rest) == 4
    assert reader.prefetch(other, list(range(8)), prefix=[]) == 8
    assert block_count(world) - before == 10


def test_pages_whose_prefix_is_gone(world: World) -> None:
    """Pages after a prefix that the store does not have are kept, and found where the engine has
    the prefix itself; a prompt from its first token on does not find them."""
    writer, reader = world.engine(seed=1), world.engine()
    lead, rest = page_keys(tokens(5), None, PAGE), tokens(4, start=500)
    assert writer.backup(rest, [0, 1, 2, 3], prefix=lead) == 4
    assert reader.prefetch(rest, [0, 1, 2, 3], prefix=lead) == 4
    assert same_pages(writer, reader, [0, 1, 2, 3])
    assert reader.prefetch([*tokens(5), *rest], list(range(10)), prefix=[]) == 0
    # The writer goes on where it was; a reader that has seen the chain knows where that is.
    more = page_keys(rest, lead[-1], PAGE)
    assert writer.backup(tokens(2, start=800), [6, 7], prefix=[*lead, *more]) == 2
    ahead = [*rest, *tokens(2, start=800)]
    assert reader.prefetch(ahead, [0, 1, 2, 3, 6, 7], prefix=lead) == 6
    assert same_pages(writer, reader, [6, 7])
    assert reader.prefetch(tokens(2, start=800), [8, 9], prefix=[*lead, *more]) == 2
    assert torch.equal(reader.page(9), writer.page(7))


def test_a_prefix_that_comes_later(world: World) -> None:
    """Once the prefix is stored as well, pages written after it belong to the whole prompt."""
    writer, reader = world.engine(seed=1), world.engine()
    lead, rest = page_keys(tokens(3), None, PAGE), tokens(2, start=500)
    writer.backup(rest, [0, 1], prefix=lead)
    writer.backup(tokens(3), [5, 6, 7], prefix=[])
    fresh = world.engine(seed=1)
    assert fresh.backup(rest, [0, 1], prefix=lead) == 2
    assert reader.prefetch([*tokens(3), *rest], list(range(5)), prefix=[]) == 5
    assert torch.equal(reader.page(3), writer.page(0))


def test_ranks_are_shards(world: World) -> None:
    """A page is there once every tensor-parallel rank has stored it, and each gets its own."""
    ranks = [world.engine(seed=n + 1, tp_rank=n, tp_size=2) for n in range(2)]
    readers = [world.engine(tp_rank=n, tp_size=2) for n in range(2)]
    assert ranks[0].backup(tokens(3), [0, 1, 2], prefix=[]) == 3
    assert readers[0].prefetch(tokens(3), [0, 1, 2], prefix=[]) == 0
    assert ranks[1].backup(tokens(3), [0, 1, 2], prefix=[]) == 3
    for writer, reader in zip(ranks, readers, strict=True):
        assert reader.prefetch(tokens(3), [0, 1, 2], prefix=[]) == 3
        assert same_pages(writer, reader, [0, 1, 2])


def test_ranks_of_latents_share_one_copy(world: World) -> None:
    """With MLA every rank reads what the first one wrote."""
    writer = world.engine("mla", seed=1, tp_size=4)
    reader = world.engine("mla", tp_rank=3, tp_size=4)
    assert writer.backend._config.is_storage_writer
    assert not reader.backend._config.is_storage_writer
    writer.backup(tokens(3), [0, 1, 2], prefix=[])
    assert reader.prefetch(tokens(3), [0, 1, 2], prefix=[]) == 3
    assert same_pages(writer, reader, [0, 1, 2])


def test_stages_and_slices_keep_apart(world: World) -> None:
    """Another pipeline stage, context-parallel slice, revision, layout or tenant's engine never
    gets these pages."""
    world.engine(seed=1).backup(tokens(3), [0, 1, 2], prefix=[])
    stage = pool("mha", "page_first")
    stage.start_layer, stage.end_layer = 3, 6
    world.add(config({**world.settings(), "interface_v1": 1}, pp_rank=1, pp_size=2), stage)
    world.engine(attn_cp_rank=1, attn_cp_size=2)
    world.engine(extra={"revision": "other"})
    world.engine(extra={"attention": {"rope": "yarn"}})
    world.engine(layout="page_head")
    for engine in world.engines[1:]:
        assert engine.prefetch(tokens(3), [0, 1, 2], prefix=[]) == 0


def test_no_lease_is_left(world: World) -> None:
    """Queries that nothing follows and loads alike leave no lease."""
    engine = world.engine(seed=1)
    engine.backup(tokens(8), list(range(8)), prefix=[])
    keys = page_keys(tokens(8), None, PAGE)
    for _ in range(50):
        assert engine.backend.batch_exists(keys) == 8
        assert all(engine.backend.batch_get_v1(keys[:3], rows([20, 21, 22])))
    assert eventually(lambda: world.served.status().lease_count == 0)


def test_requests_are_told_once(world: World) -> None:
    """A query and the loads and writes that follow it are one request to the daemon."""
    engine = world.engine(seed=1)
    ids: list[Any] = []
    space = engine.backend._reach.space()
    for name in ("lookup", "put"):
        call = getattr(space, name)
        setattr(space, name, lambda *a, _c=call, **k: (ids.append(k["request_id"]), _c(*a, **k))[1])
    for prompt in (tokens(4), tokens(4, start=300)):
        engine.prefetch(prompt, [0, 1, 2, 3], prefix=[])
        engine.backup(prompt, [0, 1, 2, 3], prefix=[])
        engine.prefetch(prompt, [0, 1, 2, 3], prefix=[])
    assert len(set(ids)) == 4  # two before and two after their pages were stored
    other = world.engine(tp_rank=1, tp_size=2)
    assert other.backend._requests.ask([b"k"]) is None


@pytest.mark.parametrize("seed", range(3))
def test_it_may_miss_but_never_lies(world: World, seed: int) -> None:
    """Whatever is written and read in any order, with and without what comes before, under
    eviction, a page that comes back is the one of its key."""
    rng, engine = random.Random(seed), world.engine(pages=16)
    # A pool of few pages under a key's own number: what a page holds follows from its key.
    prompts = [tokens(rng.randrange(4, 12), start=100 * n) for n in range(6)]
    prompts += [[*prompts[0][:12], *tokens(4, start=5000)]]
    hits = 0
    with KVClient.connect(world.served.address) as client:
        for step in range(200):
            keys = page_keys(rng.choice(prompts), None, PAGE)
            start = rng.randrange(len(keys))
            part = keys[start : start + rng.randrange(1, 8)]
            prefix = keys[:start] if rng.random() < 0.5 else None
            extra = SGLANG.hicache_storage.HiCacheStorageExtraInfo(prefix_keys=prefix)
            places = list(range(len(part)))
            if rng.random() < 0.5:
                for place, key in zip(places, part, strict=True):
                    view = engine.pool.get_data_page(place * PAGE, flat=False)
                    view.fill_(float(int(key[:5], 16)))
                engine.backend.batch_set_v1(part, rows(places), extra)
            else:
                engine.pool.kv_buffer.zero_()
                assert engine.backend.batch_exists(part, extra) <= len(part)
                flags = engine.backend.batch_get_v1(part, rows(places), extra)
                for place, key, hit in zip(places, part, flags, strict=True):
                    hits += hit
                    page = engine.pool.get_data_page(place * PAGE)
                    assert not hit or (page == float(int(key[:5], 16))).all()
            if step == 100:
                client.admin.clear(all=True)
    assert hits > 50
