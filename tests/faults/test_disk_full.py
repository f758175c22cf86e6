"""A file system that others fill: the disk tier is degraded, the daemon is not, and it mends."""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually

from kvstore.replay.own_daemon import free_address

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
BLOCKS = 400


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    options = ["-o", "size=24m,mode=700"]
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "small", str(path)], check=False)
    if done.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", 0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def test_a_full_file_system_degrades_the_tier_alone(small: Path) -> None:
    """I14: the host tier serves on, /ready stays ok, `status` has the sentence, and it heals."""
    metrics = free_address()
    daemon = DaemonProcess(
        "16MiB",
        f'tiers.disk.path = "{small}/disk"\ntiers.disk.size = "16MiB"\n'
        'tiers.disk.reserve = "1MiB"\ntiers.host.prefault = false\n',
        metrics,
    )
    tokens = [list(range(first, first + 4 * BLOCKS)) for first in (0, 10_000)]
    try:
        daemon.start()
        with daemon.client() as client:
            space = client.attach(SPEC)
            assert space.put(tokens[0], Tagged().blocks(tokens[0])).stored == BLOCKS
            assert client.admin.flush().durable_blocks == BLOCKS
            fill(small / "others")
            assert space.put(tokens[1], Tagged().blocks(tokens[1])).stored == BLOCKS
            assert client.admin.flush().left_out_blocks > 0
            status = client.status()
            assert status.state == "degraded"
            assert status.reason.startswith("disk: ")
            assert status.tiers["disk"].state == "degraded"
            assert status.tiers["host"].state == "serving"
            with urllib.request.urlopen(f"http://{metrics}/ready", timeout=5) as answer:
                assert answer.status == 200
            with space.lookup(tokens[1]) as match:
                assert Tagged().wrong(tokens[1], space.restore(match)) == 0
                assert match.matched_tokens == 4 * BLOCKS
            assert eventually(lambda: "the disk tier takes no blocks" in daemon.log)
            (small / "others").unlink()
            assert eventually(lambda: client.status().state == "serving", 20)
            assert client.admin.flush().durable_blocks > 0
            assert eventually(lambda: "takes blocks again" in daemon.log)
    finally:
        daemon.close()
