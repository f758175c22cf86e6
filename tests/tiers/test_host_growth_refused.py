"""What hinders a host pool from growing, and what is left then: all of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from growing import World

from kvstore.core.errors import ConfigError, TierError
from kvstore.tiers.host import HostTier, PoolConfig, files, pages
from kvstore.tiers.host import backing as backing_module
from kvstore.tiers.host import growth as growth_module

MIB = 1 << 20


def test_the_last_page_that_is_missing_leaves_the_old_size(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: where memory ends half way, the pool keeps its size and its blocks, returns what it got,
    says why in one sentence, and may grow later."""
    here = world(4, 64)
    here.put(20_000, 150)
    real, left = os.posix_fallocate, [5]

    def full(fd: int, offset: int, length: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(backing_module, "posix_fallocate", full)
    here.resize(48)
    assert left[0] == -1
    problem = here.tier.size_problem("")
    assert "No space left on device" in problem
    assert "\n" not in problem
    here.check()
    assert here.memory == 4 * MIB
    monkeypatch.undo()
    here.resize(48)
    assert not here.tier.size_problem("")
    here.check()


def test_memory_that_cannot_be_locked_leaves_the_old_size(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool that is locked does not grow by pages that are not; one that never was locked may."""
    locked: list[int] = []

    def limited(address: int, length: int) -> None:
        locked.append(length)
        if sum(locked) > 16 * MIB:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(pages, "lock", limited)
    here = world(8, 64, lock_memory=True)
    assert here.tier.prefault.wait(20)
    here.resize(32)
    assert "LimitMEMLOCK" in here.tier.size_problem("")
    here.check()
    assert here.memory == 8 * MIB
    here.tier.close()
    locked[:] = [16 * MIB]
    again = World(here.directory, 8, 64, lock_memory=True)
    assert again.tier.prefault.wait(20)
    assert again.tier.prefault.lock_problem
    again.resize(32)
    assert not again.tier.size_problem("")
    again.check()
    again.tier.close()


def test_a_growth_leaves_memory_to_others(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes the last page of a control group is killed: a growth stops before, and says so."""
    left = [400 * MIB]

    class Short(growth_module.LocalMachine):
        def available_bytes(self) -> int:
            left[0] -= 64 * MIB
            return left[0]

    monkeypatch.setattr(growth_module, "LocalMachine", Short)
    here = world(4, 600)
    here.resize(600)
    assert "control group" in here.tier.size_problem("")
    assert here.memory == 4 * MIB
    here.check()


def test_slots_without_memory_are_not_handed_out(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: a slot whose memory was given back, and that gets none any more, is granted to nobody;
    memory of free slots elsewhere goes to it first."""
    here = world(16, 16)
    here.put(20_000, 600)
    here.resize(2)
    for _ in range(200):
        here.tier.tick()
    assert here.memory <= 2 * MIB
    for number in sorted(here.blocks)[::2]:
        here.drop(number)
    real, budget = os.posix_fallocate, [0]

    def short(fd: int, offset: int, length: int) -> None:
        if here.memory + length > 2 * MIB + budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(backing_module, "posix_fallocate", short)
    assert here.put(300_000, 2) == 2
    here.check()
    budget[0] = -64 * MIB
    before = here.tier.usage("")
    assert here.put(300_000, 1) == 0
    assert here.tier.usage("") == before
    here.check()


def test_a_start_that_finds_no_memory_for_a_larger_size_loses_nothing(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: the error names the size; with the old one the blocks are there again."""
    here = world(4, 64)
    here.put(20_000, 100)
    here.tier.close()
    monkeypatch.setattr(files, "_memory_fields", lambda: {"MemAvailable": 8 << 10})
    with pytest.raises(TierError, match=r"tiers\.host\.size") as error:
        World(here.directory, 64, 64)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    here.open(64)
    here.restart(64)
    here.check()


def test_huge_pages_of_hugetlbfs_do_not_grow(shm_directory: Path) -> None:
    """They are set aside for a whole pool at once, so the key is refused by name."""
    with pytest.raises(ConfigError, match=r"tiers\.host\.size_max"):
        HostTier([PoolConfig("", MIB, 2 * MIB)], kind="sealed", hugepages="hugetlb")
