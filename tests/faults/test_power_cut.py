"""Power cuts: the disk tier's file system as it was on the device, and nothing else, comes back."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from daemons import DaemonProcess
from fault_shim import PRETEND, Call, FaultShim, File
from key_ring import KeyRing
from loop_image import LoopImage, freeze, loop_image
from soaked import leave_report
from writers import Expected, running

IMAGE_BYTES = 384 << 20
LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
limits.lease_ttl_seconds = 1.0
limits.max_lease_ttl_seconds = 1.0
limits.staging_bytes_per_session = "4MiB"
tiers.disk.size = "320MiB"
tiers.disk.reserve = "4MiB"
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
index.max_blocks = 100000
"""
WRITERS = 4
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture
def image() -> Iterator[LoopImage]:
    with loop_image(IMAGE_BYTES) as made:
        yield made


@pytest.fixture
def daemon(image: LoopImage) -> Iterator[DaemonProcess]:
    made = DaemonProcess("32MiB")
    yield made
    made.close()


def configure(
    daemon: DaemonProcess, image: LoopImage, random: Random, ring: KeyRing | None = None,
    limits: str = LIMITS,
) -> None:  # fmt: skip
    """A configuration for the next life; with keys they may change before it, too."""
    daemon.size = random.choice(["16MiB", "64MiB"])
    options = {
        "tiers.disk.path": f'"{image.mounted / "disk"}"',
        "tiers.disk.direct": random.choice(["true", "false"]),
        "tiers.disk.demote_watermark": random.choice([0.0, 0.2, 0.75]),
    }
    if ring is not None:
        options["tiers.disk.key_file"] = f'"{ring.path}"'
        if random.random() < 0.6:
            ring.change()
    daemon.configure(limits + "\n".join(f"{key} = {value}" for key, value in options.items()))


def cut_power(daemon: DaemonProcess, image: LoopImage) -> None:
    """The daemon and all memory are gone, and what the device did not have by then."""
    image.copy()
    daemon.kill()
    daemon.lose_memory()
    image.go_on_with_copy()


def start_anew(daemon: DaemonProcess, image: LoopImage) -> None:
    """An empty directory for the next life: what is in clear does not outlive that keys come."""
    if daemon.process is not None:
        daemon.kill()
        daemon.lose_memory()
    shutil.rmtree(image.mounted / "disk", ignore_errors=True)


def run_cuts(
    daemon: DaemonProcess, image: LoopImage, cuts: int, random: Random, ring: KeyRing | None = None
) -> Expected:
    """Cuts the power until something is lost; `lost` of the answer names what did not come back.

    With keys these change, while the daemon writes and before it starts.
    """
    expected = Expected()
    start_anew(daemon, image)
    configure(daemon, image, random, ring)
    daemon.start()
    with running(daemon.address, WRITERS, "flush") as writers:
        for _ in range(cuts):
            time.sleep(random.uniform(0.5, 1.5))
            change_keys(daemon, random, ring)
            freeze(daemon.pid)
            expected.take(writers)
            cut_power(daemon, image)
            configure(daemon, image, random, ring)
            daemon.start()
            with daemon.client(call_timeout_seconds=10.0) as client:
                expected.check(client, random)
                tier = client.status().tiers["disk"]
            assert not tier.problem
            assert tier.used_bytes < 0.9 * tier.capacity_bytes, "nothing may have been evicted"
            if expected.lost:
                break
        with daemon.client(call_timeout_seconds=10.0) as client:
            expected.check(client)
    complaints = [line for one in writers for line in one.complaints]
    assert not [line for line in complaints if not expected.lost or line[:4] != "LOST"]
    assert "which is not there" not in daemon.log, "no key was taken out that blocks need"
    print(f"{sum(expected.blocks.values())} durable, {expected.checked_blocks} checked")
    return expected


def change_keys(daemon: DaemonProcess, random: Random, ring: KeyRing | None) -> None:
    if ring is not None and random.random() < 0.4:
        ring.change()
        daemon.signal(signal.SIGHUP)
        time.sleep(random.choice([0.0, 0.01, 0.1]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("cuts", "seed"),
    [
        pytest.param(10, 1, marks=pytest.mark.timeout(600)),
        # A hundred and four, on a new disk every twenty-six: nothing may have to be evicted.
        *(pytest.param(26, seed, marks=SOAK) for seed in range(2, 6)),
    ],
)
def test_what_was_flushed_outlives_a_power_cut(
    daemon: DaemonProcess, image: LoopImage, tmp_path: Path, cuts: int, seed: int
) -> None:
    """I9, I11: over so many power cuts with an empty host after each, half of them with keys that
    change, every block that Flush said was durable is there, and what is served is right."""
    random = Random(seed)
    ring = KeyRing(tmp_path / "keys", random)
    runs = [run_cuts(daemon, image, cuts // 2, random, keys) for keys in (None, ring)]
    durable = sum(sum(run.blocks.values()) for run in runs)
    lost = [what for run in runs for what in run.lost]
    leave_report(
        f"power-cuts-{cuts}-seed-{seed}",
        {
            "cuts": cuts, "cuts_with_keys": cuts // 2, "keys_written": ring.written_count,
            "writers": WRITERS, "durable_blocks": durable,
            "checked_blocks": sum(run.checked_blocks for run in runs), "lost_blocks": len(lost),
            "wrong_bytes": 0,
        },
    )  # fmt: skip
    assert not lost, f"{lost}\n{daemon.log}"
    assert durable > 20 * cuts
    assert ring.written_count > 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("files", [tuple(File), (File.SEGMENT,)], ids=["all", "segments"])
def test_a_disk_that_does_not_sync_is_found_out(
    daemon: DaemonProcess, image: LoopImage, tmp_path: Path, files: tuple[File, ...]
) -> None:
    """The same with syncs that do nothing loses blocks within a few cuts, with keys or without,
    so that the test above can fail; what is left is served right even then (I11), and the daemon
    starts (I13)."""
    shim = FaultShim(image.mounted, tmp_path / "control")
    daemon.environ = shim.environ
    for file in files:
        shim.set(Call.SYNC, file, PRETEND)
    random = Random(2)
    ring = KeyRing(tmp_path / "keys", random) if File.INDEX not in files else None
    expected = run_cuts(daemon, image, 12, random, ring)
    leave_report(
        f"power-cuts-without-sync-of-{len(files)}",
        {"lost": expected.lost, "durable_blocks": sum(expected.blocks.values())},
    )
    assert all(shim.hits(Call.SYNC, file) for file in files if file is not File.META)
    assert expected.blocks
    assert expected.lost


@pytest.mark.long
@pytest.mark.timeout(600)
def test_power_cuts_of_a_disk_that_is_too_small(
    daemon: DaemonProcess, image: LoopImage, tmp_path: Path
) -> None:
    """I5, I11: where slots are given up and used again all the time, blocks may be gone after a
    power cut, but nothing that is served is wrong; in clear, then with keys."""
    random = Random(3)
    runs = [
        cuts_of_a_small_disk(daemon, image, random, ring)
        for ring in (None, KeyRing(tmp_path / "keys", random))
    ]
    for expected in runs:
        assert expected.lost, "the disk was large enough for all; nothing was tested"
        assert expected.checked_blocks > 500


def cuts_of_a_small_disk(
    daemon: DaemonProcess, image: LoopImage, random: Random, ring: KeyRing | None
) -> Expected:
    """Five cuts, or more until there was too much for the disk: that is the machine's matter."""
    small = LIMITS.replace("320MiB", "16MiB").replace("100000", "1500")
    expected, cuts = Expected(), 0
    start_anew(daemon, image)
    configure(daemon, image, random, ring, small)
    daemon.start()
    with running(daemon.address, WRITERS, "flush fast") as writers:
        while cuts < 5 or (not expected.lost and cuts < 25):
            cuts += 1
            time.sleep(random.uniform(1.5, 2.5))
            change_keys(daemon, random, ring)
            freeze(daemon.pid)
            expected.take(writers)
            cut_power(daemon, image)
            configure(daemon, image, random, ring, small)
            daemon.start()
            with daemon.client(call_timeout_seconds=10.0) as client:
                expected.check(client)
    complaints = [line for one in writers for line in one.complaints]
    assert not [line for line in complaints if not line.startswith("LOST")]
    return expected
