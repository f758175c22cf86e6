"""A daemon whose disk tier gets other sizes, and a thread that writes and reads meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from daemons import DaemonProcess, Tagged, wait_until

from kvstore.client import KVClient, KVSpec, KVStoreError, NotFound

MIB = 1 << 20
SPEC = KVSpec(
    model="m", revision="r", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=16,
)  # fmt: skip
"""Blocks of 64 KiB."""
CONFIG = """
tiers.host.prefault = false
tiers.host.mlock = false
limits.lease_ttl_seconds = 1.0
limits.max_lease_ttl_seconds = 1.0
limits.staging_bytes_per_session = "4MiB"
index.max_blocks = 100000
tiers.disk.reserve = "1MiB"
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
tiers.disk.demote_watermark = 0.1
"""


class Resized(DaemonProcess):
    """A daemon with a disk tier of a size that changes; `more` is the rest of its configuration."""

    def __init__(self, path: Path, more: str = "") -> None:
        self.disk_path, self.more = path, more
        super().__init__("16MiB", metrics="")
        self.write(64)

    def write(self, mebibytes: Any) -> None:
        """The configuration file, with a disk of so many MiB."""
        size = f"{mebibytes}MiB" if isinstance(mebibytes, int) else mebibytes
        tier = f'tiers.disk.path = "{self.disk_path}"\ntiers.disk.size = "{size}"\n'
        self.configure(f"{CONFIG}{tier}{self.more}")

    def resize(self, mebibytes: Any) -> str:
        """Has the daemon reload with this size; answers with what it says to that."""
        said = len(self.log)
        self.write(mebibytes)
        self.signal(signal.SIGHUP)
        wait_until(lambda: "reloaded" in self.log[said:], 10.0)
        return self.log[said:]

    @property
    def tier(self) -> Any:
        return self.status().tiers["disk"]


class Load:
    """A thread that puts prompts of 8 blocks and reads earlier ones back, until it is stopped.

    It goes on over a daemon's end. `wrong` and `right` count bytes and prompts that were read.
    """

    def __init__(self, address: str, seed: int) -> None:
        self.address, self.random = address, Random(seed)
        self.tagged = Tagged(SPEC)
        self.wrong = self.right = self.put = 0
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def tokens(self, prompt: int) -> list[int]:
        return [prompt] * (8 * SPEC.block_size)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                with KVClient.connect(self.address, call_timeout_seconds=10.0) as client:
                    space = client.attach(SPEC)
                    while not self._stop.is_set():
                        self._one(client, space)
            except (KVStoreError, OSError):
                time.sleep(0.05)  # it was killed, and starts again
            except Exception as error:
                self.problems.append(repr(error))
                return

    def _one(self, client: KVClient, space: Any) -> None:
        self.put += 1
        tokens = self.tokens(self.put)
        space.put(tokens, self.tagged.blocks(tokens))
        if not self.put % 8:
            client.admin.flush()
        for _ in range(2):
            self.read(space, self.random.randrange(max(0, self.put - 150), self.put) + 1)

    def read(self, space: Any, prompt: int) -> None:
        tokens = self.tokens(prompt)
        with space.lookup(tokens) as match:
            target = np.empty((match.block_count, SPEC.block_bytes), np.uint8)
            try:
                space.restore_into(match, target)
            except NotFound:
                return
        self.wrong += self.tagged.wrong(tokens, target)
        self.right += len(target) == 8

    def read_all(self, daemon: Resized) -> int:
        """How many of the last prompts are there whole; the thread has stopped."""
        before = self.right
        with daemon.client(call_timeout_seconds=10.0) as client:
            space = client.attach(SPEC)
            for prompt in range(max(1, self.put - 150), self.put + 1):
                self.read(space, prompt)
        return self.right - before
