"""Configuration of the disk tier: off by default, complete or refused, and on a disk of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.config import Config, convert, effective, load
from kvstore.core.config_disk import is_network_file_system
from kvstore.core.config_rules import index_block_bytes
from kvstore.core.errors import ConfigError
from kvstore.core.machine import FixedMachine, LocalMachine, file_system_type, medium_bytes

MIB, GIB = 1 << 20, 1 << 30
MACHINE = FixedMachine(memory=64 * GIB, free=20 * GIB)


def make(machine: FixedMachine = MACHINE, disk: Any = None, **sections: Any) -> Config:
    tiers = {"host": {"size": "1GiB"}, **({"disk": disk} if disk is not None else {})}
    return load(None, {}, machine, {"tiers": tiers, **sections})


def refusal(machine: FixedMachine = MACHINE, disk: Any = None, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(machine, disk, **sections)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A directory that is not there yet, in one that is."""
    return str(tmp_path / "disk")


def test_there_is_no_disk_tier_without_a_path() -> None:
    """Without `tiers.disk.path` nothing is written to a disk, whatever else is set."""
    assert make().disk_bytes == 0
    assert make(disk={"size": "5GiB"}).disk_bytes == 0
    assert make(disk={"size": "5GiB", "path": ""}).disk_bytes == 0


def test_a_path_and_a_size_make_a_disk_tier(path: str) -> None:
    """The rest has defaults, and what `check` prints means the same."""
    config = make(disk={"path": path, "size": "5GiB"})
    disk = config.tiers.disk
    assert (config.disk_bytes, disk.path, disk.reserve) == (5 * GIB, path, GIB)
    assert (disk.endurance_dwpd, disk.demote_watermark, disk.read_threads) == (1.0, 0.75, 2)
    assert (disk.read_timeout_seconds, disk.direct) == (5.0, True)
    assert convert(effective(config), Config) == config


def test_the_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is one below the directory that the daemon was started in."""
    monkeypatch.chdir(tmp_path)
    assert make(disk={"path": "d", "size": "1GiB"}).tiers.disk.path == str(tmp_path / "d")


VALUES = [
    ({}, "tiers.disk.size is missing; a disk tier needs one"),
    ({"size": "8MiB"}, "tiers.disk.size is 8MiB; pass 16MiB or more"),
    ({"size": 0}, "tiers.disk.size: the size 0 is out of range"),
    ({"size": "auto"}, "tiers.disk.size"),
    ({"reserve": "-1GiB"}, "tiers.disk.reserve"),
    ({"endurance_dwpd": -0.5}, "tiers.disk.endurance_dwpd: the value is out of range"),
    ({"endurance_dwpd": math.nan}, "tiers.disk.endurance_dwpd"),
    ({"endurance_dwpd": math.inf}, "tiers.disk.endurance_dwpd"),
    ({"demote_watermark": 1.5}, "tiers.disk.demote_watermark"),
    ({"demote_watermark": math.nan}, "tiers.disk.demote_watermark"),
    ({"read_timeout_seconds": 0}, "tiers.disk.read_timeout_seconds"),
    ({"read_timeout_seconds": math.nan}, "tiers.disk.read_timeout_seconds"),
    ({"read_threads": 0}, "tiers.disk.read_threads"),
    ({"bytes_per_second_max": 0}, "tiers.disk.bytes_per_second_max: the size 0 is out of range"),
    ({"direct": "yes"}, "tiers.disk.direct"),
    ({"sise": "1GiB"}, "tiers.disk.sise is no setting; did you mean size"),
]


@pytest.mark.parametrize(("disk", "said"), VALUES)
def test_a_wrong_value_is_named(path: str, disk: dict[str, Any], said: str) -> None:
    """Sizes, ratios and counts that cannot be are refused in a sentence with the key."""
    whole = {"path": path, **({"size": "1GiB"} if disk else {}), **disk}
    assert said in refusal(disk=whole)


def test_endurance_of_zero_is_no_limit(path: str) -> None:
    """0 drive writes a day means that writes are not limited, not that there are none."""
    disk = {"path": path, "size": "1GiB", "endurance_dwpd": 0}
    assert make(disk=disk).tiers.disk.endurance_dwpd == 0.0


def test_the_parent_must_exist(tmp_path: Path) -> None:
    """A path with a typing error does not quietly become a tree of new directories."""
    said = refusal(disk={"path": str(tmp_path / "no" / "such"), "size": "1GiB"})
    assert said.startswith("tiers.disk.path is ")
    assert "does not exist" in said


def test_a_file_is_no_directory(path: str) -> None:
    """The path of a file is refused, and the file left alone."""
    Path(path).write_text("mine")
    assert "is no directory" in refusal(disk={"path": path, "size": "1GiB"})
    assert Path(path).read_text() == "mine"


@pytest.mark.parametrize("inside", ["", "disk"])
def test_it_does_not_lie_in_the_host_pools_directory(tmp_path: Path, inside: str) -> None:
    """Nor the host pool in it: each directory has one tier, and one of them is no disk."""
    pool = tmp_path / "pool"
    pool.mkdir()
    tiers = {
        "host": {"size": "1GiB", "directory": str(pool)},
        "disk": {"path": str(pool / inside), "size": "1GiB"},
    }
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"tiers\.disk\.path .* neither may lie in the other"):
            load(None, {}, MACHINE, {"tiers": tiers})
        tiers["host"]["directory"] = tiers["disk"]["path"]
        tiers["disk"]["path"] = str(pool)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "fuseblk", "9p", "ceph"])
def test_network_file_systems_are_refused(path: str, kind: str) -> None:
    """I9: where a sync or a lock may mean nothing, nothing is called durable."""
    said = refusal(MACHINE._replace(kind=kind), disk={"path": path, "size": "1GiB"})
    assert "tiers.disk.path" in said
    assert f"type {kind}" in said


def test_local_file_systems_are_taken() -> None:
    """What is not known to be on another machine is taken, an unknown type too."""
    assert not any(map(is_network_file_system, ("ext4", "xfs", "btrfs", "zfs", "overlay", "")))


def test_the_type_of_a_file_system_is_known() -> None:
    """The mount table tells it, and the innermost mount counts."""
    assert file_system_type(Path("/proc/self")) == "proc"
    assert LocalMachine().file_system_kind("/proc/not/there") == "proc"


def test_it_fits_the_file_system_beside_the_reserve(path: str) -> None:
    """The size is what the medium can hold, with what must stay free left out."""
    disk = {"path": path, "size": "20GiB", "reserve": "1MiB"}
    assert "tiers.disk.size is 20GiB" in refusal(disk=disk)
    assert make(disk={**disk, "size": "19GiB"}).disk_bytes == 19 * GIB
    assert "tiers.disk.reserve keeps 2GiB" in refusal(
        disk={**disk, "size": "19GiB", "reserve": "2GiB"}
    )


def test_what_is_there_already_counts_as_room(path: str) -> None:
    """A full tier starts again: its own files are no reason to refuse its size."""
    machine = MACHINE._replace(free=2 * GIB, on_disk=8 * GIB)
    assert make(machine, disk={"path": path, "size": "9GiB"}).disk_bytes == 9 * GIB
    said = refusal(machine, disk={"path": path, "size": "10GiB"})
    assert "has 10 GiB in all" in said


def test_a_file_system_that_others_filled_is_no_reason_to_refuse(path: str) -> None:
    """I14: a tier that was there before starts with what it has, and waits for room."""
    machine = MACHINE._replace(free=2 * GIB, on_disk=GIB, others=40 * GIB)
    assert make(machine, disk={"path": path, "size": "9GiB"}).disk_bytes == 9 * GIB


def test_bytes_on_the_medium_are_counted(tmp_path: Path) -> None:
    """What a directory takes counts in blocks on the medium, folders below it included."""
    (tmp_path / "segments").mkdir()
    for name in ("LOCK", "segments/1.seg"):
        (tmp_path / name).write_bytes(bytes(1 << 16))
    (tmp_path / "sparse").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert 2 << 16 <= LocalMachine().directory_bytes(str(tmp_path)) <= 3 << 16
    assert LocalMachine().directory_bytes(str(tmp_path / "none")) == 0
    assert medium_bytes(str(tmp_path / "none")) == 0


QUOTAS = [
    ({"disk_cap": "1GiB", "disk_floor": "2GiB"}, "tenants[0].disk_floor is above disk_cap"),
    ({"disk_floor": "6GiB"}, "tenants[].disk_floor add up to 6 GiB, more than the 5GiB"),
    ({"disk_cap": 0}, "tenants[0].disk_cap"),
]


@pytest.mark.parametrize(("tenant", "said"), QUOTAS)
def test_wrong_quotas_are_named(path: str, tenant: dict[str, Any], said: str) -> None:
    """I17: floors that the disk cannot keep are refused."""
    disk = {"path": path, "size": "5GiB"}
    assert said in refusal(disk=disk, tenants=[{"name": "a", **tenant}])


def test_isolated_tenants_have_quotas_on_disk(path: str) -> None:
    """Clients never map the disk, so isolated tenants share it, within caps like all others."""
    tenant = {"name": "a", "isolated": True, "host_size": "256MiB", "disk_cap": "2GiB"}
    config = make(disk={"path": path, "size": "5GiB"}, tenants=[tenant])
    assert config.tenants[0].quota("disk") == (2 * GIB, None)
    assert config.tenants[0].quota("host") == (None, None)


def test_the_index_counts_blocks_of_the_disk(path: str) -> None:
    """I16: the default index has room for the disk's blocks, as far as memory allows."""
    small = make().index.max_blocks
    disk = {"path": path, "size": "16GiB"}
    assert make(disk=disk).index.max_blocks == small + (16 * GIB >> 18)
    tight = FixedMachine(memory=2 * GIB, free=20 * GIB)
    room = 2 * GIB // 8 // index_block_bytes(with_disk=True)
    huge = {"path": path, "size": "19GiB", "reserve": "1MiB"}
    assert make(tight, disk=huge).index.max_blocks == small + min(room, 19 * GIB >> 18)
    wide = FixedMachine(memory=1 << 40, free=1 << 44)
    config = make(wide, disk={"path": path, "size": "4TiB"})
    assert config.index.max_blocks == 1_000_000


def test_the_index_of_a_disk_is_checked_against_memory(path: str) -> None:
    """I16: an index that the memory cannot hold is refused, the disk's share included."""
    blocks = 60 * GIB // index_block_bytes(with_disk=False)
    assert make(index={"max_blocks": blocks}).index.max_blocks == blocks
    disk = {"path": path, "size": "5GiB"}
    assert "index.max_blocks" in refusal(disk=disk, index={"max_blocks": blocks})
