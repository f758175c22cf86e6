"""Opens the pools of a host tier: takes back what an earlier life left, makes the rest anew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from kvstore.core.entropy import random_token
from kvstore.core.errors import ConfigError
from kvstore.tiers.host import files, layout, pages
from kvstore.tiers.host.files import FileSizes, PoolFiles
from kvstore.tiers.host.layout import Superblock, name_digest
from kvstore.tiers.host.pool import HostPool, file_sizes

POOL_BYTES_MIN = 64 << 10

PoolKind = Literal["shm", "sealed"]
HugePages = Literal["off", "advise", "hugetlb"]


class PoolConfig(NamedTuple):
    """A pool to be: `""` is shared, another name is the isolated tenant it belongs to."""

    name: str
    size_bytes: int


class OpenPools:
    """The pools of a tier by number, and the directories their files lie in.

    A pool keeps its number and its memory as long as its name, its size and the machine's boot
    stay the same. Otherwise its files are removed before fresh, zeroed ones are made, so that no
    name ever inherits bytes from another.
    """

    def __init__(
        self,
        configs: Sequence[PoolConfig],
        kind: PoolKind,
        path: Path | None,
        hugepages: HugePages,
        huge_path: Path | None,
    ) -> None:
        _check_config(configs, kind, path, hugepages, huge_path)
        self.pools: dict[int, HostPool] = {}
        self.notes: list[str] = []
        self._path, self._huge_path = path, huge_path
        self._directory_fd = self._data_directory_fd = -1
        self._huge = hugepages == "hugetlb"
        page = files.check_huge_pages(0) if self._huge else 1
        sized = [(c.name, file_sizes(c.size_bytes // page * page)) for c in configs]
        try:
            if kind == "sealed":
                self._create_sealed(sized)
            else:
                self._open_directories()
                self._open_shared(sized)
        except BaseException:
            self._abandon()
            raise
        if hugepages == "advise":
            self._advise_huge_pages()

    def close(self, keep: bool) -> None:
        """Unmaps all; with `keep=False` the files are gone, too."""
        for number, pool in self.pools.items():
            pool.close()
            if not keep:
                self._unlink(number)
        self.pools.clear()
        self._close_directories()

    def _create_sealed(self, sized: list[tuple[str, FileSizes]]) -> None:
        self._check_memory([sizes for _, sizes in sized])
        for number, (name, sizes) in enumerate(sized):
            made = files.create_anonymous(number, sizes, self._huge)
            pool = self._map(number, name, made, sizes)
            # Ours are mapped writable by now; nobody gets another writable mapping.
            files.seal(made.data)
            files.seal(made.generations)
            pool.format(_superblock(pool), random_token(layout.POOL_ID_BYTES))

    def _open_directories(self) -> None:
        assert self._path is not None, "checked before"
        memory = (pages.TMPFS_MAGIC, pages.RAMFS_MAGIC)
        self._directory_fd = self._data_directory_fd = files.open_directory(self._path, memory)
        if self._huge_path is not None:
            self._data_directory_fd = files.open_directory(
                self._huge_path, (pages.HUGETLBFS_MAGIC,), "tiers.host.hugetlb_directory"
            )

    def _open_shared(self, sized: list[tuple[str, FileSizes]]) -> None:
        numbered = self._numbers(sized)
        missing = []
        for number, (name, sizes) in numbered.items():
            if not self._take_back(number, name, sizes):
                self._unlink(number)
                missing.append(number)
        sizes_missing = [numbered[number][1] for number in missing]
        if missing:
            assert self._path is not None, "checked before"
            outside = sum(sizes.allocated - self._huge * sizes.data for sizes in sizes_missing)
            files.check_room(self._directory_fd, self._path, outside)
            self._check_memory(sizes_missing)
        for number in missing:
            name, sizes = numbered[number]
            made = files.create_shared(self._directory_fd, self._data_directory_fd, number, sizes)
            pool = self._map(number, name, made, sizes)
            pool.format(_superblock(pool), random_token(layout.POOL_ID_BYTES))

    def _numbers(self, sized: list[tuple[str, FileSizes]]) -> dict[int, tuple[str, FileSizes]]:
        """Pools by number: the one their files have, else the lowest free; other files go."""
        left = {name_digest(name): (name, sizes) for name, sizes in sized}
        numbered: dict[int, tuple[str, FileSizes]] = {}
        known = set(files.find_pool_numbers(self._directory_fd))
        known |= set(files.find_pool_numbers(self._data_directory_fd))
        for number in sorted(known):
            start = files.read_start(self._directory_fd, number, layout.PAGE_BYTES)
            found = layout.parse_superblock(start)
            if found is not None and found[0].name_digest in left:
                numbered[number] = left.pop(found[0].name_digest)
            else:
                self.notes.append(
                    f"host pool {number} in {self._path} is no configured pool or damaged; "
                    "its blocks were dropped"
                )
                self._unlink(number)
        for entry in left.values():
            numbered[min(set(range(len(sized))) - set(numbered))] = entry
        return dict(sorted(numbered.items()))

    def _take_back(self, number: int, name: str, sizes: FileSizes) -> bool:
        """Whether the files of an earlier life could be taken over."""
        found = files.open_existing(self._directory_fd, self._data_directory_fd, number, sizes)
        if found is None:
            if number in files.find_pool_numbers(self._directory_fd):
                self._dropped(number, "its size changed or a file of it is missing")
            return False
        pool = self._map(number, name, found, sizes)
        problem = pool.load(_superblock(pool))
        if problem:
            del self.pools[number]
            pool.close()
            self._dropped(number, problem)
        elif pool.dropped_chunk_count:
            self.notes.append(
                f"host pool {number} in {self._path} had {pool.dropped_chunk_count} damaged "
                "chunk entries; their blocks were dropped"
            )
        return not problem

    def _dropped(self, number: int, problem: str) -> None:
        self.notes.append(
            f"host pool {number} in {self._path} starts empty: {problem}; its blocks were dropped"
        )

    def _map(self, number: int, name: str, made: PoolFiles, sizes: FileSizes) -> HostPool:
        pool = self.pools[number] = HostPool(number, name, made, sizes)
        return pool

    def _check_memory(self, sizes: list[FileSizes]) -> None:
        data = sum(s.data for s in sizes)
        if self._huge:
            files.check_huge_pages(data)
        files.check_memory(sum(s.allocated for s in sizes) - self._huge * data)

    def _advise_huge_pages(self) -> None:
        mode = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        try:
            if "[never]" in mode.read_text() or "[deny]" in mode.read_text():
                raise OSError(0, f"{mode} does not allow them; write advise to it")
            for pool in self.pools.values():
                pages.advise_huge(pool.data.ctypes.data, len(pool.data))
        except OSError as error:
            self.notes.append(f"host pools use small pages: {error.strerror}")

    def _unlink(self, number: int) -> None:
        for fd in {self._directory_fd, self._data_directory_fd} - {-1}:
            files.unlink_pool(fd, number)

    def _abandon(self) -> None:
        for number, pool in self.pools.items():
            pool.close()
            if pool.fresh:
                self._unlink(number)
        self.pools.clear()
        self._close_directories()

    def _close_directories(self) -> None:
        for fd in {self._directory_fd, self._data_directory_fd} - {-1}:
            os.close(fd)
        self._directory_fd = self._data_directory_fd = -1


def _superblock(pool: HostPool) -> Superblock:
    return Superblock(pool.slab.shift, pool.sizes.data, files.boot_id(), name_digest(pool.name))


def _check_config(
    configs: Sequence[PoolConfig],
    kind: str,
    path: Path | None,
    hugepages: str,
    huge_path: Path | None,
) -> None:
    names = [config.name for config in configs]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"host pools are named {names}; configure at least one, each name once")
    for config in configs:
        if config.size_bytes < POOL_BYTES_MIN:
            raise ConfigError(
                f"host pool {config.name!r} has {config.size_bytes} bytes; "
                f"give it at least {POOL_BYTES_MIN}"
            )
    if kind not in ("shm", "sealed"):
        raise ConfigError(f'tiers.host.pool is {kind!r}; set "shm" or "sealed"')
    if hugepages not in ("off", "advise", "hugetlb"):
        raise ConfigError(f'tiers.host.hugepages is {hugepages!r}; set "off", "advise", "hugetlb"')
    if kind == "shm" and path is None:
        raise ConfigError('tiers.host.directory is not set; pool = "shm" keeps its files there')
    if kind == "shm" and (hugepages == "hugetlb") != (huge_path is not None):
        raise ConfigError(
            'pool = "shm" needs tiers.host.hugetlb_directory if and only if '
            'tiers.host.hugepages is "hugetlb"'
        )
