"""A disk tier's directory filled past the daemon: a million blocks in a minute or so."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstore.bench.subject import MIB, Subject
from kvstore.core.machine import LocalMachine
from kvstore.core.spec import root_digest
from kvstore.locks import FileLock
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.io import aligned

# The smallest slot, and with its header page what it takes of the disk.
BLOCK_BYTES, BLOCK_DISK_BYTES = 4096, 8192
CHAIN_BLOCKS = 64
CHAINS_A_GROUP = 32
ROOM = 1.15


class DiskFiller:
    """Writes chains of 64 of the smallest blocks, of a client's space, to a tier's directory.

    The space must be known there, and no daemon may run on it.
    """

    def __init__(self, directory: Path, size_bytes: int, subject: Subject) -> None:
        self._lock = FileLock(directory / "LOCK", f"the disk tier in {directory}")
        self._tier = DiskTier(directory, size_bytes)
        self._tier.finish_recovery()
        self._subject = subject
        self._root = root_digest(subject.space_id, "", "")
        blocks = CHAIN_BLOCKS * CHAINS_A_GROUP
        self._rows = aligned(blocks * BLOCK_BYTES).reshape(blocks, BLOCK_BYTES)

    def fill(self, block_count: int) -> list[np.ndarray]:
        """Writes so many blocks, and answers with the prompts."""
        prompts: list[np.ndarray] = []
        try:
            while len(prompts) * CHAIN_BLOCKS < block_count:
                left = block_count // CHAIN_BLOCKS - len(prompts)
                chains = [
                    self._subject.prompt(CHAIN_BLOCKS) for _ in range(min(CHAINS_A_GROUP, left))
                ]
                self._write(chains)
                prompts += chains
        finally:
            self._tier.close()
            self._lock.release()
        return prompts

    def _write(self, chains: list[np.ndarray]) -> None:
        """One group."""
        headers: list[BlockHeader] = []
        for number, tokens in enumerate(chains):
            rows = self._rows[number * CHAIN_BLOCKS : (number + 1) * CHAIN_BLOCKS]
            self._subject.payloads(tokens, rows)
            headers += self._headers(tokens)
        symbol_bytes = self._subject.space.spec.symbol_bytes
        places = self._tier.reserve(BLOCK_BYTES, symbol_bytes, len(headers))
        sums = self._tier.write_many(list(zip(places, self._rows, strict=False)))
        self._tier.commit(list(zip(places, headers, sums, strict=True)))

    def _headers(self, tokens: np.ndarray) -> list[BlockHeader]:
        subject, keys = self._subject, self._subject.keys(tokens)
        raw, width = tokens.tobytes(), 4 * subject.block_size
        return [
            BlockHeader(
                subject.space_id, self._root, key, parent, i, 0, 0, BLOCK_BYTES,
                raw[i * width : (i + 1) * width],
            )
            for i, (key, parent) in enumerate(zip(keys, [self._root[:16], *keys], strict=False))
        ]  # fmt: skip


def tier_bytes(block_count: int) -> int:
    """A tier with room for so many of these blocks, their index, and what segments leave over."""
    return int(block_count * BLOCK_DISK_BYTES * ROOM) // MIB * MIB + 256 * MIB


def fitting_blocks_on_disk(directory: Path, wanted: int) -> int:
    """`wanted`, or as many blocks as half of the free space has room for."""
    free = LocalMachine().file_system_free_bytes(str(directory))
    return max(min(wanted, int(free // 2 / ROOM) // (2 * BLOCK_DISK_BYTES)), CHAIN_BLOCKS)
