"""Recovery of a store of two tiers: what comes back lies where it lay, and nothing void does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from desk import Desk, Engine

from kvstore.core.generations import Generations
from kvstore.core.recorder import Recorder
from kvstore.store.parts import DISK, HOST
from kvstore.testing import MemoryTier
from kvstore.tiers.disk import DiskTier

BLOCK = 4096
TOKENS = list(range(32))
Make = Callable[..., Desk]


@pytest.fixture
def two_tiers(make_desk: Make, shm_directory: Path) -> Desk:
    """A store of 1 MiB over a disk of 4 MiB that writes down only what it is told to."""
    section = {
        "demote_watermark": 1.0,
        "endurance_dwpd": 0.0,
        "admission": "all",
        "read_timeout_seconds": 2.0,
    }
    disk = MemoryTier(4 << 20, "disk")
    return make_desk(directory=shm_directory, disk=disk, sections={"tiers": {"disk": section}})


def stored(desk: Desk, *prompts: list[int], **query: Any) -> Engine:
    """An engine whose prompts are in both tiers."""
    engine = desk.engine()
    for tokens in prompts:
        assert set(engine.put(tokens, **query)) <= {"S", "P"}
    assert desk.wait(desk.kv.flush(None)).left_out_blocks == 0
    return engine


def places(desk: Desk, tier: int) -> list[int]:
    index = desk.kv.parts.index
    return [
        place
        for run in index.runs()
        for place in index.places_grid(run, 0, run.ready)[:, tier].ravel().tolist()
    ]


def lose_host(desk: Desk, directory: Path) -> None:
    """The machine is booted: its memory is empty, what lies on disk is not."""
    for path in directory.glob("pool-*"):
        path.unlink()
    desk.store.restart()


def tiers_of(desk: Desk, engine: Engine, tokens: list[int]) -> list[str]:
    found = engine.lookup(tokens)
    engine.release(found)
    return [step.source for step in found.plan.steps]


def test_blocks_come_back_where_they_lay(two_tiers: Desk) -> None:
    """I10: after a kill, copies in both tiers are found again and hang on one chain."""
    stored(two_tiers, TOKENS, TOKENS[:16] + [7] * 16)
    before = [sorted(places(two_tiers, tier)) for tier in (HOST, DISK)]
    two_tiers.store.restart()
    assert [sorted(places(two_tiers, tier)) for tier in (HOST, DISK)] == before
    assert two_tiers.kv.status().readopted_blocks == 12
    engine = two_tiers.engine()
    assert engine.fetched(TOKENS) == 8
    assert engine.fetched(TOKENS[:16] + [7] * 16) == 8


def test_disk_alone_outlives_a_boot(two_tiers: Desk, shm_directory: Path) -> None:
    """I10: with host memory gone, what was on disk is found and can be restored."""
    stored(two_tiers, TOKENS, adapter="lora")
    two_tiers.engine().put([9] * 32)
    lose_host(two_tiers, shm_directory)
    engine = two_tiers.engine()
    assert tiers_of(two_tiers, engine, TOKENS) == []
    assert engine.matched([9] * 32) == 0
    assert engine.fetched(TOKENS, adapter="lora") == 8
    assert two_tiers.kv.status().readopted_blocks == 8


def test_a_block_on_disk_lives_under_one_in_host(two_tiers: Desk) -> None:
    """I13: a chain is whole if each block has a copy somewhere; the tiers are joined first."""
    stored(two_tiers, TOKENS)
    host, disk = places(two_tiers, HOST), places(two_tiers, DISK)
    two_tiers.store.tier.discard(host[4:])
    two_tiers.store.disk.discard(disk[:4])
    two_tiers.store.restart()
    engine = two_tiers.engine()
    assert two_tiers.kv.status().readopted_blocks == 8
    assert tiers_of(two_tiers, engine, TOKENS) == ["host", "disk"]
    assert engine.fetched(TOKENS) == 8


def test_files_are_taken_back(make_desk: Make, shm_directory: Path, tmp_path: Path) -> None:
    """I10, I13: with a disk tier of files too, each tier's blocks come back and hang together."""
    generations, files = Generations(), tmp_path / "disk"
    files.mkdir(mode=0o700)

    def opened() -> DiskTier:
        return DiskTier(files, 16 << 20, generations=generations)

    desk = make_desk(directory=shm_directory, disk=opened())
    stored(desk, TOKENS)
    desk.store.tier.discard(places(desk, HOST)[4:])
    desk.store.disk.close()
    desk.store.restart(disk=opened())
    engine = desk.engine()
    assert tiers_of(desk, engine, TOKENS) == ["host", "disk"]
    desk.store.tier.discard(places(desk, HOST)[:4])
    desk.store.disk.close()
    desk.store.restart(disk=opened())
    engine = desk.engine()
    assert tiers_of(desk, engine, TOKENS) == ["disk"]
    assert engine.fetched(TOKENS) == 8


def test_what_hangs_on_nothing_is_given_up_in_both_tiers(two_tiers: Desk) -> None:
    """I13: below a block that no tier has any more nothing is kept, and its room comes free."""
    stored(two_tiers, TOKENS)
    two_tiers.store.tier.discard(places(two_tiers, HOST)[3:4])
    two_tiers.store.disk.discard(places(two_tiers, DISK)[3:4])
    two_tiers.store.restart()
    assert two_tiers.engine().matched(TOKENS) == 3
    usage = two_tiers.store.disk.usage()
    assert (usage.block_count, usage.resting_bytes) == (3, 0)


@pytest.mark.parametrize("how", ["clear", "epoch", "damage"])
def test_void_blocks_do_not_come_back_from_disk(
    two_tiers: Desk, shm_directory: Path, how: str
) -> None:
    """I14: cleared, of an older epoch, or with the epochs file lost: no copy anywhere counts."""
    engine = stored(two_tiers, TOKENS)
    disk = two_tiers.store.disk
    kept = disk.reopened()  # as if un-publishing on disk had not got through
    if how == "clear":
        two_tiers.wait(two_tiers.kv.clear(space_id=engine.space.id))
    elif how == "epoch":
        two_tiers.wait(two_tiers.kv.bump_epoch(engine.space.id))
    else:
        for name in ("epochs", "epochs.copy"):
            (shm_directory / name).write_bytes(b"damaged")
    two_tiers.store.restart(disk=kept)
    assert two_tiers.kv.status().readopted_blocks == 0
    assert two_tiers.engine().matched(TOKENS) == 0
    assert kept.usage().used_bytes == 0


def test_only_host_is_checked_at_start_and_rests(two_tiers: Desk) -> None:
    """I5, I11: host bytes may have a reader and may be torn; disk bytes are checked as read."""
    engine = stored(two_tiers, TOKENS)
    two_tiers.store.restart()
    parts = two_tiers.kv.parts
    assert parts.unverified == set(places(two_tiers, HOST))
    two_tiers.settle()
    assert not parts.unverified
    two_tiers.wait(two_tiers.kv.clear(space_id=engine.space.id))
    host, disk = (tier.usage() for tier in parts.tiers)
    assert (host.used_bytes, host.resting_bytes) == (0, 8 * BLOCK)
    assert (disk.used_bytes, disk.resting_bytes) == (0, 0)
    two_tiers.advance(two_tiers.store.config.limits.max_lease_ttl_seconds + 1)
    assert parts.host.usage().resting_bytes == 0


def test_a_space_is_known_while_any_tier_has_a_block(two_tiers: Desk, shm_directory: Path) -> None:
    """Spaces with nothing left are forgotten at start, those with a block on disk are not."""
    engine = stored(two_tiers, TOKENS)
    two_tiers.engine(model="other").put(TOKENS)
    lose_host(two_tiers, shm_directory)
    assert list(two_tiers.kv.parts.spaces) == [engine.space.id]
    lose_host(two_tiers, shm_directory)
    assert two_tiers.engine().fetched(TOKENS) == 8


def test_followers_and_counts_hear_of_each_tier(
    two_tiers: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is taken back is told for the tier that it lies in, stretch by stretch."""
    engine = stored(two_tiers, TOKENS)
    keys = engine.keys(TOKENS)
    host, disk = places(two_tiers, HOST), places(two_tiers, DISK)
    two_tiers.store.tier.discard(host[6:])
    two_tiers.store.disk.discard([*disk[:2], disk[4]])
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        Recorder, "readopted", lambda _, tier, blocks: counts.update({tier: blocks})
    )
    two_tiers.store.restart()
    assert counts == {"host": 6, "disk": 5}
    heard: list[Any] = []
    two_tiers.store.events.subscribe(None, 1, heard.append)
    told = [(e.medium, e.parent_key, e.keys, len(e.symbols)) for e in heard]
    root = next(two_tiers.kv.parts.index.runs()).root.key
    assert told == [
        ("host", root, b"".join(keys[:6]), 6 * 16),
        ("disk", keys[1], b"".join(keys[2:4]), 2 * 16),
        ("disk", keys[4], b"".join(keys[5:]), 3 * 16),
    ]


@pytest.mark.parametrize("seed", range(6))
def test_what_was_cleared_on_its_way_to_disk_stays_away(
    make_desk: Make, shm_directory: Path, tmp_path: Path, seed: int
) -> None:
    """I11: whatever was on its way to disk when a clear was asked for, and whenever the process
    dies after the answer, nothing of it comes back."""
    # The disk is ahead, or everything on it would be older than any clear.
    generations, files = Generations(1 << 40), tmp_path / "disk"
    files.mkdir(mode=0o700)

    def opened() -> DiskTier:
        return DiskTier(files, 16 << 20, generations=generations)

    section = {"demote_watermark": 0.0, "endurance_dwpd": 0.0, "admission": "all"}
    desk = make_desk(
        directory=shm_directory, disk=opened(), late=True, seed=seed,
        sections={"tiers": {"disk": section}},
    )  # fmt: skip
    for steps in range(6):
        engine = desk.engine()
        engine.put(TOKENS)
        desk.advance(1.0)
        for _ in range(steps):
            desk.mover.step()
        desk.wait(desk.kv.clear(engine.space.id))
        for _ in range(seed):
            desk.mover.step()
        for path in shm_directory.glob("pool-*"):
            path.unlink()
        desk.store.disk.close()
        desk.store.restart(disk=opened())
        assert tiers_of(desk, desk.engine(), TOKENS) == [], f"after {steps} steps"
