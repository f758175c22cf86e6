"""`OwnDaemon`: a daemon in a process of its own, on temporary directories, for demo and benchmarks.

Its pool lies in the memory file system under a name that tells whose it is, so that one left by a
killed demo is swept away by the next.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore.client import KVClient
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.config import GIB, MIB
from kvstore.core.errors import ConfigError, KVStoreError, StoreUnavailable
from kvstore.core.machine import LocalMachine
from kvstore.core.sizes import Size
from kvstore.replay.status import plain, read_status

PREFIX = "kvstore-own-"
MEMORY_FILE_SYSTEM = "/dev/shm"
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 60.0, 15.0, 0.02
LEAVE_SECONDS = 60.0
DEFAULT_POOL_BYTES, POOL_BYTES_MIN = 4 * GIB, 16 * MIB


class OwnDaemon:
    """Starts, kills, restarts and at last removes a daemon and all it left."""

    def __init__(self, pool_bytes: int, sections: Mapping[str, Any] | None = None) -> None:
        sweep()
        self.directory = Path(tempfile.mkdtemp(prefix="kvstore-"))
        self._pool_directory = _make_pool_directory(self.directory)
        self.socket = str(self.directory / "kvstore.sock")
        self.target = f"unix://{self.socket}"
        self._config = self.directory / "kvstore.toml"
        self._log = self.directory / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None
        tables: dict[str, dict[str, Any]] = {
            "server": {"socket": self.socket, "metrics": ""},
            "tiers.host": {
                "size": str(Size(pool_bytes)), "directory": str(self._pool_directory),
            },
        }  # fmt: skip
        for name, values in (sections or {}).items():
            tables.setdefault(name, {}).update(values)
        self.metrics_address = str(tables["server"]["metrics"])
        self._config.write_text(_toml(tables), encoding="utf-8")

    def __enter__(self) -> OwnDaemon:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Starts the daemon and waits until it serves; answers with the seconds it took."""
        began = perf_seconds()
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli.main", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")},
            )
        while not self._serving():
            if self._process.poll() is not None:
                raise KVStoreError(f"the daemon did not start: {self._last_words()}")
            if perf_seconds() - began > START_SECONDS:
                raise StoreUnavailable(f"the daemon is not ready after {START_SECONDS:g} s")
            sleep(POLL_SECONDS)
        return perf_seconds() - began

    def _serving(self) -> bool:
        if not Path(self.socket).exists():
            return False
        try:
            return bool(self.status()["state"] == "serving")
        except StoreUnavailable:
            return False

    def status(self) -> dict[str, Any]:
        """The daemon's status, as `kvstore status --json` prints it."""
        return read_status(self.target)

    def wait_prefaulted(self, seconds: float = START_SECONDS) -> None:
        """Waits until the pool's pages are there, so that no page fault is measured."""
        end = perf_seconds() + seconds
        while perf_seconds() < end:
            tier = self.status()["tiers"]["host"]
            if tier["prefaulted_bytes"] >= tier["capacity_bytes"]:
                return
            sleep(0.1)
        raise KVStoreError(f"the pool is not prefaulted after {seconds:g} s; use a smaller one")

    def kill(self) -> None:
        """kill -9: nothing is written, closed or said."""
        self._end(signal.SIGKILL)

    def flush(self) -> dict[str, Any]:
        """Has everything in host be on disk; what it answered, and the seconds it took."""
        began = perf_seconds()
        with KVClient.connect(self.target, client_name="own") as client:
            answer = plain(client.admin.flush())
        return {**answer, "seconds": perf_seconds() - began}

    def stop(self, free: bool = False) -> None:
        """Has it leave in order; with `free` the host pool goes, as after a reboot."""
        with KVClient.connect(self.target, client_name="own") as client:
            client.admin.drain(0.0, free)
        assert self._process is not None
        self._process.wait(LEAVE_SECONDS)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("kvstore: ") if lines else "it left no reason"

    def close(self) -> None:
        """Ends the daemon and removes everything of it."""
        self._end(signal.SIGKILL)
        shutil.rmtree(self._pool_directory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def _make_pool_directory(directory: Path) -> Path:
    if os.access(MEMORY_FILE_SYSTEM, os.W_OK):
        return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY_FILE_SYSTEM))
    pool = directory / "pool"
    pool.mkdir(mode=0o700)
    return pool


def sweep(directory: str | Path = MEMORY_FILE_SYSTEM) -> None:
    """Removes pools, or disks, of our own whose maker was killed before it could."""
    for path in Path(directory).glob(f"{PREFIX}*"):
        maker = path.name.removeprefix(PREFIX).partition("-")[0]
        try:
            ours = path.stat().st_uid == os.getuid()
        except FileNotFoundError:
            continue
        if ours and maker.isdecimal() and not Path(f"/proc/{maker}").exists():
            shutil.rmtree(path, ignore_errors=True)


def fitting_pool_bytes(wanted: int = DEFAULT_POOL_BYTES, least: int = POOL_BYTES_MIN) -> int:
    """`wanted`, or what half of the free memory file system and of the memory allow.

    Raises ConfigError if that is less than `least`.
    """
    machine = LocalMachine()
    free = machine.file_system_free_bytes(MEMORY_FILE_SYSTEM)
    fits = min(wanted, free // 2, machine.available_bytes() // 2)
    if fits < least:
        raise ConfigError(
            f"{MEMORY_FILE_SYSTEM} has {free >> 20} MiB free, and half of that or of the memory "
            f"is less than the {least >> 20} MiB needed; free some or mount a larger one"
        )
    return fits // (2 * MIB) * 2 * MIB


def free_address() -> str:
    """An address on this host that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    # JSON's strings, numbers and booleans are TOML's too.
    parts = []
    for name, values in tables.items():
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"
