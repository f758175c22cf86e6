"""`kvstore bench encryption`: a disk tier with keys against one without, in turns, in process.

Ratios of throughput, and processor seconds a gigabyte: on a disk that is slower than a core
encrypts, what keys cost is processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.measure import alternate, document, medians
from kvstore.core.clock import cpu_seconds, perf_seconds
from kvstore.core.entropy import random_token
from kvstore.core.key_file import KEY_BYTES, DiskKey
from kvstore.core.sizes import format_bytes
from kvstore.replay.own_disk import fitting_disk_bytes, own_disk
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.io import aligned
from kvstore.tiers.disk.vault import Vault
from kvstore.tiers.payload import digest

BLOCK_BYTES, SYMBOL_BYTES = 1 << 20, 64
BLOCKS, BLOCKS_QUICK, GROUP = 256, 32, 32
ROUNDS = 9
TIER_BYTES = 1 << 30


class Contestant:
    """One tier, and the processor seconds that writing and reading it took."""

    def __init__(self, name: str, path: Path, size: int, blocks: np.ndarray, keys: bool) -> None:
        path.mkdir(mode=0o700)
        vault = Vault([DiskKey("bench", random_token(KEY_BYTES))]) if keys else None
        self.tier = DiskTier(path, size, vault=vault)
        self.name, self._blocks, self._places = name, blocks, list[int]()
        self._checksums = [digest(block) for block in blocks]
        self._target = aligned(blocks.size).reshape(blocks.shape)
        self.cpu: dict[str, list[float]] = {"write": [], "read": []}
        self.wrong_bytes = 0

    def actions(self) -> dict[str, Callable[[], float]]:
        return {
            f"write_{self.name}": lambda: self._measured("write", self._write),
            f"read_{self.name}": lambda: self._measured("read", self._read),
        }

    def _measured(self, what: str, action: Callable[[], None]) -> float:
        if what == "write" or not self._places:
            self._clear()
        if what == "read" and not self._places:
            self._write()
        cpu, start = cpu_seconds(), perf_seconds()
        action()
        seconds = perf_seconds() - start
        self.cpu[what].append(cpu_seconds() - cpu)
        return seconds

    def _clear(self) -> None:
        self.tier.discard(self._places)
        self.tier.free(self._places)
        self.tier.commit([])
        self._places = []

    def _write(self) -> None:
        self._places = self.tier.reserve(BLOCK_BYTES, SYMBOL_BYTES, len(self._blocks))
        for start in range(0, len(self._places), GROUP):
            group = self._places[start : start + GROUP]
            items = [(place, self._blocks[start + i]) for i, place in enumerate(group)]
            sums = self.tier.write_many(items)
            self.tier.commit(
                [
                    (p, _header(start + i), s)
                    for i, (p, s) in enumerate(zip(group, sums, strict=True))
                ]
            )

    def _read(self) -> None:
        for start in range(0, len(self._places), GROUP):
            group = self._places[start : start + GROUP]
            items = [(place, self._target[start + i]) for i, place in enumerate(group)]
            sums = self.tier.read_many(items, BLOCK_BYTES)
            expected = self._checksums[start : start + len(group)]
            wrong = sum(a != b for a, b in zip(sums, expected, strict=True))
            self.wrong_bytes += wrong * BLOCK_BYTES


def _header(i: int) -> BlockHeader:
    key = i.to_bytes(16, "little")
    return BlockHeader(bytes(32), bytes(32), key, key, i, 0, 0, BLOCK_BYTES, bytes(SYMBOL_BYTES))


def run(quick: bool = False, path: Path | None = None) -> dict[str, Any]:
    """Measures two tiers in a temporary directory, below `path` if given."""
    count = BLOCKS_QUICK if quick else BLOCKS
    blocks = aligned(count * BLOCK_BYTES).reshape(count, BLOCK_BYTES)
    blocks[:] = np.frombuffer(random_token(BLOCK_BYTES), np.uint8)
    blocks[:, 0] = np.arange(count) % 256
    with own_disk(path) as directory:
        size = fitting_disk_bytes(directory, 2 * TIER_BYTES, least=4 * blocks.size) // 2
        contestants = [
            Contestant(name, directory / name, size, blocks, name == "sealed")
            for name in ("plain", "sealed")
        ]
        actions = {k: v for each in contestants for k, v in each.actions().items()}
        samples = alternate(actions, 2 if quick else ROUNDS, warmup=1)
        for each in contestants:
            each.tier.close()
    return _document(samples, contestants, blocks.size)


def _document(
    samples: dict[str, list[float]], contestants: list[Contestant], byte_count: int
) -> dict[str, Any]:
    middle = medians(samples)
    cpu = {
        f"{what}_{each.name}": float(np.median(taken[1:])) / byte_count * 1e9
        for each in contestants
        for what, taken in each.cpu.items()
    }
    figures = {
        f"{what}_ratio_to_plain": middle[f"{what}_plain"] / middle[f"{what}_sealed"]
        for what in ("write", "read")
    }
    return document(
        figures,
        samples,
        **{f"{name}_bytes_per_second": byte_count / seconds for name, seconds in middle.items()},
        cpu_seconds_per_gigabyte=cpu,
        block_bytes=BLOCK_BYTES,
        moved=format_bytes(byte_count),
        wrong_bytes=sum(each.wrong_bytes for each in contestants),
    )
