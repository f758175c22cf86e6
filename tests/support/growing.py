"""A host pool that changes its size, in files of its own, and what must be in it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.tiers.base import BlockHeader
from kvstore.tiers.host import HostTier, PoolConfig

MIB = 1 << 20


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
