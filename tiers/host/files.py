"""Files of host pools: three a pool, checked before they are trusted, allocated before use.

`data` holds payloads and `generations` 8 bytes for each 4 KiB of them; clients map both
read-only. `headers` is the daemon's alone. Files are as long as the pool may ever be, and sparse
beyond its size. All space is allocated up front or before it is touched, since touching a page that
a memory file system cannot give is a fatal signal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.core.block import BACKING_SHIFT, GENERATION_BYTES, backing_cells
from kvstore.core.errors import TierError
from kvstore.tiers.chunks import GRANULE_COUNT_MAX
from kvstore.tiers.host import layout, pages

KINDS = ("data", "generations", "headers")
_FILE_NAME = re.compile(r"pool-(\d+)\.(data|generations|headers)")


class FileSizes(NamedTuple):
    """Lengths of a pool's files: its data, in granules of 1 << `shift`, and what follows."""

    data: int
    shift: int

    @property
    def generations(self) -> int:
        at, cells = backing_cells(self.data)
        return at + cells * GENERATION_BYTES

    @property
    def headers(self) -> int:
        return layout.HEADERS_AT + self.data

    def rounded(self, size_bytes: int) -> int:
        """Whole granules of it."""
        return min(self.data, size_bytes) >> self.shift << self.shift

    def backed(self, size_bytes: int) -> int:
        """Where the last cell of memory ends that so many bytes take."""
        return min(self.data, -(-size_bytes >> BACKING_SHIFT) << BACKING_SHIFT)

    def memory_of(self, size_bytes: int) -> int:
        """What a pool takes that has so many bytes, its maps counted."""
        maps = backing_cells(size_bytes)[0] + backing_cells(self.data)[1] * GENERATION_BYTES
        return self.backed(size_bytes) + maps + layout.map_bytes(size_bytes >> self.shift)


class PoolFiles(NamedTuple):
    """Open descriptors of one pool; the `_read` ones are for clients, open read-only."""

    data: int
    generations: int
    headers: int
    data_read: int
    generations_read: int

    def close(self) -> None:
        for fd in self:
            os.close(fd)


def boot_id() -> str:
    """Names this boot of the machine; memory of another boot is not ours."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def open_directory(path: Path, magics: tuple[int, ...], key: str = "tiers.host.directory") -> int:
    """Descriptor of a pool directory; raises TierError unless it is private and in memory."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise TierError(f"{key} {path} is a symbolic link; name the directory itself") from None
        if error.errno == errno.ENOENT:
            raise TierError(
                f"{key} {path} does not exist; create it with: mkdir -m 700 {path}"
            ) from None
        raise TierError(f"{key} {path} cannot be opened ({error.strerror})") from error
    try:
        _check_directory(fd, path, magics, key)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_directory(fd: int, path: Path, magics: tuple[int, ...], key: str) -> None:
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise TierError(
            f"{key} {path} belongs to uid {status.st_uid}, the daemon runs as {os.geteuid()}; "
            "use a directory of the daemon's own user"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise TierError(
            f"{key} {path} has mode {stat.S_IMODE(status.st_mode):04o}, others can enter it; "
            f"make it private with: chmod 700 {path}"
        )
    if pages.file_system_magic(fd) not in magics:
        raise TierError(
            f"{key} {path} is not on a memory file system of the right kind; "
            "use a directory under /dev/shm (hugetlbfs for huge pages)"
        )


def check_room(directory_fd: int, path: Path, needed_bytes: int) -> None:
    """Raises TierError if the file system of the directory has less free space than needed."""
    status = os.fstatvfs(directory_fd)
    free = status.f_bavail * status.f_frsize
    if needed_bytes > free:
        raise TierError(
            f"tiers.host.size needs {needed_bytes} bytes with its maps, but {path} has {free} "
            "free; lower the size or enlarge the memory file system"
        )


def check_memory(needed_bytes: int) -> None:
    """Raises TierError if the machine has less memory available than needed."""
    available = _memory_fields().get("MemAvailable", 0) << 10
    if needed_bytes > available:
        raise TierError(
            f"tiers.host.size needs {needed_bytes} bytes with its maps, but the machine has "
            f"{available} available; lower the size"
        )


def find_pool_numbers(directory_fd: int) -> list[int]:
    """Numbers of the pools that have any file in the directory."""
    matches = map(_FILE_NAME.fullmatch, os.listdir(directory_fd))
    return sorted({int(match[1]) for match in matches if match})


def read_start(directory_fd: int, number: int, length: int) -> bytes:
    """First bytes of a pool's headers file; empty if there is none."""
    fd = _open_file(directory_fd, f"pool-{number}.headers", os.O_RDONLY)
    if fd is None:
        return b""
    try:
        return os.pread(fd, length, 0)
    finally:
        os.close(fd)


def unlink_pool(directory_fd: int, number: int) -> None:
    for kind in KINDS:
        with suppress(FileNotFoundError):
            os.unlink(f"pool-{number}.{kind}", dir_fd=directory_fd)


def open_existing(
    directory_fd: int, data_directory_fd: int, number: int, sizes: FileSizes
) -> PoolFiles | None:
    """Files of an earlier life; None if one is missing or too short.

    Raises TierError if one is a link, shared with others or not a file of ours: somebody else
    made it.
    """
    fds: list[int] = []
    try:
        for kind in KINDS:
            where = data_directory_fd if kind == "data" else directory_fd
            fd = _open_file(where, f"pool-{number}.{kind}", os.O_RDWR)
            if fd is not None:
                fds.append(fd)
            if fd is None or os.fstat(fd).st_size < getattr(sizes, kind):
                _close_all(fds)
                return None
        return _with_readers(directory_fd, data_directory_fd, number, fds)
    except BaseException:
        _close_all(fds)
        raise


def lengthen(files: PoolFiles, sizes: FileSizes) -> None:
    """Longer files for a pool that may grow further than it could; its superblock comes last.

    Cells lie elsewhere now, and say nothing is backed: a crash before the end finds no others.
    """
    at, count = backing_cells(sizes.data)
    try:
        for fd, kind in zip(files, KINDS, strict=False):
            if os.fstat(fd).st_size < getattr(sizes, kind):
                os.ftruncate(fd, getattr(sizes, kind))
        os.posix_fallocate(files.generations, at, count * GENERATION_BYTES)
        os.pwrite(files.generations, (1).to_bytes(GENERATION_BYTES, "little") * count, at)
    except OSError as error:
        raise no_memory(sizes.data, error) from error


def allocate_books(files: PoolFiles, sizes: FileSizes, size_bytes: int) -> None:
    """Memory for the maps of a pool of so many bytes; raises OSError."""
    at, count = backing_cells(sizes.data)
    os.posix_fallocate(files.generations, at, count * GENERATION_BYTES)
    os.posix_fallocate(files.generations, 0, backing_cells(size_bytes)[0])
    os.posix_fallocate(files.headers, 0, layout.map_bytes(size_bytes >> sizes.shift))


def create_shared(
    directory_fd: int, data_directory_fd: int, number: int, sizes: FileSizes, size_bytes: int
) -> PoolFiles:
    """Fresh zeroed files, 0600, that have memory for so much of the pool.

    Raises TierError and leaves none behind if memory is short.
    """
    fds: list[int] = []
    try:
        for kind in KINDS:
            where = data_directory_fd if kind == "data" else directory_fd
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fds.append(os.open(f"pool-{number}.{kind}", flags, 0o600, dir_fd=where))
        made = _with_readers(directory_fd, data_directory_fd, number, fds)
        _allocate(made, sizes, size_bytes)
        return made
    except BaseException as error:
        _close_all(fds)
        unlink_pool(directory_fd, number)
        unlink_pool(data_directory_fd, number)
        if isinstance(error, OSError):
            raise no_memory(size_bytes, error) from error
        raise


def create_anonymous(number: int, sizes: FileSizes, size_bytes: int, huge: bool) -> PoolFiles:
    """Fresh memory that no path names; `seal` makes it safe to share."""
    fds: list[int] = []
    try:
        for kind in KINDS:
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            if huge and kind == "data":
                flags |= pages.MFD_HUGETLB
            fds.append(os.memfd_create(f"kvstore-pool-{number}.{kind}", flags))
            os.fchmod(fds[-1], 0o600)
        for fd in fds[:2]:
            fds.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
        made = PoolFiles(*fds)
        _allocate(made, sizes, size_bytes)
        return made
    except OSError as error:
        _close_all(fds)
        raise no_memory(size_bytes, error) from error


def seal(fd: int) -> None:
    """No new writable mapping, by anybody, and no change of size; existing mappings stay."""
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | pages.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def check_huge_pages(needed_bytes: int) -> int:
    """Bytes of one huge page; raises TierError if too few are reserved and free."""
    fields = _memory_fields()
    page = fields.get("Hugepagesize", 0) << 10
    free = fields.get("HugePages_Free", 0) - fields.get("HugePages_Rsvd", 0)
    if not page or free * page < needed_bytes:
        want = -(-needed_bytes // page) if page else 0
        raise TierError(
            f'tiers.host.hugepages = "hugetlb" needs {want} huge pages of {page} bytes, '
            f'{free} are free; reserve them with sysctl vm.nr_hugepages={want} or set "advise"'
        )
    return page


def _memory_fields() -> dict[str, int]:
    text = Path("/proc/meminfo").read_text()
    return {k: int(v) for k, v in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}


def _open_file(directory_fd: int, name: str, access: int) -> int | None:
    try:
        fd = os.open(name, access | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TierError(
            f"{name} in tiers.host.directory cannot be opened ({error.strerror}); remove it"
        ) from error
    status = os.fstat(fd)
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
    if not private or status.st_uid != os.geteuid() or status.st_nlink != 1:
        os.close(fd)
        raise TierError(
            f"{name} in tiers.host.directory is not a private file of this user; remove it"
        )
    return fd


def _with_readers(
    directory_fd: int, data_directory_fd: int, number: int, fds: list[int]
) -> PoolFiles:
    for where, kind in ((data_directory_fd, "data"), (directory_fd, "generations")):
        fd = _open_file(where, f"pool-{number}.{kind}", os.O_RDONLY)
        if fd is None:
            raise TierError(f"pool-{number}.{kind} vanished while it was opened; start again")
        fds.append(fd)
    return PoolFiles(*fds)


def _allocate(made: PoolFiles, sizes: FileSizes, size_bytes: int) -> None:
    for fd, kind in zip(made, KINDS, strict=False):
        os.ftruncate(fd, getattr(sizes, kind))
    os.posix_fallocate(made.data, 0, sizes.backed(size_bytes))
    allocate_books(made, sizes, size_bytes)


def no_memory(size_bytes: int, error: OSError) -> TierError:
    return TierError(
        f"a host pool of {size_bytes} bytes cannot be allocated ({error.strerror}); "
        "lower tiers.host.size or free memory"
    )


def is_possible(sizes: FileSizes) -> bool:
    """Whether a pool can have such files, read from one."""
    return 12 <= sizes.shift <= 40 and 0 < sizes.data >> sizes.shift <= GRANULE_COUNT_MAX


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
