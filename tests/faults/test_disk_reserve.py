"""A file system that others fill and empty, around a disk tier that is to leave room on it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import eventually
from loop_image import LoopImage, tell
from sick_disks import BLOCKS, SickDisk

from kvstore.client import KVClient

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
FILE_SYSTEM_BYTES, RESERVE_BYTES = 112 << 20, 16 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system of each kind."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-small-", dir="/dev/shm"))
    if request.param == "ext4":
        image = LoopImage(folder / "loop", FILE_SYSTEM_BYTES)
        yield image.mounted
        image.close()
    else:
        mounted = folder / "mounted"
        mounted.mkdir()
        options = f"size={FILE_SYSTEM_BYTES},mode=700"
        tell("mount", "-t", "tmpfs", "-o", options, "small", str(mounted))
        yield mounted
        tell("umount", str(mounted))
        mounted.rmdir()
    folder.rmdir()


@pytest.fixture
def daemon(small: Path) -> Iterator[SickDisk]:
    made = SickDisk(
        small / "disk", disk_size="64MiB", reserve=str(RESERVE_BYTES), shim=False
    ).start()  # fmt: skip
    assert isinstance(made, SickDisk)
    yield made
    made.close()


def free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


class Others:
    """Who else uses the file system: files of theirs, so large that `left` bytes stay free."""

    def __init__(self, path: Path) -> None:
        self.path = path / "others"

    def leave(self, left: int) -> None:
        size = 1 << 20
        with open(self.path, "ab", 0) as file:
            while size >= 4096:
                try:
                    if free_bytes(self.path.parent) - size >= left and file.write(bytes(size)):
                        os.fsync(file.fileno())  # else it is not yet known to take any room
                        continue
                except OSError:
                    pass
                size //= 2

    def go(self) -> None:
        self.path.unlink()


class Watch:
    """The least free space that was seen while it ran."""

    def __init__(self, path: Path) -> None:
        self.path, self.least, self._over = path, free_bytes(path), False
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over:
            self.least = min(self.least, free_bytes(self.path))
            time.sleep(0.002)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()


def test_the_reserve_stays_free(daemon: SickDisk, small: Path) -> None:
    """I14: the tier grows only as far as `tiers.disk.reserve` allows, at every moment, and goes
    on with the room it has; it grows again when others have made room."""
    others = Others(small)
    with daemon.calm_client() as client:
        daemon.stored(client, 0)
        assert daemon.flushed(client) == (BLOCKS, 0)
        others.leave(RESERVE_BYTES + (12 << 20))
        with Watch(small) as watch:
            for number in range(1, 20):
                daemon.stored(client, number)
                daemon.flushed(client)
                assert daemon.found(client, number) == BLOCKS
        assert watch.least >= RESERVE_BYTES
        assert watch.least < RESERVE_BYTES + (6 << 20), "the room there was has been used"
        used = client.status().tiers["disk"].used_bytes
        assert used > 4 << 20
        others.go()
        assert daemon.recovers(client), daemon.problem(client)
        for number in range(20, 40):
            daemon.stored(client, number)
        # Room is measured every few seconds only.
        assert eventually(lambda: used_after_flush(daemon, client) > used + (8 << 20), 30.0, 0.5)


def used_after_flush(daemon: SickDisk, client: KVClient) -> int:
    daemon.flushed(client)
    return int(client.status().tiers["disk"].used_bytes)


@pytest.mark.long
def test_no_space_left_again_and_again(daemon: SickDisk, small: Path) -> None:
    """I9, I14: with not a byte left the tier says so and host goes on; with space again it takes
    blocks without a restart, and what was durable before, between and after outlives a reboot."""
    others, numbers = Others(small), iter(range(100))
    durable = []
    with daemon.calm_client() as client:
        for _ in range(3):
            number = next(numbers)
            daemon.stored(client, number)
            assert daemon.flushed(client) == (BLOCKS * (len(durable) + 1), 0)
            durable.append(number)
            others.leave(0)
            for number in (next(numbers) for _ in range(8)):
                daemon.stored(client, number)
                assert daemon.found(client, number) == BLOCKS
                durable.append(number)
            assert daemon.flushed(client)[1] > 0
            assert [daemon.found(client, n) for n in durable] == [BLOCKS] * len(durable)
            others.go()
            assert daemon.recovers(client), daemon.problem(client)
            assert daemon.flushed(client) == (BLOCKS * len(durable), 0)
    daemon.reboot()
    with daemon.calm_client() as client:
        assert [daemon.found(client, n) for n in durable] == [BLOCKS] * len(durable)
