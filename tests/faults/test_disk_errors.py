"""A disk that answers with errors: nothing wrong is served, nothing is counted that is not there.

Errors are injected below the daemon, into LMDB's calls as well as into its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_shim import EIO, ENOSPC, PRETEND, Call, File
from sick_disks import BLOCKS, SickDisk

from kvstore.client import KVClient
from kvstore.core.errors import KVStoreError

WRITES = [
    pytest.param(Call.WRITE, File.SEGMENT, EIO, id="payloads and headers"),
    pytest.param(Call.SYNC, File.SEGMENT, EIO, id="syncs of segments"),
    pytest.param(Call.ALLOCATE, File.SEGMENT, ENOSPC, id="no room for a segment"),
    pytest.param(Call.WRITE, File.INDEX, EIO, id="pages of the index"),
    pytest.param(Call.WRITE, File.INDEX, ENOSPC, id="no room for the index"),
    pytest.param(Call.SYNC, File.INDEX, EIO, id="syncs of the index"),
    pytest.param(Call.WRITE, File.META, EIO, id="meta pages of the index"),
]

SYNCS = [
    pytest.param(Call.SYNC, File.SEGMENT, id="sync of a segment"),
    pytest.param(Call.SYNC, File.INDEX, id="sync of the index"),
    pytest.param(Call.WRITE, File.META, id="meta page of the index"),
]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SickDisk]:
    with SickDisk(tmp_path / "disk") as made:
        yield made


@pytest.fixture
def client(daemon: SickDisk) -> Iterator[KVClient]:
    with daemon.calm_client() as made:
        yield made


def begin_with_disk_only(daemon: SickDisk, client: KVClient, *numbers: int) -> None:
    """So many prompts are on disk and in no memory."""
    daemon.stored(client, *numbers)
    assert daemon.flushed(client) == (BLOCKS * len(numbers), 0)
    daemon.reboot()


# ---- Writing ----


@pytest.mark.parametrize(("call", "file", "error"), WRITES)
def test_a_disk_that_cannot_be_written(
    daemon: SickDisk, client: KVClient, call: Call, file: File, error: int
) -> None:
    """I12, I14: while a disk fails, Flush counts nothing as durable that it could not make so,
    status tells in one sentence, host goes on and what is on disk is served; when it works again
    the tier takes blocks by itself, and they outlive a reboot."""
    begin_with_disk_only(daemon, client, 1)
    pid = daemon.pid
    with daemon.calm_client() as client:
        daemon.shim.set(call, file, error)
        daemon.stored(client, 2, 3)
        durable, left_out = daemon.flushed(client)
        assert durable + left_out == 3 * BLOCKS
        assert left_out > 0
        assert daemon.shim.hits(call, file) > 0
        assert sum(daemon.flushed(client)) == 3 * BLOCKS, "a Flush in vain costs nothing"
        assert "tier disk" in daemon.problem(client)
        assert daemon.found(client, 2) == BLOCKS
        daemon.stored(client, 4)
        assert daemon.found(client, 4) == BLOCKS
        assert daemon.found(client, 1) == BLOCKS, daemon.reason
        daemon.shim.clear()
        assert daemon.recovers(client), daemon.problem(client)
        assert daemon.flushed(client) == (4 * BLOCKS, 0)
    assert daemon.pid == pid
    daemon.reboot()
    with daemon.calm_client() as client:
        assert [daemon.found(client, n) for n in (1, 2, 3, 4)] == [BLOCKS] * 4
        assert not daemon.problem(client)


@pytest.mark.parametrize(("call", "file"), SYNCS)
def test_a_single_error_is_not_passed_over(
    daemon: SickDisk, client: KVClient, call: Call, file: File
) -> None:
    """I12: an error that comes once and never again, as after a failed sync, fails its group
    all the same: it is not asked again in the hope of a better answer."""
    daemon.shim.set(call, file, EIO, calls=1)
    daemon.stored(client, 1)
    durable, left_out = daemon.flushed(client)
    assert daemon.shim.hits(call, file) == 1
    assert left_out > 0
    assert durable + left_out == BLOCKS
    assert daemon.recovers(client), daemon.problem(client)
    assert daemon.flushed(client) == (BLOCKS, 0)
    daemon.reboot()
    with daemon.calm_client() as client:
        assert daemon.found(client, 1) == BLOCKS


def test_a_crash_after_a_failed_sync(daemon: SickDisk, client: KVClient) -> None:
    """I9, I11, I12: what a failed group left on the medium is found right or not at all, and what
    was durable before it is all there."""
    daemon.stored(client, 1)
    assert daemon.flushed(client) == (BLOCKS, 0)
    daemon.shim.set(Call.SYNC, File.SEGMENT, EIO)
    daemon.stored(client, 2)
    assert daemon.flushed(client) == (BLOCKS, BLOCKS)
    daemon.shim.clear()
    daemon.reboot()
    with daemon.calm_client() as client:
        assert daemon.found(client, 1) == BLOCKS
        assert daemon.found(client, 2) in range(BLOCKS + 1)


def test_a_bump_that_cannot_be_written_down(daemon: SickDisk, client: KVClient) -> None:
    """I13: an epoch that is not on the medium is not called durable, and no block of the old
    one comes back as one of the new."""
    daemon.stored(client, 1)
    assert daemon.flushed(client) == (BLOCKS, 0)
    (space,) = client.status(with_spaces=True).spaces
    for call in (Call.WRITE, Call.SYNC):
        daemon.shim.set(call, File.OTHER, EIO)
        with pytest.raises(KVStoreError):
            client.admin.bump_epoch(space.space_id)
        daemon.shim.wait(call, File.OTHER)
        daemon.shim.clear()
    client.admin.bump_epoch(space.space_id)
    daemon.reboot()
    with daemon.calm_client() as client:
        assert daemon.matched(client, 1) == 0


# ---- Reading ----


def test_a_disk_that_cannot_be_read(daemon: SickDisk, client: KVClient) -> None:
    """I11, I14: blocks that cannot be read are refused with a reason, and host goes on; they can
    be stored again and are durable then."""
    begin_with_disk_only(daemon, client, 1, 2)
    with daemon.calm_client() as client:
        daemon.stored(client, 3)
        daemon.shim.set(Call.READ, File.SEGMENT, EIO)
        assert daemon.matched(client, 1) == BLOCKS
        assert daemon.found(client, 1) == 0
        daemon.shim.wait(Call.READ, File.SEGMENT)
        assert "recompute" in daemon.reason
        assert daemon.found(client, 3) == BLOCKS
        daemon.shim.clear()
        assert daemon.found(client, 2) == BLOCKS
        daemon.stored(client, 1)
        assert daemon.flushed(client) == (3 * BLOCKS, 0)
    daemon.reboot()
    with daemon.calm_client() as client:
        assert [daemon.found(client, n) for n in (1, 2, 3)] == [BLOCKS] * 3


def test_a_read_that_fails_once(daemon: SickDisk, client: KVClient) -> None:
    """I11: one failed read of many blocks costs none of them: each is read by itself then."""
    begin_with_disk_only(daemon, client, 1)
    with daemon.calm_client() as client:
        daemon.shim.set(Call.READ, File.SEGMENT, EIO, calls=1)
        assert daemon.found(client, 1) == BLOCKS
        daemon.shim.wait(Call.READ, File.SEGMENT)


def test_a_read_that_lies(daemon: SickDisk, client: KVClient) -> None:
    """I11: a read that says it is done and is not gives a miss, never what was in memory."""
    begin_with_disk_only(daemon, client, 1, 2)
    with daemon.calm_client() as client:
        daemon.shim.set(Call.READ, File.SEGMENT, PRETEND)
        assert daemon.found(client, 1) == 0
        daemon.shim.wait(Call.READ, File.SEGMENT)
        assert "checksum" in daemon.reason
        daemon.shim.clear()
        assert daemon.found(client, 2) == BLOCKS
        assert daemon.found(client, 1) in range(BLOCKS + 1)
        daemon.stored(client, 1)
        assert daemon.found(client, 1) == BLOCKS


def test_writes_that_lie(daemon: SickDisk, client: KVClient) -> None:
    """I11: writes of payloads and headers that say they are done and are not are misses later;
    what was written before is served."""
    daemon.stored(client, 1)
    assert daemon.flushed(client) == (BLOCKS, 0)
    daemon.shim.set(Call.WRITE, File.SEGMENT, PRETEND)
    daemon.stored(client, 2)
    daemon.flushed(client)
    daemon.shim.wait(Call.WRITE, File.SEGMENT)
    daemon.shim.clear()
    daemon.reboot()
    with daemon.calm_client() as client:
        assert daemon.found(client, 1) == BLOCKS
        assert daemon.found(client, 2) == 0
        daemon.stored(client, 2)
        assert daemon.flushed(client) == (2 * BLOCKS, 0)


def test_a_start_on_a_disk_that_cannot_be_read(daemon: SickDisk, client: KVClient) -> None:
    """I13, I14: a start ends while segments cannot be read, and nothing durable is thrown away
    for it: it is there when they can be read again."""
    daemon.stored(client, 1)
    assert daemon.flushed(client) == (BLOCKS, 0)
    daemon.kill()
    daemon.lose_memory()
    daemon.shim.set(Call.READ, File.SEGMENT, EIO)
    daemon.start()
    daemon.shim.wait(Call.READ, File.SEGMENT)
    daemon.shim.clear()
    daemon.reboot()
    with daemon.calm_client() as client:
        assert daemon.found(client, 1) == BLOCKS
