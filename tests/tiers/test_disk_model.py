"""A disk tier against a dictionary, through crashes and power cuts: it may miss, never lie."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import numpy as np
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
SIZES_TO = (3 << 20, CAPACITY, CAPACITY, 6 << 20)


class Model:
    """What the tier has promised: numbers of blocks that must be there, and that may be."""

    def __init__(self, directory: Path, seed: int, resize_share: float = 0.0) -> None:
        self.directory, self.random = directory, Random(seed)
        self.resize_share = resize_share
        self.durable: dict[int, tuple[int, int]] = {}
        """number -> (place, length) of committed blocks."""
        self.capacity = self.largest = CAPACITY
        self.next_number = 1
        self.lengths: dict[int, int] = {}
        self.generation = 0
        self.tier: DiskTier
        self.io: VolatileIO
        self.open()

    def open(self) -> None:
        self.io = VolatileIO(self.random, self.directory.parent / "limbo")
        size = self.largest
        if self.resize_share:
            # After a resize that was cut short, either size is right; less may cost blocks.
            size = self.random.choice([self.capacity, size, size])
        self.tier = DiskTier(self.directory, size, io=self.io)
        found = recovered(self.tier)
        if size < self.largest:
            self.durable = {n: held for n, held in self.durable.items() if n in found}
        self.capacity = self.largest = size
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
        if self.resize_share and self.random.random() < self.resize_share:
            action = "resize"
        getattr(self, action)()
        size = directory_bytes(self.directory)
        assert size <= self.largest, f"the directory has {size} bytes"

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

    def resize(self) -> None:
        """To another size and to the end, by what the store does: drop, move, finish."""
        self.capacity = self.random.choice(SIZES_TO)
        self.largest = max(self.largest, self.capacity)
        goal = self.tier.begin_resize(self.capacity)
        while self.durable and (over := self.tier.usage().used_bytes - goal) > 0:
            drop(self.tier, [self.durable.pop(min(self.durable))[0]])
            assert self.tier.usage().used_bytes - goal < over
        self.tier.check_integrity()
        while True:
            self.tier.commit([])
            if self.tier.owed_bytes:
                assert self.tier.choose_leaving(np.empty(0, np.int64))
                self.empty_segments()
            elif excess := self.tier.finish_resize():
                while excess > 0:
                    place, length = self.durable.pop(min(self.durable))
                    drop(self.tier, [place])
                    excess -= length
            else:
                break
        self.largest = self.capacity
        self.tier.check_integrity()

    def empty_segments(self) -> None:
        for number, (place, length) in sorted(self.durable.items()):
            if self.tier.is_leaving(np.array([place]))[0]:
                targets = self.tier.reserve_for_move(length, 64, 1)
                if targets:
                    checksum = self.tier.copy(place, targets[0], length)
                    assert checksum == self.tier.checksum(place)
                    self.tier.commit([(targets[0], self.tier.header(place), checksum)])
                    self.durable[number] = targets[0], length
                else:
                    del self.durable[number]
                drop(self.tier, [place])

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
        elif self.resize_share:
            return
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


def run(directory: Path, seed: int, lives: int, steps: int, resize_share: float = 0.0) -> None:
    model = Model(directory, seed, resize_share)
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


@pytest.mark.parametrize(
    "seed", [200, 201, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(202, 210))]
)
def test_durable_blocks_survive_power_cuts_in_a_resize(disk_directory: Path, seed: int) -> None:
    """I9, I11, I22: the same where the tier gets another size now and then, dropping the oldest:
    what was not dropped is there after a cut at any moment, at the size before or after."""
    run(disk_directory, seed, lives=8, steps=12, resize_share=0.25)
