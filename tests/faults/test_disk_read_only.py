"""A file system that turns read-only, as the kernel makes it after an error of its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemons import eventually
from loop_image import LoopImage, loop_image, tell
from sick_disks import BLOCKS, SickDisk

from kvstore.cli.main import run

IMAGE_BYTES = 256 << 20


@pytest.fixture
def image() -> Iterator[LoopImage]:
    if os.geteuid():
        pytest.skip("only root may mount")
    with loop_image(IMAGE_BYTES) as made:
        yield made


@pytest.fixture
def daemon(image: LoopImage) -> Iterator[SickDisk]:
    with SickDisk(image.mounted / "disk", shim=False) as made:
        yield made


def turn_read_only(image: LoopImage) -> None:
    """The kernel finds an error in the file system, and forbids all writing, open files too."""
    tell("mount", "-o", "remount,errors=remount-ro", str(image.mounted))
    device = Path(tell("findmnt", "-n", "-o", "SOURCE", str(image.mounted)).strip())
    switch = Path("/sys/fs/ext4") / device.name / "trigger_fs_error"
    if not os.access(switch, os.W_OK):
        pytest.skip(f"{switch} cannot be written here")
    switch.write_text("on purpose")
    assert eventually(lambda: not can_write(image.mounted))


def can_write(folder: Path) -> bool:
    try:
        (folder / "try").touch()
    except OSError as error:
        return error.errno != errno.EROFS
    (folder / "try").unlink()
    return True


@pytest.mark.long
def test_a_file_system_that_turns_read_only(
    daemon: SickDisk, image: LoopImage, capfd: pytest.CaptureFixture[str]
) -> None:
    """I9, I14: what is on disk is served from a read-only file system, host goes on, `status` says
    it in a sentence; a start and fsck say what is to be done; on a sound one all is back."""
    with daemon.calm_client() as client:
        daemon.stored(client, 1)
        assert daemon.flushed(client) == (BLOCKS, 0)
    daemon.reboot()
    with daemon.calm_client() as client:
        turn_read_only(image)
        assert daemon.found(client, 1) == BLOCKS
        daemon.stored(client, 2)
        assert daemon.flushed(client)[1] > 0
        assert "Read-only file system" in daemon.problem(client)
        assert daemon.found(client, 2) == BLOCKS
        assert daemon.found(client, 1) == BLOCKS
    daemon.kill()
    daemon.log_path.unlink()
    assert daemon.launch().wait(30) in (1, 2)
    lines = [line for line in daemon.log.splitlines() if line.startswith("kvstore: ")]
    assert len(lines) == 1, daemon.log
    assert "Read-only" in lines[0]
    assert "Traceback" not in daemon.log
    capfd.readouterr()
    assert run(["fsck", str(daemon.path)]) == 2
    assert "Read-only" in capfd.readouterr().err
    image.copy()
    daemon.lose_memory()
    image.go_on_with_copy()
    daemon.start()
    with daemon.calm_client() as client:
        assert not daemon.problem(client)
        assert daemon.found(client, 1) == BLOCKS
        daemon.stored(client, 2)
        assert daemon.flushed(client) == (2 * BLOCKS, 0)
