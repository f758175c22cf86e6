"""Opening host pools: what is taken back, what is refused, and what the refusal says."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, TierError
from kvstore.tiers.host import HostTier, PoolConfig, files, pages
from kvstore.tiers.host import pool as host_pool

MIB = 1 << 20


def opened(directory, *pools, **options):
    return HostTier([PoolConfig(*pool) for pool in pools], directory=directory, **options)


def put(tier, make_header, pool="", value=7):
    place = tier.reserve(100_000, 16, 1, pool)[0]
    checksum = tier.write(place, np.full(100_000, value, np.uint8))
    tier.commit([(place, make_header(value, 100_000), checksum)])
    return place


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


def test_pools_keep_their_number_and_bytes_by_name(shm_directory, make_header):
    """I10: a pool is taken back by its name, wherever it stands in the configuration."""
    tier = opened(shm_directory, ("", MIB), ("acme", MIB))
    place = put(tier, make_header, "acme")
    tier.close()
    tier = opened(shm_directory, ("umbrella", MIB), ("acme", MIB), ("", MIB))
    assert [block.place for block in tier.recover()] == [place]
    assert tier.shared_pools("acme")[0].pool_id == 1
    assert tier.shared_pools("umbrella")[0].pool_id == 2
    assert not tier.notes
    tier.close()


def test_another_name_gets_zeroed_memory(shm_directory, make_header):
    """I21: a tenant never maps memory that another tenant's pool had."""
    tier = opened(shm_directory, ("", MIB), ("acme", MIB))
    put(tier, make_header, "acme", value=0xEE)
    old = os.fstat(tier.shared_pools("acme")[0].data_fd).st_ino
    tier.close()
    tier = opened(shm_directory, ("", MIB), ("umbrella", MIB))
    pool = tier.shared_pools("umbrella")[0]
    assert os.fstat(pool.data_fd).st_ino != old
    assert not any(os.pread(pool.data_fd, pool.data_bytes, 0))
    assert not any(os.pread(pool.generations_fd, pool.generation_bytes, 0))
    assert "no configured pool" in tier.notes[0]
    assert list(tier.recover()) == []
    tier.close()


@pytest.mark.parametrize("pools", [[("", 2 * MIB)], [("", MIB // 2)]])
def test_another_size_keeps_the_blocks(shm_directory, make_header, pools):
    """I10: a pool is taken back at another size, larger or smaller, with what is in it."""
    tier = opened(shm_directory, ("", MIB))
    place = put(tier, make_header)
    tier.close()
    tier = opened(shm_directory, *pools)
    (block,) = tier.recover()
    assert block.place == place
    assert tier.verify(place, 100_000, block.checksum)
    tier.adopt(place)
    tier.free(tier.finish_recovery())
    assert not tier.notes
    assert tier.usage().capacity_bytes == pools[0][1]
    tier.check_integrity()
    tier.close()


def test_missing_file_starts_empty(shm_directory, make_header):
    """I13: a pool of which a file is gone starts empty."""
    tier = opened(shm_directory, ("", MIB))
    put(tier, make_header)
    tier.close()
    (shm_directory / "pool-0.generations").unlink()
    tier = opened(shm_directory, ("", MIB))
    assert list(tier.recover()) == []
    assert len(tier.notes) == 1
    tier.close()


def test_generations_continue_in_a_new_pool(shm_directory, make_header):
    """I5: the counter starts where the caller says, and never below what a pool remembers."""
    tier = opened(shm_directory, ("", MIB), first_generation=500)
    assert tier.generation(put(tier, make_header)) == 500
    tier.close()
    tier = opened(shm_directory, ("", MIB), ("acme", MIB), first_generation=7)
    tier.free(tier.finish_recovery())
    assert tier.generation(put(tier, make_header, "acme")) > 500
    tier.close()


def test_generation_reservation_is_renewed(shm_directory, make_header, monkeypatch):
    """I5: more generations than are reserved at once are reserved before they are given."""
    monkeypatch.setattr("kvstore.tiers.host.tier.GENERATION_STEP", 3)
    tier = opened(shm_directory, ("", 4 * MIB))
    given = [tier.generation(put(tier, make_header)) for _ in range(8)]
    tier.close()
    tier = opened(shm_directory, ("", 4 * MIB))
    assert len(list(tier.recover())) == 8
    tier.finish_recovery()
    assert tier.generation(put(tier, make_header)) > max(given)
    tier.close()


@pytest.mark.parametrize("damage", ["missing", "link", "mode", "disk", "file"])
def test_unsafe_directories_are_refused(shm_directory, tmp_path, damage):
    """I7: a directory that is missing, a link, open to others or on a disk is refused by name."""
    path, words = shm_directory / "pools", "pools"
    if damage == "missing":
        words = "mkdir -m 700"
    elif damage == "link":
        (shm_directory / "real").mkdir(mode=0o700)
        path.symlink_to(shm_directory / "real")
        words = "symbolic link"
    elif damage == "mode":
        path.mkdir(mode=0o750)
        words = "chmod 700"
    elif damage == "file":
        path.write_text("")
        words = "Not a directory"
    else:
        path = tmp_path
        path.chmod(0o700)
        words = "memory file system"
    with pytest.raises(TierError, match=words) as error:
        opened(path, ("", MIB))
    assert str(path) in one_sentence(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_directory_of_another_user_is_refused(shm_directory):
    """I7: a directory that belongs to somebody else is refused."""
    os.chown(shm_directory, 65534, 65534)
    with pytest.raises(TierError, match="belongs to uid 65534") as error:
        opened(shm_directory, ("", MIB))
    one_sentence(error)


@pytest.mark.parametrize("kind", ["data", "generations", "headers"])
@pytest.mark.parametrize("damage", ["symlink", "hard link", "mode", "owner"])
def test_files_made_by_others_are_refused(shm_directory, kind, damage):
    """I7: a pool file that is a link, shared or readable by others is refused, not used."""
    opened(shm_directory, ("", MIB)).close()
    path = shm_directory / f"pool-0.{kind}"
    if damage == "symlink":
        path.rename(shm_directory / "elsewhere")
        path.symlink_to(shm_directory / "elsewhere")
    elif damage == "hard link":
        os.link(path, shm_directory / "second-name")
    elif damage == "mode":
        path.chmod(0o640)
    elif os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        pytest.skip("needs root to give a file away")
    with pytest.raises(TierError, match=f"pool-0.{kind}") as error:
        opened(shm_directory, ("", MIB))
    assert "remove it" in one_sentence(error)


@pytest.mark.parametrize("kind", ["shm", "sealed"])
def test_more_memory_than_there_is_is_refused(shm_directory, kind):
    """A pool that no memory is left for is refused at open, and leaves no file behind."""
    with pytest.raises(TierError, match=r"tiers\.host\.size") as error:
        opened(shm_directory, ("", MIB), ("acme", 1 << 46), kind=kind)
    assert "lower the size" in one_sentence(error)
    assert not list(shm_directory.iterdir())


def test_allocation_that_fails_leaves_nothing(shm_directory, monkeypatch):
    """I14: when memory runs out during allocation, the error says so and the files are gone."""

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "posix_fallocate", full)
    for kind in ("shm", "sealed"):
        with pytest.raises(TierError, match="No space left") as error:
            opened(shm_directory, ("", MIB), kind=kind)
        one_sentence(error)
    assert not list(shm_directory.iterdir())


def test_no_memory_for_headers_means_no_slots(shm_directory, make_header, monkeypatch):
    """I14: when a chunk's headers find no memory, the pool grants nothing and stays sound."""

    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = opened(shm_directory, ("", MIB))
    put(tier, make_header)
    monkeypatch.setattr(host_pool, "posix_fallocate", full)
    assert tier.reserve(4096, 16, 5) == []
    tier.check_integrity()
    monkeypatch.undo()
    assert len(tier.reserve(4096, 16, 5)) == 5
    tier.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "file"}, r"tiers\.host\.pool"),
        ({"hugepages": "yes"}, r"tiers\.host\.hugepages"),
        ({"hugepages": "hugetlb"}, "hugetlb_directory"),
        ({"hugetlb_directory": "/dev/hugepages"}, "hugetlb_directory"),
    ],
)
def test_wrong_options_are_named(shm_directory, options, words):
    """A wrong option is a ConfigError that names the key."""
    with pytest.raises(ConfigError, match=words) as error:
        opened(shm_directory, ("", MIB), **options)
    one_sentence(error)


def test_wrong_pools_are_named(shm_directory):
    """Pools must be there, named once each, and large enough."""
    for pools in ([], [("a", MIB), ("a", MIB)], [("", 100)]):
        with pytest.raises(ConfigError) as error:
            opened(shm_directory, *pools)
        one_sentence(error)
    with pytest.raises(ConfigError, match=r"tiers\.host\.directory"):
        HostTier([PoolConfig("", MIB)])


def huge_pages_free():
    return files._memory_fields().get("HugePages_Free", 0)


def test_huge_pages_that_are_not_reserved_are_refused(shm_directory):
    """`hugetlb` without enough reserved pages says how many and how to reserve them."""
    if huge_pages_free() * 2 * MIB >= 1 << 40:
        pytest.skip("this machine has a terabyte of huge pages")
    with pytest.raises(TierError, match=r"vm\.nr_hugepages=524288") as error:
        opened(shm_directory, ("", 1 << 40), kind="sealed", hugepages="hugetlb")
    one_sentence(error)


@pytest.mark.skipif(huge_pages_free() < 4, reason="needs 4 free huge pages")
def test_sealed_pool_on_huge_pages(make_header):
    """A sealed pool works on reserved huge pages."""
    tier = HostTier([PoolConfig("", 8 * MIB)], kind="sealed", hugepages="hugetlb", prefault=True)
    place = put(tier, make_header)
    assert tier.verify(place, 100_000, tier.checksum(place))
    tier.prefault.wait(10)
    assert tier.prefaulted_bytes == 8 * MIB
    tier.close()


def test_prefault_makes_pages_present_in_the_background(shm_directory):
    """All pages are touched, and locked where that is allowed; progress is readable."""
    tier = opened(shm_directory, ("", 8 * MIB), ("acme", MIB), prefault=True, lock_memory=True)
    assert tier.prefault.wait(30)
    assert tier.prefaulted_bytes == 9 * MIB
    assert tier.locked_bytes == 9 * MIB or "LimitMEMLOCK" in tier.prefault.lock_problem
    tier.close()


def test_refused_locking_is_no_failure(shm_directory, monkeypatch, caplog):
    """Where memory may not be locked the pool works without, and the log says why, once."""

    def refuse(address, length):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pages, "lock", refuse)
    tier = opened(shm_directory, ("", 8 * MIB), prefault=True, lock_memory=True)
    tier.prefault.wait(30)
    assert (tier.prefaulted_bytes, tier.locked_bytes) == (8 * MIB, 0)
    assert "Cannot allocate memory" in tier.prefault.lock_problem
    assert [record.getMessage() for record in caplog.records] == [tier.prefault.lock_problem]
    tier.close()


def test_prefault_ends_with_the_tier(shm_directory, monkeypatch):
    """Closing does not wait for the rest of a large pool, nor unmap under the thread."""
    entered, may_go = threading.Event(), threading.Event()

    def slow(address, length):
        entered.set()
        may_go.wait(10)

    monkeypatch.setattr(pages, "populate", slow)
    tier = opened(shm_directory, ("", 64 * MIB), prefault=True)
    assert entered.wait(10)
    threading.Timer(0.05, may_go.set).start()
    tier.close()
    assert tier.prefaulted_bytes <= 8 * MIB
    assert not [t for t in threading.enumerate() if t.name == "kvstore-prefault"]


def test_prefault_changes_no_byte(shm_directory, make_header):
    """I10: touching the pages of a pool that was taken back leaves its blocks alone."""
    tier = opened(shm_directory, ("", 4 * MIB))
    place = put(tier, make_header)
    tier.close()
    tier = opened(shm_directory, ("", 4 * MIB), prefault=True)
    tier.prefault.wait(30)
    block = next(tier.recover())
    assert block.place == place
    assert tier.verify(place, 100_000, block.checksum)
    tier.close()
