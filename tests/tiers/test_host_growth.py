"""A host pool that grows above its first size: bytes, memory, restarts, what clients see."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from growing import World

from kvstore.client.pools import MappedPool
from kvstore.core.block import backing_cells
from kvstore.tiers.host import files

MIB = 1 << 20
SIZES = [3000, 20_000, 300_000]


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
    maps = os.fstat(here.pool.files.generations).st_blocks * 512
    assert maps >= 32 * MIB >> 9, "slots are handed out whose generations may find no memory"
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


def test_a_growth_makes_room_for_blocks_that_were_too_large(world: Callable[..., World]) -> None:
    """A pool of 1 MiB has no slot of 3 MiB, one that grew has, though it was asked for before."""
    here = world(1, 64)
    assert here.put(3 * MIB, 1) == 0
    here.resize(64)
    assert here.put(3 * MIB, 15) == 15
    here.check()


def test_what_a_larger_life_left_beyond_the_end_is_gone(world: Callable[..., World]) -> None:
    """I11: generations that a crash left behind the end of a smaller pool are not there when it has
    grown again."""
    here = world(16, 64)
    here.put(20_000, 50)
    here.tier.close()
    with open(here.directory / "pool-0.generations", "r+b") as file:
        for at in (3 * MIB + 8192, 9 * MIB, 16 * MIB - 4096):
            file.seek(at >> 9)
            file.write((77).to_bytes(8, "little"))
    here.size = 3 * MIB
    here.open(64)
    here.restart(64)
    here.resize(64)
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
