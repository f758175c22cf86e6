"""Clear and epochs: gone at once, gone for good, and nothing of before comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.core.errors import FailedPrecondition, LeaseLost, NotFound, TierError

TOKENS = list(range(32))


def test_clear_drops_a_space_and_nothing_else(desk: Any, engine: Any) -> None:
    """A cleared space is empty at once; others keep their blocks."""
    other = desk.engine(model="other")
    engine.put(TOKENS)
    other.put(TOKENS)
    assert desk.wait(desk.kv.clear(engine.space.id)) == 8
    assert engine.matched(TOKENS) == 0
    assert other.matched(TOKENS) == 8
    assert engine.put(TOKENS) == "SSSSSSSS"


def test_clear_of_a_tenant_and_of_all(desk: Any) -> None:
    """Clear takes all spaces of a tenant, or everything; unknown ones are NotFound."""
    a, b = desk.engine("default"), desk.engine("default", model="other")
    a.put(TOKENS)
    b.put(TOKENS)
    for wrong in ({"tenant": "nobody"}, {"space_id": bytes(32)}):
        with pytest.raises(NotFound):
            desk.kv.clear(**wrong)
    assert desk.wait(desk.kv.clear(tenant="default")) == 16
    a.put(TOKENS)
    b.put(TOKENS)
    assert desk.wait(desk.kv.clear()) == 16
    assert desk.wait(desk.kv.clear()) == 0


def test_a_large_space_goes_in_slices_but_at_once(make_desk: Any) -> None:
    """A clear takes turns; from its first moment on nothing of the space is found or taken in."""
    desk = make_desk("16MiB")
    engine = desk.engine()
    tokens = list(range(4 * 3000))
    engine.put(tokens)
    engine.lookup(tokens[:400], request_id="live")
    later = desk.kv.clear(engine.space.id)
    turns = 0
    while not later.done:
        for name in ("live", f"r{turns}"):
            query = engine.query(tokens[:400], request_id=name)
            assert desk.kv.lookup(engine.attachment, query, 0).lease_id == 0
        answer = desk.kv.reserve(engine.attachment, engine.query([1] * 32), 0)
        assert (answer.outcomes, answer.reservation_id) == (bytes(8), 0)
        desk.store.check_integrity()
        turns += desk.store.turn()
    assert turns > 5
    assert later.result() == 3000


def test_slots_of_cleared_blocks_rest_until_their_leases_end(desk: Any, engine: Any) -> None:
    """I5, I6: cleared blocks lose their generation at once, their slots only after the lease."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    places = set(found.slots.places.tolist())
    desk.wait(desk.kv.clear(engine.space.id))
    assert not engine.is_intact(found)
    assert desk.usage().resting_bytes == 8 * 4096
    with pytest.raises(LeaseLost):
        desk.kv.restore(engine.session, found.lease_id, 0, 0, lambda slots: None)
    assert desk.kv.renew(engine.session, [found.lease_id])[0] == [found.lease_id]
    assert (engine.session, "lost_leases", [found.lease_id]) in desk.notices
    other = desk.engine(model="other")
    other.put([1] * 1024)
    held = other.lookup([1] * 1024)
    assert held.matched_tokens == 1024 - 32
    assert not places & set(held.slots.places.tolist())
    engine.release(found)
    assert desk.usage().resting_bytes == 0
    other.put([2] * 32)
    assert other.matched([2] * 32) == 8


def test_all_slots_of_a_lost_lease_rest(desk: Any, engine: Any) -> None:
    """I5, I6: a lease over several runs keeps all its slots from reuse, whichever run goes first,
    whether they were cleared or lie above a block that was quarantined."""
    engine.put(TOKENS)
    for n in range(1, 8):
        engine.put([*TOKENS[: 4 * n], *[99] * 8])
    found = engine.lookup(TOKENS)
    places = set(found.slots.places.tolist())
    desk.kv.remover.quarantine(found.slots.places.tolist()[6])
    desk.store.drain()
    other = desk.engine(model="other")
    for n in range(4):
        other.put([n] * 1024)
        held = other.lookup([n] * 1024)
        assert not places & set(held.slots.places.tolist())
        other.release(held)
    desk.wait(desk.kv.clear(engine.space.id))
    other.put([9] * 1024)
    held = other.lookup([9] * 1024)
    assert held.matched_tokens >= 4 * 240
    assert not places & set(held.slots.places.tolist())
    other.release(held)
    assert len([notice for notice in desk.notices if notice[1] == "lost_leases"]) == 1
    engine.release(found)
    assert desk.usage().resting_bytes == 0


def test_resting_slots_end_with_the_lease_s_time(desk: Any, engine: Any) -> None:
    """I6: a client that never lets go of a cleared lease holds its slots for the lease's time."""
    engine.put(TOKENS)
    engine.lookup(TOKENS)
    desk.wait(desk.kv.clear(engine.space.id))
    desk.advance(desk.store.config.limits.lease_ttl_seconds - 0.1)
    assert desk.usage().resting_bytes == 8 * 4096
    desk.advance(0.2)
    assert desk.usage().resting_bytes == 0


def test_commits_of_an_older_epoch_are_refused(make_desk: Any) -> None:
    """I4, I5: bytes of before a bump are never READY after it, whenever their copy ends."""
    for seed in range(30):
        desk = make_desk(late=True, seed=seed)
        engine = desk.engine()
        answer = engine.reserve(TOKENS)
        keys = engine.keys(TOKENS)
        later = engine.commit_later(answer.reservation_id, [engine.run(keys, 0, 4)])
        for _ in range(seed % 3):
            desk.mover.step()
        epoch, removed = desk.kv.bump_epoch(engine.space.id).result()
        assert epoch == engine.space.epoch == 1
        assert removed in (4, 8)
        desk.settle()
        assert set(later.result()[0].outcomes) <= {0, 4}
        with pytest.raises(NotFound):
            engine.commit(answer.reservation_id, TOKENS, 4, 4)
        assert engine.matched(TOKENS) == 0
        assert engine.put(TOKENS) == "SSSSSSSS"
        assert engine.matched(TOKENS) == 8


def test_a_bump_invalidates_leases(desk: Any, engine: Any) -> None:
    """I6: an epoch's leases are LeaseLost after its end; the new epoch's bytes are its own."""
    engine.put(TOKENS)
    found = engine.lookup(TOKENS)
    assert desk.wait(desk.kv.bump_epoch(engine.space.id)) == (1, 8)
    assert not engine.is_intact(found)
    engine.put(TOKENS)
    again = engine.lookup(TOKENS)
    assert engine.check(again, TOKENS, epoch=1) == 8
    with pytest.raises(AssertionError, match="foreign"):
        engine.check(again, TOKENS, epoch=0)


def test_epochs_outlive_the_store(make_desk: Any, shm_directory: Path) -> None:
    """I13: neither cleared nor bumped blocks come back after a kill, and epochs go on counting."""
    desk = make_desk(directory=shm_directory)
    engine, cleared, kept = (desk.engine(model=name) for name in ("bumped", "cleared", "kept"))
    for one in (engine, cleared, kept):
        one.put(TOKENS)
    desk.wait(desk.kv.bump_epoch(engine.space.id))
    desk.wait(desk.kv.clear(cleared.space.id))
    cleared.put([5] * 16)
    desk.store.restart()
    engine, cleared, kept = (desk.engine(model=name) for name in ("bumped", "cleared", "kept"))
    assert [one.matched(TOKENS) for one in (engine, cleared, kept)] == [0, 0, 8]
    assert cleared.matched([5] * 16) == 4
    assert engine.space.epoch == 1
    engine.put(TOKENS)
    desk.store.restart()
    engine = desk.engine(model="bumped")
    assert engine.matched(TOKENS) == 8
    assert desk.wait(desk.kv.bump_epoch(engine.space.id)) == (2, 8)


def test_a_space_that_cannot_be_written_down_is_no_space(
    make_desk: Any, shm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: a space that a restart would not know is refused, until it can be written down."""
    desk = make_desk(directory=shm_directory)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvstore.store.record.os.fsync", full)
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="No space left"):
            desk.engine()
    monkeypatch.undo()
    desk.engine().put(TOKENS)
    desk.store.restart()
    assert desk.engine().matched(TOKENS) == 8


def test_a_clear_that_cannot_be_written_down_changes_nothing(
    make_desk: Any, shm_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13: a bump or clear that would not survive a crash fails, and the space serves on."""
    desk = make_desk(directory=shm_directory)
    engine = desk.engine()
    engine.put(TOKENS)

    def full(*_: Any) -> None:
        raise TierError("the epochs file cannot be written")

    record = desk.kv.parts.record
    monkeypatch.setattr(record, "bump", full)
    monkeypatch.setattr(record, "mark_cleared", full)
    for call in (desk.kv.bump_epoch, desk.kv.clear):
        with pytest.raises(FailedPrecondition, match="cannot be written"):
            call(engine.space.id)
        assert engine.matched(TOKENS) == 8
    monkeypatch.undo()
    assert desk.wait(desk.kv.clear(engine.space.id)) == 8
