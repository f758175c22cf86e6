"""`Config`: every setting with its default, read from TOML, environment and the machine.

`load` answers with a configuration that is complete and fits this machine, or raises ConfigError
with one sentence naming the key and the fix. Meanings: docs/configuration.md.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec

from kvstore.core.config_input import apply_environment, explain, merge
from kvstore.core.config_rules import check, index_block_bytes
from kvstore.core.errors import ConfigError
from kvstore.core.machine import LocalMachine, Machine, may_be_there
from kvstore.core.prices import Prices
from kvstore.core.section import Section
from kvstore.core.sizes import AUTO, AutoSize, Size, parse_size

Count = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Factor = Annotated[float, msgspec.Meta(gt=0, le=64)]
Role = Literal["engine", "admin"]

SOCKET_IN_RUN = "/run/kvstore/kvstore.sock"
MIB, GIB = 1 << 20, 1 << 30
DISK_BLOCK_BYTES, MAX_BLOCKS_DEFAULT = 256 << 10, 1_000_000


class TcpSection(Section, frozen=True):
    listen: str = ""
    cert: str = ""
    key: str = ""
    client_ca: str = ""


class ServerSection(Section, frozen=True):
    socket: str = ""
    socket_group: str = ""
    metrics: str = "127.0.0.1:9750"
    console: bool = False
    worker_threads: Count = 2
    drain_seconds: Seconds = 10.0
    tcp: TcpSection = TcpSection()


class AccessRule(Section, frozen=True):
    """Who a peer is: one of `uid`, `gid`, `certificate`; the first rule that fits counts."""

    uid: int | None = None
    gid: int | None = None
    certificate: str = ""
    tenant: str = "default"
    role: Role = "engine"


class TenantSection(Section, frozen=True):
    """`host_size` is the pool of an isolated tenant; its host cap and floor are for the shared."""

    name: str = ""
    isolated: bool = False
    host_size: Size | None = None
    host_cap: Size | None = None
    host_floor: Size | None = None
    disk_cap: Size | None = None
    disk_floor: Size | None = None

    def quota(self, tier: str) -> tuple[int | None, int | None]:
        """Cap and floor in a tier by its name; None where there is none."""
        cap, floor = getattr(self, f"{tier}_cap"), getattr(self, f"{tier}_floor")
        return None if cap is None else int(cap), None if floor is None else int(floor)


class HostSection(Section, frozen=True):
    size: AutoSize = AUTO
    size_max: Size | None = None
    pool: Literal["shm", "sealed"] = "shm"
    directory: str = ""
    hugepages: Literal["off", "advise", "hugetlb"] = "off"
    hugetlb_directory: str = ""
    prefault: bool = True
    mlock: bool = True


class DiskSection(Section, frozen=True):
    """Without a path there is no disk tier; with one, a size is required."""

    path: str = ""
    size: Size | None = None
    reserve: Size = Size(GIB)
    endurance_dwpd: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0
    demote_watermark: Share = 0.75
    admission: Literal["measured", "all"] = "measured"
    read_timeout_seconds: Seconds = 5.0
    read_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    bytes_per_second_max: Size | None = None
    direct: bool = True
    key_file: str = ""


class HbmSection(Section, frozen=True):
    """Without a size there is no tier in the memory of a GPU."""

    size: Size | None = None
    device: str = ""
    devices: Annotated[tuple[str, ...], msgspec.Meta(max_length=16)] = ()
    share: Literal["copy", "in_place"] = "copy"
    staging_bytes_per_session: Size = Size(256 * MIB)
    staging_bytes: Size = Size(2 * GIB)


class TiersSection(Section, frozen=True):
    host: HostSection = HostSection()
    disk: DiskSection = DiskSection()
    hbm: HbmSection = HbmSection()


class PolicySection(Section, frozen=True):
    eviction: str = "saved_time"
    shadows: tuple[str, ...] = ("lru", "gdsf", "saved_time")
    shadow_capacities: Annotated[tuple[Factor, ...], msgspec.Meta(max_length=8)] = (0.5, 2.0, 4.0)


class LimitsSection(Section, frozen=True):
    sessions: Count = 256
    leases_per_session: Count = 4096
    spaces: Count = 1024
    leased_bytes_per_session: AutoSize = AUTO
    leased_bytes_per_tenant: AutoSize = AUTO
    pinned_bytes_per_session: AutoSize = AUTO
    pinned_bytes_per_tenant: AutoSize = AUTO
    reserved_bytes_per_session: AutoSize = AUTO
    reserved_bytes_per_tenant: AutoSize = AUTO
    staging_bytes_per_session: Size = Size(64 * MIB)
    staging_bytes: AutoSize = AUTO
    lease_ttl_seconds: Seconds = 10.0
    max_lease_ttl_seconds: Seconds = 60.0
    staging_ttl_seconds: Seconds = 30.0
    max_pin_ttl_seconds: Seconds = 86_400.0
    queue_bytes_per_link: Size = Size(GIB)
    inflight_message_bytes: Size = Size(256 * MIB)
    message_bytes: Size = Size(4 * MIB)
    events_kept: Count = 65_536
    subscriptions: Count = 256
    subscriptions_per_session: Count = 16
    decisions_kept: Count = 4096
    journal_bytes: Size = Size(GIB)
    trace_bytes: Size = Size(64 * MIB)


class IndexSection(Section, frozen=True):
    max_blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0


class LoggingSection(Section, frozen=True):
    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"


class EventsSection(Section, frozen=True):
    """KV events on ZeroMQ, beside Subscribe; without an address there is none."""

    publish: str = ""
    replay: str = ""
    topic: str = "kvstore"
    form: Literal["map", "array"] = "map"
    tenants: tuple[str, ...] = ("default",)


class Config(Section, frozen=True):
    server: ServerSection = ServerSection()
    access: tuple[AccessRule, ...] = ()
    tenants: tuple[TenantSection, ...] = ()
    tiers: TiersSection = TiersSection()
    policy: PolicySection = PolicySection()
    prices: Prices = Prices()
    limits: LimitsSection = LimitsSection()
    index: IndexSection = IndexSection()
    logging: LoggingSection = LoggingSection()
    events: EventsSection = EventsSection()

    @property
    def host_pools(self) -> dict[str, int]:
        """Bytes of each host pool: `""` is shared, the others belong to the tenant they name.

        Together they are `tiers.host.size`: isolated pools come out of it.
        """
        isolated = {t.name: int(t.host_size or 0) for t in self.tenants if t.isolated}
        return {"": int(self.tiers.host.size) - sum(isolated.values()), **isolated}

    @property
    def host_pool_sizes(self) -> list[tuple[str, int, int]]:
        """Name, bytes and most bytes of each host pool: only the shared one may grow."""
        host, pools = self.tiers.host, self.host_pools
        more = max(0, int(host.size_max or 0) - int(host.size))
        return [(name, size, size if name else size + more) for name, size in pools.items()]

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier; 0 without one."""
        disk = self.tiers.disk
        return int(disk.size or 0) if disk.path else 0

    @property
    def lane_socket(self) -> str:
        """The side socket that sessions open over, beside the gRPC one."""
        return f"{self.server.socket}.lane"


def load(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration of the file, then the environment, then `overrides` (as TOML tables)."""
    environ = environ or {}
    machine = machine or LocalMachine()
    config = fill_in(read(path, environ, overrides), environ, machine)
    check(config, machine)
    return config


def read(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration as written: what depends on the machine is not filled in, nor checked."""
    raw = read_file(path) if path is not None else {}
    raw = apply_environment(raw, environ or {}, Config, convert)
    config: Config = convert(merge(raw, overrides or {}), Config)
    return config


def read_file(path: str | Path) -> dict[str, Any]:
    """Tables of a TOML file; raises ConfigError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read ({error.strerror}); "
            "correct the path or leave --config out"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is no valid TOML: {error}") from error


def convert(raw: Any, kind: Any, strict: bool = True) -> Any:
    """`raw` as a section or value; raises ConfigError naming the key."""
    try:
        return msgspec.convert(raw, kind, strict=strict, dec_hook=_decode_custom)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), Config)) from None


def _decode_custom(kind: type, value: Any) -> Any:
    assert issubclass(kind, Size), f"no decoder for {kind}"
    return AUTO if kind is AutoSize and value == "auto" else kind(parse_size(value))


def effective(config: Config) -> dict[str, Any]:
    """`config` as TOML tables; reading them back gives an equal configuration."""
    tables: dict[str, Any] = _without_none(msgspec.to_builtins(config, enc_hook=str))
    return tables


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value


def settings(kind: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its default as written in a file: `tiers.host.size`, `access[].uid`."""
    defaults = kind()
    for name, hint in get_type_hints(kind).items():
        default = getattr(defaults, name)
        if isinstance(default, Section):
            yield from settings(type(default), f"{prefix}{name}.")
        elif default == () and issubclass(hint.__args__[0], Section):
            yield from settings(hint.__args__[0], f"{prefix}{name}[].")
        else:
            yield prefix + name, str(default) if isinstance(default, Size) else default


def default_socket(environ: Mapping[str, str]) -> str:
    """Where a daemon listens if its configuration does not say."""
    return _socket_candidates(environ)[0]


def find_socket(environ: Mapping[str, str], socket: str | None = None) -> str:
    """Where a client looks for the daemon: the first candidate that may exist, else the first."""
    candidates = [socket] if socket else _socket_candidates(environ)
    return next((path for path in candidates if may_be_there(path)), candidates[0])


def _socket_candidates(environ: Mapping[str, str]) -> list[str]:
    if environ.get("KVSTORE_SOCKET"):
        return [environ["KVSTORE_SOCKET"]]
    runtime = environ.get("XDG_RUNTIME_DIR")
    in_runtime = [f"{runtime}/kvstore/kvstore.sock"] if runtime else []
    return [*in_runtime, SOCKET_IN_RUN]


def fill_in(config: Config, environ: Mapping[str, str], machine: Machine) -> Config:
    """`config` with every default that depends on the machine or on another key."""
    socket = config.server.socket or default_socket(environ)
    socket = str(Path(socket).absolute())
    host = _fill_in_host(config.tiers.host, socket, machine)
    disk = config.tiers.disk
    if disk.path:
        disk = msgspec.structs.replace(disk, path=str(Path(disk.path).absolute()))
    tiers = TiersSection(host=host, disk=disk, hbm=config.tiers.hbm)
    return msgspec.structs.replace(
        config,
        server=msgspec.structs.replace(config.server, socket=socket),
        access=config.access or _own_access(machine.uid()),
        tiers=tiers,
        limits=_fill_in_limits(config.limits, host.size, machine),
        index=_fill_in_index(config.index, tiers, machine),
    )


def _own_access(uid: int) -> tuple[AccessRule, ...]:
    """The daemon's own user and root, who could take what they want anyway."""
    return tuple(AccessRule(uid=own, role="admin") for own in dict.fromkeys((uid, 0)))


def _fill_in_host(host: HostSection, socket: str, machine: Machine) -> HostSection:
    directory = host.directory
    if not directory:
        digest = hashlib.sha256(socket.encode()).hexdigest()[:8]
        directory = f"/dev/shm/kvstore-{machine.uid()}-{digest}"
    directory = str(Path(directory).absolute())
    size = host.size or _default_host_size(directory, host.pool, machine)
    if not host.size and host.size_max is not None:
        size = AutoSize(min(size, host.size_max))
    size_max = Size(size) if host.size_max is None else host.size_max
    return msgspec.structs.replace(host, directory=directory, size=size, size_max=size_max)


def _default_host_size(directory: str, pool: str, machine: Machine) -> AutoSize:
    """25 % of the memory or half of the free memory file system, whichever is less.

    A pool that is there already keeps its size, or a restart would not re-adopt it.
    """
    if pool == "shm" and (present := machine.pool_bytes(directory)):
        return AutoSize(present)
    size = machine.available_bytes() // 4
    if pool == "shm":
        size = min(size, machine.file_system_free_bytes(directory) // 2)
    step = 64 * MIB if size >= GIB else 2 * MIB
    return AutoSize(max(size // step, 1) * step)


def _fill_in_limits(limits: LimitsSection, host_size: int, machine: Machine) -> LimitsSection:
    def part(value: AutoSize, share: float) -> AutoSize:
        return value or AutoSize(max(int(host_size * share) >> 12 << 12, 4096))

    return msgspec.structs.replace(
        limits,
        leased_bytes_per_session=part(limits.leased_bytes_per_session, 0.5),
        leased_bytes_per_tenant=part(limits.leased_bytes_per_tenant, 0.75),
        pinned_bytes_per_session=part(limits.pinned_bytes_per_session, 0.25),
        pinned_bytes_per_tenant=part(limits.pinned_bytes_per_tenant, 0.25),
        reserved_bytes_per_session=part(limits.reserved_bytes_per_session, 0.5),
        reserved_bytes_per_tenant=part(limits.reserved_bytes_per_tenant, 0.5),
        staging_bytes=limits.staging_bytes or _default_staging(limits, host_size, machine),
    )


def _default_staging(limits: LimitsSection, host_size: int, machine: Machine) -> AutoSize:
    """A quarter of the host tier, at least 16 sessions' worth, at most a quarter of memory."""
    session = limits.staging_bytes_per_session
    wanted = max(host_size // 4, 16 * session)
    return AutoSize(max(min(wanted, machine.available_bytes() // 4), session) >> 12 << 12)


def _fill_in_index(index: IndexSection, tiers: TiersSection, machine: Machine) -> IndexSection:
    """As many blocks as the pool may have smallest slots, and the disk has slots of 256 KiB.

    At most a million (576 MB of index); those of the disk at most in an eighth of the memory.
    """
    in_host = max(int(tiers.host.size_max or tiers.host.size) >> 12, 1024)
    disk_bytes = int(tiers.disk.size or 0) if tiers.disk.path else 0
    memory = machine.available_bytes() // 8
    on_disk = min(disk_bytes // DISK_BLOCK_BYTES, memory // index_block_bytes(with_disk=True))
    wanted = min(in_host + on_disk, MAX_BLOCKS_DEFAULT)
    return IndexSection(max_blocks=index.max_blocks or wanted)
