"""An index of many small blocks, put through the public client: what lookups are measured on."""

from __future__ import annotations

import random

import numpy as np

from kvstore.bench.subject import Subject
from kvstore.core.machine import LocalMachine
from kvstore.replay.own_daemon import MEMORY_FILE_SYSTEM

# The smallest slot takes 4 KiB of pool, whatever the payload.
SLOT_BYTES, PAYLOAD_BYTES = 4096, 64
PROMPT_BLOCKS = 1000
ROOM = 1.06


class Filler:
    """Puts prompts that branch off earlier ones, as conversations do.

    By default a prompt has a thousand blocks, and half of the prompts share their beginning with
    an earlier one. With fewer `new_blocks` every prompt adds just so many to an earlier one.
    """

    def __init__(self, subject: Subject, seed: int = 1, new_blocks: int = PROMPT_BLOCKS) -> None:
        self._subject, self._rng = subject, random.Random(seed)
        self._new_blocks = new_blocks
        self._rows = np.empty((PROMPT_BLOCKS, subject.block_bytes), dtype=np.uint8)
        self._prompts: list[np.ndarray] = []
        self.block_count = 0

    def fill(self, block_count: int) -> None:
        """Puts until `block_count` blocks are stored."""
        while self.block_count < block_count:
            left = block_count - self.block_count
            prefix = self._prefix()
            room = PROMPT_BLOCKS - len(prefix) // self._subject.block_size
            fresh = self._subject.prompt(min(room, self._new_blocks, left))
            self._put(prefix, fresh)

    def _prefix(self) -> np.ndarray:
        """The beginning of an earlier prompt, cut at random, or nothing."""
        if not self._prompts or (self._new_blocks == PROMPT_BLOCKS and self._rng.random() < 0.5):
            return self._subject.prompt(0)
        parent = self._rng.choice(self._prompts)
        blocks = min(len(parent) // self._subject.block_size, PROMPT_BLOCKS - 1)
        return parent[: self._rng.randint(1, blocks) * self._subject.block_size]

    def _put(self, prefix: np.ndarray, fresh: np.ndarray) -> None:
        tokens = np.concatenate([prefix, fresh])
        shared = len(prefix) // self._subject.block_size
        rows = self._subject.payloads(tokens, self._rows, shared)
        self._subject.put(tokens, rows, first_block=shared)
        self.block_count += len(rows)
        self._prompts.append(tokens)

    def sample(self, count: int, block_count: int) -> list[np.ndarray]:
        """Beginnings, `block_count` long, of prompts drawn at random."""
        long_enough = block_count * self._subject.block_size
        prompts = [p for p in self._prompts if len(p) >= long_enough]
        return [self._rng.choice(prompts)[:long_enough].copy() for _ in range(count)]


def fitting_blocks(wanted: int) -> int:
    """`wanted`, or as many blocks as half of the memory file system has slots for."""
    machine = LocalMachine()
    free = min(machine.file_system_free_bytes(MEMORY_FILE_SYSTEM), machine.available_bytes())
    return min(wanted, int(free // 2 / ROOM) // SLOT_BYTES)


def pool_bytes(block_count: int) -> int:
    """A pool with room for `block_count` of the smallest blocks."""
    mib = 1 << 20
    return max(int(block_count * SLOT_BYTES * ROOM) // mib, 64) * mib
