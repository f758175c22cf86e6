"""Configuration: complete, checked against the machine, and clear about what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.core.config import (
    Config,
    convert,
    default_socket,
    effective,
    find_socket,
    load,
    settings,
)
from kvstore.core.config_rules import parse_address, parse_group
from kvstore.core.errors import ConfigError
from kvstore.core.machine import FixedMachine

GIB = 1 << 30
MACHINE = FixedMachine(memory=64 * GIB, free=20 * GIB)


def make(machine: FixedMachine = MACHINE, **sections: Any) -> Config:
    return load(None, {}, machine, sections)


def refusal(machine: FixedMachine = MACHINE, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(machine, **sections)
    return str(caught.value)


def test_default_host_size_is_a_quarter_of_memory_or_half_the_file_system() -> None:
    """Without a file the host tier takes the smaller of the two."""
    assert make().tiers.host.size == 10 * GIB
    assert make(FixedMachine(8 * GIB, 20 * GIB)).tiers.host.size == 2 * GIB
    assert make(tiers={"host": {"pool": "sealed"}}).tiers.host.size == 16 * GIB


def test_default_host_size_keeps_a_pool_that_is_there() -> None:
    """I10: after a kill the default size is the old pool's, so that it can be re-adopted."""
    machine = FixedMachine(60 * GIB, 10 * GIB, pools=7 * GIB)
    assert make(machine).tiers.host.size == 7 * GIB


def test_pools_to_readopt_count_as_memory() -> None:
    """A size that fits only because the old pool's pages are ours already is accepted."""
    machine = FixedMachine(20 * GIB, 2 * GIB, pools=8 * GIB)
    assert make(machine, tiers={"host": {"size": "8GiB"}}).tiers.host.size == 8 * GIB


def test_effective_reads_back_equal() -> None:
    """What `check` prints is itself a configuration that means the same."""
    config = make(
        tenants=[{"name": "a", "host_cap": "2GiB"}, {"name": "b", "isolated": True,
                  "host_size": "1GiB"}],
        access=[{"gid": 7, "tenant": "a"}, {"certificate": "peer", "tenant": "b"}],
    )  # fmt: skip
    assert convert(effective(config), Config) == config
    assert load(None, {}, MACHINE, effective(config)) == config


def test_no_access_rules_mean_the_daemons_own_user_and_root() -> None:
    """Without rules only the uid that runs the daemon and root get in, as admins."""
    rules = make(FixedMachine(user=1000)).access
    assert [rule.uid for rule in rules] == [1000, 0]
    assert {(rule.tenant, rule.role) for rule in rules} == {("default", "admin")}
    assert [rule.uid for rule in make(FixedMachine(user=0)).access] == [0]


def test_isolated_pools_come_out_of_the_tier() -> None:
    """I8: an isolated tenant has a pool of its own; all pools together are the tier's size."""
    tenant = {"name": "a", "isolated": True, "host_size": "3GiB"}
    config = make(tenants=[tenant], tiers={"host": {"size": "8GiB"}})
    assert config.host_pools == {"": 5 * GIB, "a": 3 * GIB}


UNKNOWN = [
    ({"foo": 1}, "foo"),
    ({"tiers": {"tape": {"path": "/x"}}}, "tiers.tape"),
    ({"tiers": {"host": {"sise": "1GiB"}}}, "tiers.host.sise is no setting; did you mean size"),
    ({"access": [{"user": 1}]}, "access[0].user"),
]
WRONG_TYPE = [
    ({"tiers": 4}, "tiers: the value is a whole number; pass a table"),
    ({"access": {"uid": 1}}, "access: the value is a table; pass a list"),
    ({"server": {"socket": 4}}, "server.socket: the value is a whole number; pass text in quotes"),
    ({"limits": {"sessions": "many"}}, "limits.sessions: the value is text in quotes"),
    ({"limits": {"sessions": 1.5}}, "limits.sessions"),
    ({"tiers": {"host": {"mlock": "yes"}}}, "tiers.host.mlock: the value is text in quotes"),
    ({"tiers": {"host": {"pool": "disk"}}}, "tiers.host.pool: the value is not known"),
    ({"access": [{"uid": 1, "role": "root"}]}, "access[0].role: the value is not known"),
    ({"logging": {"level": "loud"}}, "pass one of debug, info, warning, error"),
    ({"tiers": {"host": {"size": True}}}, "tiers.host.size"),
    ({"tiers": {"host": {"size": []}}}, "tiers.host.size"),
]
OUT_OF_RANGE = [
    ({"tiers": {"host": {"size": 0}}}, "tiers.host.size: the size 0 is out of range"),
    ({"tiers": {"host": {"size": "-1GiB"}}}, "tiers.host.size"),
    ({"tiers": {"host": {"size": "1KiB"}}}, "tiers.host.size is 1KiB"),
    ({"limits": {"sessions": 0}}, "limits.sessions: the value is out of range"),
    ({"limits": {"staging_bytes_per_session": "auto"}}, "limits.staging_bytes_per_session"),
    ({"limits": {"lease_ttl_seconds": 0}}, "limits.lease_ttl_seconds"),
    ({"limits": {"lease_ttl_seconds": float("nan")}}, "lease_ttl_seconds"),
    ({"limits": {"lease_ttl_seconds": float("inf")}}, "lease_ttl_seconds"),
    ({"limits": {"lease_ttl_seconds": 100}}, "limits.max_lease_ttl_seconds"),
    ({"limits": {"message_bytes": 1}}, "limits.message_bytes"),
    ({"limits": {"inflight_message_bytes": "1MiB"}}, "limits.inflight_message_bytes"),
    ({"limits": {"staging_bytes": "1MiB"}}, "limits.staging_bytes"),
    ({"server": {"metrics": "9750"}}, "server.metrics"),
    ({"server": {"metrics": "localhost:99999"}}, "server.metrics"),
    ({"server": {"socket_group": "no-such-group"}}, "server.socket_group"),
    ({"server": {"socket": "/" + "x" * 110}}, "server.socket"),
    ({"tiers": {"host": {"directory": "/no/such/dir"}}}, "tiers.host.directory"),
]
TENANTS = [
    ({"access": [{}]}, "access[0]: pass exactly one of uid, gid and certificate"),
    ({"access": [{"uid": 1, "gid": 1}]}, "access[0]"),
    ({"access": [{"uid": -1}]}, "access[0]"),
    ({"access": [{"uid": 1, "tenant": "x"}]}, "access[0].tenant"),
    ({"tenants": [{}]}, "tenants[0].name"),
    ({"tenants": [{"name": "a"}, {"name": "a"}]}, "tenants[1].name"),
    ({"tenants": [{"name": "a", "isolated": True}]}, "tenants[0].host_size"),
    ({"tenants": [{"name": "a", "host_size": "1GiB"}]}, "tenants[0].host_size"),
    ({"tenants": [{"name": "a", "isolated": True, "host_size": "1GiB", "host_cap": "1GiB"}]},
     "tenants[0]"),
    ({"tenants": [{"name": "a", "isolated": True, "host_size": "10GiB"}]}, "tiers.host.size"),
    ({"tenants": [{"name": "a", "host_cap": "1GiB", "host_floor": "2GiB"}]}, "host_floor"),
    ({"tenants": [{"name": "a", "host_floor": "11GiB"}]}, "host_floor"),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "said"), UNKNOWN + WRONG_TYPE + OUT_OF_RANGE + TENANTS)
def test_wrong_setting_is_named(sections: dict[str, Any], said: str) -> None:
    """Unknown keys, wrong types and impossible values are refused in a sentence with the key."""
    text = refusal(**sections)
    assert said in text
    assert "\n" not in text


def test_size_beyond_memory_is_refused() -> None:
    """More than the memory, or than the memory file system has free, names the size's key."""
    host = {"tiers": {"host": {"size": "30GiB"}}}
    assert "file system" in refusal(**host)
    assert "of memory are available" in refusal(FixedMachine(16 * GIB, 99 * GIB), **host)
    sealed = {"tiers": {"host": {"size": "30GiB", "pool": "sealed"}}}
    assert make(**sealed).tiers.host.size == 30 * GIB


def test_index_is_checked_against_memory() -> None:
    """I16: the largest index allowed must fit beside pools and staging."""
    assert "index.max_blocks is 1000000000" in refusal(index={"max_blocks": 10**9})
    assert make().index.max_blocks > 0


def test_tcp_needs_mutual_tls(tmp_path: Path) -> None:
    """I18: TCP is off by default, and refused without certificate, key and client CA."""
    assert make().server.tcp.listen == ""
    assert "server.tcp.cert is empty" in refusal(server={"tcp": {"listen": "0.0.0.0:9751"}})
    files = {name: str(tmp_path / name) for name in ("cert", "key", "client_ca")}
    tcp = {"listen": "0.0.0.0:9751", **files}
    assert "server.tcp.cert: there is no file" in refusal(server={"tcp": tcp})
    for path in files.values():
        Path(path).touch()
    assert make(server={"tcp": tcp}).server.tcp.listen == "0.0.0.0:9751"


def test_addresses_and_groups_are_read() -> None:
    """IPv6 hosts stand in brackets; a group is a name or a number."""
    assert parse_address("key", "[::1]:9750") == ("::1", 9750)
    assert parse_group("key", "") is None
    assert parse_group("key", "4711") == 4711
    assert parse_group("key", "root") == 0
    environ = {"KVSTORE_SERVER__METRICS": "[::1]:9750"}
    assert load(None, environ, MACHINE).server.metrics == "[::1]:9750"


def test_environment_overrides_the_file(tmp_path: Path) -> None:
    """A variable beats the file; lists are written as TOML or JSON."""
    file = tmp_path / "kvstore.toml"
    file.write_text('[tiers.host]\nsize = "1GiB"\nmlock = true\n[logging]\nlevel = "debug"\n')
    environ = {
        "KVSTORE_TIERS__HOST__SIZE": "2GiB",
        "KVSTORE_TIERS__HOST__MLOCK": "false",
        "KVSTORE_LIMITS__SESSIONS": "7",
        "KVSTORE_SERVER__METRICS": "",
        "KVSTORE_ACCESS": '[{uid = 5}, {"gid" = 6, role = "admin"}]',
        "KVSTORE_TENANTS": '[{"name": "a"}]',
        "KVSTORE_CHECK": "1",
        "PATH": "/bin",
    }
    config = load(file, environ, MACHINE)
    assert config.tiers.host.size == 2 * GIB
    assert not config.tiers.host.mlock
    assert (config.limits.sessions, config.server.metrics) == (7, "")
    assert [(rule.uid, rule.gid) for rule in config.access] == [(5, None), (None, 6)]
    assert config.logging.level == "debug"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("KVSTORE_TIERS__HOST__SISE", "1GiB", "tiers.host.sise is no setting"),
        ("KVSTORE_TIERS__TAPE__PATH", "/x", "tiers.tape is no setting"),
        ("KVSTORE_LIMITS__SESSIONS", "many", "pass a whole number"),
        ("KVSTORE_TIERS__HOST__SIZE", "big", "is no size"),
        ("KVSTORE_ACCESS", "[{uid = }]", "pass a list"),
    ],
)
def test_wrong_variable_is_named(variable: str, value: str, said: str) -> None:
    """An error in a variable names the variable."""
    with pytest.raises(ConfigError) as caught:
        load(None, {variable: value}, MACHINE)
    assert variable in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["[server", "a = ", "\xff"])
def test_broken_file_is_named(tmp_path: Path, text: str) -> None:
    """A file that is no TOML is refused by its name."""
    file = tmp_path / "kvstore.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="no valid TOML"):
        load(file, {}, MACHINE)
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.toml", {}, MACHINE)


def test_sockets_are_looked_for_in_order(tmp_path: Path) -> None:
    """$KVSTORE_SOCKET, then the user's runtime directory, then /run; clients take what exists."""
    runtime = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert default_socket({**runtime, "KVSTORE_SOCKET": "/a"}) == "/a"
    assert default_socket(runtime) == f"{tmp_path}/kvstore/kvstore.sock"
    assert default_socket({}) == "/run/kvstore/kvstore.sock"
    assert find_socket(runtime, "/b") == "/b"
    (tmp_path / "kvstore").mkdir()
    (tmp_path / "kvstore" / "kvstore.sock").touch()
    assert find_socket(runtime) == f"{tmp_path}/kvstore/kvstore.sock"


def test_directories_of_two_sockets_differ() -> None:
    """I20: daemons on two sockets get two pool directories without being told."""
    one, two = (make(server={"socket": f"/tmp/{name}.sock"}) for name in "ab")
    assert one.tiers.host.directory != two.tiers.host.directory
    assert one.lane_socket == "/tmp/a.sock.lane"


def test_settings_lists_every_key_once() -> None:
    """The list that documentation is checked against holds each key, lists with brackets."""
    keys = [key for key, _ in settings()]
    assert len(keys) == len(set(keys))
    assert {"tiers.host.size", "access[].uid", "server.tcp.listen"} <= set(keys)
    assert all(not isinstance(default, msgspec.Struct) for _, default in settings())
