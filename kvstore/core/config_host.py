"""Rules of the host tier's size, and of the largest that it may ever have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core.errors import ConfigError
from kvstore.core.sizes import Size, format_bytes

if TYPE_CHECKING:
    from kvstore.core.config import Config
    from kvstore.core.machine import Machine

# Address space only, but a process has 128 TiB of it, and a pool is mapped twice.
SIZE_MAX = Size(32 << 40)


def check_host(config: Config) -> None:
    """Raises ConfigError for the first rule that the sizes of `tiers.host` break."""
    host = config.tiers.host
    size_max = host.size if host.size_max is None else host.size_max
    if size_max < host.size:
        raise ConfigError(
            f"tiers.host.size_max is {size_max}, below tiers.host.size, {host.size}; raise it or "
            "remove it"
        )
    if size_max > max(SIZE_MAX, host.size):
        raise ConfigError(f"tiers.host.size_max is {size_max}; pass {SIZE_MAX} or less")
    if host.hugepages == "hugetlb" and size_max > host.size:
        raise ConfigError(
            "tiers.host.size_max is above tiers.host.size, but pages of tiers.host.hugepages = "
            "'hugetlb' are set aside for a whole pool at once; remove it or use 'advise'"
        )


def never_fits(config: Config, machine: Machine) -> str:
    """Why the pools can never be as large as `tiers.host.size_max`; empty if they may."""
    host = config.tiers.host
    if host.size_max is None or host.size_max <= host.size:
        return ""
    rooms = {"this machine's memory": machine.total_bytes()}
    if host.pool == "shm":
        rooms[f"the file system of {host.directory}"] = machine.file_system_bytes(host.directory)
    where, room = min(rooms.items(), key=lambda item: item[1])
    if host.size_max <= room:
        return ""
    return (
        f"tiers.host.size_max is {host.size_max}, but {where} has {format_bytes(room)}: the host "
        "tier can never grow that far"
    )
