"""Puts: reserve, commit, publish in chain order, and every way they do not come to an end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from desk import letters_of, outcomes

from kvstore.core.errors import Draining, InvalidRequest, NotFound, TierError
from kvstore.store.parts import RESERVE_BLOCKS_MAX
from kvstore.testing import Fault, FaultyTier, MemoryTier

TOKENS = list(range(32))  # 8 blocks


def test_put_then_found(engine: Any) -> None:
    """What was put is matched whole, and its bytes are its own."""
    assert engine.put(TOKENS) == "SSSSSSSS"
    found = engine.lookup(TOKENS)
    assert (found.matched_tokens, found.restore_tokens, found.pending_tokens) == (32, 32, 0)
    assert engine.check(found, TOKENS) == 8
    assert found.plan.kind == "load_all"


def test_present_blocks_are_not_wanted_again(engine: Any) -> None:
    """A second put of the same prompt sends nothing; a longer one only what is new."""
    engine.put(TOKENS[:16])
    assert engine.put(TOKENS) == "PPPPSSSS"
    assert engine.put(TOKENS) == "PPPPPPPP"
    assert engine.desk.usage().block_count == 8


def test_nothing_is_visible_before_its_commit(engine: Any) -> None:
    """I3: a reserved block, its parent READY or not, is no match until its bytes are committed."""
    engine.put(TOKENS[:16])
    answer = engine.reserve(TOKENS)
    found = engine.lookup(TOKENS)
    assert (found.matched_tokens, found.pending_tokens) == (16, 16)
    assert engine.commit(answer.reservation_id, TOKENS, 4, 4) == "SSSS"
    assert engine.matched(TOKENS) == 8


def test_children_wait_for_their_parents(engine: Any) -> None:
    """I3: blocks committed before their parents become visible with them, not before."""
    answer = engine.reserve(TOKENS)
    assert engine.commit(answer.reservation_id, TOKENS, 4, 4) == "OOOO"
    assert engine.lookup(TOKENS).matched_tokens == 0
    assert engine.commit(answer.reservation_id, TOKENS, 1, 3) == "OOO"
    assert engine.desk.usage().block_count == 0
    assert engine.commit(answer.reservation_id, TOKENS, 0, 1) == "S"
    assert engine.matched(TOKENS) == 8
    assert engine.desk.kv.status().reservation_count == 0


def test_copies_that_end_out_of_order_publish_in_order(make_desk: Any) -> None:
    """I3: whatever order copies end in, blocks are visible under READY parents only."""
    for seed in range(20):
        desk = make_desk("4MiB", late=True, seed=seed)
        engine = desk.engine()
        tokens = list(range(4 * 64))
        answer = engine.reserve(tokens)
        keys = engine.keys(tokens)
        later = [
            engine.commit_later(answer.reservation_id, [engine.run(keys, i, 8)])
            for i in range(0, 64, 8)
        ]
        while desk.mover.step():
            desk.store.drain()
            engine.matched(tokens)
            desk.store.check_integrity()
        assert all(completion.done for completion in later)
        assert engine.matched(tokens) == 64


def test_a_block_has_all_shards_or_none(desk: Any) -> None:
    """I3: a block is READY only with every shard; one ahead of its siblings stays STAGING."""
    ranks = [desk.engine(shard=shard, engine_id="e", shard_count=3) for shard in range(3)]
    assert ranks[0].put(TOKENS) == "OOOOOOOO"
    assert ranks[2].put(TOKENS[:16]) == "OOOO"
    for rank in ranks:
        found = rank.lookup(TOKENS)
        assert (found.matched_tokens, found.pending_tokens) == (0, 32)
    assert ranks[1].put(TOKENS) == "SSSSOOOO"
    for rank in ranks:
        assert rank.matched(TOKENS) == 4
    assert ranks[2].put(TOKENS) == "PPPPSSSS"
    for rank in ranks:
        assert rank.matched(TOKENS) == 8
    assert desk.kv.status().reservation_count == 0


def test_a_shard_ahead_is_given_up_in_time(desk: Any) -> None:
    """A shard whose siblings never come leaves with its reservation's time, nothing leaks."""
    ahead, other = (desk.engine(shard=shard, shard_count=2) for shard in range(2))
    ahead.put(TOKENS)
    limit = desk.store.config.limits.staging_ttl_seconds
    desk.advance(limit - 1)
    assert other.lookup(TOKENS).pending_tokens == 32
    desk.advance(2)
    assert other.lookup(TOKENS).pending_tokens == 0
    assert desk.usage().used_bytes == 0
    assert other.put(TOKENS) == "OOOOOOOO"
    assert ahead.put(TOKENS) == "SSSSSSSS"


def test_two_writers_of_one_block(desk: Any) -> None:
    """The second writer hears PENDING and sends nothing; what the first gives up is free again."""
    first, second = desk.engine(), desk.engine()
    answer = first.reserve(TOKENS[:16])
    assert second.put(TOKENS) == "OOOOOOOO"
    desk.kv.abort(first.session, answer.reservation_id)
    desk.store.drain()
    assert second.put(TOKENS) == "SSSSSSSS"


def test_a_writer_may_continue_what_another_writes(desk: Any) -> None:
    """Blocks after another's pending ones may be written: they are READY once those are."""
    first, second = desk.engine(), desk.engine()
    answer = first.reserve(TOKENS[:16])
    other = second.reserve(TOKENS)
    assert bytes(other.outcomes).count(1) == 4
    assert second.commit(other.reservation_id, TOKENS, 4, 4) == "OOOO"
    assert first.commit(answer.reservation_id, TOKENS, 0, 4) == "SSSS"
    assert first.matched(TOKENS) == 8


@pytest.mark.parametrize("ending", ["commit", "expire"])
def test_a_writer_keeps_what_it_has_above_others_blocks(desk: Any, ending: str) -> None:
    """I4, I22: when a writer gives up, one that wrote above its blocks keeps its own: to commit
    them, or to give them back in time."""
    above, below, rank = (desk.engine(shard=n, shard_count=2) for n in (0, 0, 1))
    other = rank.reserve(TOKENS[:20])
    lower = below.reserve(TOKENS, 5)
    assert letters_of(lower.outcomes) == "WWW"
    upper = above.reserve(TOKENS)
    assert letters_of(upper.outcomes) == "WWWWWOOO"
    desk.kv.abort(below.session, lower.reservation_id)
    desk.store.check_integrity()
    if ending == "commit":
        assert above.commit(upper.reservation_id, TOKENS, 0, 5) == "OOOOO"
        assert rank.commit(other.reservation_id, TOKENS, 0, 5) == "SSSSS"
        assert above.matched(TOKENS) == rank.matched(TOKENS) == 5
    desk.advance(desk.store.config.limits.staging_ttl_seconds + 1)
    assert above.lookup(TOKENS).pending_tokens == 0
    assert desk.kv.status().block_count == (5 if ending == "commit" else 0)
    assert desk.usage().used_bytes == desk.usage().block_count * 4096


def test_abort_leaves_nothing(engine: Any) -> None:
    """I4: an aborted put is not visible, before or after part of it was committed."""
    answer = engine.reserve(TOKENS)
    engine.commit(answer.reservation_id, TOKENS, 2, 4)
    engine.desk.kv.abort(engine.session, answer.reservation_id)
    engine.desk.settle()
    assert engine.lookup(TOKENS).pending_tokens == 0
    assert engine.desk.usage().used_bytes == 0


def test_abort_while_copies_run(make_desk: Any) -> None:
    """I4, I5: an aborted put's slots are reused only after its running copies ended."""
    for seed in range(20):
        desk = make_desk(late=True, seed=seed)
        engine, other = desk.engine(), desk.engine()
        answer = engine.reserve(TOKENS)
        late = engine.commit_later(answer.reservation_id, [engine.run(engine.keys(TOKENS), 0, 8)])
        for _ in range(seed % 3):
            desk.mover.step()
        desk.kv.abort(engine.session, answer.reservation_id)
        desk.store.check_integrity()
        assert engine.lookup(TOKENS).matched_tokens in (0, 32)
        other.put([7] * 400)
        desk.settle()
        assert late.done
        assert other.matched([7] * 400) == 100


def test_a_failed_copy_is_not_visible(make_desk: Any) -> None:
    """I4: blocks whose copy failed are rejected, with the blocks that depend on them."""
    tier = FaultyTier(MemoryTier(1 << 20), Random(0))
    desk = make_desk(tier=tier)
    engine = desk.engine()
    answer = engine.reserve(TOKENS)
    assert engine.commit(answer.reservation_id, TOKENS, 0, 3) == "SSS"
    tier.budget.rates[Fault.WRITE_ERROR] = 1.0
    keys = engine.keys(TOKENS)
    later = engine.commit_later(answer.reservation_id, [engine.run(keys, 3, 1)])
    (result,) = desk.wait(later)
    assert result.outcomes == b"\0"
    assert "the copy failed" in result.reason
    tier.budget.rates.clear()
    assert engine.matched(TOKENS) == 3
    assert engine.put(TOKENS) == "PPPSSSSS"


class PickyTier(MemoryTier):
    """Fails to write the places in `bad`."""

    bad: frozenset[int] = frozenset()

    def write(self, place: int, source: Any) -> bytes:
        if place in self.bad:
            raise TierError(f"place {place} is bad")
        return super().write(place, source)


def test_blocks_behind_a_failed_copy(make_desk: Any) -> None:
    """I4, I22: blocks copied behind one whose copy failed are rejected, and their slots serve."""
    for seed in range(20):
        tier = PickyTier(1 << 20)
        desk = make_desk(tier=tier, late=True, seed=seed)
        engine = desk.engine()
        answer = engine.reserve(TOKENS)
        keys = engine.keys(TOKENS)
        tier.bad = frozenset({desk.kv.reservations.get(answer.reservation_id).waiting[2]})
        runs = [engine.run(keys, n, 1) for n in range(8)]
        results = desk.wait(engine.commit_later(answer.reservation_id, runs))
        assert outcomes(results) == "SS------"
        assert "is bad" in results[2].reason
        assert all("a block before these" in result.reason for result in results[3:])
        desk.settle()
        assert desk.usage().used_bytes == 2 * 4096
        assert engine.matched(TOKENS) == 2
        tier.bad = frozenset()
        assert engine.put(TOKENS) == "PPSSSSSS"


def test_commit_after_its_time(engine: Any) -> None:
    """A commit after the reservation's time answers NotFound, and nothing of it stays."""
    answer = engine.reserve(TOKENS)
    engine.desk.advance(engine.desk.store.config.limits.staging_ttl_seconds + 0.1)
    with pytest.raises(NotFound, match="reserve again"):
        engine.commit(answer.reservation_id, TOKENS, 0, 8)
    assert engine.lookup(TOKENS).matched_tokens == 0
    assert engine.desk.usage().used_bytes == 0


def test_commits_extend_a_reservation(engine: Any) -> None:
    """A long put lives as long as commits keep coming."""
    limit = engine.desk.store.config.limits.staging_ttl_seconds
    answer = engine.reserve(TOKENS)
    for block in range(8):
        engine.desk.advance(limit * 0.7)
        assert engine.commit(answer.reservation_id, TOKENS, block, 1) == "S"
    assert engine.matched(TOKENS) == 8


def test_double_commit(engine: Any) -> None:
    """A block commits once: again is InvalidRequest, or NotFound once all are done."""
    answer = engine.reserve(TOKENS)
    engine.commit(answer.reservation_id, TOKENS, 0, 4)
    with pytest.raises(InvalidRequest, match="block 3 does not wait"):
        engine.commit(answer.reservation_id, TOKENS, 3, 2)
    twice = [engine.run(engine.keys(TOKENS), 4, 2), engine.run(engine.keys(TOKENS), 5, 2)]
    with pytest.raises(InvalidRequest, match="block 5 does not wait"):
        engine.commit_later(answer.reservation_id, twice)
    assert engine.commit(answer.reservation_id, TOKENS, 4, 4) == "SSSS"
    with pytest.raises(NotFound):
        engine.commit(answer.reservation_id, TOKENS, 0, 8)
    assert engine.matched(TOKENS) == 8


def test_nobody_commits_for_another(desk: Any) -> None:
    """A reservation is its session's alone: others cannot commit or abort it."""
    owner, thief = desk.engine(), desk.engine()
    answer = owner.reserve(TOKENS)
    with pytest.raises(NotFound):
        thief.commit(answer.reservation_id, TOKENS, 0, 8)
    desk.kv.abort(thief.session, answer.reservation_id)
    assert owner.commit(answer.reservation_id, TOKENS, 0, 8) == "SSSSSSSS"


def test_parent_cleared_between_reserve_and_commit(engine: Any) -> None:
    """Blocks whose prefix was cleared after Reserve are rejected, and nothing leaks."""
    engine.put(TOKENS[:16])
    answer = engine.reserve(TOKENS)
    engine.desk.wait(engine.desk.kv.clear(engine.space.id))
    with pytest.raises(NotFound):
        engine.commit(answer.reservation_id, TOKENS, 4, 4)
    assert engine.lookup(TOKENS).matched_tokens == 0
    assert engine.desk.usage().used_bytes == 0
    assert engine.put(TOKENS) == "SSSSSSSS"


def test_a_reserved_prefix_is_not_evicted(make_desk: Any) -> None:
    """A reservation holds the ancestors of what it writes: no parent goes before its commit."""
    desk = make_desk()
    engine, other = desk.engine(), desk.engine()
    engine.put(TOKENS[:16])
    answer = engine.reserve(TOKENS)
    for n in range(10):
        other.put([100 + n] * 200)
    assert engine.commit(answer.reservation_id, TOKENS, 4, 4) == "SSSS"
    assert engine.matched(TOKENS) == 8


def test_long_prompts_reserve_in_windows(make_desk: Any) -> None:
    """One Reserve answers for a bounded number of blocks; the next begins where it ended."""
    desk = make_desk("16MiB")
    engine = desk.engine()
    tokens = list(range(4 * 2500))
    windows, first = [], 0
    while first < 2500:
        windows.append(engine.put_window(tokens, first))
        first += len(windows[-1])
    assert {len(window) for window in windows[:-1]} == {RESERVE_BLOCKS_MAX}
    assert set("".join(windows)) == {"S"}
    assert engine.matched(tokens) == 2500


def test_a_full_index_evicts(make_desk: Any) -> None:
    """I16: `index.max_blocks` bounds what is kept; old blocks make way for new ones within it."""
    desk = make_desk(sections={"index": {"max_blocks": 20}})
    engine = desk.engine()
    assert engine.put(TOKENS) == "SSSSSSSS"
    assert engine.put([5] * 32) == "SSSSSSSS"
    assert engine.matched(TOKENS) == 8
    assert engine.put([6] * 32) == "SSSSSSSS"
    assert desk.kv.status().block_count <= 20
    assert engine.matched(TOKENS) == 8
    assert engine.matched([5] * 32) < 8


def test_a_full_index_keeps_what_it_extends(make_desk: Any) -> None:
    """I16: room for a longer prompt comes from other prompts, not from its own beginning."""
    desk = make_desk(sections={"index": {"max_blocks": 18}})
    engine = desk.engine()
    engine.put(TOKENS[:16])
    engine.put([5] * 48)
    assert engine.put(TOKENS) == "PPPPSSSS"
    held = engine.lookup(TOKENS)
    assert engine.put(list(range(100, 200))) == "S" * 9 + "-" * 16
    assert engine.is_intact(held)


def test_draining_takes_no_new_blocks(engine: Any) -> None:
    """A draining store refuses Reserve and Lookup, but what is reserved may be committed."""
    answer = engine.reserve(TOKENS)
    engine.desk.kv.drain(10.0, False)
    with pytest.raises(Draining):
        engine.reserve([1, 2, 3, 4])
    with pytest.raises(Draining):
        engine.lookup(TOKENS)
    assert engine.commit(answer.reservation_id, TOKENS, 0, 8) == "SSSSSSSS"
    assert (engine.session, "draining", 10.0) in engine.desk.notices


def test_a_full_copy_queue_rejects(make_desk: Any) -> None:
    """What finds the copy queue full is rejected with that reason; nothing waits, nothing leaks."""
    desk = make_desk(late=True)
    desk.mover.queue_bytes = 8192
    engine = desk.engine()
    answer = engine.reserve(TOKENS)
    keys = engine.keys(TOKENS)
    first = engine.commit_later(answer.reservation_id, [engine.run(keys, 0, 2)])
    second = engine.commit_later(answer.reservation_id, [engine.run(keys, 2, 6)])
    desk.settle()
    assert [set(c.result()[0].outcomes) for c in (first, second)] == [{4}, {0}]
    assert "queue is full" in second.result()[0].reason
    assert engine.matched(TOKENS) == 2
    desk.mover.queue_bytes = 1 << 20
    assert engine.put(TOKENS) == "PPSSSSSS"
