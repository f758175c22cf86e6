"""`Fleet` and `Watch`: many client processes of one daemon, and how the daemon is meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import load_roles
from daemons import SPEC, DaemonProcess
from load_roles import BOARD, OVER, Board

from kvstore.client import KVClient


class Sample(NamedTuple):
    """The daemon at one moment; what may not be seen of another's process is 0."""

    seconds: float
    phase: int
    sessions: int
    leases: int
    reservations: int
    gold_bytes: int
    resident_bytes: int
    private_bytes: int
    connections: int


class Fleet:
    """Client processes, forked from one that has everything imported, and what they said."""

    def __init__(self, daemon: DaemonProcess) -> None:
        path = daemon.directory / "board"
        path.write_bytes(bytes(BOARD.size))
        self.board = Board(str(path))
        self.roles: dict[int, tuple[str, int]] = {}
        self.said: list[dict[str, Any]] = []
        self.ready = 0
        self.holding: set[int] = set()
        self.reserved: dict[int, int] = {}
        """The first token of what each process reserved last."""
        script = Path(load_roles.__file__)
        self._process = subprocess.Popen(
            [sys.executable, str(script), daemon.address, str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": str(script.parent)},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard = json.loads(line)
            if "forked" in heard:
                self.roles[heard["forked"]] = (heard["role"], heard["number"])
            elif "ready" in heard:
                self.ready += 1
            elif "reserved" in heard:
                self.reserved[heard["pid"]] = heard["reserved"]
            elif "holds" in heard:
                self.holding.add(heard["pid"])
            else:
                self.said.append(heard)

    def fork(self, role: str, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{role} {number}\n")

    def kill(self, pid: int) -> None:
        """kill -9, and another one in its place."""
        role, number = self.roles.pop(pid)
        self.holding.discard(pid)
        self.reserved.pop(pid, None)
        os.kill(pid, signal.SIGKILL)
        self.fork(role, number)

    def of(self, role: str) -> list[int]:
        return [pid for pid, (name, _) in list(self.roles.items()) if name == role]

    def close(self) -> None:
        self.board.write(OVER)
        for pid in self.roles:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        time.sleep(0.5)
        for pid in self.roles:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(20)
        self._reader.join(20)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Watch:
    """Asks a daemon five times a second how it is, on a session that was there first."""

    def __init__(self, daemon: DaemonProcess, client: KVClient) -> None:
        self.samples: list[Sample] = []
        self.took: list[float] = []
        """Seconds of each look."""
        self.phase = 0
        self._daemon, self._client = daemon, client
        self._space = client.attach(SPEC)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.2):
            self.look()

    def look(self) -> Sample:
        with self._lock:
            began = time.monotonic()
            status = self._client.status(with_tenants=True)
            self.took.append(time.monotonic() - began)
            gold = {one.tenant: one.used_bytes["host"] for one in status.tenants}.get("gold", 0)
            sample = Sample(
                time.monotonic(), self.phase, status.session_count, status.lease_count,
                status.reservation_count, gold, *memory_of(self._daemon.pid),
                connections_of(self._daemon.pid),
            )  # fmt: skip
            self.samples.append(sample)
            return sample

    def is_pending(self, tokens: list[int]) -> bool:
        """Whether somebody has reserved this prompt."""
        with self._lock, self._space.lookup(tokens) as match:
            return bool(match.pending_tokens)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes, and those of them that are the process's own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    resident, private = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "RssAnon"))
    return resident, private


def connections_of(pid: int) -> int:
    """Sockets that a process has open, and memory without a name; 0 where one may not look."""
    count = 0
    with suppress(PermissionError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed just now
                count += os.readlink(entry).startswith(("socket:", "/memfd:"))
    return count


def segments_of(pid: int) -> set[str]:
    """Inodes of the staging segments that a process has mapped, none where one may not look."""
    with suppress(PermissionError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:kvstore-staging" in line}
    return set()


def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    """How long it takes until it is so; infinity if it takes longer."""
    began = time.monotonic()
    while time.monotonic() - began < limit:
        if condition():
            return time.monotonic() - began
        time.sleep(0.01)
    return float("inf")
