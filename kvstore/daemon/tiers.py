"""Tiers and record of a daemon: locked, opened and closed as the configuration says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from kvstore.core.config import Config, HostSection
from kvstore.core.config_hbm import device_uuids
from kvstore.core.config_host import never_fits
from kvstore.core.errors import ConfigError
from kvstore.core.generations import Generations
from kvstore.core.key_file import read_key_file
from kvstore.core.machine import LocalMachine
from kvstore.daemon.gpu import Gpus, open_gpus
from kvstore.locks import FileLock, private_directory
from kvstore.mover import (
    ARENA_LINKS,
    CHECK_LINK,
    COPY_LINK,
    DISK_CHECK_LINK,
    READ_LINK,
    RECORD_LINK,
    WRITE_LINK,
)
from kvstore.store.record import FileRecord, MemoryRecord, move_record
from kvstore.tiers.base import AddressableTier, DeviceTier, Tier
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.directory import FORMAT, check_empty, check_private, read_format
from kvstore.tiers.epochs import EpochsFile
from kvstore.tiers.host import HostTier, PoolConfig
from kvstore.tiers.throttle import ThrottledTier

if TYPE_CHECKING:
    from kvstore.tiers.disk.vault import Vault

LOCK_NAME = "LOCK"
WRITE_THREADS = 2

_log = logging.getLogger("kvstore.daemon")


class OpenTiers(NamedTuple):
    """What the store is put together from; `epochs` is None where nothing is written down."""

    host: HostTier
    disk: DiskTier | None
    record: MemoryRecord | FileRecord
    epochs: EpochsFile | None
    gpus: Gpus | None = None
    vault: Vault | None = None

    @property
    def hbm(self) -> tuple[DeviceTier, ...]:
        return () if self.gpus is None else self.gpus.tiers

    @property
    def notes(self) -> list[str]:
        """What was dropped, mended or could not be had at the start."""
        parts = (self.host, self.disk, self.epochs)
        return [note for part in parts if part is not None for note in part.notes]

    def grown(self) -> None:
        """The host tier has more memory: GPUs read it from there, too."""
        if self.gpus is not None:
            self.gpus.follow(self.host.memories)

    @property
    def locked_block_count(self) -> int:
        """Encrypted blocks on disk that no key opened."""
        return 0 if self.disk is None else self.disk.locked_block_count

    def take_keys(self, key_file: str) -> bool:
        """Reads the keys of the disk tier again; whether it writes with another one from now on.

        Raises ConfigError, and then nothing has changed.
        """
        if self.vault is None:
            return False
        is_other = self.vault.take(read_key_file(key_file))
        self.tell_keys()
        return is_other

    def tell_keys(self) -> None:
        """Logs which key is written with, and which are still needed to read."""
        if self.vault is not None and self.disk is not None:
            counts = sorted(self.disk.blocks_by_key().items())
            told = [f"{count} with {name}" for name, count in counts]
            _log.info(
                "blocks are written to disk with key %s; there are %s",
                self.vault.writing, ", ".join(told) or "none yet",
            )  # fmt: skip


def lock_directories(config: Config) -> list[FileLock]:
    """Locks the directory of each tier, made if missing; raises ConfigError or AlreadyRunning."""
    locks = []
    host, disk = config.tiers.host, config.tiers.disk
    if host.pool == "shm":
        path = Path(host.directory)
        private_directory(path, "tiers.host.directory")
        locks.append(FileLock(path / LOCK_NAME, f"the host pool in {path}"))
    if disk.path:
        path = Path(disk.path)
        private_directory(path, "tiers.disk.path")
        check_private(path)
        if not (path / FORMAT).exists():
            check_empty(path)  # before anything is written into a directory of somebody else's
        locks.append(FileLock(path / LOCK_NAME, f"the disk tier in {path}"))
    return locks


def open_tiers(config: Config) -> OpenTiers:
    """Opens what the locked directories hold. Raises TierError, ConfigError, FailedPrecondition."""
    host_config, disk_config = config.tiers.host, config.tiers.disk
    if problem := never_fits(config, LocalMachine()):
        _log.warning("%s", problem)
    shm = Path(host_config.directory) if host_config.pool == "shm" else None
    path = Path(disk_config.path) if disk_config.path else None
    vault = open_vault(disk_config.key_file if disk_config.path else "")
    epochs: EpochsFile | None = None
    if path is not None:
        read_format(path)  # of another version nothing is touched, its record neither
        epochs = move_record(path, shm, first=not (path / FORMAT).exists())
    elif shm is not None:
        epochs = EpochsFile(shm)
    generations = Generations(max(1, epochs.generation_floor if epochs else 1))
    disk = None
    if path is not None:
        disk = DiskTier(
            path, config.disk_bytes, reserve_bytes=int(disk_config.reserve),
            generations=generations, direct=disk_config.direct, vault=vault,
        )  # fmt: skip
    host = _open_host(config, host_config, shm, generations)
    record: MemoryRecord | FileRecord = MemoryRecord()
    directory = path or shm
    if epochs is not None and directory is not None:
        record = FileRecord(directory, epochs, lambda: generations.next, path is not None)
    gpus = open_gpus(config, host.memories, generations)
    if gpus is not None:
        host.keep_memory()
    return OpenTiers(host, disk, record, epochs, gpus, vault)


def open_vault(key_file: str) -> Vault | None:
    """What encrypts the disk tier; None without a file of keys. Raises ConfigError."""
    if not key_file:
        return None
    try:
        from kvstore.tiers.disk.vault import Vault
    except ImportError as error:
        raise ConfigError(
            "tiers.disk.key_file needs cryptography; run `pip install kvstore-daemon[encryption]` "
            "or set it to ''"
        ) from error
    return Vault(read_key_file(key_file))


def paced(disk: DiskTier | None, config: Config) -> Tier | None:
    """The disk tier as the store uses it: no faster than the configuration lets it be."""
    limit = config.tiers.disk.bytes_per_second_max
    if disk is None or limit is None:
        return disk
    # Nobody asks a disk tier for the memory that the decorator's type promises.
    return ThrottledTier(cast("AddressableTier", disk), float(limit))


def _open_host(
    config: Config, host: HostSection, directory: Path | None, generations: Generations
) -> HostTier:
    return HostTier(
        [PoolConfig(*pool) for pool in config.host_pool_sizes],
        kind=host.pool,
        directory=directory,
        hugepages=host.hugepages,
        hugetlb_directory=host.hugetlb_directory or None,
        prefault=host.prefault,
        lock_memory=host.mlock,
        generations=generations,
    )


def link_threads(config: Config) -> dict[str, int]:
    """Worker threads of each link there is."""
    threads = {COPY_LINK: config.server.worker_threads, CHECK_LINK: 1}
    if config.tiers.disk.path:
        threads |= {
            WRITE_LINK: WRITE_THREADS,
            READ_LINK: config.tiers.disk.read_threads,
            DISK_CHECK_LINK: 1,
            RECORD_LINK: 1,
        }
    if config.tiers.hbm.size is not None:
        threads |= dict.fromkeys(ARENA_LINKS, len(device_uuids(config.tiers.hbm)))
    return threads


class ProblemLog:
    """Tells the log when a tier, or the configured policy, gets a problem, and when it is over."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._policy_reason = ""

    def tell(self, tier: str, problem: str) -> None:
        if problem != self._told.get(tier, ""):
            self._told[tier] = problem
            if problem:
                _log.error("the %s tier takes no blocks: %s", tier, problem)
            else:
                _log.warning("the %s tier takes blocks again", tier)

    def tell_policy(self, policy: str, reason: str) -> None:
        """`policy` acts, for this reason if it is not the configured one."""
        if reason == self._policy_reason:
            return
        self._policy_reason = reason
        if reason:
            _log.warning("%s evicts now: %s", policy, reason)
        else:
            _log.info("%s evicts again, as configured", policy)


def call_within(seconds: float, call: Callable[[], None]) -> bool:
    """Runs `call` and waits for it that long; False when it is not over, and goes on by itself."""
    thread = threading.Thread(target=call, name="kvstore close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
