"""A disk tier that shrinks and grows while it serves: what goes and stays, what space it takes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from disk_world import directory_bytes

from kvstore.client import KVSpec
from kvstore.core.errors import TierError
from kvstore.testing import InProcessStore, ManualClock
from kvstore.tiers.disk import DiskTier

MIB = 1 << 20
SPEC = KVSpec(
    model="m", revision="r", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=16,
)  # fmt: skip
"""Blocks of 64 KiB."""
BLOCKS = 8
ACTIONS = ("put", "put", "look", "lease", "release", "resize", "resize", "clear")
SECTIONS = {
    "tiers": {"disk": {"endurance_dwpd": 0, "admission": "all", "demote_watermark": 0.1}},
    "index": {"max_blocks": 100_000},
    "limits": {"lease_ttl_seconds": 30.0},
}


class World:
    """A small host tier over a disk of 32 MiB; prompts of 8 blocks whose bytes tell them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = DiskTier(directory, 32 * MIB)
        self.store = InProcessStore("4MiB", disk=self.disk, clock=ManualClock(), sections=SECTIONS)
        self.kv = self.store.kv
        self.client = self.store.client()
        self.space = self.client.attach(SPEC)

    def tokens(self, prompt: int) -> list[int]:
        return [1000 + prompt] * (16 * BLOCKS)

    def payload(self, prompt: int) -> bytes:
        return prompt.to_bytes(4, "little") * (SPEC.block_bytes // 4)

    def put(self, *prompts: int) -> None:
        for prompt in prompts:
            self.space.put(self.tokens(prompt), [self.payload(prompt)] * BLOCKS)
            if not prompt % 4:
                self.client.admin.flush()

    def resize(self, byte_count: int, seconds: float = 20.0) -> None:
        """What a reload does, and the ticks after it."""
        with self.store.lock:
            self.kv.behind.resized(byte_count)
        self.store.advance(seconds)

    def check(self) -> Any:
        with self.store.lock:
            self.kv.check_integrity()
            usage = self.disk.usage()
        assert usage.used_bytes + usage.free_bytes + usage.resting_bytes == usage.capacity_bytes
        return usage

    def found(self, prompts: Any) -> list[int]:
        """Prompts that are there whole; what is served is right."""
        whole = []
        for prompt in prompts:
            with self.space.lookup(self.tokens(prompt)) as match:
                views = self.space.restore(match)
                assert all(bytes(view) == self.payload(prompt) for view in views)
                if match.matched_tokens == 16 * BLOCKS:
                    whole.append(prompt)
        return whole


@pytest.fixture
def world() -> Iterator[World]:
    # In memory: how long a disk syncs is not what is looked at here.
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/dev/shm") as place:
        made = World(Path(place))
        yield made
        made.store.close()
        made.disk.close()


def test_a_disk_shrinks_and_gives_its_space_back(world: World) -> None:
    """What the policy values least goes, the rest stays and is right, and files take less."""
    world.put(*range(56))
    before = world.check()
    assert before.used_bytes > 20 * MIB
    world.resize(20 * MIB)
    usage = world.check()
    assert usage.capacity_bytes < 20 * MIB
    assert usage.used_bytes > 15 * MIB
    assert directory_bytes(world.directory) <= 20 * MIB
    assert world.disk.owed_bytes == 0
    assert len(world.found(range(56))) > 30
    world.check()


def test_scattered_blocks_move_together(world: World) -> None:
    """Where every segment keeps some blocks, these are copied to fewer; none is lost by that."""
    world.put(*range(56))
    with world.store.lock:
        for run in [run for run in world.kv.parts.index.runs() if run.ready]:
            if run.symbol(0)[0] % 2:
                world.kv.remover.cut(run, 3, "capacity")
    world.client.admin.flush()
    world.store.advance(2.0)
    before = world.check()
    world.resize(24 * MIB, seconds=3.0)
    after = world.check()
    assert (after.used_bytes, after.block_count) == (before.used_bytes, before.block_count)
    assert before.block_count > 230
    assert directory_bytes(world.directory) <= 24 * MIB
    assert world.disk.owed_bytes == 0
    assert len(world.found(range(56))) > 20


def test_a_disk_grows(world: World) -> None:
    """What a larger size adds is used at once, and counts as capacity at once."""
    world.put(*range(8))
    world.resize(128 * MIB, seconds=2.0)
    assert world.check().capacity_bytes > 120 * MIB
    world.put(*range(8, 100))
    assert world.check().used_bytes > 44 * MIB
    assert len(world.found(range(100))) == 100


def test_what_is_leased_stays_where_it_is(world: World) -> None:
    """A leased block is neither dropped nor moved; the disk is over for so long, and says so."""
    world.put(*range(40))
    world.put(*range(100, 108))  # host holds others
    index, tokens = world.kv.parts.index, world.tokens(3)
    match = world.space.lookup(tokens)
    assert match.matched_tokens == 16 * BLOCKS

    def places() -> list[int]:
        (run,) = [run for run in index.runs() if run.symbol(0)[:4] == (1003).to_bytes(4, "little")]
        return index.places_grid(run, 0, run.ready)[:, 1].ravel().tolist()

    before = places()
    assert min(before) >= 0
    for size in (16 * MIB, 12 * MIB, 8 * MIB):
        world.resize(size, seconds=5.0)
        world.check()
        assert places() == before
    views = world.space.restore(match)
    assert all(bytes(view) == world.payload(3) for view in views)
    match.release()
    world.store.advance(20.0)
    world.check()
    assert world.disk.owed_bytes == 0
    assert directory_bytes(world.directory) <= 8 * MIB


def test_sizes_that_cannot_be_are_refused(world: World) -> None:
    """Less than a segment, more than the file system has, more than the directory can name."""
    world.put(1, 2)
    before = world.check()
    for size, why in [
        (100_000, "no room for one segment"),
        (1 << 55, "was made for less"),
        (60 << 30, "bytes free|GiB free"),
    ]:
        with pytest.raises(TierError, match=why), world.store.lock:
            world.kv.behind.resized(size)
    assert world.check() == before


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_a_resized_store_may_miss_and_never_lies(world: World, seed: int) -> None:
    """I1, I6, I22: puts, leases, clears and resizes in any order; what is served is right."""
    random, held = Random(seed), list[Any]()
    for _ in range(30):
        action = random.choice([*ACTIONS])
        prompt = random.randrange(60)
        if action == "put":
            world.put(*range(prompt, prompt + 5))
        elif action == "look":
            world.found(range(prompt, prompt + 10))
        elif action == "lease":
            held.append(world.space.lookup(world.tokens(prompt)))
        elif action == "release" and held:
            match = held.pop(random.randrange(len(held)))
            world.store.advance(0.1)
            assert not match.matched_tokens or world.space.restore(match) is not None
            match.release()
        elif action == "resize":
            size = random.choice([4, 8, 16, 24, 32, 48]) * MIB
            world.resize(size, seconds=random.choice([0.0, 0.1, 0.5, 3.0]))
        elif action == "clear" and random.random() < 0.3:
            world.client.admin.clear(all=True)
        world.check()
    for match in held:
        match.release()
    world.resize(8 * MIB, seconds=35.0)  # leases that a clear has cut end by time
    world.check()
    assert world.disk.owed_bytes == 0
    assert directory_bytes(world.directory) <= 8 * MIB
    world.found(range(66))
