"""A changed configuration: what a running daemon takes over, and what it names for a restart."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.config import load, read, settings
from kvstore.core.errors import ConfigError, InvalidRequest, Unauthenticated
from kvstore.core.machine import FixedMachine
from kvstore.core.sizes import Size
from kvstore.daemon.reload import ISOLATION, LIVE, ConfigSource, Outcome, Reloader
from kvstore.server.access import Access
from kvstore.server.sessions import Sessions
from kvstore.server.staging import StagingBudget
from kvstore.store.sessions import Identity
from kvstore.testing import InProcessStore
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier

CONFIGURATION_PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BASE: dict[str, Any] = {"tiers": {"host": {"size": "16MiB", "pool": "sealed"}}}
WORDS = {
    "policy.eviction": "lru", "logging.format": "json", "logging.level": "error",
    "tiers.host.pool": "shm", "tiers.host.hugepages": "advise", "tiers.disk.admission": "all",
    "server.metrics": "127.0.0.1:1", "server.socket": "/run/other.sock",
}  # fmt: skip
RULE = {"uid": 1001, "tenant": "default"}


class Rig:
    """A store with its reloader; `write` says what the configuration file holds now."""

    def __init__(self, store: InProcessStore, sections: Any = BASE) -> None:
        self.store, self.sections = store.kv, sections
        config = self._load()
        self.store.parts.config = config
        limits = config.limits
        self.sessions = Sessions(
            self.store, Access(config.access, 0), limits, StagingBudget(1 << 20, 1 << 20, 1 << 22)
        )
        source = ConfigSource(self._load, lambda: read(None, {}, self.sections))
        assert isinstance(store.tier, HostTier)
        self.tier = store.tier
        self.reloader = Reloader(self.store, self.sessions, store.clock, config, source, self.tier)

    def _load(self) -> Any:
        return load(None, {}, FixedMachine(), self.sections)

    def reload(self, **sections: Any) -> Outcome:
        """What a reload with these tables answers."""
        self.sections = {**BASE, **sections}
        return self.reloader.reload()

    def write(self, **sections: Any) -> tuple[list[str], list[str]]:
        """(applied, waiting for a restart) of a reload with these tables."""
        return tuple(self.reload(**sections)[:2])  # type: ignore[return-value]

    @property
    def capacity(self) -> int:
        return self.tier.usage("").capacity_bytes

    def settle(self) -> None:
        """Ticks as the daemon does until the pool has its size."""
        end = time.monotonic() + 20.0
        while self.tier.is_growing(""):
            assert time.monotonic() < end
            time.sleep(0.002)
            self.tier.tick()
        self.reloader.tick()


@pytest.fixture
def rig() -> Iterator[Rig]:
    logger = logging.getLogger("kvstore")
    before = logger.level, list(logger.handlers), logger.propagate
    with InProcessStore("16MiB") as store:
        yield Rig(store)
    logger.setLevel(before[0])
    logger.handlers, logger.propagate = before[1], before[2]


def other(key: str, default: Any) -> Any:
    """A value of the same kind that is not the default."""
    if key in WORDS:
        return WORDS[key]
    if "MiB" in str(default) or default == "auto":
        return str(Size(96 << 20))
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default * 2 or 1
    if isinstance(default, list | tuple):
        return [1.5] if default and isinstance(default[0], float) else ["lru"]
    return "none"


def test_every_key_is_either_live_or_named(rig: Rig) -> None:
    """Each setting that differs is in exactly one list: applied if it is live, else waiting."""
    seen = 0
    for key, default in settings():
        if "[]" in key:
            continue
        section, _, name = key.rpartition(".")
        tables: Any = {name: other(key, default)}
        for part in reversed(section.split(".")):
            tables = {part: tables}
        try:
            read(None, {}, tables)
            rig.sections = {**BASE, **tables}
            applied, waiting, *_ = rig.reloader.reload()
        except ConfigError:
            continue  # it needs another key beside it
        seen += 1
        assert (key in applied, key in waiting) == (key in LIVE, key not in LIVE), key
        rig.write()
    assert seen > 40


def test_live_keys_exist_and_are_documented() -> None:
    """Every live key is a setting, and docs/configuration.md names exactly these."""
    keys = {key.partition("[]")[0] for key, _ in settings()}
    assert keys >= LIVE
    section = CONFIGURATION_PAGE.read_text(encoding="utf-8").partition("## Without a restart")[2]
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("* `")]
    assert {row.split("`")[1] for row in rows} == LIVE


def test_a_second_reload_finds_nothing_and_still_names_what_waits(rig: Rig) -> None:
    """What is applied is not told again; what waits for a restart is, until it is as it was."""
    change = {"server": {"drain_seconds": 3.0, "worker_threads": 7}}
    assert rig.write(**change) == (["server.drain_seconds"], ["server.worker_threads"])
    assert rig.write(**change) == ([], ["server.worker_threads"])
    assert rig.reloader.running.server.drain_seconds == 3.0
    assert rig.reloader.running.server.worker_threads == 2
    assert rig.write(server={"drain_seconds": 3.0}) == ([], [])


def test_access_rules_hold_for_the_next_session(rig: Rig) -> None:
    """A user that a new rule lets in gets in; one whose rule is gone does not any more."""
    engine = Identity(uid=1001, gid=1001)
    with pytest.raises(Unauthenticated):
        rig.sessions.admit(engine)
    assert rig.write(access=[RULE])[0] == ["access"]
    assert rig.sessions.admit(engine).role == "engine"
    rig.write(access=[{**RULE, "uid": 1002}])
    with pytest.raises(Unauthenticated):
        rig.sessions.admit(engine)


def test_limits_hold_for_the_next_call(rig: Rig) -> None:
    """A lowered time to live of pins is refused from now on; clients are told new limits."""
    rig.write(limits={"max_pin_ttl_seconds": 5.0, "leased_bytes_per_session": "1MiB"})
    session = rig.store.open_session(Identity(uid=0), "admin", ["default"], None)
    with pytest.raises(InvalidRequest, match=r"max_pin_ttl_seconds, 5\.0"):
        rig.store.pins.pin(session, "r", None, 1, 60.0)
    assert rig.store.parts.limits.leased_bytes_per_session == 1 << 20
    rig.store.close_session(session)


def test_quotas_and_new_tenants_need_no_restart(rig: Rig) -> None:
    """A tenant that is new may be used, with its cap; one that is gone has no quota any more."""
    tenants = [{"name": "chat", "host_cap": "2MiB"}]
    assert rig.write(tenants=tenants)[0] == ["tenants"]
    assert "chat" in rig.store.parts.known_tenants()
    assert rig.store.parts.residency.quota("chat", 0).cap_bytes == 2 << 20
    rig.write()
    assert rig.store.parts.residency.quota("chat", 0).cap_bytes is None


def test_isolation_waits_and_pools_stay(rig: Rig) -> None:
    """A tenant that is to be isolated shares a pool until the restart, and that is said."""
    tenants = [{"name": "medical", "isolated": True, "host_size": "4MiB"}]
    assert rig.write(tenants=tenants)[1] == [ISOLATION]
    assert rig.store.parts.pool_of("medical") == ""
    assert list(rig.reloader.running.host_pools) == [""]
    assert rig.write(tenants=tenants)[1] == [ISOLATION]


def test_the_host_tier_shrinks_and_grows_up_to_what_it_was(rig: Rig) -> None:
    """A smaller size is applied at once, and a larger one again; more waits for a restart."""

    def sized(size: str) -> tuple[list[str], list[str]]:
        return rig.write(tiers={"host": {"size": size, "pool": "sealed"}})

    assert sized("8MiB") == (["tiers.host.size"], [])
    assert rig.capacity == 8 << 20
    assert sized("12MiB") == ([], [])
    rig.settle()
    assert sized("32MiB") == ([], ["tiers.host.size"])
    assert rig.reloader.running.tiers.host.size == 12 << 20
    assert sized("16MiB") == ([], [])
    rig.settle()
    assert rig.capacity == 16 << 20


def test_a_larger_host_tier_holds_once_its_memory_is_there() -> None:
    """Size, limits that are shares of it and floors that only it keeps come together; a growth that
    is taken back before changes nothing; more than size_max waits for a restart."""

    def sized(size: str) -> Any:
        return {"host": {"size": size, "size_max": "64MiB", "pool": "sealed"}}

    tenants = [{"name": "chat", "host_floor": "40MiB"}]
    limits = {"pinned_bytes_per_session": "1MiB"}
    with InProcessStore("16MiB", sections={"tiers": sized("16MiB")}) as store:
        rig = Rig(store, {"tiers": sized("16MiB"), "limits": limits})
        answer = rig.reload(tiers=sized("64MiB"), limits=limits, tenants=tenants)
        assert answer[:3] == ([], [], [])
        assert answer.begun == "tiers.host.size grows from 16MiB to 64MiB"
        parts = rig.store.parts
        assert (rig.capacity, parts.limits.leased_bytes_per_session) == (16 << 20, 8 << 20)
        assert parts.residency.quota("chat", 0).floor_bytes is None
        rig.settle()
        assert (rig.capacity, parts.limits.leased_bytes_per_session) == (64 << 20, 32 << 20)
        assert parts.limits.pinned_bytes_per_session == 1 << 20
        assert parts.residency.quota("chat", 0).floor_bytes == 40 << 20
        assert rig.reload(tiers=sized("64MiB"), limits=limits, tenants=tenants) == ([], [], [], "")
        assert rig.reload(tiers=sized("16MiB"), limits=limits).applied[0] == "tenants"
        assert parts.limits.leased_bytes_per_session == 8 << 20
        assert rig.reload(tiers=sized("48MiB"), limits=limits).begun
        stays = "tiers.host.size stays 16MiB"
        assert rig.reload(tiers=sized("16MiB"), limits=limits) == ([], [], [], stays)
        rig.settle()
        assert rig.capacity == 16 << 20
        larger = {"host": {"size": "65MiB", "size_max": "65MiB", "pool": "sealed"}}
        waiting = ["tiers.host.size", "tiers.host.size_max"]
        assert rig.reload(tiers=larger, limits=limits)[:2] == ([], waiting)


def test_memory_that_lacks_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I14: the old size stays with all that follows from it, and the next reload tries again."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sections = {"tiers": {"host": {"size": "16MiB", "size_max": "64MiB", "pool": "sealed"}}}
    with InProcessStore("16MiB", sections=sections) as store:
        rig = Rig(store, sections)
        larger = {"host": {"size": "64MiB", "size_max": "64MiB", "pool": "sealed"}}
        monkeypatch.setattr("kvstore.tiers.host.backing.posix_fallocate", full)
        assert rig.reload(tiers=larger).begun
        rig.settle()
        assert (
            "tiers.host.size stays 16MiB and not 64MiB: memory for it cannot be had" in caplog.text
        )
        assert rig.capacity == 16 << 20
        assert rig.reloader.running.tiers.host.size == 16 << 20
        monkeypatch.undo()
        assert rig.reload(tiers=larger).begun
        rig.settle()
        assert rig.capacity == 64 << 20


def test_the_disk_tier_takes_another_size(tmp_path: Path) -> None:
    """It is applied at once; with another path both wait, and what cannot be is said, and why."""
    place = tmp_path / "disk"
    place.mkdir(mode=0o700)

    def sized(size: str, path: Path = place) -> Any:
        return {"disk": {"path": str(path), "size": size}, **BASE["tiers"]}

    disk = DiskTier(place, 32 << 20)
    with InProcessStore("16MiB", disk=disk) as store:
        rig = Rig(store, {"tiers": sized("32MiB")})
        assert rig.reload(tiers=sized("48MiB"))[:3] == (["tiers.disk.size"], [], [])
        assert rig.reloader.running.tiers.disk.size == 48 << 20
        assert 40 << 20 < disk.usage().capacity_bytes < 48 << 20
        assert rig.reload(tiers=sized("16MiB"))[:3] == (["tiers.disk.size"], [], [])
        assert disk.usage().capacity_bytes < 16 << 20
        elsewhere = rig.reload(tiers=sized("64MiB", tmp_path / "other"))
        assert elsewhere[:3] == ([], ["tiers.disk.path", "tiers.disk.size"], [])
        assert rig.reload(tiers=sized("16MiB"))[:3] == ([], [], [])
        disk._books.room.reserve_bytes = 1 << 60
        answer = rig.reload(tiers=sized("64MiB"))
        assert answer[:2] == ([], [])
        assert "tiers.disk.size stays 16MiB and not 64MiB: the file system of" in str(answer)
        assert "tiers.disk.reserve keeps" in str(answer)
        assert rig.reloader.running.tiers.disk.size == 16 << 20
        assert rig.reload(tiers=sized("64MiB")) == answer
    disk.close()


def test_a_wrong_configuration_changes_nothing(rig: Rig) -> None:
    """One fault, and nothing of the file is taken over."""
    with pytest.raises(ConfigError):
        rig.write(server={"drain_seconds": 3.0}, tenants=[{"name": ""}])
    assert rig.reloader.running.server.drain_seconds == 10.0


def test_logging_changes_at_once(rig: Rig) -> None:
    """A new level counts from the next line on."""
    rig.write(logging={"level": "error"})
    assert logging.getLogger("kvstore").level == logging.ERROR


def test_what_a_call_has_set_ends_with_a_reload(rig: Rig) -> None:
    """The configured policy acts again after a reload, though nothing in the file has changed."""
    rig.store.set_policy("fifo")
    assert rig.write() == ([], [])
    assert rig.store.shadowing.guard.configured == "saved_time"
