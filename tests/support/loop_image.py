"""`LoopImage`: a small file system on a loop device, whose power can be cut. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Nothing gets to the device by the mere passing of time: what is on it was asked to be there.
MOUNT_OPTIONS = "loop,commit=600,nodiscard"


def tell(*command: str) -> str:
    """Runs a command; AssertionError with what it said if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise AssertionError(f"{command[0]} is missing, and this test cannot be without") from error
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}{result.stdout}"
    return result.stdout


@contextmanager
def loop_image(size_bytes: int) -> Iterator[LoopImage]:
    """An image in a folder of its own in memory, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-image-", dir="/dev/shm"))
    image = LoopImage(folder / "loop", size_bytes)
    yield image
    image.close()
    folder.rmdir()


class LoopImage:
    """An ext4 file system in a file in memory, mounted at `mounted`.

    What was written and not synced is in the page cache of the mounted file system alone. A copy
    of the image, made while nobody writes, is what a power cut would leave.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        assert os.geteuid() == 0, "a loop device needs root; run this as root"
        self.folder, self.mounted, self._number = folder, folder / "mounted", 0
        self.mounted.mkdir(parents=True)
        with open(self.path, "wb") as file:
            file.truncate(size_bytes)
        tell("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0", str(self.path))
        self.mount()

    @property
    def path(self) -> Path:
        """The image in use now."""
        return self.folder / f"image-{self._number}"

    def mount(self) -> None:
        tell("mount", "-o", MOUNT_OPTIONS, str(self.path), str(self.mounted))

    def unmount(self) -> None:
        end = time.monotonic() + 20.0
        while subprocess.run(["umount", str(self.mounted)], capture_output=True).returncode:
            assert time.monotonic() < end, f"{self.mounted} is in use"
            time.sleep(0.05)

    def copy(self) -> Path:
        """What is on the device at this moment, as a file of its own."""
        path = self.folder / f"image-{self._number + 1}"
        tell("cp", "--sparse=always", str(self.path), str(path))
        return path

    def go_on_with_copy(self) -> None:
        """Unmounts, and mounts the last copy instead: power is back."""
        self.unmount()
        self.path.unlink()
        self._number += 1
        self.mount()

    def close(self) -> None:
        if os.path.ismount(self.mounted):
            self.unmount()
        shutil.rmtree(self.folder, ignore_errors=True)


def freeze(pid: int) -> None:
    """SIGSTOP, and waits until every thread has stopped: none is inside a call any more."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 20.0
    while any(_state(task) not in "Tt" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < end, f"process {pid} does not stop"
        time.sleep(0.005)


def _state(task: Path) -> str:
    return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
