"""Events: a subscriber can rebuild which blocks are readable, at every moment."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from follower import Follower, ready_keys

from kvstore.core.errors import TierError
from kvstore.testing import MemoryTier

TOKENS = list(range(32))


def test_events_tell_what_is_readable(make_desk: Any) -> None:
    """The set of READY keys follows from Stored, Removed and Cleared, without gaps or repeats."""
    desk = make_desk(sections={"tenants": [{"name": "b"}]})
    everything, only_b = Follower(desk.store.events), Follower(desk.store.events, "b")
    random = Random(5)
    engines = [desk.engine(), desk.engine(model="other"), desk.engine("b")]
    for n in range(120):
        engine = random.choice(engines)
        tokens = [random.randrange(3) for _ in range(4 * random.randrange(1, 12))]
        action = random.random()
        if action < 0.8:
            engine.put(tokens * random.randrange(1, 4))
        elif action < 0.85:
            desk.wait(desk.kv.clear(engine.space.id))
        elif action < 0.9:
            desk.wait(desk.kv.bump_epoch(engine.space.id))
        else:
            engine.put([n] * 800)
        for engine in engines:
            assert everything.of(engine) == of(desk, engine)
        assert only_b.of(engines[2]) == everything.of(engines[2])
        assert not only_b.of(engines[0])


def of(desk: Any, engine: Any) -> set[bytes]:
    """READY keys of an engine's space, in truth."""
    return ready_keys(desk.kv.parts).get((engine.space.id, "host"), set())


def test_parents_link_up(desk: Any, engine: Any) -> None:
    """Every Stored event names the key before its first block, so that chains can be rebuilt."""
    follower = Follower(desk.store.events)
    for n in (2, 5, 8):
        engine.put(TOKENS[: 4 * n])
    engine.put([*TOKENS[:12], *[7] * 8])
    keys = engine.keys(TOKENS)
    assert [follower.parents[key] for key in keys[1:]] == keys[:-1]
    fork = engine.keys([*TOKENS[:12], *[7] * 8])
    assert follower.parents[fork[3]] == keys[2]


def test_a_new_life_tells_what_it_adopted(make_desk: Any, shm_directory: Path) -> None:
    """I10: after a restart the log, from its first event on, names every block that is there."""
    desk = make_desk(directory=shm_directory)
    engine = desk.engine()
    for n in (3, 8):
        engine.put(TOKENS[: 4 * n])
    engine.put([*TOKENS[:12], *[7] * 8])
    before = of(desk, engine)
    desk.store.restart()
    follower, engine = Follower(desk.store.events), desk.engine()
    assert follower.of(engine) == of(desk, engine) == before
    keys = engine.keys(TOKENS)
    assert [follower.parents[key] for key in keys[1:]] == keys[:-1]
    engine.put([5] * 32)
    assert follower.of(engine) == of(desk, engine)


def test_late_subscribers_get_what_is_kept(make_desk: Any) -> None:
    """A subscriber from a number on gets kept events from there; from 0, only new ones."""
    desk = make_desk(sections={"limits": {"events_kept": 10}})
    engine = desk.engine()
    for n in range(30):
        engine.put([n] * 4)
    log = desk.store.events
    assert (log.oldest, log.sequence) == (21, 30)
    heard: list[int] = []
    from_the_middle = log.subscribe(None, 25, lambda event: heard.append(event.sequence))
    log.subscribe(None, 0, lambda event: heard.append(-event.sequence))
    engine.put([99] * 4)
    assert heard == [*range(25, 31), 31, -31]
    from_the_middle.close()
    from_the_middle.close()
    assert log.subscriber_count == 1


def test_shards_are_one_event(desk: Any) -> None:
    """A block of several shards is stored once, when all are there, and removed once."""
    follower = Follower(desk.store.events)
    ranks = [desk.engine(shard=shard, shard_count=2) for shard in range(2)]
    ranks[0].put(TOKENS)
    assert not follower.of(ranks[0])
    ranks[1].put(TOKENS)
    assert follower.of(ranks[0]) == set(ranks[0].keys(TOKENS))
    desk.engine(model="other").put([1] * 1024)
    assert not follower.of(ranks[0])


class UnwritableTier(MemoryTier):
    """Commits fail while `broken`."""

    broken = False

    def commit(self, blocks: Any) -> list[int]:
        if self.broken:
            raise TierError("the header cannot be written")
        return super().commit(blocks)


def test_headers_that_cannot_be_written(make_desk: Any) -> None:
    """I4: blocks whose header the tier cannot write are rejected with all below, and not told."""
    tier = UnwritableTier(1 << 20)
    desk = make_desk(tier=tier)
    engine = desk.engine()
    follower = Follower(desk.store.events)
    engine.put(TOKENS[:8])
    engine.put([*TOKENS[:8], 50, 51, 52, 53])
    answer = engine.reserve(TOKENS)
    other = desk.engine()
    below = other.reserve([*TOKENS, 9, 9, 9, 9])
    assert other.commit(below.reservation_id, [*TOKENS, 9, 9, 9, 9], 8, 1) == "O"
    assert engine.commit(answer.reservation_id, TOKENS, 3, 5) == "OOOOO"
    tier.broken = True
    assert engine.commit(answer.reservation_id, TOKENS, 2, 1) == "-"
    desk.settle()
    tier.broken = False
    assert engine.matched(TOKENS) == 2
    assert len(follower.of(engine)) == 3
    assert desk.kv.status().reservation_count == 0
    assert engine.put(TOKENS) == "PPSSSSSS"
