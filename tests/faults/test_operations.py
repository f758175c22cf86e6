"""What operators do to a daemon under load, and what happens to its machine: nothing is wrong."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually
from sick_disks import BLOCKS, SickDisk
from wall_clock import WallClock

from kvstore.client import KVClient, StoreUnavailable

ENGINES = 4
RESTARTS = 3
CALL_SECONDS = 2.0
DAY, YEAR = 86_400, 365 * 86_400
BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Engine(threading.Thread):
    """Sends requests as an engine does: looks up, restores, computes the rest, puts it.

    A request fails if anything but StoreUnavailable comes of its lookup or put, or anything at all
    of the restore of what a lookup has promised.
    """

    def __init__(self, address: str, number: int) -> None:
        super().__init__(daemon=True)
        self.client = KVClient.connect(address, call_timeout_seconds=CALL_SECONDS)
        self.space = self.client.attach(SPEC)
        self.tagged = Tagged()
        self.prompts = [[number << 20 | n << 12 | i for i in range(64)] for n in range(6)]
        self.stopped = threading.Event()
        self.requests = self.hits = self.alone = self.wrong = 0
        self.slowest = 0.0
        self.failed: list[BaseException] = []

    def run(self) -> None:
        for tokens in itertools.cycle(self.prompts):
            if self.stopped.is_set():
                break
            began = time.monotonic()
            try:
                self.request(tokens)
            except Exception as error:
                self.failed.append(error)
            self.slowest = max(self.slowest, time.monotonic() - began)
            self.requests += 1
            time.sleep(0.005)

    def request(self, tokens: list[int]) -> None:
        try:
            match = self.space.lookup(tokens)
        except StoreUnavailable:
            self.alone += 1  # computed without the store
            return
        with match:
            target = np.empty((match.block_count, SPEC.block_bytes), np.uint8)
            self.space.restore_into(match, target)
        self.hits += bool(len(target))
        self.wrong += self.tagged.wrong(tokens, target)
        try:
            self.space.put(tokens, self.tagged.blocks(tokens))
        except StoreUnavailable:
            self.alone += 1

    def stop(self) -> None:
        self.stopped.set()
        self.join(30.0)
        self.client.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SickDisk]:
    """With a disk tier; not started."""
    made = SickDisk(tmp_path / "disk", shim=False)
    yield made
    made.close()


@pytest.fixture
def engines(daemon: SickDisk) -> Iterator[list[Engine]]:
    daemon.start()
    made = [Engine(daemon.address, number) for number in range(1, ENGINES + 1)]
    for engine in made:
        engine.start()
    yield made
    for engine in made:
        engine.stop()


@pytest.mark.timeout(180)
def test_rolling_restarts_under_load(daemon: SickDisk, engines: list[Engine]) -> None:
    """I6, I10: over three drains and restarts under load no request fails: what a lookup promised
    is restored, later ones compute alone, at once, and all go on with their blocks afterwards."""
    for way in range(RESTARTS):
        before = [engine.hits for engine in engines]
        assert eventually(
            lambda seen=before: all(e.hits > n + 5 for e, n in zip(engines, seen, strict=True)),
            30.0,
        ), [engine.failed for engine in engines]
        if way % 2:
            with daemon.calm_client() as operator:
                operator.admin.drain(10.0)
        else:
            daemon.signal(signal.SIGTERM)
        assert daemon.wait(20.0) == 0
        daemon.start()
        assert daemon.status().readopted_blocks >= ENGINES * 6 * 16
    last = [engine.hits for engine in engines]
    assert eventually(lambda: all(e.hits > n for e, n in zip(engines, last, strict=True)), 30.0)
    for engine in engines:
        engine.stop()
        assert not engine.failed, engine.failed
        assert not engine.wrong
        assert engine.alone, "the load never met a daemon that was away"
        assert engine.slowest < CALL_SECONDS + 1.0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a boot id of its own")
def test_another_boot(daemon: SickDisk, tmp_path: Path) -> None:
    """I9, I10: memory of another boot is not believed, and a sentence says so; what is on disk is
    there, and nothing is wrong."""
    daemon.start()
    with daemon.calm_client() as client:
        daemon.stored(client, 1)
        assert daemon.flushed(client) == (BLOCKS, 0)
        daemon.stored(client, 2)
    daemon.kill()
    other = tmp_path / "boot_id"
    other.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    # In a mount namespace of its own, the daemon alone sees it.
    inside = f'mount --bind {other} {BOOT_ID} && exec "$@"'
    daemon.program = ["unshare", "--mount", "sh", "-c", inside, "sh", *daemon.program]
    daemon.start()
    assert "boot id changed" in daemon.log
    with daemon.calm_client() as client:
        assert daemon.found(client, 1) == BLOCKS
        assert daemon.found(client, 2) == 0
        daemon.stored(client, 2)
        assert daemon.found(client, 2) == BLOCKS


def jumps(daemon: SickDisk) -> int:
    return daemon.log.count("the wall clock jumped")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to move the clock with")
def test_the_wall_clock_jumps(daemon: SickDisk, engines: list[Engine]) -> None:
    """I6, I9: however far the wall clock jumps, forward or back, under load and over a restart,
    leases hold, nothing is lost or wrong, and each jump is logged."""
    daemon.kill()
    clock = WallClock(daemon.directory / "clock")
    daemon.environ = clock.environ
    daemon.start()
    with daemon.calm_client() as client:
        daemon.stored(client, 1)
        assert daemon.flushed(client)[1] == 0
        space = client.attach(SPEC)
        held = space.lookup([1 << 16 | i for i in range(4 * BLOCKS)])
        for number, seconds in enumerate([3600, -3600, 10 * YEAR, -10 * YEAR, 0], 1):
            clock.set(seconds)
            assert eventually(lambda n=number: jumps(daemon) >= n, 10.0), daemon.log
            held.check()
            assert daemon.found(client, 1) == BLOCKS
            daemon.stored(client, 1 + number)
        held.release()
        assert daemon.flushed(client)[1] == 0
    # The next life is ten days before the last one.
    daemon.kill()
    daemon.lose_memory()
    clock.set(-10 * DAY)
    daemon.start()
    with daemon.calm_client() as client:
        assert [daemon.found(client, n) for n in range(1, 7)] == [BLOCKS] * 6
        daemon.stored(client, 20)
        assert daemon.found(client, 20) == BLOCKS
    for engine in engines:
        engine.stop()
        assert not engine.failed, engine.failed
        assert not engine.wrong


def test_two_daemons_at_the_same_moment(daemon: SickDisk) -> None:
    """I20: of two daemons that start on one disk at once, one serves; the other leaves with one
    sentence that names the directory, and spoils nothing."""
    other = DaemonProcess("16MiB")
    other.configure(daemon.base)
    try:
        processes = [one.launch() for one in (daemon, other)]
        assert eventually(lambda: any(p.poll() is not None for p in processes), 30.0)
        loser, winner = sorted((other, daemon), key=lambda d: d.process.poll() is None)
        assert loser.wait() == 2
        lines = [line for line in loser.log.splitlines() if line.startswith("kvstore: ")]
        assert len(lines) == 1, loser.log
        assert str(daemon.path) in lines[0]
        assert eventually(lambda: "serving on" in winner.log, 30.0)
        assert winner.status().state == "serving"
    finally:
        other.close()


def test_another_version_is_left_as_it_is(daemon: SickDisk) -> None:
    """A disk of a later version is refused with one sentence, and not a byte of it is changed."""
    daemon.start()
    with daemon.calm_client() as client:
        daemon.stored(client, 1)
        assert daemon.flushed(client) == (BLOCKS, 0)
        (space,) = client.status(with_spaces=True).spaces
        client.admin.bump_epoch(space.space_id)
    daemon.kill()
    file = daemon.path / "format.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 99'))
    # As a later one would have it: another record, too.
    (daemon.path / "epochs").write_bytes(b"KVEPOCH\x63 and what we cannot know")
    before = contents(daemon.path)
    daemon.log_path.unlink()
    assert daemon.launch().wait(30) == 1
    lines = [line for line in daemon.log.splitlines() if line.startswith("kvstore: ")]
    assert len(lines) == 1, daemon.log
    assert "format 99" in lines[0]
    assert contents(daemon.path) == before


def contents(path: Path) -> dict[str, bytes]:
    """Every file, but the one that says who looks at them."""
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "LOCK"]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}
