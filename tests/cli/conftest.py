"""A daemon in a process of its own, and the command line run against it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore.cli.main import run
from kvstore.client import KVClient, KVSpec, Match, Space

START_SECONDS = 30.0
BLOCK_TOKENS = 16
TENANTS = """
[[tenants]]
name = "chat"

[[tenants]]
name = "medical"
isolated = true
host_size = "4MiB"

[[access]]
uid = {uid}
role = "{role}"

[[access]]
uid = {uid}
tenant = "chat"

[[access]]
uid = {uid}
tenant = "medical"
"""


def tiny_spec(model: str = "tiny") -> KVSpec:
    """Blocks of 4 KiB."""
    return KVSpec(
        model=model, revision="r1", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16",
        block_size=BLOCK_TOKENS,
    )  # fmt: skip


class Outcome(NamedTuple):
    """What a verb printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """Standard error, after making sure that it is one sentence and nothing else came out."""
        assert self.out == ""
        assert self.err.startswith("kvstore: ")
        assert len(self.err.splitlines()) == 1, self.err
        return self.err.removeprefix("kvstore: ").strip()


class Engine:
    """What an engine does to a daemon, in short."""

    def __init__(self, client: KVClient) -> None:
        self.client = client

    def fill(self, blocks: int = 4, model: str = "tiny", **attach: Any) -> Space:
        """Stores one prompt of `blocks` blocks of 4 KiB, each of one repeated byte, 7 and up."""
        space = self.client.attach(tiny_spec(model), **attach)
        payload = [bytes([7 + i]) * space.spec.block_bytes for i in range(blocks)]
        assert space.put(self.prompt(blocks), payload).stored == blocks
        return space

    def lease(self, space: Space, blocks: int = 4, request_id: str | None = None) -> Match:
        match = space.lookup(self.prompt(blocks), request_id=request_id)
        assert match.matched_tokens == blocks * BLOCK_TOKENS
        return match

    @staticmethod
    def prompt(blocks: int) -> list[int]:
        return list(range(1, 1 + blocks * BLOCK_TOKENS))


class ServedDaemon:
    """`kvstore serve` in a directory of its own below /dev/shm."""

    def __init__(self, directory: Path, role: str = "admin", extra: str = "") -> None:
        self.directory = directory
        self.socket = str(directory / "kv.sock")
        self.pool = directory / "pool"
        self.config = directory / "kvstore.toml"
        self.log = directory / "log"
        self.write_config(TENANTS.format(uid=os.getuid(), role=role) + extra)
        self.process: subprocess.Popen[bytes] | None = None

    def write_config(self, text: str) -> None:
        self.config.write_text(
            f'[server]\nsocket = "{self.socket}"\nmetrics = ""\n'
            f'[tiers.host]\nsize = "16MiB"\ndirectory = "{self.pool}"\n{text}'
        )

    def start(self, *options: str) -> ServedDaemon:
        """Starts the daemon and waits until it serves."""
        self.process = self.spawn(*options)
        end = time.monotonic() + START_SECONDS
        while "serving on" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, "the daemon is not ready"
            time.sleep(0.01)
        return self

    def spawn(self, *options: str) -> subprocess.Popen[bytes]:
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                self.command(*options), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )

    def command(self, *options: str) -> list[str]:
        return [*command_of("serve", "--config", str(self.config)), *options]

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal and waits; answers with the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(START_SECONDS)

    def client(self) -> KVClient:
        return KVClient.connect(f"unix://{self.socket}")

    def refused(self, *options: str) -> Outcome:
        """What one more daemon of this configuration says before it ends."""
        done = subprocess.run(
            self.command(*options), capture_output=True, text=True, cwd="/", timeout=START_SECONDS
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    @staticmethod
    def engine(client: KVClient) -> Engine:
        return Engine(client)

    @staticmethod
    def fill_and_lease(client: KVClient) -> Match:
        """Four blocks, stored and leased."""
        engine = Engine(client)
        return engine.lease(engine.fill(4))


def command_of(*arguments: str) -> list[str]:
    return [sys.executable, "-Im", "kvstore.cli.main", *arguments]


@pytest.fixture(scope="session")
def command_line() -> Callable[..., list[str]]:
    """The command line as arguments of a process of its own."""
    return command_of


@pytest.fixture(scope="session")
def directories() -> Iterator[Callable[[], Path]]:
    """Makes directories in the memory file system, short enough for a socket's path."""
    made: list[Path] = []

    def make() -> Path:
        made.append(Path(tempfile.mkdtemp(prefix="kvt-", dir="/dev/shm")))
        return made[-1]

    yield make
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def serve(directories: Callable[[], Path]) -> Iterator[Callable[..., ServedDaemon]]:
    """Makes daemons, not started yet; those still there at the end are killed by process id."""
    made: list[ServedDaemon] = []

    def make(**options: str) -> ServedDaemon:
        made.append(ServedDaemon(directories(), **options))
        return made[-1]

    yield make
    for daemon in made:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.end()


@pytest.fixture(scope="session")
def shared_daemon(serve: Callable[..., ServedDaemon]) -> ServedDaemon:
    return serve().start()


@pytest.fixture
def daemon(shared_daemon: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> ServedDaemon:
    """A daemon that runs for all tests, empty; the command line finds it by the environment."""
    monkeypatch.setenv("KVSTORE_SOCKET", shared_daemon.socket)
    with shared_daemon.client() as client:
        client.admin.clear(all=True)
    return shared_daemon


@pytest.fixture
def engine(daemon: ServedDaemon) -> Iterator[Engine]:
    """An engine's client, attached for the test."""
    with daemon.client() as client:
        yield Engine(client)


@pytest.fixture
def kv(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command line in this process."""

    def call(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = run(arguments)
        return Outcome(code, *capfd.readouterr())

    return call
