"""Processes of `writer.py`, what they have said so far, and whether a daemon still has it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import writer
from daemons import Tagged

from kvstore.client import KVClient, NotFound


class WriterProcess:
    """Runs until it is stopped, across daemons; what it heard lives here, outside of them."""

    def __init__(self, address: str, seed: int, mode: str = "") -> None:
        self.seed = seed
        script = Path(writer.__file__)
        # Where PYTHONSAFEPATH is set a script does not see its own folder.
        environ = {**os.environ, "PYTHONPATH": str(script.parent)}
        self.process = subprocess.Popen(
            [sys.executable, str(script), address, str(seed), *mode.split()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        self.acked: dict[int, int] = {}
        self.durable: dict[int, int] = {}
        """Blocks of each family that a Flush said were on disk."""
        self.complaints: list[str] = []
        self.hits = self.left_out = 0
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait(self) -> None:
        """Waits until it is attached."""
        assert self._ready.wait(60), "the writer cannot attach"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, *numbers = line.split()
            if word == "ready":
                self._ready.set()
            elif word == "ack":
                self.acked[int(numbers[0])] = int(numbers[1])
            elif word == "durable":
                self.durable[int(numbers[0])] = int(numbers[1])
            elif word == "hit":
                self.hits += int(numbers[0])
            elif word == "left":
                self.left_out += int(numbers[0])
            else:
                self.complaints.append(line)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@contextmanager
def running(address: str, count: int, mode: str = "") -> Iterator[list[WriterProcess]]:
    """So many writers of a daemon, which must be there until all are attached."""
    writers: list[WriterProcess] = []
    try:
        for seed in range(count):
            writers.append(WriterProcess(address, seed, mode))
        for one in writers:
            one.wait()
        yield writers
    finally:
        for one in writers:
            one.stop()


class Expected:
    """What Flush said was durable, by writer and family, and checks of a daemon against it."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], int] = {}
        self._checked: dict[tuple[int, int], int] = {}
        self.checked_blocks = 0
        """Blocks that were found and right, over all checks."""
        self.lost: list[str] = []
        self._spaces: tuple[Any, dict[int, Any]] = (None, {})

    def take(self, writers: list[WriterProcess]) -> None:
        """Hears what the writers have said up to now."""
        for one in writers:
            for family, blocks in list(one.durable.items()):
                self.blocks[one.seed, family] = blocks

    def check(self, client: KVClient, random: Random | None = None) -> None:
        """All that is new since the last check, and with `random` a tenth of the rest, else all.

        Whatever is served is right. What is missing is kept in `lost`.
        """
        for (seed, family), blocks in self.blocks.items():
            is_new = self._checked.get((seed, family), 0) < blocks
            if random is None or is_new or random.random() < 0.1:
                self._check(client, seed, family, blocks)
                self._checked[seed, family] = blocks

    def _space(self, client: KVClient, seed: int) -> Any:
        """The writer's space, attached once a client: attachments of a session are limited."""
        if self._spaces[0] is not client:
            self._spaces = (client, {})
        spaces = self._spaces[1]
        if seed not in spaces:
            spaces[seed] = client.attach(writer.spec_of(seed))
        return spaces[seed]

    def _check(self, client: KVClient, seed: int, family: int, blocks: int) -> None:
        spec = writer.spec_of(seed)
        space, tokens = self._space(client, seed), writer.prompt(family, writer.FLUSH_BLOCKS)
        with space.lookup(tokens) as match:
            target = np.empty((match.block_count, spec.block_bytes), np.uint8)
            try:
                space.restore_into(match, target)
            except NotFound as error:
                self.lost.append(f"family {family} of writer {seed}: {error}")
                return
        wrong = Tagged(spec).wrong(tokens, target)
        assert wrong == 0, f"family {family} of writer {seed} has {wrong} wrong bytes"
        if len(target) < blocks:
            self.lost.append(f"family {family} of writer {seed}: {len(target)} of {blocks} blocks")
        self.checked_blocks += min(len(target), blocks)
