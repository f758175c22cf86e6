"""A host pool that grows above its first size: bytes, memory, restarts, and what hinders it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvstore.client.pools import MappedPool
from kvstore.core.block import backing_cells
from kvstore.core.errors import ConfigError, TierError
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.host import HostTier, PoolConfig, files, pages
from kvstore.tiers.host import backing as backing_module
from kvstore.tiers.host import growth as growth_module

MIB = 1 << 20
SIZES = [3000, 20_000, 300_000]


class World:
    """A pool in files, its blocks by number, and what they must hold."""

    def __init__(self, directory: Path, size: int, size_max: int, **options: Any) -> None:
        self.directory, self.options = directory, options
        self.size, self.number = size * MIB, 0
        self.blocks: dict[int, tuple[int, int]] = {}
        self.resting: list[int] = []
        self.open(size_max)

    def open(self, size_max: int) -> None:
        self.size_max = max(size_max * MIB, self.size)
        pools = [PoolConfig("", self.size, self.size_max)]
        self.tier = HostTier(pools, directory=self.directory, **self.options)
        self.pool = self.tier._by_name[""]

    def put(self, length: int, count: int) -> int:
        """Stores blocks of this length; how many found room."""
        places = self.tier.reserve(length, 64, count)
        for place in places:
            self.number += 1
            payload = np.full(length, self.number % 251, np.uint8)
            header = BlockHeader(
                b"s" * 32, b"r" * 32, self.number.to_bytes(16, "little"), b"p" * 16,
                self.number, 0, 0, length, self.number.to_bytes(4, "little") * 16,
            )  # fmt: skip
            self.tier.commit([(place, header, self.tier.write(place, payload))])
            self.blocks[self.number] = place, length
        return len(places)

    def drop(self, number: int) -> None:
        place, _ = self.blocks.pop(number)
        self.tier.discard([place])
        self.tier.free([place])

    def resize(self, size: int) -> None:
        """What a reload does, and the store after it: what is over goes."""
        self.tier.resize("", size * MIB)
        self.settle()
        if not self.tier.size_problem(""):
            self.size = size * MIB
        self.trim()

    def settle(self) -> None:
        end = time.monotonic() + 20.0
        while self.tier.is_growing(""):
            assert time.monotonic() < end
            time.sleep(0.001)
            self.tier.tick()

    def trim(self) -> None:
        for number in list(self.blocks):
            if self.tier.usage("").used_bytes <= self.size:
                break
            self.drop(number)

    def restart(self, size_max: int, size: int = 0) -> None:
        """As after kill -9: files stay as they are, and all blocks have to be found in them."""
        self.size = size * MIB or self.size
        self.tier.close()
        self.open(size_max)
        found = {int.from_bytes(b.header.key, "little"): b for b in self.tier.recover()}
        assert set(found) == set(self.blocks)
        for number, block in found.items():
            assert (block.place, block.header.length) == self.blocks[number]
            self.tier.adopt(block.place)
        self.tier.free(self.tier.finish_recovery())
        self.trim()

    def check(self) -> None:
        """Every byte of every block, every book, and that what is said to have memory has it."""
        for number, (place, length) in self.blocks.items():
            view = np.frombuffer(self.tier.view(place, length), np.uint8)
            assert (view == number % 251).all(), f"block {number} has other bytes"
        self.tier.check_integrity()
        usage = self.tier.usage("")
        assert usage.used_bytes <= self.size
        assert usage.capacity_bytes == self.size
        assert sum(stop - start for start, stop in self.pool.backing.runs()) <= self.memory

    @property
    def memory(self) -> int:
        return next(self.directory.glob("pool-*.data")).stat().st_blocks * 512


@pytest.fixture
def world(shm_directory: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(size: int, size_max: int, **options: Any) -> World:
        made.append(World(shm_directory, size, size_max, **options))
        return made[-1]

    yield make
    for one in made:
        one.tier.close()


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_sizes_keeps_every_byte(world: Callable[..., World], seed: int) -> None:
    """I10, I22: puts, drops, growths, shrinks and restarts at any size and any largest size, in any
    order: each block that was not dropped is there with its bytes, and the books are right."""
    random = Random(seed)
    here = world(random.choice([2, 5, 8]), 24)
    for _ in range(120):
        what = random.random()
        if what < 0.55:
            here.put(random.choice(SIZES), random.randrange(1, 12))
        elif what < 0.7 and here.blocks:
            for number in random.sample(sorted(here.blocks), min(6, len(here.blocks))):
                here.drop(number)
        elif what < 0.82:
            here.resize(random.randrange(1, here.size_max // MIB + 1))
        elif what < 0.94:
            for _ in range(random.randrange(1, 40)):
                here.tier.tick()
        else:
            here.restart(random.choice([1, 16, 24, 40]), random.choice([0, 0, 2, 7, 16]))
        if random.random() < 0.2:
            here.check()
    here.check()


def test_only_the_size_takes_memory(world: Callable[..., World]) -> None:
    """Of a pool that may have 64 MiB and has 4 only these take memory; a growth takes what it adds,
    and a smaller size returns it all the way."""
    here = world(4, 64, prefault=True)
    assert here.tier.prefault.wait(20)
    assert here.memory == 4 * MIB
    total = sum(path.stat().st_blocks * 512 for path in here.directory.iterdir())
    assert total < 4 * MIB + 128 * 1024
    here.resize(32)
    assert here.memory == 32 * MIB
    assert here.tier.prefaulted_bytes == 32 * MIB
    assert here.put(300_000, 200) > 100
    here.resize(4)
    for _ in range(100):
        here.tier.tick()
    here.check()
    assert here.memory <= 4 * MIB
    here.restart(64)
    here.check()
    for _ in range(100):
        here.tier.tick()
    assert here.memory <= 4 * MIB


def test_a_client_sees_what_has_memory_and_touches_nothing_else(
    world: Callable[..., World],
) -> None:
    """A mapping made before a growth shows the blocks put after it; bringing its pages into the
    client's tables gives no hole memory, before and after a pool was made smaller."""
    here = world(4, 64)
    shared = here.tier.shared_pools("")[0]
    client = MappedPool.map(
        shared.pool_id, shared.data_fd, shared.data_bytes, shared.generations_fd,
        shared.generation_bytes,
    )  # fmt: skip
    assert len(client.data) == 64 * MIB
    assert client.touch(0, 64 * MIB) == 64 * MIB
    assert here.memory == 4 * MIB
    assert client.backing.tolist() == [0] + [1] * 15
    here.put(20_000, 200)
    here.resize(48)
    assert client.backing.tolist() == [0] + [2] * 11 + [1] * 4
    before = set(here.blocks)
    here.put(300_000, 100)
    beyond = [
        here.blocks[n] for n in set(here.blocks) - before if here.blocks[n][0] << 12 > 4 * MIB
    ]
    assert len(beyond) > 90
    for number, (place, length) in here.blocks.items():
        start = place << 12
        assert (client.data[start : start + length] == number % 251).all()
        assert client.generations[place] == here.tier.generation(place)
    here.resize(4)
    for _ in range(100):
        here.tier.tick()
    small = here.memory
    client.touch(0, 64 * MIB)
    assert here.memory == small


def test_a_client_of_a_daemon_that_does_not_tell_maps_all() -> None:
    """Without cells behind the generation map all of a pool counts as having memory."""
    at, _ = backing_cells(8 * MIB)
    pool = MappedPool.over(0, memoryview(bytearray(8 * MIB)), memoryview(bytearray(at)))
    assert pool.backing.tolist() == [0, 0]
    assert pool.touch(0, 8 * MIB) == 8 * MIB


def test_the_last_page_that_is_missing_leaves_the_old_size(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: where memory ends half way, the pool keeps its size and its blocks, returns what it got,
    says why in one sentence, and may grow later."""
    here = world(4, 64)
    here.put(20_000, 150)
    real, left = os.posix_fallocate, [5]

    def full(fd: int, offset: int, length: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(backing_module, "posix_fallocate", full)
    here.resize(48)
    assert left[0] == -1
    problem = here.tier.size_problem("")
    assert "No space left on device" in problem
    assert "\n" not in problem
    here.check()
    assert here.memory == 4 * MIB
    monkeypatch.undo()
    here.resize(48)
    assert not here.tier.size_problem("")
    here.check()


def test_memory_that_cannot_be_locked_leaves_the_old_size(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is locked does not grow by pages that are not; one that never was locked may."""
    locked: list[int] = []

    def limited(address: int, length: int) -> None:
        locked.append(length)
        if sum(locked) > 16 * MIB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pages, "lock", limited)
    here = world(8, 64, lock_memory=True)
    assert here.tier.prefault.wait(20)
    here.resize(32)
    assert "LimitMEMLOCK" in here.tier.size_problem("")
    here.check()
    assert here.memory == 8 * MIB
    here.tier.close()
    locked[:] = [16 * MIB]
    again = World(here.directory, 8, 64, lock_memory=True)
    assert again.tier.prefault.wait(20)
    assert again.tier.prefault.lock_problem
    again.resize(32)
    assert not again.tier.size_problem("")
    again.check()
    again.tier.close()


def test_a_growth_leaves_memory_to_others(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes the last page of a control group is killed: a growth stops before, and says so."""
    left = [400 * MIB]

    class Short(growth_module.LocalMachine):
        def available_bytes(self) -> int:
            left[0] -= 64 * MIB
            return left[0]

    monkeypatch.setattr(growth_module, "LocalMachine", Short)
    here = world(4, 600)
    here.resize(600)
    assert "control group" in here.tier.size_problem("")
    assert here.memory == 4 * MIB
    here.check()


def test_another_size_ends_a_growth(world: Callable[..., World]) -> None:
    """The last size that was asked for is the one there will be, however soon it was asked for."""
    here = world(4, 256)
    here.put(20_000, 100)
    for size in (256, 200, 3, 128, 4, 64, 64, 32):
        here.tier.resize("", size * MIB)
    here.resize(32)
    here.check()
    assert here.memory == 32 * MIB
    here.tier.resize("", 256 * MIB)
    here.tier.close()
    here.open(256)
    assert here.memory == 32 * MIB


def test_slots_without_memory_are_not_handed_out(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: a slot whose memory was given back, and that gets none any more, is granted to nobody;
    memory of free slots elsewhere goes to it first."""
    here = world(16, 16)
    here.put(20_000, 600)
    here.resize(2)
    for _ in range(200):
        here.tier.tick()
    assert here.memory <= 2 * MIB
    for number in sorted(here.blocks)[::2]:
        here.drop(number)
    real, budget = os.posix_fallocate, [0]

    def short(fd: int, offset: int, length: int) -> None:
        if here.memory + length > 2 * MIB + budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(backing_module, "posix_fallocate", short)
    assert here.put(300_000, 2) == 2
    here.check()
    budget[0] = -64 * MIB
    before = here.tier.usage("")
    assert here.put(300_000, 1) == 0
    assert here.tier.usage("") == before
    here.check()


def test_a_longer_pool_is_made_of_the_one_that_is_there(world: Callable[..., World]) -> None:
    """I10: a start with a larger size_max keeps all blocks, though the files were shorter; one that
    was cut short before its end leaves the pool as it was."""
    here = world(5, 5)
    here.put(20_000, 200)
    here.restart(48)
    here.check()
    here.resize(48)
    here.put(300_000, 100)
    here.check()
    sizes = here.pool.sizes
    files.lengthen(here.pool.files, sizes._replace(data=sizes.data + 2 * MIB))
    here.restart(48)
    here.check()
    here.restart(52, 52)
    here.check()
    here.restart(4, 4)
    assert len(here.pool.data) == 52 * MIB
    here.check()


def test_a_sealed_pool_grows_too(shm_directory: Path) -> None:
    """Memory that nobody can map writable grows as well; made smaller it keeps its memory."""
    here = World(shm_directory, 4, 32, kind="sealed")
    here.put(20_000, 100)
    here.resize(32)
    assert here.put(300_000, 90) == 90
    fd = here.tier.shared_pools("")[0].data_fd
    assert os.fstat(fd).st_blocks * 512 == 32 * MIB
    here.resize(2)
    for _ in range(50):
        here.tier.tick()
    here.resize(32)
    assert here.put(300_000, 90) > 80
    here.tier.check_integrity()
    here.tier.close()


def test_a_start_that_finds_no_memory_for_a_larger_size_loses_nothing(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: the error names the size; with the old one the blocks are there again."""
    here = world(4, 64)
    here.put(20_000, 100)
    here.tier.close()
    monkeypatch.setattr(files, "_memory_fields", lambda: {"MemAvailable": 8 << 10})
    with pytest.raises(TierError, match=r"tiers\.host\.size") as error:
        World(here.directory, 64, 64)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    here.open(64)
    here.restart(64)
    here.check()


def test_huge_pages_of_hugetlbfs_do_not_grow(shm_directory: Path) -> None:
    """They are set aside for a whole pool at once, so the key is refused by name."""
    with pytest.raises(ConfigError, match=r"tiers\.host\.size_max"):
        HostTier([PoolConfig("", MIB, 2 * MIB)], kind="sealed", hugepages="hugetlb")
