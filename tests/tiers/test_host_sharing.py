"""What a client with the pool's descriptors can and cannot do."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

from kvstore.tiers.host import HostTier, PoolConfig

POOLS = [PoolConfig("", 2 << 20), PoolConfig("acme", 1 << 20)]
NOBODY = 65534


@pytest.fixture(params=["shm", "sealed"])
def tier(request, shm_directory):
    made = HostTier(POOLS, kind=request.param, directory=shm_directory)
    yield made
    made.close(keep=False)


@pytest.fixture
def sealed():
    made = HostTier(POOLS, kind="sealed")
    yield made
    made.close()


def fds(tier):
    pool = tier.shared_pools("")[0]
    return pool.data_fd, pool.generations_fd


def test_client_sees_blocks_and_generations(tier, make_header):
    """A client that maps the pool read-only finds the payload and its generation at the place."""
    pool = tier.shared_pools("")[0]
    data = mmap.mmap(pool.data_fd, pool.data_bytes, prot=mmap.PROT_READ)
    generations = mmap.mmap(pool.generations_fd, pool.generation_bytes, prot=mmap.PROT_READ)
    place = tier.reserve(5000, 16, 2)[1]
    checksum = tier.write(place, np.full(5000, 9, np.uint8))
    words = memoryview(generations).cast("Q")
    assert words[place] == 0
    generation = tier.commit([(place, make_header(1, 5000), checksum)])[0]
    assert words[place] == generation
    assert data[place << 12 : (place << 12) + 5000] == bytes([9]) * 5000
    tier.discard([place])
    assert words[place] == 0
    assert not any(words)
    assert pool.generation_bytes == pool.data_bytes // 4096 * 8 + 8  # a cell for each 4 MiB


def test_each_tenant_gets_its_own_pool_only(tier):
    """I8: an isolated tenant is given its pool, the others the shared one, never both."""
    shared, isolated = tier.shared_pools(""), tier.shared_pools("acme")
    assert [(pool.pool_id, pool.name) for pool in shared] == [(0, "")]
    assert [(pool.pool_id, pool.name) for pool in isolated] == [(1, "acme")]
    inodes = {os.fstat(fd).st_ino for pool in [*shared, *isolated] for fd in pool[2:4]}
    assert len(inodes) == 4


def test_handed_descriptors_are_read_only(tier):
    """I7: a handed-over descriptor can be neither written nor mapped writable."""
    for fd in fds(tier):
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def test_sealed_pool_resists_everybody(sealed):
    """I7: with `sealed` no way leads to writing, for root and the daemon's own uid neither."""
    for fd in fds(sealed):
        path = f"/proc/self/fd/{fd}"
        try:
            widened = os.open(path, os.O_RDWR)
        except PermissionError:
            continue
        with pytest.raises(PermissionError):
            mmap.mmap(widened, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for attack in (
            lambda fd: os.pwrite(fd, b"x", 0),
            lambda fd: os.ftruncate(fd, 0),
            lambda fd: os.ftruncate(fd, 1 << 30),
            lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        ):
            with pytest.raises(PermissionError):
                attack(widened)
        os.close(widened)
        with pytest.raises(PermissionError):
            os.truncate(path, 0)


def test_sealed_mapping_cannot_be_widened(sealed):
    """I7: a read-only mapping of a sealed pool cannot be made writable later."""
    code = (
        "import ctypes, mmap, sys\n"
        "fd = int(sys.argv[1])\n"
        "m = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.mmap.restype = ctypes.c_void_p\n"
        "at = libc.mmap(None, 4096, 1, 1, fd, ctypes.c_long(0))\n"
        "print(libc.mprotect(ctypes.c_void_p(at), 4096, 3), ctypes.get_errno())\n"
    )
    for fd in fds(sealed):
        answer = subprocess.run(
            [sys.executable, "-c", code, str(fd)], pass_fds=[fd], capture_output=True, text=True
        )
        assert answer.stdout.split() == ["-1", "13"], answer.stderr


def test_daemon_still_writes_a_sealed_pool(sealed, make_header):
    """The mapping from before the seal goes on to work."""
    place = sealed.reserve(5000, 16, 1)[0]
    checksum = sealed.write(place, np.full(5000, 1, np.uint8))
    sealed.commit([(place, make_header(0, 5000), checksum)])
    assert sealed.verify(place, 5000, checksum)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_users_cannot_open_a_shared_pool(shm_directory):
    """I7: another uid can neither open a pool's files nor widen a descriptor it was given."""
    tier = HostTier(POOLS, directory=shm_directory)
    fd = tier.shared_pools("")[0].data_fd
    os.chmod(shm_directory, 0o755)
    code = (
        "import mmap, os, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "directory, fd = sys.argv[1], int(sys.argv[2])\n"
        "assert len(mmap.mmap(fd, 4096, prot=mmap.PROT_READ)) == 4096\n"
        "paths = [os.path.join(directory, name) for name in os.listdir(directory)]\n"
        "assert len(paths) == 6\n"
        "for path in [*paths, f'/proc/self/fd/{fd}']:\n"
        "    for flags in (os.O_RDONLY, os.O_RDWR):\n"
        "        try:\n"
        "            os.open(path, flags)\n"
        "        except PermissionError:\n"
        "            continue\n"
        "        print('opened', path)\n"
        "print('done')\n"
    )
    answer = subprocess.run(
        [sys.executable, "-I", "-c", code, str(shm_directory), str(fd)],
        pass_fds=[fd], capture_output=True, text=True,
    )  # fmt: skip
    assert answer.stdout == "done\n", answer.stderr
    tier.close()


def test_pool_files_are_private(shm_directory):
    """I7: pool files are 0600, allocated in full, and nothing else lies beside them."""
    tier = HostTier(POOLS, directory=shm_directory)
    names = sorted(path.name for path in shm_directory.iterdir())
    assert names == [
        f"pool-{i}.{kind}" for i in range(2) for kind in ("data", "generations", "headers")
    ]
    for path in shm_directory.iterdir():
        status = path.stat()
        assert status.st_mode & 0o777 == 0o600
        if path.suffix != ".headers":
            assert status.st_blocks * 512 >= status.st_size
    tier.close(keep=False)
    assert not list(shm_directory.iterdir())


def test_header_memory_is_allocated_before_it_is_touched(shm_directory, make_header):
    """I14: a chunk has memory for its headers before its slots are given, and returns it.

    A write to memory that the file system cannot give would kill the daemon.
    """
    tier = HostTier([PoolConfig("", 4 << 20)], directory=shm_directory)
    headers = shm_directory / "pool-0.headers"
    before = headers.stat().st_blocks
    places = tier.reserve(4096, 4000, 500)
    allocated = headers.stat().st_blocks
    assert (allocated - before) * 512 >= len(places) * 4176
    tier.commit([(p, make_header(i, 4096, 4000), bytes(16)) for i, p in enumerate(places)])
    assert headers.stat().st_blocks == allocated
    tier.discard(places)
    tier.free(places)
    tier.reserve(500_000, 16, 8)
    assert headers.stat().st_blocks < allocated / 4
    tier.check_integrity()
    tier.close()
