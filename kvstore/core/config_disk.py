"""Rules of the disk tier: where its directory may lie, how large it may be, and quotas in it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError
from kvstore.core.key_file import read_key_file
from kvstore.core.sizes import format_bytes

if TYPE_CHECKING:
    from kvstore.core.config import Config, DiskSection
    from kvstore.core.machine import Machine

DISK_BYTES_MIN = 16 << 20
# Files of these are not kept, locked or synced by this host's kernel alone.
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "pvfs2",
    "smb3", "smbfs", "virtiofs",
})  # fmt: skip


def is_network_file_system(kind: str) -> bool:
    """Whether files on a file system of this type may live elsewhere; any of FUSE counts."""
    return kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse")


def check_disk(config: Config, machine: Machine) -> None:
    """Raises ConfigError for the first rule that `tiers.disk`, or a price, breaks."""
    disk = config.tiers.disk
    if config.prices.fault():
        raise ConfigError(config.prices.fault())
    if math.isnan(disk.read_timeout_seconds):
        raise ConfigError("tiers.disk.read_timeout_seconds is not a number; pass seconds above 0")
    if not disk.path:
        return
    if disk.size is None:
        raise ConfigError("tiers.disk.size is missing; a disk tier needs one, such as '100GiB'")
    if disk.size < DISK_BYTES_MIN:
        raise ConfigError(f"tiers.disk.size is {disk.size}; pass 16MiB or more")
    _check_place(config, machine)
    _check_room(disk, machine)
    if disk.key_file:
        read_key_file(disk.key_file)


def _check_place(config: Config, machine: Machine) -> None:
    path, host = Path(config.tiers.disk.path), config.tiers.host
    try:
        has_parent, is_other = path.parent.is_dir(), path.exists() and not path.is_dir()
    except PermissionError:
        raise ConfigError(
            f"tiers.disk.path is {path}, where uid {os.geteuid()} may not look; run as the user of "
            "that directory or pass another"
        ) from None
    if not has_parent:
        raise ConfigError(
            f"tiers.disk.path is {path}, but {path.parent} does not exist; make it or pass "
            "another directory"
        )
    if is_other:
        raise ConfigError(f"tiers.disk.path is {path}, which is no directory; pass another")
    pool, here = Path(host.directory).resolve(), path.resolve()
    if host.pool == "shm" and (here.is_relative_to(pool) or pool.is_relative_to(here)):
        raise ConfigError(
            f"tiers.disk.path is {path}, and tiers.host.directory is {host.directory}; neither may "
            "lie in the other, so choose another path, on a disk"
        )
    kind = machine.file_system_kind(str(path))
    if is_network_file_system(kind):
        raise ConfigError(
            f"tiers.disk.path is {path} on a file system of type {kind}, which may lose locks and "
            "synced writes; choose a directory on a local disk (ext4 or xfs)"
        )


def _check_room(disk: DiskSection, machine: Machine) -> None:
    room, what = machine.file_system_free_bytes(disk.path), "free"
    if machine.directory_bytes(disk.path):
        # A tier that was there before starts on a file system that others have filled since, too:
        # it grows as soon as there is room.
        room, what = machine.file_system_bytes(disk.path), "in all"
    if disk.size is not None and disk.size > room - disk.reserve:
        raise ConfigError(
            f"tiers.disk.size is {disk.size}, but the file system of {disk.path} has "
            f"{format_bytes(room)} {what}, of which tiers.disk.reserve keeps {disk.reserve} free; "
            "lower one of them or free some space"
        )


def check_disk_quotas(config: Config) -> None:
    """Raises ConfigError for the first cap or floor in the disk tier that cannot be."""
    for i, tenant in enumerate(config.tenants):
        if tenant.disk_cap and (tenant.disk_floor or 0) > tenant.disk_cap:
            raise ConfigError(f"tenants[{i}].disk_floor is above disk_cap; lower the floor")
    floors = sum(tenant.disk_floor or 0 for tenant in config.tenants)
    if config.tiers.disk.path and floors > config.disk_bytes:
        raise ConfigError(
            f"tenants[].disk_floor add up to {format_bytes(floors)}, more than the "
            f"{config.tiers.disk.size} of tiers.disk.size; lower them or raise it"
        )
