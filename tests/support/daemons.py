"""`DaemonProcess`: a real daemon in a process of its own, to be killed, frozen and fed signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvstore.client import KVClient, KVSpec, StoreUnavailable
from kvstore.core.keys import chain_keys
from kvstore.core.spec import root_digest, space_id
from kvstore.replay.payload import PayloadMaker

START_SECONDS = 60.0
# Blocks of 4 tokens and 16 KiB.
SPEC = KVSpec(
    model="m", revision="r", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32",
    block_size=4,
)  # fmt: skip


class Tagged:
    """Prompts and payloads of one space: every block's bytes are its own, and can be told."""

    def __init__(self, spec: KVSpec = SPEC, tenant: str = "default", epoch: int = 0) -> None:
        self.spec = spec
        self.space_id = space_id(spec, tenant)
        self.maker = PayloadMaker(self.space_id, epoch, spec.block_bytes)

    def keys(self, tokens: list[int]) -> list[bytes]:
        raw = np.array(tokens, "<u4").tobytes()
        width = 4 * self.spec.block_size
        return chain_keys(
            root_digest(self.space_id, "", "")[:16],
            [raw[i : i + width] for i in range(0, len(raw) - width + 1, width)],
        )

    def blocks(self, tokens: list[int]) -> list[bytes]:
        return [self.maker.make(key) for key in self.keys(tokens)]

    def wrong(self, tokens: list[int], blocks: Any) -> int:
        """Bytes of restored `blocks` that are not their own."""
        pairs = zip(self.keys(tokens), blocks, strict=False)
        return sum(self.maker.wrong_bytes(key, block) for key, block in pairs)


class DaemonProcess:
    """One daemon on directories of its own; at the end it is gone, with all that it left.

    `config` is TOML that goes below the tables of its own. `start` may be called again and again.
    """

    def __init__(self, size: str = "64MiB", config: str = "", metrics: str = "") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
        self.socket = self.directory / "run" / "kv.sock"
        self.pool = self.directory / "pool"
        self.log_path = self.directory / "log"
        self.config_path = self.directory / "kvstore.toml"
        self.size = size
        self.config = (
            f'tiers.host.directory = "{self.pool}"\n'
            f'server.socket = "{self.socket}"\nserver.metrics = "{metrics}"\n'
        )
        self.configure(config)
        self.process: subprocess.Popen[bytes] | None = None
        self.environ: dict[str, str] = {}
        """What the process finds in its environment besides this one's."""
        self.options: list[str] = []
        """Further options of `kvstore serve`."""
        self.program = [sys.executable, "-m", "kvstore.cli.main"]
        """What runs `serve`."""

    def configure(self, extra: str) -> None:
        """Writes the configuration file: `extra` below what each daemon here needs."""
        size = f'tiers.host.size = "{self.size}"\n'
        self.config_path.write_text(f"{size}{self.config}{extra}\n")

    @property
    def address(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts the process without waiting."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
        environ |= self.environ
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*self.program, "serve", "--config", str(self.config_path), *self.options],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environ,
            )  # fmt: skip
        return self.process

    def start(self) -> DaemonProcess:
        """Starts it and waits until it serves."""
        process, end = self.launch(), time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, f"the daemon left: {self.log}"
            assert time.monotonic() < end, f"the daemon is not ready: {self.log}"
            try:
                self.client().close()
                return self
            except StoreUnavailable:
                time.sleep(0.02)

    def client(self, **options: Any) -> KVClient:
        return KVClient.connect(self.address, **options)

    def status(self) -> Any:
        with self.client() as client:
            return client.status()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and waits until the process is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def lose_memory(self) -> None:
        """Host blocks are gone, as after a reboot; the daemon is not running."""
        shutil.rmtree(self.pool, ignore_errors=True)

    def wait(self, seconds: float = 20.0) -> int:
        """Waits for its end; answers with the exit status."""
        assert self.process is not None
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def eventually(condition: Any, seconds: float = 10.0, pause: float = 0.01) -> bool:
    """Whether `condition()` becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause)
    return bool(condition())


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    """Returns as soon as `condition()` is true; AssertionError if it does not get so in time."""
    assert eventually(condition, seconds), "it takes too long"
