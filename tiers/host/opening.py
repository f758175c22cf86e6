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
    """A pool to be: `""` is shared, another name is the isolated tenant it belongs to.

    It may grow to `max_bytes`; 0 is its size.
    """

    name: str
    size_bytes: int
    max_bytes: int = 0


class Wanted(NamedTuple):
    """A pool to open: its name, its size and the lengths of its files."""

    name: str
    size_bytes: int
    sizes: FileSizes

    @property
    def memory_bytes(self) -> int:
        return self.sizes.memory_of(self.size_bytes)


class OpenPools:
    """The pools of a tier by number, and the directories their files lie in.

    A pool keeps its number and its memory as long as its name and the machine's boot stay the
    same; files that are too short for it are made longer, longer ones stay as they are. Otherwise
    its files are removed before fresh, zeroed ones are made, so that no name ever inherits bytes
    from another.
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
        sized = [_wanted(config, page) for config in configs]
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

    def _create_sealed(self, sized: list[Wanted]) -> None:
        self._check_memory(sized)
        for number, wanted in enumerate(sized):
            made = files.create_anonymous(number, wanted.sizes, wanted.size_bytes, self._huge)
            pool = self._map(number, wanted.name, made, wanted.sizes)
            # Ours are mapped writable by now; nobody gets another writable mapping.
            files.seal(made.data)
            files.seal(made.generations)
            _format(pool, wanted.size_bytes)

    def _open_directories(self) -> None:
        assert self._path is not None, "checked before"
        memory = (pages.TMPFS_MAGIC, pages.RAMFS_MAGIC)
        self._directory_fd = self._data_directory_fd = files.open_directory(self._path, memory)
        if self._huge_path is not None:
            self._data_directory_fd = files.open_directory(
                self._huge_path, (pages.HUGETLBFS_MAGIC,), "tiers.host.hugetlb_directory"
            )

    def _open_shared(self, sized: list[Wanted]) -> None:
        numbered = self._numbers(sized)
        missing = []
        for number, wanted in numbered.items():
            if not self._take_back(number, wanted):
                self._unlink(number)
                missing.append(number)
        lacking = [numbered[number] for number in missing]
        if missing:
            self._check_room(sum(w.memory_bytes - self._huge * w.size_bytes for w in lacking))
            self._check_memory(lacking)
        for number in missing:
            name, size_bytes, sizes = numbered[number]
            made = files.create_shared(
                self._directory_fd, self._data_directory_fd, number, sizes, size_bytes
            )
            _format(self._map(number, name, made, sizes), size_bytes)

    def _numbers(self, sized: list[Wanted]) -> dict[int, Wanted]:
        """Pools by number: the one their files have, else the lowest free; other files go."""
        left = {name_digest(wanted.name): wanted for wanted in sized}
        numbered: dict[int, Wanted] = {}
        known = set(files.find_pool_numbers(self._directory_fd))
        known |= set(files.find_pool_numbers(self._data_directory_fd))
        for number in sorted(known):
            found = self._superblock(number)
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

    def _superblock(self, number: int) -> tuple[Superblock, bytes] | None:
        start = files.read_start(self._directory_fd, number, layout.PAGE_BYTES)
        return layout.read_superblock(start)

    def _take_back(self, number: int, wanted: Wanted) -> bool:
        """Whether the files of an earlier life could be taken over.

        Raises TierError where memory lacks for a larger size than it had; the files stay.
        """
        found = self._superblock(number)
        if found is None:  # no files, or those of a pool that stood elsewhere
            return False
        shift, length = found[0].granule_shift, found[0].size_bytes
        longer = FileSizes(max(length, wanted.sizes.data >> shift << shift), shift)
        sizes, size_bytes = FileSizes(length, shift), longer.rounded(wanted.size_bytes)
        made = files.open_existing(self._directory_fd, self._data_directory_fd, number, sizes)
        fits = files.is_possible(longer) and size_bytes
        if made is None or not fits or (self._huge and longer != wanted.sizes):
            if made is not None:
                made.close()
            self._dropped(number, "its size changed or a file of it is missing")
            return False
        if longer != sizes:
            files.lengthen(made, longer)
        pool = self._map(number, wanted.name, made, longer)
        if longer != sizes:
            pool.lengthened(_superblock(pool), found[1])
        problem = self._load(pool, size_bytes)
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

    def _load(self, pool: HostPool, size_bytes: int) -> str:
        try:
            problem = pool.load(size_bytes, _superblock(pool))
            if not problem:
                lacking = pool.backing.missing_bytes(size_bytes)
                self._check_room(lacking)
                files.check_memory(lacking)
                pool.back()
            return problem
        except OSError as error:
            raise files.no_memory(size_bytes, error) from error

    def _check_room(self, byte_count: int) -> None:
        assert self._path is not None, "checked before"
        files.check_room(self._directory_fd, self._path, byte_count)

    def _dropped(self, number: int, problem: str) -> None:
        self.notes.append(
            f"host pool {number} in {self._path} starts empty: {problem}; its blocks were dropped"
        )

    def _map(self, number: int, name: str, made: PoolFiles, sizes: FileSizes) -> HostPool:
        pool = self.pools[number] = HostPool(number, name, made, sizes)
        return pool

    def _check_memory(self, lacking: list[Wanted]) -> None:
        data = sum(wanted.size_bytes for wanted in lacking)
        if self._huge:
            files.check_huge_pages(data)
        files.check_memory(sum(wanted.memory_bytes for wanted in lacking) - self._huge * data)

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


def _wanted(config: PoolConfig, page: int) -> Wanted:
    sizes = file_sizes(config.size_bytes // page * page, config.max_bytes // page * page)
    return Wanted(config.name, sizes.rounded(config.size_bytes // page * page), sizes)


def _format(pool: HostPool, size_bytes: int) -> None:
    pool.format(size_bytes, _superblock(pool), random_token(layout.POOL_ID_BYTES))


def _superblock(pool: HostPool) -> Superblock:
    return Superblock(pool.sizes.shift, pool.sizes.data, files.boot_id(), name_digest(pool.name))


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
        if hugepages == "hugetlb" and config.max_bytes > config.size_bytes:
            raise ConfigError(
                'tiers.host.hugepages is "hugetlb", whose pages are set aside for a whole pool at '
                "once; remove tiers.host.size_max"
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
