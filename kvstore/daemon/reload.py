"""What of a changed configuration a running daemon takes over, and what needs a restart."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from kvstore.core.clock import Clock
from kvstore.core.config import Config, TenantSection
from kvstore.core.config_rules import POOL_BYTES_MIN
from kvstore.core.errors import TierError
from kvstore.logs import configure
from kvstore.server.access import Access
from kvstore.server.sessions import Sessions
from kvstore.store.kvstore import KVStore
from kvstore.tiers.host import HostTier

_log = logging.getLogger("kvstore.daemon")

# Keys that take effect at once. Of `tenants`, isolation and pools need a restart.
LIVE = frozenset({
    "access", "tenants", "policy.eviction", "server.drain_seconds", "logging.format",
    "logging.level", "tiers.disk.read_timeout_seconds",
    *(f"limits.{name}" for name in (
        "leases_per_session", "spaces", "leased_bytes_per_session", "leased_bytes_per_tenant",
        "pinned_bytes_per_session", "pinned_bytes_per_tenant", "reserved_bytes_per_session",
        "reserved_bytes_per_tenant", "staging_ttl_seconds", "max_pin_ttl_seconds",
    )),
})  # fmt: skip
# Live too: up to tiers.host.size_max as it was at the start, and up to what a file system has room
# for.
HOST_SIZE, DISK_SIZE = "tiers.host.size", "tiers.disk.size"
# Where these are "auto" they are shares of the host tier, and follow it.
SHARES = (
    "leased_bytes_per_session", "leased_bytes_per_tenant", "pinned_bytes_per_session",
    "pinned_bytes_per_tenant", "reserved_bytes_per_session", "reserved_bytes_per_tenant",
)  # fmt: skip
ISOLATION = "tenants[].isolated and host_size"
KEYS = "keys in tiers.disk.key_file"


class ConfigSource(NamedTuple):
    """Where a daemon's configuration comes from: complete and checked, and as it was written.

    Defaults that follow the machine differ from hour to hour; only what was written is compared.
    """

    load: Callable[[], Config]
    read: Callable[[], Config]


class Outcome(NamedTuple):
    """Keys that differ from those in force: taken over, waiting for a restart, and refused why.

    `begun` says what is being done, and is told of when it is over.
    """

    applied: list[str]
    waiting: list[str]
    refused: list[str]
    begun: str = ""

    def __str__(self) -> str:
        done = ", ".join(self.applied) or ("" if self.begun else "nothing has changed")
        done = ", ".join(filter(None, (done, self.begun)))
        rest = f"; a restart is needed for {', '.join(self.waiting)}" if self.waiting else ""
        for sentence in self.refused:
            rest += f"; {sentence}"
        return f"policy and quotas are reloaded ({done}){rest}"


class Growing(NamedTuple):
    """A larger host tier whose memory is being had: what holds once it is there."""

    keys: list[str]
    config: Config
    asked: Config


class Reloader:
    """Applies changed settings to a store and its sessions; the owner thread alone calls it."""

    def __init__(
        self,
        store: KVStore,
        sessions: Sessions,
        clock: Clock,
        running: Config,
        source: ConfigSource,
        host: HostTier,
        take_keys: Callable[[str], bool] = lambda key_file: False,
        grown: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._sessions, self._clock = store, sessions, clock
        self._source = source
        self._host, self._take_keys, self._grown = host, take_keys, grown
        self._most_bytes = running.host_pool_sizes[0][2]
        self._growing: Growing | None = None
        self._asked = source.read()
        self.running = running

    def reload(self) -> Outcome:
        """Reads the configuration again; raises ConfigError, and then changes nothing."""
        config, asked = self._source.load(), self._source.read()
        has_new_keys = self._take_keys(self.running.tiers.disk.key_file)
        keys = changed(self._asked, asked)
        applied = [key for key in keys if key in LIVE]
        was_growing = self._growing is not None
        held = self._resize_host(keys, config, asked, applied)
        refused: list[str] = []
        if DISK_SIZE in keys and "tiers.disk.path" not in keys and self._store.parts.disk:
            sentence = self._resize_disk(config)
            (refused if sentence else applied).append(sentence or DISK_SIZE)
        waiting = [key for key in keys if key not in applied and key not in held]
        if refused:
            waiting.remove(DISK_SIZE)
        if _pools(asked) != _pools(self._asked):
            waiting.append(ISOLATION)
        self._take(applied, config, asked, ISOLATION not in waiting and "tenants" not in held)
        begun, size = "", self.running.tiers.host.size
        if held:
            begun = f"{HOST_SIZE} grows from {size} to {config.tiers.host.size}"
        elif was_growing and HOST_SIZE not in applied:
            begun = f"{HOST_SIZE} stays {size}"
        return Outcome([*applied, KEYS] if has_new_keys else applied, waiting, refused, begun)

    def tick(self) -> None:
        """Takes a larger host tier into use, once its memory is there; or says why it is not."""
        growing = self._growing
        if growing is None or self._host.is_growing(""):
            return
        self._growing, problem = None, self._host.size_problem("")
        size, wanted = self.running.tiers.host.size, growing.config.tiers.host.size
        if problem:
            _log.error("%s stays %s and not %s: %s", HOST_SIZE, size, wanted, problem)
            return
        has_tenants = "tenants" in growing.keys and _pools(growing.asked) == _pools(self._asked)
        self._take(growing.keys, growing.config, growing.asked, has_tenants)
        self._grown()
        _log.info("%s is %s now, and was %s", HOST_SIZE, wanted, size)

    def _resize_host(
        self, keys: list[str], config: Config, asked: Config, applied: list[str]
    ) -> list[str]:
        """Has the shared pool take its new size; the keys that hold once its memory is there."""
        now, self._growing = self.running.host_pools[""], None
        wanted = int(config.tiers.host.size) - self._isolated_bytes()
        if HOST_SIZE not in keys or not POOL_BYTES_MIN <= wanted <= self._most_bytes:
            self._host.resize("", now)  # ends a growth that is not wanted any more
            return []
        self._host.resize("", wanted)
        if wanted <= now:
            applied.append(HOST_SIZE)
            return []
        held = [HOST_SIZE]
        floors = sum(int(tenant.host_floor or 0) for tenant in config.tenants)
        if "tenants" in applied and floors > now:
            applied.remove("tenants")
            held.append("tenants")
        self._growing = Growing(held, config, asked)
        return held

    def _take(self, keys: list[str], config: Config, asked: Config, has_tenants: bool) -> None:
        """These keys hold from now on."""
        before = self.running
        self.running = self._merged(keys, config, asked)
        self._asked = with_keys(self._asked, [key for key in keys if key != "tenants"], asked)
        if has_tenants:
            self._asked = with_keys(self._asked, ["tenants"], asked)
        self._apply(before, config)

    def _merged(self, keys: list[str], config: Config, asked: Config) -> Config:
        """The settings in force from now on: pools stay what they were opened with."""
        if HOST_SIZE in keys:
            keys = keys + [f"limits.{name}" for name in SHARES if not getattr(asked.limits, name)]
        merged = with_keys(self.running, keys, config)
        pools = {tenant.name: tenant for tenant in self.running.tenants if tenant.isolated}
        tenants = [pools.get(t.name) or _shared(t) for t in merged.tenants]
        named = {tenant.name for tenant in tenants}
        tenants += [tenant for name, tenant in pools.items() if name not in named]
        running: Config = msgspec.structs.replace(merged, tenants=tuple(tenants))
        return running

    def _resize_disk(self, config: Config) -> str:
        """Has the disk tier take its new size; why not, if that cannot be."""
        try:
            capacity = self._store.behind.resized(config.disk_bytes)
        except TierError as error:
            size = self.running.tiers.disk.size
            return f"{DISK_SIZE} stays {size} and not {config.tiers.disk.size}: {error}"
        self._store.shadowing.disk_resized(capacity)
        return ""

    def _isolated_bytes(self) -> int:
        return sum(size for pool, size in self.running.host_pools.items() if pool)

    def _apply(self, before: Config, config: Config) -> None:
        store, running = self._store, self.running
        store.parts.config = running
        self._sessions.take_over(Access(running.access, os.geteuid()), running.limits)
        if running.logging != before.logging:
            configure(self._clock, running.logging.format, running.logging.level)
        # These two hold although nothing was written anew: they may have been set by a call.
        if config.policy.eviction != store.shadowing.guard.configured:
            store.set_policy(config.policy.eviction)
        self._take_quotas(before)
        if running.tiers.host.size != before.tiers.host.size:
            store.resized(running.host_pools[""])

    def _take_quotas(self, before: Config) -> None:
        parts = self._store.parts
        quotas = {tenant.name: tenant.quota for tenant in self.running.tenants}
        for tier, tier_name in enumerate(parts.tier_names):
            for tenant in before.tenants:
                if tenant.name not in quotas:
                    parts.residency.set_quota(tenant.name, tier, None, None)
            for name, quota in quotas.items():
                parts.residency.set_quota(name, tier, *quota(tier_name))
                self._store.remover.trim(tier, parts.pool_of(name), name)


def changed(old: Config, new: Config) -> list[str]:
    """Keys whose values differ; a list of tables is one key."""
    before, after = dict(leaves(old)), dict(leaves(new))
    return [key for key, value in after.items() if before.get(key) != value]


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every setting, lists whole."""
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def with_keys(base: Any, keys: list[str], source: Any) -> Any:
    """`base` with the values that `source` has for these keys."""
    for key in keys:
        name, _, rest = key.partition(".")
        value = getattr(source, name)
        if rest:
            value = with_keys(getattr(base, name), [rest], value)
        base = msgspec.structs.replace(base, **{name: value})
    return base


def _pools(config: Config) -> dict[str, Any]:
    """Isolated tenants with the sizes of their pools."""
    return {tenant.name: tenant.host_size for tenant in config.tenants if tenant.isolated}


def _shared(tenant: TenantSection) -> TenantSection:
    """The tenant without a pool of its own: it gets one with a restart."""
    return msgspec.structs.replace(tenant, isolated=False, host_size=None)
