"""Configuration of a host tier that may grow: what follows from its largest size, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.cli.doctor_memory import memory_file_system
from kvstore.cli.findings import OK, WARN
from kvstore.core.config import Config, convert, effective, load
from kvstore.core.config_host import never_fits
from kvstore.core.errors import ConfigError
from kvstore.core.machine import FixedMachine

MIB, GIB = 1 << 20, 1 << 30
MACHINE = FixedMachine(memory=64 * GIB, free=20 * GIB)


def make(host: Any, machine: FixedMachine = MACHINE, **sections: Any) -> Config:
    return load(None, {}, machine, {"tiers": {"host": host}, **sections})


def test_without_a_largest_size_a_tier_does_not_grow() -> None:
    """The default is the size itself; what `check` prints means the same."""
    config = make({"size": "2GiB"})
    assert config.tiers.host.size_max == config.tiers.host.size == 2 * GIB
    assert config.host_pool_sizes == [("", 2 * GIB, 2 * GIB)]
    assert convert(effective(config), Config) == config


def test_only_the_shared_pool_grows() -> None:
    """Pools of isolated tenants come out of the size and keep theirs; all that may be added to the
    size is the shared pool's."""
    tenants = [{"name": "medical", "isolated": True, "host_size": "512MiB"}]
    config = make({"size": "2GiB", "size_max": "100GiB"}, tenants=tenants)
    assert config.host_pool_sizes == [
        ("", 1536 * MIB, 98 * GIB + 1536 * MIB), ("medical", 512 * MIB, 512 * MIB),
    ]  # fmt: skip
    assert config.limits.leased_bytes_per_session == GIB


def test_the_index_has_room_for_the_largest_size() -> None:
    """`index.max_blocks` is not changed by a reload, so its default is for all that may come."""
    assert make({"size": "64MiB"}).index.max_blocks == 16384
    assert make({"size": "64MiB", "size_max": "256MiB"}).index.max_blocks == 65536


def test_a_default_size_is_at_most_the_largest() -> None:
    """`auto` takes a share of the memory, or what is there already, but never more than it may."""
    assert make({"size_max": "1GiB"}).tiers.host.size == GIB
    assert make({"size_max": "30GiB"}).tiers.host.size == 10 * GIB
    left = FixedMachine(64 * GIB, 20 * GIB, pools=3 * GIB)
    assert make({"size_max": "30GiB"}, left).tiers.host.size == 3 * GIB


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"size": "2GiB", "size_max": "1GiB"}, "is 1GiB, below tiers.host.size, 2GiB; raise it"),
        ({"size": "2GiB", "size_max": 0}, "the size 0 is out of range"),
        ({"size": "2GiB", "size_max": "33TiB"}, "pass 32TiB or less"),
        ({"size": "2GiB", "size_max": "auto"}, "tiers.host.size_max"),
        ({"size": "2GiB", "size_max": -1}, "tiers.host.size_max"),
        ({"size": "2GiB", "size_max": "many"}, "tiers.host.size_max"),
        ({"size": "2GiB", "size_max": True}, "tiers.host.size_max"),
        ({"size": "2GiB", "size_max": "3GiB", "hugepages": "hugetlb"}, "set aside"),
        ({"size": "2GiB", "size_maximum": "3GiB"}, "did you mean size_max"),
    ],
)
def test_what_cannot_be_is_refused_by_name(host: Any, words: str) -> None:
    """One sentence that names the key and the fix."""
    with pytest.raises(ConfigError) as caught:
        make(host)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_what_can_never_be_is_warned_of() -> None:
    """A largest size above what is free now is what it is for; one above all there is a mistake."""
    roomy = FixedMachine(64 * GIB, 5 * GIB, others=60 * GIB)
    fits = make({"size": "2GiB", "size_max": "60GiB"}, roomy)
    assert not never_fits(fits, roomy)
    small = FixedMachine(64 * GIB, 20 * GIB, others=GIB)
    assert "file system" in never_fits(fits, small)
    assert "memory has 32 GiB" in never_fits(fits, FixedMachine(32 * GIB, 90 * GIB))
    assert not never_fits(make({"size": "2GiB"}), FixedMachine(GIB, GIB))
    sealed = make({"size": "2GiB", "size_max": "60GiB", "pool": "sealed"})
    assert not never_fits(sealed, small)
    assert memory_file_system(sealed, small, False).status == OK
    assert memory_file_system(sealed, FixedMachine(32 * GIB, 90 * GIB), False).status == WARN
