"""The size of a disk tier's directory: never above what is configured, whatever happens."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from disk_world import BrokenIO, directory_bytes, drop, is_right, payload, put, recovered

from kvstore.core.errors import TierError
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.directory import OURS
from kvstore.tiers.disk.layout import parse_superblock

MIB = 1 << 20


class Watch(BrokenIO):
    """Looks at the directory after every call to the medium."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        super().__init__()
        self.directory, self.size_bytes = directory, size_bytes
        self.largest = 0
        self.before = lambda call: self.look()

    def look(self) -> None:
        size = directory_bytes(self.directory)
        self.largest = max(self.largest, size)
        assert size <= self.size_bytes, f"{size} bytes in a directory of {self.size_bytes}"


@pytest.mark.parametrize("seed", range(6))
def test_cap_holds_at_every_moment(disk_directory: Path, seed: int) -> None:
    """Files of all kinds together stay within the size, by blocks and by lengths, classes mixed."""
    random, stored, number = Random(seed), {}, 0
    watch = Watch(disk_directory, 6 * MIB)
    tier = DiskTier(disk_directory, 6 * MIB, io=watch)
    for _ in range(120):
        length, symbol = random.choice([(3000, 64), (60_000, 500), (300_000, 5000)])
        numbers = list(range(number, number + random.randrange(1, 12)))
        number += len(numbers)
        stored |= {(i, length): p for i, p in put(tier, numbers, length, symbol).items()}
        if random.random() < 0.5:
            gone = random.sample(sorted(stored), len(stored) // 2)
            drop(tier, [stored.pop(key) for key in gone])
        tier.commit([])
        watch.look()
    assert watch.largest > 5 * MIB
    assert all(is_right(tier, place, i, length) for (i, length), place in stored.items())
    tier.check_integrity()
    tier.close()
    watch.look()


def test_smaller_size_drops_the_oldest_segments_first(disk_directory: Path) -> None:
    """Reopened with less, the tier removes what was written longest ago before it writes a byte."""
    tier = DiskTier(disk_directory, 32 * MIB)
    stored = {}
    for first in range(0, 400, 50):
        stored |= put(tier, list(range(first, first + 50)), 60_000)
    newest = put(tier, [1000], 60_000)
    tier.close()
    kept = stored | newest
    for size in (20 * MIB, 12 * MIB, 12 * MIB, 4 * MIB):
        written = []

        class Check(Watch):
            def pwritev(self, fd, buffers, offset, written=written):
                written.append(directory_bytes(self.directory))
                return super().pwritev(fd, buffers, offset)

        io = Check(disk_directory, size)
        io.before = lambda call: None
        tier = DiskTier(disk_directory, size, io=io)
        io.before = lambda call, io=io: io.look()
        found = recovered(tier)
        assert found.keys() <= kept.keys()
        assert 1000 in found
        assert directory_bytes(disk_directory) <= size
        assert all(is_right(tier, place, i, 60_000) for i, place in found.items())
        used = tier.usage().used_bytes
        assert used > 0.3 * size
        kept = found
        tier.check_integrity()
        tier.close()
    tier = DiskTier(disk_directory, 32 * MIB)
    assert recovered(tier).keys() == kept.keys()
    assert len(put(tier, list(range(2000, 2300)), 60_000)) == 300
    tier.close()


def test_index_that_outgrew_the_size_is_made_anew(disk_directory: Path) -> None:
    """An index file never shrinks: where it is larger than its share now, it is written anew."""
    tier = DiskTier(disk_directory, 128 * MIB)
    for first in range(0, 600, 40):
        put(tier, list(range(first, first + 40)), 4096, 3000)
    tier.close()
    assert (disk_directory / "index" / "data.mdb").stat().st_size > 2 * MIB
    tier = DiskTier(disk_directory, 8 * MIB)
    found = recovered(tier)
    assert directory_bytes(disk_directory) <= 8 * MIB
    assert 50 < len(found) < 600
    assert max(found) == 599
    tier.check_integrity()
    assert all(is_right(tier, place, i, 4096) for i, place in found.items())
    tier.close()


def test_other_files_count_too(disk_directory: Path) -> None:
    """What lies in the directory besides takes from the tier, and is not removed by it."""
    ballast = disk_directory / "spaces.json"
    ballast.write_bytes(bytes(MIB))
    tier = DiskTier(disk_directory, 16 * MIB, io=Watch(disk_directory, 16 * MIB))
    stored = put(tier, list(range(2000)))
    assert 400 < len(stored) < 800
    drop(tier, list(stored.values()))
    tier.commit([])
    assert tier.reserve(900_000, 64, 1)
    tier.probe()
    ballast.write_bytes(bytes(14 * MIB))
    place = tier.reserve(2_000_000, 64, 1)[0]
    with pytest.raises(TierError, match="outgrow"):
        tier.write(place, payload(1))
    assert tier.problem
    tier.close()
    assert ballast.stat().st_size == 14 * MIB


def test_segments_change_class_as_files(disk_directory: Path) -> None:
    """Memory of one class serves another once it is empty: other files, other serial numbers."""
    tier = DiskTier(disk_directory, 8 * MIB)
    small = put(tier, list(range(2000)))
    names = {path.name for path in (disk_directory / "segments").iterdir()}
    assert tier.reserve(300_000, 64, 1) == []
    drop(tier, list(small.values()))
    assert tier.reserve(300_000, 64, 1) == []
    tier.commit([])
    large = put(tier, list(range(3000, 3100)), 300_000)
    assert len(large) > 15
    others = {path.name for path in (disk_directory / "segments").iterdir()}
    assert min(int(name[:-4]) for name in others - names) > max(int(n[:-4]) for n in names)
    assert all(is_right(tier, place, i, 300_000) for i, place in large.items())
    tier.check_integrity()
    tier.close()
    for path in (disk_directory / "segments").iterdir():
        superblock = parse_superblock(path.read_bytes()[:4096])
        assert superblock is not None
        assert f"{superblock.serial}.seg" == path.name
        assert path.stat().st_size == superblock.geometry.file_bytes


def test_drain_makes_room_for_another_class(disk_directory: Path) -> None:
    """Blocks in the way of another size are named, few of them, and leaving they make the room."""
    tier = DiskTier(disk_directory, 8 * MIB)
    small = put(tier, list(range(2000)))
    assert tier.reserve(300_000, 64, 1) == []
    moving = tier.drain_candidates(300_000, 64)
    assert 0 < len(moving) < len(small)
    drop(tier, moving)
    tier.commit([])
    assert len(put(tier, [5000], 300_000)) == 1
    tier.check_integrity()
    tier.close()


def test_files_are_private_and_named_by_number(disk_directory: Path) -> None:
    """I19: no name comes from outside, and nobody else can read a file or enter a folder."""
    tier = DiskTier(disk_directory, 8 * MIB)
    put(tier, list(range(100)))
    assert {path.name for path in disk_directory.iterdir()} <= OURS
    for path in disk_directory.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
    assert all(p.name[:-4].isdigit() for p in (disk_directory / "segments").iterdir())
    tier.close(keep=False)
    assert list(disk_directory.iterdir()) == []


def test_payload_of_many_pieces(disk_directory: Path) -> None:
    """A payload larger than the buffers in between comes back whole, from any memory."""
    tier = DiskTier(disk_directory, 32 * MIB)
    length = 3 * MIB + 77
    places = put(tier, [1, 2], length)
    assert all(is_right(tier, place, i, length) for i, place in places.items())
    place = tier.reserve(length, 64, 1)[0]
    assert tier.copy(places[1], place, length) == tier.checksum(places[1])
    assert tier.write(place, payload(2, length)) == tier.checksum(places[2])
    tier.close()
