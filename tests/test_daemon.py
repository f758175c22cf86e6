"""What the daemon says of tiers, and that a disk that hangs keeps it from nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from kvstore.core.clock import perf_seconds
from kvstore.core.config import Config, load
from kvstore.core.machine import FixedMachine
from kvstore.daemon.daemon import Daemon
from kvstore.daemon.tiers import ProblemLog, call_within, link_threads, paced
from kvstore.testing import MemoryTier
from kvstore.tiers.throttle import ThrottledTier


def configured(**tiers: Any) -> Config:
    return load(None, {}, FixedMachine(), {"tiers": tiers})


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Whoever waits for it hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_links_of_the_disk_are_there_with_a_disk(tmp_path: Any) -> None:
    """Without a disk tier no thread waits for one; with one, as many read as configured."""
    assert set(link_threads(configured())) == {"staging>host", "host>check"}
    disk = {"path": str(tmp_path / "d"), "size": "1GiB", "read_threads": 5}
    threads = link_threads(configured(disk=disk))
    assert threads["disk>host"] == 5
    assert (threads["host>disk"], threads["disk>check"], threads["record"]) == (2, 1, 1)


def test_a_disk_is_no_faster_than_it_may_be(tmp_path: Any) -> None:
    """With a limit the disk tier is slowed down to it, without one it is used as it is."""
    disk: Any = MemoryTier(1 << 20, "disk")
    section = {"path": str(tmp_path / "d"), "size": "1GiB"}
    assert paced(disk, configured(disk=section)) is disk
    limited = paced(disk, configured(disk={**section, "bytes_per_second_max": "500MB"}))
    assert isinstance(limited, ThrottledTier)
    assert limited.bandwidth_bytes_per_second == 500e6
    assert paced(None, configured()) is None


def test_a_call_that_hangs_is_left(stuck: threading.Event) -> None:
    """Closing waits for a disk as long as it said, and no longer."""
    began = perf_seconds()
    assert not call_within(0.05, lambda: bool(stuck.wait()))  # type: ignore[arg-type]
    assert perf_seconds() - began < 5
    assert call_within(5, lambda: None)


def test_a_problem_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line when a tier gets a problem, one when it is another, one at its end."""
    problems = ProblemLog()
    with caplog.at_level(logging.WARNING):
        for problem in ("", "full", "full", "broken", "", ""):
            problems.tell("disk", problem)
    assert [record.getMessage() for record in caplog.records] == [
        "the disk tier takes no blocks: full",
        "the disk tier takes no blocks: broken",
        "the disk tier takes blocks again",
    ]


class Tiers(NamedTuple):
    host: Any
    disk: Any
    gpus: Any = None


class Tier:
    """Counts how often it is closed; hangs if it is told to."""

    def __init__(self, stuck: threading.Event | None = None) -> None:
        self.stuck = stuck
        self.closed = 0

    def close(self, keep: bool = True) -> None:
        if self.stuck is not None:
            self.stuck.wait()
        self.closed += 1


class Mover:
    def __init__(self, left: int) -> None:
        self.left = left

    def queued_bytes(self, link: str) -> int:
        return self.left


def closing(disk: Tier | None, left: int = 0) -> tuple[bool, Tier]:
    daemon, host = Daemon(configured()), Tier()
    daemon._tiers = Tiers(host, disk)  # type: ignore[assignment]
    daemon._mover = Mover(left)  # type: ignore[assignment]
    daemon._links = ("staging>host", "disk>host")
    return daemon._close_tiers(), host


def test_tiers_are_closed_when_nothing_hangs() -> None:
    """A daemon that leaves in order closes each tier once."""
    disk = Tier()
    done, host = closing(disk)
    assert (done, host.closed, disk.closed) == (True, 1, 1)
    assert closing(None)[0]


def test_bytes_under_way_keep_tiers_as_they_are() -> None:
    """While a worker may still write into a pool, it is left like in a crash, and so are locks."""
    disk = Tier()
    done, host = closing(disk, left=4096)
    assert (done, host.closed, disk.closed) == (False, 0, 0)


def test_a_disk_that_does_not_close_is_left(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I14: the daemon's end does not wait for a disk that hangs."""
    monkeypatch.setattr("kvstore.daemon.daemon.CLOSE_SECONDS", 0.05)
    done, host = closing(Tier(stuck))
    assert (done, host.closed) == (False, 0)
