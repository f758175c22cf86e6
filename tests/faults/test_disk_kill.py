"""kill -9 of a daemon with a disk tier under processes that flush: what was durable comes back."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from daemons import DaemonProcess
from key_ring import KeyRing
from soaked import leave_report
from writers import Expected, WriterProcess, running

LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
limits.lease_ttl_seconds = 1.0
limits.max_lease_ttl_seconds = 1.0
limits.staging_bytes_per_session = "4MiB"
tiers.disk.reserve = "1MiB"
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
index.max_blocks = 200000
"""
DISK_BYTES = 1 << 30


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    made = DaemonProcess("32MiB", on_disk(tmp_path / "disk"))
    yield made
    made.close()


def on_disk(path: Path, more: str = "") -> str:
    return f'{LIMITS}tiers.disk.path = "{path}"\ntiers.disk.size = {DISK_BYTES}\n{more}'


def any_configuration(
    daemon: DaemonProcess, path: Path, random: Random, ring: KeyRing | None
) -> None:
    daemon.size = random.choice(["8MiB", "16MiB", "64MiB"])
    options = {
        "server.worker_threads": random.randrange(1, 4),
        "tiers.host.pool": random.choice(['"shm"', '"sealed"']),
        "tiers.disk.demote_watermark": random.choice([0.0, 0.2, 0.75, 1.0]),
        "tiers.disk.direct": random.choice(["true", "false"]),
        "tiers.disk.read_threads": random.randrange(1, 4),
        "tiers.disk.size": random.choice([DISK_BYTES, DISK_BYTES * 3 // 2]),
    }
    if ring is not None:
        options["tiers.disk.key_file"] = f'"{ring.path}"'
    lines = [f"{key} = {value}" for key, value in options.items()]
    daemon.configure(f'{LIMITS}tiers.disk.path = "{path}"\n' + "\n".join(lines))


class Totals:
    """What a loop has done, so that a test can see that it did something."""

    def __init__(self) -> None:
        self.kills = self.emptied = self.on_disk = self.kills_with_keys = 0
        self.key_changes = self.keys_written = 0
        self.durable_blocks = self.checked_blocks = 0
        self.slowest_start = 0.0

    def __repr__(self) -> str:
        return str(vars(self))

    def add(self, expected: Expected, ring: KeyRing | None) -> None:
        """A directory whose time is over."""
        self.durable_blocks += sum(expected.blocks.values())
        self.checked_blocks += expected.checked_blocks
        if ring is not None:
            self.key_changes += ring.changes.total()
            self.keys_written += ring.written_count


def run_kills(
    daemon: DaemonProcess, folder: Path, kills: int, count: int, seed: int, parts: int
) -> Totals:
    """The kills in so many parts, each on a directory of its own: in clear, with keys, in clear...

    A directory that has blocks in clear drops them when it gets keys, as it promises; within a
    part keys only change in ways that lose none.
    """
    random, totals = Random(seed), Totals()
    for part in range(parts):
        ring = KeyRing(folder / f"keys-{part}", random) if part % 2 else None
        path = folder / f"disk-{part}"
        any_configuration(daemon, path, random, ring)
        daemon.start()
        run_part(daemon, path, kills * (part + 1) // parts, count, random, ring, totals)
        shutil.rmtree(path)
    print(totals)
    assert totals.slowest_start < 30.0
    assert not totals.kills_with_keys or totals.keys_written > 1
    return totals


def run_part(
    daemon: DaemonProcess, path: Path, kills: int, count: int, random: Random,
    ring: KeyRing | None, totals: Totals,
) -> None:  # fmt: skip
    """Until there were so many kills, with the last one and all that is durable checked."""
    expected = Expected()
    with running(daemon.address, count, "flush") as writers:
        while totals.kills < kills:
            time.sleep(random.uniform(0.3, 0.9))
            change_keys(daemon, random, ring)
            kill(daemon, totals, ring)
            expected.take(writers)
            if random.random() < 0.8:
                daemon.lose_memory()
                totals.emptied += 1
            any_configuration(daemon, path, random, ring)
            if ring is not None and random.random() < 0.6:
                ring.change()
            if random.random() < 0.2:
                # Once more, in the middle of its recovery.
                daemon.launch()
                time.sleep(random.uniform(0.2, 0.8))
                kill(daemon, totals, ring)
            start_and_check(daemon, expected, totals, random)
        daemon.kill()
        expected.take(writers)
        daemon.lose_memory()
        start_and_check(daemon, expected, totals, None)
    daemon.kill()
    daemon.lose_memory()
    check_complaints(writers)
    assert "which is not there" not in daemon.log, "no key was taken out that blocks need"
    totals.add(expected, ring)


def kill(daemon: DaemonProcess, totals: Totals, ring: KeyRing | None) -> None:
    daemon.kill()
    totals.kills += 1
    totals.kills_with_keys += ring is not None


def change_keys(daemon: DaemonProcess, random: Random, ring: KeyRing | None) -> None:
    """Now and then while it serves; the kill comes at any time after."""
    if ring is not None and random.random() < 0.4:
        ring.change()
        daemon.signal(signal.SIGHUP)
        time.sleep(random.choice([0.0, 0.01, 0.1]))


def start_and_check(
    daemon: DaemonProcess, expected: Expected, totals: Totals, random: Random | None
) -> None:
    began = time.monotonic()
    daemon.start()
    totals.slowest_start = max(totals.slowest_start, time.monotonic() - began)
    with daemon.client(call_timeout_seconds=10.0) as client:
        expected.check(client, random)
        tier = client.status().tiers["disk"]
    assert not expected.lost, f"{expected.lost}\n{daemon.log}"
    assert tier.problem == ""
    assert tier.used_bytes < 0.9 * tier.capacity_bytes, "nothing durable may have been evicted"
    totals.on_disk = tier.block_count


def check_complaints(writers: list[WriterProcess]) -> None:
    assert not [line for one in writers for line in one.complaints]
    assert all(one.process.returncode == 0 for one in writers)
    assert all(one.durable and one.hits for one in writers)


@pytest.mark.parametrize(
    ("kills", "seed", "parts"),
    [
        pytest.param(8, 1, 2, marks=pytest.mark.timeout(400)),
        pytest.param(30, 2, 2, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param(
            200, 3, 4, marks=[pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(3600)]
        ),
    ],
)
def test_flushed_blocks_survive_kills(
    daemon: DaemonProcess, tmp_path: Path, kills: int, seed: int, parts: int
) -> None:
    """I9, I11: over so many kills under writers, with a configuration of its own for each life and
    mostly with all host memory gone, half of them with keys that change, what Flush said
    was durable is back and right."""
    writers = 5 if kills < 10 else 8
    totals = run_kills(daemon, tmp_path, kills, writers, seed, parts)
    figures = {**vars(totals), "seed": seed, "writers": writers, "lost_blocks": 0, "wrong_bytes": 0}
    leave_report(f"kills-{kills}", figures)
    assert totals.durable_blocks > 25 * kills
    assert totals.kills_with_keys > kills // 3


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_key_that_leaves_is_found_out(daemon: DaemonProcess, tmp_path: Path) -> None:
    """The same with the first of two keys taken out: its blocks are lost, and the campaign above
    sees that; what the other key wrote is right (I11)."""
    ring, random, expected = KeyRing(tmp_path / "keys", Random(4)), Random(5), Expected()
    any_configuration(daemon, tmp_path / "disk", random, ring)
    daemon.start()
    with running(daemon.address, 4, "flush") as writers:
        while ring.written_count < 2 or not expected.blocks:
            time.sleep(1.0)
            expected.take(writers)
            if expected.blocks:
                ring.change()
                daemon.signal(signal.SIGHUP)
        time.sleep(1.0)
        daemon.kill()
        expected.take(writers)
        daemon.lose_memory()
        ring.forget()
        daemon.start()
        with daemon.client(call_timeout_seconds=10.0) as client:
            expected.check(client)
    assert expected.lost
    assert "which is not there" in daemon.log
    complaints = [line for one in writers for line in one.complaints]
    assert all(line.startswith("LOST") for line in complaints)


def overflowed(expected: Expected, writers: list[WriterProcess]) -> bool:
    """Whether there was more than the disk holds: durable blocks made way, or others had to."""
    return bool(expected.lost) or any(one.left_out for one in writers)


@pytest.mark.timeout(300)
def test_kills_of_a_disk_that_is_too_small(daemon: DaemonProcess, tmp_path: Path) -> None:
    """I5, I11: where slots are given up and used again all the time, blocks may be gone after a
    kill with all host memory, but nothing that is served is wrong."""
    daemon.size = "16MiB"
    # A flush leaves out what the disk has no room for; what is due makes older blocks go.
    small = f'{LIMITS}tiers.disk.size = "16MiB"\ntiers.disk.demote_watermark = 0.0\n'
    daemon.configure(f'{small}tiers.disk.path = "{tmp_path / "disk"}"')
    expected, kills, began = Expected(), 0, time.monotonic()
    daemon.start()
    with running(daemon.address, 4, "flush fast") as writers:
        # How much is written in a second is the machine's matter: until there was too much.
        while kills < 8 or (not overflowed(expected, writers) and time.monotonic() - began < 180):
            time.sleep(2.0)
            daemon.kill()
            kills += 1
            daemon.lose_memory()
            expected.take(writers)
            daemon.start()
            with daemon.client(call_timeout_seconds=10.0) as client:
                expected.check(client)
    complaints = [line for one in writers for line in one.complaints]
    assert not [line for line in complaints if not line.startswith("LOST")]
    assert overflowed(expected, writers), "the disk was large enough; nothing was tested"
    assert expected.checked_blocks > 500
