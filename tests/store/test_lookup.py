"""Lookups and leases: what is granted, how long it holds, and every way that it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from kvstore.core.errors import InvalidRequest, LeaseLost
from kvstore.core.plan import Slots

TOKENS = list(range(32))  # 8 blocks


def test_a_hit_is_exact(engine: Any) -> None:
    """I1: another token anywhere ends the match at its block, and never later."""
    engine.put(TOKENS)
    for at in range(32):
        other = [*TOKENS[:at], 999, *TOKENS[at + 1 :]]
        assert engine.matched(other) == at // 4


def test_roots_keep_prompts_apart(engine: Any) -> None:
    """I1: adapter and cache_salt are part of a prompt's identity, each on its own."""
    engine.put(TOKENS, adapter="a", salt="b")
    assert engine.matched(TOKENS, adapter="a", salt="b") == 8
    for other in ({}, {"adapter": "a"}, {"salt": "b"}, {"adapter": "b", "salt": "a"}):
        assert engine.matched(TOKENS, **other) == 0
        engine.put(TOKENS, **other)
        assert engine.matched(TOKENS, **other) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"}, {"revision": "r2"}, {"layer_first": 1}, {"pp_size": 2},
        {"layout": "LKHND"}, {"attention": {"sliding_window": "128"}}, {"group": "g"},
        {"shard_count": 2}, {"dtype": "uint8", "head_dim": 256},
        {"num_kv_heads": 4, "head_dim": 32},
    ],
)  # fmt: skip
def test_specs_keep_blocks_apart(desk: Any, change: dict[str, Any]) -> None:
    """I1: a spec that differs in any field is another space: same tokens, no hit."""
    one, other = desk.engine(), desk.engine(**change)
    one.put(TOKENS)
    assert one.space.block_bytes == other.space.block_bytes
    assert other.matched(TOKENS) == 0


def test_local_tokens_come_without_slots(engine: Any) -> None:
    """Tokens that the engine has already are matched and leased but need no slot."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS, local=12)
    assert (found.matched_tokens, found.restore_tokens) == (32, 20)
    assert found.slots.first_block == 3
    assert engine.check(found, TOKENS) == 5
    everything = engine.lookup(TOKENS, local=32)
    assert everything.restore_tokens == 0
    assert everything.lease_id
    assert engine.check(everything, TOKENS) == 0


def test_repeats_share_one_lease(desk: Any, engine: Any) -> None:
    """An identical lookup of one request answers with the live lease; anything else replaces it."""
    engine.put(TOKENS)
    first = engine.lookup(TOKENS[:16], request_id="r")
    again = engine.lookup(TOKENS[:16], request_id="r")
    assert again.lease_id == first.lease_id
    assert len(desk.kv.parts.leases) == 1
    grown = engine.lookup(TOKENS, request_id="r")
    assert grown.lease_id != first.lease_id
    assert len(desk.kv.parts.leases) == 1
    for change in ({"local": 4}, {"salt": "s"}, {"adapter": "a"}):
        engine.lookup(TOKENS, request_id="r", **change)
        assert len(desk.kv.parts.leases) <= 1
    engine.lookup(TOKENS, request_id="other")
    engine.lookup(TOKENS)
    engine.lookup(TOKENS)
    assert desk.kv.finish_request(engine.attachment, "other") == 1
    assert desk.kv.finish_request(engine.attachment, "other") == 0


def test_a_request_that_no_longer_matches_lets_its_lease_go(desk: Any, engine: Any) -> None:
    """A request whose prompt changed to one that is not stored holds nothing any more."""
    engine.put(TOKENS)
    engine.lookup(TOKENS, request_id="r")
    assert engine.lookup([9] * 32, request_id="r").lease_id == 0
    assert desk.leased_bytes() == 0


def ranks_of(desk: Any, count: int = 2) -> list[Any]:
    """The ranks of one engine, with a prompt stored."""
    ranks = [desk.engine(shard=n, engine_id="e", shard_count=count) for n in range(count)]
    for rank in ranks:
        rank.put(TOKENS)
    return ranks


def test_ranks_share_the_lease_of_a_request(desk: Any) -> None:
    """I1, I6: ranks share one lease, each reads its own shard, and the last release ends it."""
    ranks = ranks_of(desk)
    found = [rank.lookup(TOKENS, request_id="r") for rank in ranks]
    assert found[0].lease_id == found[1].lease_id
    for rank, answer in zip(ranks, found, strict=True):
        assert rank.check(answer, TOKENS) == 8
    ranks[1].release(found[1])
    other = desk.engine(model="other")
    for n in range(20):
        other.put([100 + n] * 100)
    assert ranks[0].check(found[0], TOKENS) == 8
    ranks[0].release(found[0])
    assert desk.leased_bytes() == 0


def test_a_rank_restores_from_a_lease_that_another_looked_up(desk: Any) -> None:
    """I1: whoever looked a request up, each rank is given its own shard's slots and bytes."""
    ranks = ranks_of(desk, 3)
    lease = ranks[0].lookup(TOKENS, request_id="r")
    for rank in ranks:
        emitted: list[Slots] = []
        desk.wait(desk.kv.restore(rank.session, lease.lease_id, 0, 0, emitted.append))
        assert rank.check(structs.replace(lease, slots=emitted[0]), TOKENS) == 8
        data, _ = desk.wait(desk.kv.read_block(rank.session, lease.lease_id, 6))
        right = rank.payload(rank.keys(TOKENS)[6])
        assert np.array_equal(np.frombuffer(data, np.uint8), right)
    ranks[2].release(lease)
    assert desk.leased_bytes() == 0


def test_the_death_of_one_rank_leaves_the_others_their_leases(desk: Any) -> None:
    """I15: leases end with the last session of their engine, not with the one that asked."""
    ranks = ranks_of(desk)
    found = ranks[0].lookup(TOKENS, request_id="r")
    desk.kv.close_session(ranks[0].session)
    assert desk.kv.renew(ranks[1].session, [found.lease_id])[0] == []
    desk.kv.close_session(ranks[1].session)
    assert desk.leased_bytes() == 0


def test_a_lease_grows_while_blocks_arrive(desk: Any, engine: Any) -> None:
    """A repeated lookup gets what was pending before, under the same lease."""
    writer = desk.engine()
    writer.put(TOKENS[:16])
    answer = writer.reserve(TOKENS)
    first = engine.lookup(TOKENS, request_id="r")
    assert (first.matched_tokens, first.pending_tokens) == (16, 16)
    assert engine.lookup(TOKENS, request_id="r").lease_id == first.lease_id
    writer.commit(answer.reservation_id, TOKENS, 4, 4)
    more = engine.lookup(TOKENS, request_id="r")
    assert (more.lease_id, more.matched_tokens, more.pending_tokens) == (first.lease_id, 32, 0)
    assert engine.check(more, TOKENS) == 8
    assert desk.leased_bytes() == 8 * 4096
    engine.release(more)
    assert desk.leased_bytes() == 0


def test_a_leased_block_stays(desk: Any, engine: Any) -> None:
    """I6: whatever else is stored, leased blocks keep their place, bytes and generation."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    other = desk.engine(model="other")
    for n in range(20):
        other.put([n] * 400)
        desk.store.check_integrity()
    assert engine.is_intact(found)
    assert engine.check(found, TOKENS) == 8
    engine.release(found)
    other.put([77] * 1024)
    assert not engine.is_intact(found)
    assert engine.matched(TOKENS) < 8


def test_a_frozen_client_gets_lease_lost(desk: Any, engine: Any) -> None:
    """I6: past its time a lease is LeaseLost in every call; its slots may then be others'."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    ttl = desk.store.config.limits.lease_ttl_seconds
    desk.advance(ttl - 0.5)
    assert desk.kv.renew(engine.session, [found.lease_id])[0] == []
    desk.advance(ttl - 0.5)
    assert engine.is_intact(found)
    desk.advance(1.0)
    assert desk.kv.renew(engine.session, [found.lease_id])[0] == [found.lease_id]
    with pytest.raises(LeaseLost):
        desk.kv.restore(engine.session, found.lease_id, 0, 0, lambda slots: None)
    with pytest.raises(LeaseLost):
        desk.kv.read_block(engine.session, found.lease_id, 0)
    assert (engine.session, "lost_leases", [found.lease_id]) in desk.notices


def test_restore_says_again_where_blocks_lie(desk: Any, engine: Any) -> None:
    """Restore answers slots of any part of a lease, and refuses what is not leased by it."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS[:24])
    emitted: list[Slots] = []
    desk.wait(desk.kv.restore(engine.session, found.lease_id, 2, 3, emitted.append))
    desk.wait(desk.kv.restore(engine.session, found.lease_id, 0, 0, emitted.append))
    assert [slots.first_block for slots in emitted] == [2, 0]
    assert np.array_equal(emitted[0].places, found.slots.places[2:5])
    assert np.array_equal(emitted[1].places, found.slots.places)
    for first, count in ((0, 7), (6, 1), (7, 0), (-1, 2)):
        with pytest.raises(InvalidRequest, match="are not all leased"):
            desk.kv.restore(engine.session, found.lease_id, first, count, emitted.append)
    stranger = desk.engine()
    with pytest.raises(LeaseLost):
        desk.kv.restore(stranger.session, found.lease_id, 0, 0, emitted.append)


def test_read_block_copies_one_block_out(desk: Any, engine: Any) -> None:
    """Bytes for clients without shared memory are the block's own, with their checksum."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    for block, key in enumerate(engine.keys(TOKENS)):
        data, checksum = desk.wait(desk.kv.read_block(engine.session, found.lease_id, block))
        assert np.array_equal(np.frombuffer(data, np.uint8), engine.payload(key))
        assert len(checksum) == 16


def test_a_block_being_read_outlives_its_lease(make_desk: Any) -> None:
    """I5, I6: a copy out under way keeps its slot, whether its lease or its space ends."""
    for seed in range(30):
        desk = make_desk(late=True, seed=seed)
        engine = desk.engine()
        engine.put(TOKENS)
        found = engine.lookup(TOKENS)
        later = desk.kv.read_block(engine.session, found.lease_id, 5)
        engine.release(found)
        if seed % 2:
            desk.kv.clear(engine.space.id)
        other = desk.engine(model="other")
        other.put([8] * 1024)
        desk.settle()
        try:
            data, _ = later.result()
        except LeaseLost:
            assert seed % 2
        else:
            right = engine.payload(engine.keys(TOKENS)[5])
            assert np.array_equal(np.frombuffer(data, np.uint8), right)


@pytest.mark.long
def test_lookups_without_release_leak_nothing(make_desk: Any) -> None:
    """I6, I15: after 1e5 lookups that nobody releases or finishes, leased bytes return to 0."""
    limits = dict.fromkeys(("leased_bytes_per_session", "leased_bytes_per_tenant"), "1TiB")
    desk = make_desk(sections={"limits": limits})
    engines = [desk.engine() for _ in range(30)]
    engines[0].put(TOKENS)
    query = engines[0].query(TOKENS)
    granted = 0
    for n in range(100_000):
        granted += bool(desk.kv.lookup(engines[n % 30].attachment, query, 0).lease_id)
    assert granted == 100_000
    assert desk.leased_bytes() == 100_000 * 8 * 4096
    desk.advance(desk.store.config.limits.lease_ttl_seconds)
    for _ in range(100):
        desk.advance(0.05)
    assert desk.leased_bytes() == 0
    assert len(desk.kv.parts.leases) == 0
    assert all(engine.session.lease_count == 0 for engine in engines)


def test_limits_shorten_the_match(make_desk: Any) -> None:
    """Over a lease limit the match is shorter and says which limit it was; never an error."""
    block = 4096
    desk = make_desk(
        sections={
            "limits": {
                "leased_bytes_per_session": 10 * block, "leased_bytes_per_tenant": 24 * block,
                "leases_per_session": 2,
            }
        }
    )  # fmt: skip
    one, two, three = (desk.engine() for _ in range(3))
    one.put(TOKENS)
    held = one.lookup(TOKENS)
    short = one.lookup(TOKENS)
    assert short.matched_tokens == 8
    assert "limits.leased_bytes_per_session allows 2 of 8" in short.reason
    none = one.lookup(TOKENS)
    assert (none.matched_tokens, none.lease_id) == (0, 0)
    assert "limits.leases_per_session" in none.reason
    two.lookup(TOKENS)
    cut = three.lookup(TOKENS)
    assert cut.matched_tokens == 24
    assert "limits.leased_bytes_per_tenant" in cut.reason
    one.release(held)
    assert one.lookup(TOKENS).matched_tokens == 32
    assert three.lookup(TOKENS, request_id="x").matched_tokens == 0


def test_a_repeat_at_the_limit_still_answers(make_desk: Any) -> None:
    """A request that grows replaces its lease even where both do not fit together."""
    desk = make_desk(sections={"limits": {"leased_bytes_per_session": 8 * 4096}})
    engine = desk.engine()
    engine.put(TOKENS)
    assert engine.lookup(TOKENS[:28], request_id="r").matched_tokens == 28
    assert engine.lookup(TOKENS, request_id="r").matched_tokens == 32


def test_a_million_tokens_go_in_slices(make_desk: Any) -> None:
    """A 1,000,000-token prompt is walked in slices: other calls are served in between."""
    desk = make_desk("128MiB")
    engine = desk.engine(dtype="uint8", head_dim=2, block_size=64)
    tokens = np.arange(1_000_000)
    total = 1_000_000 // 64
    engine.put(tokens)
    later = desk.kv.lookup(engine.attachment, engine.query(tokens), 0)
    small, turns = engine.query(tokens[:640]), 0
    while not later.done:
        assert desk.kv.lookup(engine.attachment, small, 0).matched_tokens == 640
        turns += 1
        desk.store.turn()
    assert turns >= total // 1024
    found = later.result()
    assert found.matched_tokens == 1_000_000
    assert engine.check(found, tokens) == total


def test_a_walk_in_slices_survives_what_happens_meanwhile(make_desk: Any) -> None:
    """I1, I6: a lookup whose blocks are cleared between two slices answers with what is there."""
    desk = make_desk("16MiB")
    engine = desk.engine()
    tokens = list(range(4 * 3000))
    engine.put(tokens)
    for turns in range(4):
        later = desk.kv.lookup(engine.attachment, engine.query(tokens), 0)
        for _ in range(turns):
            desk.store.turn()
        answered = later.done
        desk.kv.clear(engine.space.id)
        found = desk.wait(later)
        assert answered or not found.matched_tokens
        desk.settle()
        assert not found.lease_id or not engine.is_intact(found)
        assert engine.matched(tokens) == 0
        engine.put(tokens)
