"""A host pool that shrinks and grows while it serves: what goes, what stays, what memory it has."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.client import KVSpec
from kvstore.testing import InProcessStore, ManualClock
from kvstore.tiers.host import HostTier, PoolConfig
from kvstore.tiers.slab import Slab

MIB = 1 << 20
SPEC = KVSpec(
    model="m", revision="r", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip
"""Blocks of 16 KiB."""


class Pool:
    """A store over a pool of 8 MiB in shared memory, full of prompts of 8 blocks."""

    def __init__(self, place: Path) -> None:
        self.tier = HostTier([PoolConfig("", 8 * MIB)], directory=place, prefault=True)
        assert self.tier.prefault.wait(20)
        self.store = InProcessStore(tier=self.tier, clock=ManualClock())
        self.kv = self.store.kv
        self.client = self.store.client()
        self.space = self.client.attach(SPEC)
        self.data = next(place.glob("pool-*.data"))
        for prompt in range(80):
            self.put(prompt)

    def tokens(self, prompt: int) -> list[int]:
        return [prompt] * 32

    def put(self, prompt: int) -> None:
        payload = bytes([prompt]) * SPEC.block_bytes
        self.space.put(self.tokens(prompt), [payload] * 8)

    def resize(self, byte_count: int, ticks: int = 400) -> None:
        """What a reload does, and the ticks after it."""
        with self.store.lock:
            self.tier.resize("", byte_count)
            self.kv.resized(byte_count)
        self.tick(ticks)

    def tick(self, ticks: int) -> None:
        for _ in range(ticks):
            self.store.advance(0.05)
            with self.store.lock:
                self.tier.tick()
        while self.tier.is_growing(""):
            time.sleep(0.002)
            self.tier.tick()

    def check(self) -> Any:
        """Usage, after everything was recounted."""
        self.kv.check_integrity()
        self.tier.check_integrity()
        usage = self.tier.usage("")
        assert usage.used_bytes + usage.free_bytes + usage.resting_bytes == usage.capacity_bytes
        return usage

    @property
    def memory(self) -> int:
        return self.data.stat().st_blocks * 512

    def found(self) -> list[int]:
        """Prompts that are there whole, with the right bytes."""
        whole = []
        for prompt in range(80):
            with self.space.lookup(self.tokens(prompt)) as match:
                if match.matched_tokens == 32:
                    for view in self.space.restore(match):
                        assert bytes(view) == bytes([prompt]) * SPEC.block_bytes
                    whole.append(prompt)
        return whole


@pytest.fixture
def pool() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/dev/shm") as place:
        made = Pool(Path(place))
        yield made
        made.store.close()
        made.tier.close(keep=False)


def test_a_pool_shrinks_to_its_new_size(pool: Pool) -> None:
    """What is used, and the memory that is taken, go down to it; what stays is right."""
    assert pool.check().used_bytes > 7 * MIB
    assert pool.memory > 7 * MIB
    pool.resize(3 * MIB)
    usage = pool.check()
    assert usage.capacity_bytes == 3 * MIB
    assert 2 * MIB < usage.used_bytes <= 3 * MIB
    assert pool.memory <= 3 * MIB + 64 * 1024
    assert len(pool.found()) >= 20


def test_a_smaller_pool_stays_small_under_load(pool: Pool) -> None:
    """New prompts make others leave; neither books nor memory pass the size."""
    pool.resize(3 * MIB)
    for prompt in range(80):
        pool.put(prompt)
        pool.tick(4)
        assert pool.check().used_bytes <= 3 * MIB
    pool.tick(200)
    assert pool.memory <= 3 * MIB + 64 * 1024
    assert 79 in pool.found()


def test_a_pool_grows_again(pool: Pool) -> None:
    """Up to the size it was made with; then it holds as much as it did."""
    pool.resize(2 * MIB)
    pool.resize(8 * MIB, ticks=1)
    for prompt in range(80):
        pool.put(prompt)
    usage = pool.check()
    assert usage.capacity_bytes == 8 * MIB
    assert usage.used_bytes > 7 * MIB
    assert len(pool.found()) > 50


def test_what_is_leased_stays_until_it_ends(pool: Pool) -> None:
    """Blocks under a lease are not evicted; the pool is over for so long, and says so."""
    prompt = pool.found()[-1]
    match = pool.space.lookup(pool.tokens(prompt))
    views = pool.space.restore(match)
    pool.resize(64 << 10)
    usage = pool.check()
    assert usage.used_bytes == 8 * 16384
    assert usage.capacity_bytes == 8 * 16384
    for view in views:
        assert bytes(view) == bytes([prompt]) * SPEC.block_bytes
    match.check()
    del views
    match.release()
    pool.tick(300)
    assert pool.check().used_bytes <= 64 << 10


def test_slabs_hand_out_nothing_above_their_ceiling() -> None:
    """Whatever is reserved, freed and lowered, in two sizes; free ranges are no more than free."""
    slab, random = Slab(4 * MIB), Random(3)
    held: list[int] = []
    for _ in range(600):
        if random.random() < 0.05:
            slab.ceiling_bytes = random.randrange(0, 4 * MIB)
        size = random.choice([4096, 65536])
        before = slab.used_bytes + slab.resting_bytes
        taken = slab.reserve(size, 512, random.randrange(1, 20))
        held += taken
        assert not taken or before + len(taken) * size <= slab.ceiling_bytes
        random.shuffle(held)
        keep = random.randrange(len(held) + 1)
        for offset in held[keep:]:
            slab.rest(offset)
            slab.free(offset)
        del held[keep:]
        slab.check_integrity()
    at, free = 0, 0
    while at < slab.capacity_bytes >> slab.shift:
        ranges, at = slab.free_ranges(at)
        free += sum(length for _, length in ranges)
    assert free <= slab.free_bytes
