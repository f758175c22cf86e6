"""`kvstore bench start`: how long a daemon with many blocks on disk takes until it serves.

From the start of the process to the state `serving`, and to the first lookup answered, which must
hit. What the page cache has of the directory is dropped before.
"""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.fill import Filler
from kvstore.bench.fill_disk import (
    BLOCK_BYTES,
    CHAIN_BLOCKS,
    DiskFiller,
    fitting_blocks_on_disk,
    tier_bytes,
)
from kvstore.bench.measure import document
from kvstore.bench.subject import MIB, Subject
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError
from kvstore.replay.own_daemon import OwnDaemon
from kvstore.replay.own_disk import disk_section, own_disk

BLOCKS, KILLED_BLOCKS = 1_000_000, 100_000
ROUNDS = 3
POOL_BYTES = 256 * MIB
SAMPLE_PROMPTS = 20
WRITING_SECONDS = 3.0


def run(quick: bool = False, path: Path | None = None, blocks: int | None = None) -> dict[str, Any]:
    """Starts after an orderly end with `blocks` blocks, and with a tenth of them after a kill."""
    wanted = blocks or (20_000 if quick else BLOCKS)
    rounds = 1 if quick else ROUNDS
    with own_disk(path) as directory:
        calm = _Start(directory / "calm", fitting_blocks_on_disk(directory, wanted))
        samples = calm.measure(rounds, kill=False)
    with own_disk(path) as directory:
        killed = _Start(directory / "killed", max(calm.blocks // 10, CHAIN_BLOCKS))
        samples |= killed.measure(rounds, kill=True)
    figures = {
        "serving_seconds": max(samples["serving"]),
        "serving_seconds_after_kill": max(samples["serving_after_kill"]),
        "first_hit_seconds": max(samples["first_hit"]),
        "first_hit_seconds_after_kill": max(samples["first_hit_after_kill"]),
    }
    return document(
        figures,
        samples,
        block_count=calm.blocks,
        readopted_blocks=calm.readopted,
        block_count_after_kill=killed.blocks,
        readopted_blocks_after_kill=killed.readopted,
        block_bytes=BLOCK_BYTES,
        fill_blocks_per_second=calm.fill_rate,
        wrong_bytes=calm.wrong_bytes + killed.wrong_bytes,
    )


class _Start:
    """A directory with `blocks` blocks on disk, and a daemon that is started on it."""

    def __init__(self, directory: Path, blocks: int) -> None:
        directory.mkdir(mode=0o700)
        self._directory, self.blocks = directory, blocks // CHAIN_BLOCKS * CHAIN_BLOCKS
        self.wrong_bytes, self.readopted, self.fill_rate = 0, [0] * 0, 0.0
        self._rng = random.Random(blocks)

    def measure(self, rounds: int, kill: bool) -> dict[str, list[float]]:
        size = tier_bytes(2 * self.blocks)
        sections = {
            "tiers.disk": disk_section(self._directory, size, demote_watermark=0.0),
            "index": {"max_blocks": 2 * self.blocks + POOL_BYTES // BLOCK_BYTES},
        }
        serving, first_hit = [], []
        with OwnDaemon(POOL_BYTES, sections) as daemon:
            prompts = self._fill(daemon, size)
            for number in range(rounds):
                if kill:
                    self._start(daemon, prompts)
                    self._kill_while_writing(daemon, seed=number + 1)
                forget_pages(self._directory)
                seconds, hit_seconds = self._start(daemon, prompts)
                self.readopted.append(daemon.status()["readopted_blocks"])
                daemon.stop()
                serving.append(seconds)
                first_hit.append(hit_seconds)
        suffix = "_after_kill" if kill else ""
        return {f"serving{suffix}": serving, f"first_hit{suffix}": first_hit}

    def _fill(self, daemon: OwnDaemon, size: int) -> list[np.ndarray]:
        """Has the space be known, ends the daemon, and writes to its tier past it."""
        subject = Subject(daemon.target, BLOCK_BYTES)
        tokens = subject.prompt(1)
        subject.put(tokens, subject.payloads(tokens, np.empty((1, BLOCK_BYTES), np.uint8)))
        subject.client.admin.flush()
        daemon.stop(free=True)
        start = perf_seconds()
        prompts = DiskFiller(self._directory / "tier", size, subject).fill(self.blocks)
        self.fill_rate = self.blocks / (perf_seconds() - start)
        subject.close()
        return prompts

    def _start(self, daemon: OwnDaemon, prompts: list[np.ndarray]) -> tuple[float, float]:
        """Seconds to `serving` and to the first hit; then more prompts are looked at."""
        began = perf_seconds()
        seconds = daemon.start()
        subject = Subject(daemon.target, BLOCK_BYTES)
        try:
            sample = self._rng.sample(prompts, min(SAMPLE_PROMPTS, len(prompts)))
            hit_seconds = 0.0
            for tokens in sample:
                with subject.space.lookup(tokens) as match:
                    hit_seconds = hit_seconds or perf_seconds() - began
                    if match.matched_tokens != len(tokens):
                        raise KVStoreError(f"a prompt of the benchmark is not there: {match}")
                self.wrong_bytes += subject.stored_wrong_bytes(tokens)
        finally:
            subject.close()
        return seconds, hit_seconds

    def _kill_while_writing(self, daemon: OwnDaemon, seed: int) -> None:
        """kill -9 while a client puts blocks that are all written to disk at once."""
        subject = Subject(daemon.target, BLOCK_BYTES, seed=seed)
        writer = threading.Thread(target=_write_until_gone, args=(subject,))
        writer.start()
        sleep(min(WRITING_SECONDS, self.blocks / 10_000))
        daemon.kill()
        writer.join()
        subject.close()


def _write_until_gone(subject: Subject) -> None:
    filler = Filler(subject, new_blocks=CHAIN_BLOCKS)
    with suppress(KVStoreError):
        while True:
            filler.fill(filler.block_count + CHAIN_BLOCKS)


def forget_pages(directory: Path) -> None:
    """Drops what the page cache has of a directory's files."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
