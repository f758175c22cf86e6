"""`SickDisk`: a daemon whose disk can be made to fail, and what a client finds in it meanwhile."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually
from fault_shim import FaultShim

from kvstore.client import KVClient, NotFound

BLOCKS = 64
LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
limits.lease_ttl_seconds = 1.0
limits.max_lease_ttl_seconds = 1.0
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
tiers.disk.demote_watermark = 1.0
tiers.disk.read_timeout_seconds = 1.0
"""


def prompt(number: int) -> list[int]:
    """A prompt of 64 blocks of 16 KiB that shares none with another number's."""
    return [number << 16 | i for i in range(4 * BLOCKS)]


class SickDisk(DaemonProcess):
    """A daemon with a disk tier in `path`; `shim` breaks its files if gcc is there."""

    def __init__(
        self, path: Path, more: str = "", size: str = "64MiB", disk_size: str = "64MiB",
        reserve: str = "1MiB", shim: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(size)
        self.path = path
        self.base = (
            f'{LIMITS}tiers.disk.path = "{path}"\ntiers.disk.size = "{disk_size}"\n'
            f'tiers.disk.reserve = "{reserve}"\n'
        )
        self.configure(f"{self.base}{more}")
        if shim and shutil.which("gcc") is None:
            self.close()
            pytest.skip("there is no gcc to compile the faults with")
        if shim:
            self.shim = FaultShim(path, self.directory / "control")
            self.environ = self.shim.environ
        self.tagged = Tagged()

    def calm_client(self) -> KVClient:
        """A client that leaves a busy machine its time."""
        return self.client(call_timeout_seconds=5.0)

    def put(self, client: KVClient, number: int) -> Any:
        tokens = prompt(number)
        return client.attach(SPEC).put(tokens, self.tagged.blocks(tokens))

    def stored(self, client: KVClient, *numbers: int) -> None:
        for number in numbers:
            result = self.put(client, number)
            assert result.stored + result.present == BLOCKS, result

    def matched(self, client: KVClient, number: int) -> int:
        """Blocks that a lookup promises."""
        with client.attach(SPEC).lookup(prompt(number)) as match:
            return match.block_count

    def found(self, client: KVClient, number: int) -> int:
        """Blocks that are restored, every byte of them right; 0 if any of them cannot be had."""
        space, tokens = client.attach(SPEC), prompt(number)
        with space.lookup(tokens) as match:
            if not match.block_count:
                return 0
            try:
                views = space.restore(match)
            except NotFound as error:
                self.reason = str(error)
                return 0
            assert self.tagged.wrong(tokens, views) == 0
            match.check()
            return len(views)

    def flushed(self, client: KVClient) -> tuple[int, int]:
        """(durable, left out) blocks of a Flush of all."""
        result = client.admin.flush()
        return result.durable_blocks, result.left_out_blocks

    def reboot(self) -> None:
        """Dies, with everything in memory, and starts again."""
        self.kill()
        self.lose_memory()
        self.start()

    def problem(self, client: KVClient) -> str:
        """What `status` says of the disk, one sentence; empty when nothing is wrong."""
        status = client.status()
        sentence: str = status.tiers["disk"].problem
        assert (status.state == "degraded") == bool(sentence), status
        assert "\n" not in sentence
        return sentence

    def recovers(self, client: KVClient) -> bool:
        """Whether the tier takes blocks again, all by itself."""
        return eventually(lambda: not self.problem(client), 15.0, 0.1)


class Latencies:
    """How long calls take, the worst of them."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.count = 0

    def measure(self, call: Any) -> Any:
        began = time.monotonic()
        value = call()
        self.worst = max(self.worst, time.monotonic() - began)
        self.count += 1
        return value
