"""Rules that a complete configuration must keep beyond each key's own type."""

from __future__ import annotations

import grp
import math
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.core.config_disk import check_disk, check_disk_quotas
from kvstore.core.config_hbm import check_hbm
from kvstore.core.config_host import check_host
from kvstore.core.errors import ConfigError
from kvstore.core.sizes import format_bytes

if TYPE_CHECKING:
    from kvstore.core.config import Config
    from kvstore.core.machine import Machine

# sockaddr_un.sun_path is 108 bytes; the side socket adds ".lane".
SOCKET_PATH_MAX = 107 - len(".lane")
INDEX_BLOCK_BYTES, TYPICAL_SYMBOL_BYTES = 512, 64
# What a second tier adds: a place, and the slot's generation and checksum beside it.
DISK_SLOT_BYTES = 64
MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX = 64 << 10, 256 << 20
POOL_BYTES_MIN = 1 << 20


def check(config: Config, machine: Machine) -> None:
    """Raises ConfigError for the first rule that `config` breaks."""
    _check_server(config)
    _check_events(config)
    _check_access(config)
    check_host(config)
    _check_tenants(config)
    _check_limits(config)
    check_disk(config, machine)
    check_disk_quotas(config)
    check_hbm(config)
    _check_memory(config, machine)


def _check_server(config: Config) -> None:
    server = config.server
    if len(server.socket.encode()) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"server.socket is {len(server.socket.encode())} bytes long ({server.socket}); "
            f"pass a path of at most {SOCKET_PATH_MAX} bytes"
        )
    if server.metrics:
        parse_address("server.metrics", server.metrics)
    parse_group("server.socket_group", server.socket_group)
    tcp = server.tcp
    if not tcp.listen:
        return
    parse_address("server.tcp.listen", tcp.listen)
    for name in ("cert", "key", "client_ca"):
        path = getattr(tcp, name)
        if not path:
            raise ConfigError(
                f"server.tcp.{name} is empty; TCP works only with mutual TLS, "
                "so pass cert, key and client_ca or remove server.tcp.listen"
            )
        if not Path(path).is_file():
            raise ConfigError(f"server.tcp.{name}: there is no file {path}; correct the path")


def parse_address(key: str, text: str) -> tuple[str, int]:
    """(host, port) of `host:port`; an IPv6 host is in brackets. Raises ConfigError naming `key`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"{key} is {text!r}; pass host:port, such as '127.0.0.1:9750'")
    return host.strip("[]"), int(port)


def parse_group(key: str, group: str) -> int | None:
    """The number of a group given by name or number; None without one."""
    if not group or group.isdecimal():
        return int(group) if group else None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"{key} is {group!r}, which is no group here; create it or correct the name"
        ) from None


def _check_events(config: Config) -> None:
    events = config.events
    for name in ("publish", "replay"):
        address = getattr(events, name)
        if address and not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"events.{name} is {address!r}; pass an address such as 'tcp://127.0.0.1:5557' or "
                "'ipc:///run/kvstore/events'"
            )
    if events.replay and not events.publish:
        raise ConfigError("events.replay has nothing to replay; set events.publish too")


def _check_access(config: Config) -> None:
    tenants = {"default", *(tenant.name for tenant in config.tenants)}
    for i, rule in enumerate(config.access):
        named = [rule.uid is not None, rule.gid is not None, bool(rule.certificate)]
        if sum(named) != 1:
            raise ConfigError(f"access[{i}]: pass exactly one of uid, gid and certificate")
        if min(rule.uid or 0, rule.gid or 0) < 0:
            raise ConfigError(f"access[{i}]: uid and gid are 0 or more; correct the number")
        if rule.tenant not in tenants:
            raise ConfigError(
                f"access[{i}].tenant is {rule.tenant!r}, which no [[tenants]] table names; "
                "add the table or correct the name"
            )


def _check_tenants(config: Config) -> None:
    seen: set[str] = set()
    for i, tenant in enumerate(config.tenants):
        key = f"tenants[{i}]"
        if not tenant.name or len(tenant.name) > 128 or not tenant.name.isprintable():
            raise ConfigError(f"{key}.name is {tenant.name!r}; pass 1 to 128 printable characters")
        if tenant.name in seen:
            raise ConfigError(f"{key}.name: {tenant.name!r} is there twice; remove one table")
        seen.add(tenant.name)
        if tenant.isolated and tenant.host_size is None:
            raise ConfigError(f"{key}.host_size is missing; an isolated tenant's pool needs a size")
        if tenant.isolated and (tenant.host_size or 0) < POOL_BYTES_MIN:
            raise ConfigError(f"{key}.host_size is {tenant.host_size}; pass 1MiB or more")
        if tenant.host_size and not tenant.isolated:
            raise ConfigError(
                f"{key}.host_size is for isolated tenants; use host_cap or isolate it"
            )
        if tenant.isolated and (tenant.host_cap or tenant.host_floor):
            raise ConfigError(
                f"{key}: host_cap and host_floor are for the shared pool; remove them, "
                "an isolated tenant has exactly host_size"
            )
        if tenant.host_cap and (tenant.host_floor or 0) > tenant.host_cap:
            raise ConfigError(f"{key}.host_floor is above host_cap; lower the floor")
    _check_tenant_sums(config)


def _check_tenant_sums(config: Config) -> None:
    size = config.tiers.host.size
    isolated = sum(tenant.host_size or 0 for tenant in config.tenants if tenant.isolated)
    shared = size - isolated
    if shared < POOL_BYTES_MIN:
        raise ConfigError(
            f"tiers.host.size is {size}, and isolated tenants take {format_bytes(isolated)} of it; "
            "leave at least 1 MiB for the shared pool"
        )
    floors = sum(tenant.host_floor or 0 for tenant in config.tenants)
    if floors > shared:
        raise ConfigError(
            f"tenants[].host_floor add up to {format_bytes(floors)}, more than the shared pool's "
            f"{format_bytes(shared)}; lower them or raise tiers.host.size"
        )


def _check_limits(config: Config) -> None:
    limits = config.limits
    for section in (config.server, limits):
        for name in section.__struct_fields__:
            if name.endswith("_seconds") and math.isnan(getattr(section, name)):
                raise ConfigError(f"{name} is not a number; pass seconds above 0")
    if limits.max_lease_ttl_seconds < limits.lease_ttl_seconds:
        raise ConfigError(
            "limits.max_lease_ttl_seconds is below limits.lease_ttl_seconds; raise it"
        )
    if not MESSAGE_BYTES_MIN <= limits.message_bytes <= MESSAGE_BYTES_MAX:
        raise ConfigError(f"limits.message_bytes is {limits.message_bytes}; pass 64KiB to 256MiB")
    if limits.inflight_message_bytes < limits.message_bytes:
        raise ConfigError("limits.inflight_message_bytes is below limits.message_bytes; raise it")
    if limits.staging_bytes < limits.staging_bytes_per_session:
        raise ConfigError(
            "limits.staging_bytes is below limits.staging_bytes_per_session; raise it"
        )


def index_block_bytes(with_disk: bool) -> int:
    """Memory that an indexed block takes, with a symbol of ordinary length."""
    return INDEX_BLOCK_BYTES + TYPICAL_SYMBOL_BYTES + (DISK_SLOT_BYTES if with_disk else 0)


def _check_memory(config: Config, machine: Machine) -> None:
    """Pools, then the index, against what the machine has; pages of a pool to re-adopt count."""
    host = config.tiers.host
    if host.pool == "shm" and not Path(host.directory).parent.is_dir():
        raise ConfigError(
            f"tiers.host.directory is {host.directory}, but {Path(host.directory).parent} does "
            "not exist; make it or pass another directory"
        )
    present = machine.pool_bytes(host.directory) if host.pool == "shm" else 0
    available = machine.available_bytes() + present
    if host.size > available:
        raise ConfigError(
            f"tiers.host.size is {host.size}, but only {format_bytes(available)} of memory are "
            "available; lower it or raise the memory or cgroup limit"
        )
    if host.pool == "shm":
        free = machine.file_system_free_bytes(host.directory) + present
        if host.size > free:
            raise ConfigError(
                f"tiers.host.size is {host.size}, but the file system of {host.directory} has "
                f"{format_bytes(free)} free; lower it or mount a larger memory file system there"
            )
    index = config.index.max_blocks * index_block_bytes(bool(config.tiers.disk.path))
    staging = config.limits.staging_bytes
    if host.size + staging + index > available:
        raise ConfigError(
            f"index.max_blocks is {config.index.max_blocks}: an index of up to "
            f"{format_bytes(index)}, pools of {host.size} and staging of {staging} are more than "
            f"the {format_bytes(available)} of memory available; lower one of them"
        )
