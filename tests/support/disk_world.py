"""A disk tier with blocks that follow from their number, and media that fail on purpose."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.io import PAGE, FileIO, aligned

SIZE = 12_000
GROUP = 64


class PowerCut(BaseException):
    """Everything stops here; no handler of errors runs on purpose."""


@lru_cache(4096)
def payload(i: int, length: int = SIZE) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, length, dtype=np.uint8)


def header(i: int, length: int = SIZE, symbol_bytes: int = 64) -> BlockHeader:
    return BlockHeader(
        space=bytes([1 + i % 3]) * 32,
        root=bytes([1 + i % 5]) * 32,
        key=i.to_bytes(16, "little"),
        parent_key=(i + 1).to_bytes(16, "big"),
        position=i % 1000,
        shard=i % 2,
        epoch=i % 4,
        length=length,
        symbol=(i.to_bytes(4, "little") * symbol_bytes)[:symbol_bytes],
    )


def number_of(found: BlockHeader) -> int:
    return int.from_bytes(found.key, "little")


def put(tier: DiskTier, numbers: list[int], length: int = SIZE, symbol_bytes: int = 64) -> dict:
    """Stores blocks, in groups; places by number, of those that found room."""
    places = tier.reserve(length, symbol_bytes, len(numbers))
    stored = list(zip(numbers, places, strict=False))
    for start in range(0, len(stored), GROUP):
        group = stored[start : start + GROUP]
        checksums = tier.write_many([(place, payload(i, length)) for i, place in group])
        tier.commit(
            [
                (place, header(i, length, symbol_bytes), checksum)
                for (i, place), checksum in zip(group, checksums, strict=True)
            ]
        )
    return dict(stored)


def drop(tier: DiskTier, places: list[int]) -> None:
    tier.discard(places)
    tier.free(places)


def recovered(tier: DiskTier) -> dict[int, int]:
    """Adopts all that was found; places by number. Two of one number: the first."""
    columns = tier.recover_columns()
    tier.adopt_many(columns.rows["place"])
    tier.finish_recovery()
    numbers = [int.from_bytes(key.tobytes(), "little") for key in columns.rows["key"]]
    return dict(zip(numbers, columns.rows["place"].tolist(), strict=True))


def is_right(tier: DiskTier, place: int, i: int, length: int = SIZE) -> bool:
    """Whether the block is readable and right; asserts that it is not readable and wrong."""
    target = aligned(-(-length // PAGE) * PAGE)
    (checksum,) = tier.read_many([(place, target)], length)
    if checksum != tier.checksum(place):
        return False
    assert np.array_equal(target[:length], payload(i, length)), "wrong bytes passed the check"
    return True


def directory_bytes(path: Path) -> int:
    """What `du` says, by blocks or by sizes, whichever is more."""
    blocks = sizes = 0
    for folder, _, files in os.walk(path):
        for name in [".", *files]:
            status = Path(folder, name).lstat()
            blocks += status.st_blocks * 512
            sizes += status.st_size
    return max(blocks, sizes)


def abandon(tier: DiskTier) -> None:
    """Lets go of a tier as a killed process does: nothing more is written."""
    tier._index.close()
    tier._books.close()
    tier._files.close()


class BrokenIO(FileIO):
    """Fails where it is told to: `fail[call]` is what the next calls raise, None for success."""

    def __init__(self) -> None:
        self.fail: dict[str, list[BaseException | None]] = {}
        self.calls: Counter[str] = Counter()
        self.before: Callable[[str], None] = lambda call: None

    def _count(self, call: str) -> None:
        self.calls[call] += 1
        self.before(call)
        planned = self.fail.get(call)
        error = planned.pop(0) if planned else None
        if error is not None:
            raise error

    def make_direct(self, fd):
        self._count("make_direct")
        super().make_direct(fd)

    def allocate(self, fd, length):
        self._count("allocate")
        super().allocate(fd, length)

    def pwritev(self, fd, buffers, offset):
        self._count("pwritev")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd, buffers, offset):
        self._count("preadv")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd):
        self._count("fdatasync")
        super().fdatasync(fd)

    def fsync(self, fd):
        self._count("fsync")
        super().fsync(fd)

    def unlink(self, name, directory_fd):
        self._count("unlink")
        super().unlink(name, directory_fd)

    def commit(self, transaction):
        self._count("commit")
        super().commit(transaction)


class VolatileIO(BrokenIO):
    """A medium with a cache: `power_cut` takes back, page by page, any part that was not synced.

    Files are named by their inode. What LMDB writes is durable at once here: its own promise.
    """

    def __init__(self, random: Random, limbo: Path) -> None:
        super().__init__()
        self._random = random
        self._limbo = limbo
        limbo.mkdir(exist_ok=True)
        self._unsynced: dict[int, list[tuple[int, bytes]]] = {}
        self._fresh: set[str] = set()
        self._unlinked: dict[str, Path] = {}

    def open(self, name, flags, directory_fd):
        if flags & os.O_CREAT:
            self._fresh.add(name)
        return super().open(name, flags, directory_fd)

    def pwritev(self, fd, buffers, offset):
        pages = sum(map(len, buffers)) // PAGE
        undo = self._unsynced.setdefault(os.fstat(fd).st_ino, [])
        for at in range(offset, offset + pages * PAGE, PAGE):
            page = aligned(PAGE)
            os.preadv(fd, [page], at)
            undo.append((at, page.tobytes()))
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd):
        super().fdatasync(fd)
        self._unsynced.pop(os.fstat(fd).st_ino, None)

    def fsync(self, fd):
        super().fsync(fd)
        self._fresh.clear()
        for path in self._unlinked.values():
            path.unlink()
        self._unlinked.clear()

    def unlink(self, name, directory_fd):
        keep = self._limbo / name
        self._count("unlink")
        os.link(name, keep, src_dir_fd=directory_fd)
        os.unlink(name, dir_fd=directory_fd)
        self._unlinked[name] = keep

    def power_cut(self, directory: Path) -> None:
        """The machine lost power: what was not synced may be there, or not, or in part."""
        for name, kept in self._unlinked.items():
            if name in self._fresh or self._random.random() < 0.5:
                kept.unlink()
            else:
                os.rename(kept, directory / "segments" / name)
        for path in list((directory / "segments").iterdir()):
            if path.name in self._fresh and self._random.random() < 0.5:
                path.unlink()
                continue
            undo = self._unsynced.get(path.stat().st_ino, [])
            with path.open("r+b") as file:
                for at, old in reversed(undo):
                    if self._random.random() < 0.5:
                        file.seek(at)
                        file.write(old)
