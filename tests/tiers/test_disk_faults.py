"""A disk that fails: the group fails, the tier says so, and nothing else is harmed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
from disk_world import (
    SIZE,
    BrokenIO,
    drop,
    header,
    is_right,
    payload,
    put,
    recovered,
)

from kvstore.core.errors import CorruptBlock, TierError
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.io import aligned
from kvstore.tiers.disk.opening import map_bytes

MIB = 1 << 20


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def io() -> BrokenIO:
    return BrokenIO()


@pytest.fixture
def tier(disk_directory: Path, io: BrokenIO) -> Iterator[DiskTier]:
    made = DiskTier(disk_directory, 16 * MIB, io=io)
    yield made
    made.close()


def stage(tier: DiskTier, numbers: list[int]) -> list:
    """Written blocks, ready to be committed."""
    places = tier.reserve(SIZE, 64, len(numbers))
    checksums = tier.write_many([(p, payload(i)) for i, p in zip(numbers, places, strict=True)])
    return [(p, header(i), c) for i, p, c in zip(numbers, places, checksums, strict=True)]


def give_up(tier: DiskTier, blocks: list) -> list[int]:
    places = [place for place, _, _ in blocks]
    drop(tier, places)
    return places


def test_failed_sync_fails_its_group_for_good(tier, io, disk_directory):
    """I12: no block of the group is published, none of its slots is used again in this life."""
    good = put(tier, [1, 2, 3])
    blocks = stage(tier, [4, 5])
    io.fail["fdatasync"] = [failure(errno.EIO)]
    with pytest.raises(TierError, match="sync"):
        tier.commit(blocks)
    assert "sync" in tier.problem
    places = give_up(tier, blocks)
    assert [tier.generation(place) for place in places] == [0, 0]
    assert tier.reserve(SIZE, 64, 1) == []
    tier.probe()
    assert tier.problem == ""
    tier.commit([])
    again = put(tier, list(range(10, 2000)))
    assert not set(again.values()) & set(places)
    for number, place in [*good.items(), *list(again.items())[:20]]:
        assert is_right(tier, place, number)
    usage = tier.usage()
    assert usage.resting_bytes == 2 * 16384
    assert usage.used_bytes + usage.free_bytes + usage.resting_bytes == usage.capacity_bytes
    tier.check_integrity()
    tier.close()
    reopened = DiskTier(disk_directory, 16 * MIB)
    assert recovered(reopened).keys() >= good.keys() | again.keys()
    reopened.close()


def test_failed_sync_taints_what_others_wrote(tier, io):
    """I12: blocks that another worker wrote to the same file before may be lost: refused, too."""
    first, second = stage(tier, [1]), stage(tier, [2])
    io.fail["fdatasync"] = [failure(errno.EIO)]
    with pytest.raises(TierError):
        tier.commit(first)
    with pytest.raises(TierError, match="write them elsewhere"):
        tier.commit(second)
    give_up(tier, first)
    give_up(tier, second)
    tier.probe()
    third = stage(tier, [3])
    assert len(tier.commit(third)) == 1


@pytest.mark.parametrize("call", ["pwritev", "allocate"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_write_is_an_error_that_passes(tier, io, call, number):
    """I14: a write that fails costs its block; after a probe the tier takes blocks again."""
    io.fail[call] = [failure(number)]
    places = tier.reserve(SIZE, 64, 3)
    with pytest.raises(TierError, match="failed to"):
        tier.write_many([(place, payload(1)) for place in places])
    assert tier.problem
    drop(tier, places)
    tier.probe()
    assert tier.problem == ""
    for i, place in put(tier, [1, 2, 3]).items():
        assert is_right(tier, place, i)
    tier.check_integrity()


def test_problem_stays_while_the_disk_fails(tier, io):
    """I14: a probe that finds the disk still broken leaves the tier closed for blocks."""
    put(tier, [1])
    blocks = stage(tier, [2])
    io.fail["fdatasync"] = [failure(errno.EIO)] * 2
    with pytest.raises(TierError):
        tier.commit(blocks)
    tier.probe()
    assert tier.problem
    tier.probe()
    assert tier.problem == ""


@pytest.mark.parametrize("error", [lmdb.PanicError("x"), lmdb.DiskError("x"), failure(5)])
def test_failed_transaction_fails_its_group(tier, io, disk_directory, error):
    """I12, I14: the index is opened anew and goes on; the group is not published, then or later."""
    good, blocks = put(tier, [1]), stage(tier, [2, 3])
    io.fail["commit"] = [error]
    with pytest.raises(TierError, match="index"):
        tier.commit(blocks)
    assert tier.problem
    give_up(tier, blocks)
    tier.probe()
    assert tier.problem == ""
    good |= put(tier, [4])
    tier.check_integrity()
    tier.close()
    reopened = DiskTier(disk_directory, 16 * MIB)
    assert recovered(reopened).keys() == good.keys()
    reopened.close()


def test_transaction_that_fails_after_the_fact_is_undone(tier, io):
    """I4: a group that was reported as failed does not stay in the index."""
    put(tier, [1])
    blocks = stage(tier, [2])

    class Late:
        def commit(self, transaction):
            transaction.commit()
            raise lmdb.DiskError("the answer was lost")

    tier._index._io = Late()
    with pytest.raises(TierError):
        tier.commit(blocks)
    tier._index._io = io
    give_up(tier, blocks)
    tier.probe()
    put(tier, [3])
    tier.check_integrity()
    assert len(tier._index.blocks()[0]) == 2


def test_index_of_another_time_means_reading_only(tier, io, monkeypatch):
    """I14: if acknowledged groups are gone from the index, it is written no more, only read."""
    places = put(tier, [1])
    blocks = stage(tier, [2])
    io.fail["commit"] = [lmdb.PanicError("x")]
    monkeypatch.setattr(tier._index, "meta", lambda: None)
    with pytest.raises(TierError):
        tier.commit(blocks)
    assert "read-only" in tier.problem
    tier.probe()
    assert "read-only" in tier.problem
    with pytest.raises(TierError, match="read-only"):
        tier.commit([])
    assert is_right(tier, places[1], 1)
    assert tier.reserve(SIZE, 64, 1) == []


def test_index_that_cannot_be_made_means_reading_only(disk_directory, io):
    """I13, I14: a start that cannot write its index serves what is there, and starts no loop."""
    tier = DiskTier(disk_directory, 16 * MIB)
    stored = put(tier, list(range(20)))
    tier.close()
    shutil.rmtree(disk_directory / "index")
    io.fail["commit"] = [failure(errno.ENOSPC)]
    tier = DiskTier(disk_directory, 16 * MIB, io=io)
    assert "read-only" in tier.problem
    found = recovered(tier)
    assert found.keys() == stored.keys()
    assert all(is_right(tier, place, i) for i, place in found.items())
    assert tier.reserve(SIZE, 64, 1) == []
    tier.close()
    tier = DiskTier(disk_directory, 16 * MIB)
    assert tier.problem == ""
    assert recovered(tier).keys() == stored.keys()
    tier.close()


def test_full_index_takes_no_more_blocks(tier):
    """I14: at its limit the index refuses blocks, but still removes some, and goes on then."""
    stored: dict[int, int] = {}

    def fill() -> None:
        for first in range(0, 10_000, 20):
            stored.update(put(tier, list(range(first, first + 20)), 4096, 3500))

    with pytest.raises(TierError, match="full"):
        fill()
    assert len(stored) >= 80
    assert "full" in tier.problem
    numbers = sorted(stored)
    tier.probe()
    assert "full" in tier.problem
    drop(tier, [stored.pop(number) for number in numbers[:40]])
    tier.probe()
    assert tier.problem == ""
    stored |= put(tier, [5001], 4096, 3500)
    tier.check_integrity()
    assert all(is_right(tier, place, i, 4096) for i, place in stored.items())


def test_read_errors_are_misses(tier, io):
    """I11: what cannot be read is no answer, and its neighbours are read all the same."""
    places = put(tier, [1, 2, 3])
    targets = [aligned(12288) for _ in places]
    pairs = list(zip(places.values(), targets, strict=True))
    io.fail["preadv"] = [failure(errno.EIO), None, failure(errno.EIO)]
    found = tier.read_many(pairs, SIZE)
    assert [checksum is not None for checksum in found] == [True, False, True]
    assert np.array_equal(targets[0][:SIZE], payload(1))
    io.fail["preadv"] = [failure(errno.EIO)]
    with pytest.raises(TierError, match="failed to read"):
        tier.read(places[1], targets[0], SIZE)
    io.fail["preadv"] = [failure(errno.EIO)]
    assert not tier.verify(places[1], SIZE, tier.checksum(places[1]))
    assert tier.problem == ""


def test_transfers_cut_short_are_taken_up(disk_directory):
    """A call that moves less than it was asked for is no error."""

    class Short(BrokenIO):
        def pwritev(self, fd, buffers, offset):
            return os.pwritev(fd, [buffers[0][:4096]], offset)

        def preadv(self, fd, buffers, offset):
            return os.preadv(fd, [buffers[0][:4096]], offset)

    tier = DiskTier(disk_directory, 16 * MIB, io=Short())
    assert all(is_right(tier, place, i) for i, place in put(tier, [1, 2, 3]).items())
    tier.close()


def test_refused_direct_io_is_done_without(disk_directory, io):
    """Where the file system has no O_DIRECT, the page cache is used, and emptied again."""
    io.fail["make_direct"] = [failure(errno.EINVAL)]
    tier = DiskTier(disk_directory, 16 * MIB, io=io)
    places = put(tier, [1, 2, 3])
    assert not tier.is_direct
    assert io.calls["make_direct"] == 1
    assert all(is_right(tier, place, i) for i, place in places.items())
    tier.close()


def test_slot_that_spoils_thrice_is_left_alone(tier):
    """I11: after three reports a slot is not used again in this life."""
    place = put(tier, [1])[1]
    for number in (2, 3):
        tier.report_bad(place)
        drop(tier, [place])
        tier.commit([])
        assert put(tier, [number])[number] == place
    tier.report_bad(place)
    drop(tier, [place])
    tier.commit([])
    assert put(tier, [4])[4] != place
    assert tier.usage().resting_bytes == 16384
    with pytest.raises(CorruptBlock):
        tier.checksum(place)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 3 MiB."""
    path = tmp_path / "small"
    path.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_full_disk_is_lived_through(small_disk):
    """I14: on a full file system the tier keeps what it has, and goes on when there is room."""
    ballast = small_disk / "LOCK"
    ballast.write_bytes(bytes(MIB))
    tier = DiskTier(small_disk, 16 * MIB)
    stored: dict[int, int] = {}
    for number in range(400):
        try:
            stored |= put(tier, [number])
        except TierError:
            break
    assert tier.problem or len(stored) < 400
    assert len(stored) > 10
    assert all(is_right(tier, place, i) for i, place in stored.items())
    drop(tier, [stored.pop(i) for i in sorted(stored)[:10]])
    ballast.unlink()
    tier.probe()
    assert tier.problem == ""
    stored |= put(tier, list(range(1000, 1030)))
    assert len(stored) > 30
    tier.check_integrity()
    tier.close()
    reopened = DiskTier(small_disk, 16 * MIB)
    assert recovered(reopened).keys() == stored.keys()
    reopened.close()


def test_reserve_of_the_file_system_is_kept(disk_directory, io, monkeypatch):
    """No segment is made where that would leave less free space than is reserved, with what the
    index may still grow by."""
    free = 10 * MIB + map_bytes(16 * MIB)
    monkeypatch.setattr(io, "free_bytes", lambda fd: free)
    tier = DiskTier(disk_directory, 16 * MIB, reserve_bytes=9 * MIB, io=io)
    assert 0 < len(put(tier, list(range(500)))) <= 64
    free = 9 * MIB
    tier.probe()
    assert tier.reserve(SIZE, 64, 500) == []
    assert tier.problem == ""
    free = 20 * MIB
    tier.probe()
    assert len(put(tier, list(range(1000, 1500)))) == 500
    tier.close()
