"""A disk tier against a dictionary, through crashes and power cuts: it may miss, never lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest
from disk_world import (
    SIZE,
    PowerCut,
    VolatileIO,
    abandon,
    directory_bytes,
    drop,
    header,
    is_right,
    payload,
    recovered,
)

from kvstore.tiers.disk import DiskTier

CAPACITY = 4 << 20
SIZES = (SIZE, 3000, 50_000)


class Model:
    """What the tier has promised: numbers of blocks that must be there, and that may be."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = directory, Random(seed)
        self.durable: dict[int, tuple[int, int]] = {}
        """number -> (place, length) of committed blocks."""
        self.next_number = 1
        self.lengths: dict[int, int] = {}
        self.generation = 0
        self.tier: DiskTier
        self.io: VolatileIO
        self.open()

    def open(self) -> None:
        self.io = VolatileIO(self.random, self.directory.parent / "limbo")
        self.tier = DiskTier(self.directory, CAPACITY, io=self.io)
        found = recovered(self.tier)
        missing = self.durable.keys() - found.keys()
        assert not missing, f"durable blocks {sorted(missing)} are lost"
        for number, place in found.items():
            right = is_right(self.tier, place, number, self.lengths[number])
            assert right or number not in self.durable, f"durable block {number} is damaged"
        self.tier.check_integrity()
        assert self.tier.next_generation() > self.generation, "generations are handed out again"
        kept = set(self.durable)
        drop(self.tier, [place for number, place in found.items() if number not in kept])
        self.durable = {n: (found[n], self.lengths[n]) for n in kept}

    def step(self) -> None:
        action = self.random.choice(["put", "put", "put", "drop", "settle", "read", "probe"])
        getattr(self, action)()
        size = directory_bytes(self.directory)
        assert size <= CAPACITY, f"the directory has {size} bytes"

    def put(self) -> None:
        length, count = self.random.choice(SIZES), self.random.randrange(1, 12)
        places = self.tier.reserve(length, 64, count)
        numbers = list(range(self.next_number, self.next_number + len(places)))
        self.next_number += len(places)
        self.lengths.update(dict.fromkeys(numbers, length))
        items = [(p, payload(n, length)) for n, p in zip(numbers, places, strict=True)]
        checksums = self.tier.write_many(items)
        if self.random.random() < 0.2:
            drop(self.tier, places)
            return
        blocks = [
            (place, header(number, length), checksum)
            for number, place, checksum in zip(numbers, places, checksums, strict=True)
        ]
        generations = self.tier.commit(blocks)
        self.generation = max([self.generation, *generations])
        self.durable.update({n: (place, length) for n, place in zip(numbers, places, strict=True)})

    def drop(self) -> None:
        count = min(len(self.durable), self.random.randrange(12))
        numbers = self.random.sample(sorted(self.durable), count)
        drop(self.tier, [self.durable.pop(number)[0] for number in numbers])

    def settle(self) -> None:
        assert self.tier.commit([]) == []

    def probe(self) -> None:
        self.tier.probe()

    def read(self) -> None:
        for number in self.random.sample(sorted(self.durable), min(3, len(self.durable))):
            place, length = self.durable[number]
            assert is_right(self.tier, place, number, length)

    def crash(self) -> None:
        """Dies within the next steps, at any call to the medium."""
        left = self.random.randrange(1, 60)

        def before(call: str) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise PowerCut

        self.io.before = before
        try:
            while True:
                self.step()
        except PowerCut:
            pass
        abandon(self.tier)
        self.io.power_cut(self.directory)
        (self.directory / "index.loading").unlink(missing_ok=True)
        self.spoil_index()
        self.open()

    def spoil_index(self) -> None:
        """Now and then the index is gone, or one of an earlier life is put in its place."""
        index, older = self.directory / "index", self.directory.parent / "older"
        chance = self.random.random()
        if chance < 0.15:
            shutil.rmtree(index)
        elif chance < 0.3 and older.exists():
            shutil.rmtree(index)
            shutil.copytree(older, index)
        elif chance < 0.6:
            shutil.rmtree(older, ignore_errors=True)
            shutil.copytree(index, older)
            return
        else:
            return
        # Without the index nobody knows the last generation; the epochs file sees to that.
        self.generation = 0


def run(directory: Path, seed: int, lives: int, steps: int) -> None:
    model = Model(directory, seed)
    for _ in range(lives):
        for _ in range(model.random.randrange(steps)):
            model.step()
        model.crash()
    for _ in range(3):
        model.tier.close()
        model.open()
    model.tier.close(keep=False)


@pytest.mark.parametrize("seed", range(8))
def test_durable_blocks_survive_power_cuts(disk_directory: Path, seed: int) -> None:
    """I9, I11, I22: what was committed is there after a cut at any moment; never other bytes."""
    run(disk_directory, seed, lives=3, steps=25)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(100, 140))
def test_durable_blocks_survive_many_power_cuts(disk_directory: Path, seed: int) -> None:
    """I9, I11, I22: the same, for longer."""
    run(disk_directory, seed, lives=12, steps=60)
