"""What the machine says about its memory."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.core.machine import LocalMachine, cgroup_limit_bytes, existing_parent, meminfo


def test_local_machine_answers(tmp_path: Path) -> None:
    """This machine has memory, a file system, and no pools where none were made."""
    machine = LocalMachine()
    assert 0 < machine.available_bytes() <= meminfo()["MemTotal"]
    assert machine.available_bytes() <= cgroup_limit_bytes()
    assert machine.file_system_free_bytes(str(tmp_path / "not" / "there")) > 0
    assert machine.pool_bytes(str(tmp_path)) == 0


def test_pool_bytes_adds_the_pools_up(tmp_path: Path) -> None:
    """Pool files count by the memory they take; other files in the directory do not."""
    for name in ("pool-0.data", "pool-1.data", "pool-1.headers"):
        (tmp_path / name).write_bytes(bytes(65536))
    os.truncate(tmp_path / "pool-1.data", 1 << 30)
    assert LocalMachine().pool_bytes(str(tmp_path)) == 2 * 65536


def test_existing_parent_climbs(tmp_path: Path) -> None:
    """The nearest ancestor that exists stands in for a path that does not."""
    assert existing_parent(str(tmp_path / "a" / "b")) == tmp_path
