"""kill -9 of a daemon with a disk tier under processes that flush: what was durable comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from daemons import DaemonProcess
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


def any_configuration(daemon: DaemonProcess, path: Path, random: Random) -> None:
    daemon.size = random.choice(["8MiB", "16MiB", "64MiB"])
    options = {
        "server.worker_threads": random.randrange(1, 4),
        "tiers.host.pool": random.choice(['"shm"', '"sealed"']),
        "tiers.disk.demote_watermark": random.choice([0.0, 0.2, 0.75, 1.0]),
        "tiers.disk.direct": random.choice(["true", "false"]),
        "tiers.disk.read_threads": random.randrange(1, 4),
        "tiers.disk.size": random.choice([DISK_BYTES, DISK_BYTES * 3 // 2]),
    }
    lines = [f"{key} = {value}" for key, value in options.items()]
    daemon.configure(f'{LIMITS}tiers.disk.path = "{path}"\n' + "\n".join(lines))


class Totals:
    """What a loop has done, so that a test can see that it did something."""

    def __init__(self) -> None:
        self.kills = self.emptied = self.on_disk = 0
        self.slowest_start = 0.0

    def __repr__(self) -> str:
        return str(vars(self))


def run_kills(
    daemon: DaemonProcess, path: Path, kills: int, count: int, seed: int
) -> tuple[Expected, Totals]:
    random, expected, totals = Random(seed), Expected(), Totals()
    daemon.start()
    with running(daemon.address, count, "flush") as writers:
        while totals.kills < kills:
            time.sleep(random.uniform(0.3, 0.9))
            daemon.kill()
            totals.kills += 1
            expected.take(writers)
            if random.random() < 0.8:
                daemon.lose_memory()
                totals.emptied += 1
            any_configuration(daemon, path, random)
            if random.random() < 0.2:
                # Once more, in the middle of its recovery.
                daemon.launch()
                time.sleep(random.uniform(0.2, 0.8))
                daemon.kill()
                totals.kills += 1
            start_and_check(daemon, expected, totals, random)
        daemon.kill()
        expected.take(writers)
        daemon.lose_memory()
        start_and_check(daemon, expected, totals, None)
    print(totals, f"{expected.checked_blocks} checked, {sum(expected.blocks.values())} durable")
    check_complaints(writers)
    assert totals.slowest_start < 30.0
    return expected, totals


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
    ("kills", "seed"),
    [
        pytest.param(10, 1, marks=pytest.mark.timeout(400)),
        pytest.param(30, 2, marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
        pytest.param(200, 3, marks=[pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_flushed_blocks_survive_kills(
    daemon: DaemonProcess, tmp_path: Path, kills: int, seed: int
) -> None:
    """I9, I11: over so many kills under eight writers, with a configuration of its own for each
    life and mostly with all host memory gone, what Flush said was durable is back and right."""
    expected, totals = run_kills(daemon, tmp_path / "disk", kills, 8, seed)
    durable = sum(expected.blocks.values())
    leave_report(
        f"kills-{kills}",
        {
            **vars(totals), "seed": seed, "writers": 8, "durable_blocks": durable,
            "checked_blocks": expected.checked_blocks, "lost_blocks": len(expected.lost),
            "wrong_bytes": 0,
        },
    )  # fmt: skip
    assert durable > 25 * kills


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
