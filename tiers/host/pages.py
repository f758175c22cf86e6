"""Calls to the kernel about memory that Python lacks, or makes while holding the GIL."""

from __future__ import annotations

import ctypes
import os

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
MFD_HUGETLB = 0x4
F_SEAL_FUTURE_WRITE = 0x10

TMPFS_MAGIC = 0x01021994
RAMFS_MAGIC = 0x858458F6
HUGETLBFS_MAGIC = 0x958458F6

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

# ctypes releases the GIL around each call; mmap.madvise would hold it through page faults.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def advise_huge(address: int, length: int) -> None:
    """Asks for transparent huge pages; raises OSError where the kernel has none."""
    _check(_libc.madvise(address, length, MADV_HUGEPAGE))


def populate(address: int, length: int) -> None:
    """Makes pages present and writable without changing what they hold."""
    _check(_libc.madvise(address, length, MADV_POPULATE_WRITE))


def lock(address: int, length: int) -> None:
    """Keeps pages from being swapped out."""
    _check(_libc.mlock(address, length))


def unlock(address: int, length: int) -> None:
    """Lets pages be swapped out again."""
    _check(_libc.munlock(address, length))


def punch(fd: int, offset: int, length: int) -> None:
    """Returns file memory to the system; the range reads as zeros from now on."""
    _check(_libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length))


def file_system_magic(fd: int) -> int:
    """Type of the file system that a descriptor lies on (statfs f_type)."""
    answer = ctypes.create_string_buffer(512)
    _check(_libc.fstatfs(fd, answer))
    return int.from_bytes(answer.raw[:4], "little")
