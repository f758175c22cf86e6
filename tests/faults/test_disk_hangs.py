"""A disk that does not answer: only who needs it waits, and nobody waits for long."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemons import eventually
from fault_shim import HANG, Call, File
from sick_disks import BLOCKS, Latencies, SickDisk

from kvstore.client import KVClient

READ_TIMEOUT = 1.0
SOON = 5.0  # far more than anything in memory takes on a busy machine
LEAVES_WITHIN = 40.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SickDisk]:
    """Prompts 1, 2 and 3 are on disk alone, prompt 4 is in host too."""
    with SickDisk(tmp_path / "disk", size="16MiB") as made:
        with made.calm_client() as client:
            made.stored(client, 1, 2, 3)
            assert made.flushed(client) == (3 * BLOCKS, 0)
        made.reboot()
        with made.calm_client() as client:
            made.stored(client, 4)
            assert made.flushed(client) == (4 * BLOCKS, 0)
        yield made


@pytest.fixture
def client(daemon: SickDisk) -> Iterator[KVClient]:
    with daemon.calm_client() as made:
        yield made


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    """Where calls run that may wait for the disk."""
    with ThreadPoolExecutor(2) as made:
        yield made


def host_goes_on(daemon: SickDisk, client: KVClient, seconds: float) -> None:
    """Lookups, restores and puts in host, for a while: all right, all soon.

    Of few prompts: a fast machine would put so many that those on disk have to go.
    """
    latencies, end = Latencies(), time.monotonic() + seconds
    numbers = itertools.cycle(range(100, 103))
    while time.monotonic() < end:
        number = next(numbers)
        assert latencies.measure(lambda: daemon.found(client, 4)) == BLOCKS
        result = latencies.measure(lambda n=number: daemon.put(client, n))  # type: ignore[misc]
        assert result.stored + result.present == BLOCKS, result
    assert latencies.count >= 4
    assert latencies.worst < SOON


def on_its_own(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_reads_that_hang(daemon: SickDisk, client: KVClient, aside: ThreadPoolExecutor) -> None:
    """I14: a restore from a disk that hangs ends within the read timeout, with a reason; later
    ones are not even begun; host goes on, status tells; after the hang all is as before."""
    daemon.shim.set(Call.READ, File.SEGMENT, HANG)
    began = time.monotonic()
    with daemon.calm_client() as other:
        restore = aside.submit(daemon.found, other, 1)
        daemon.shim.wait(Call.READ, File.SEGMENT)
        host_goes_on(daemon, client, 0.5)
        assert restore.result(READ_TIMEOUT + SOON) == 0
        assert time.monotonic() - began >= READ_TIMEOUT
    assert "the disk has not answered for 1.0 s" in daemon.reason
    assert "has not answered" in daemon.problem(client)
    began = time.monotonic()
    assert daemon.found(client, 2) == 0
    assert time.monotonic() - began < SOON
    host_goes_on(daemon, client, 0.5)
    daemon.shim.clear()
    assert eventually(lambda: daemon.found(client, 1) == BLOCKS)
    assert [daemon.found(client, n) for n in (2, 3, 4)] == [BLOCKS] * 3
    assert eventually(lambda: not daemon.problem(client))


@pytest.mark.parametrize("file", [File.SEGMENT, File.INDEX])
def test_syncs_that_hang(
    daemon: SickDisk, client: KVClient, aside: ThreadPoolExecutor, file: File
) -> None:
    """I14: while a sync hangs a Flush waits, and nobody else: puts beyond what host holds go in,
    since what is on disk can give way; after the hang Flush ends, and it is all durable."""
    daemon.shim.set(Call.SYNC, file, HANG)
    daemon.stored(client, 5)
    with daemon.calm_client() as other:
        flush = aside.submit(daemon.flushed, other)
        daemon.shim.wait(Call.SYNC, file)
        host_goes_on(daemon, client, 1.0)
        assert eventually(lambda: "write" in daemon.problem(client))
        assert not flush.done()
        daemon.shim.clear()
        durable, left_out = flush.result(30.0)
        assert daemon.recovers(client), daemon.problem(client)
    assert durable >= 5 * BLOCKS
    assert left_out == 0 or not daemon.matched(client, 5)
    daemon.reboot()
    with daemon.calm_client() as client:
        assert [daemon.found(client, n) for n in (1, 2, 3, 4, 5)] == [BLOCKS] * 5


@pytest.mark.long
@pytest.mark.parametrize(("call", "file"), [(Call.READ, File.SEGMENT), (Call.SYNC, File.SEGMENT)])
def test_sigterm_while_the_disk_hangs(
    daemon: SickDisk, client: KVClient, call: Call, file: File
) -> None:
    """A daemon whose disk hangs leaves within a bounded time, and what was durable is there at
    the next start (I9)."""
    daemon.shim.set(call, file, HANG)
    daemon.stored(client, 5)
    with daemon.calm_client() as other:
        waits = on_its_own(lambda: _in_vain(daemon, other, call))
        daemon.shim.wait(call, file)
        began = time.monotonic()
        daemon.signal(signal.SIGTERM)
        daemon.wait(LEAVES_WITHIN)
        print(f"left after {time.monotonic() - began:.1f} s")
        waits.join(SOON)
    daemon.shim.clear()
    daemon.lose_memory()
    daemon.start()
    with daemon.calm_client() as client:
        assert [daemon.found(client, n) for n in (1, 2, 3, 4)] == [BLOCKS] * 4


def _in_vain(daemon: SickDisk, client: KVClient, call: Call) -> None:
    try:
        if call is Call.READ:
            daemon.found(client, 1)
        else:
            daemon.flushed(client)
    except Exception as error:
        print(f"told: {error!r}")
