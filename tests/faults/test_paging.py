"""More than memory holds, through disk and back: whose bytes they are, and what the disk takes."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from daemons import DaemonProcess, Tagged

from kvstore.bench.subject import bench_spec

MIB = 1 << 20
SESSIONS, SESSION_BLOCKS = 200, 8
WIDE = bench_spec(32 << 10)
DISK_BYTES, HOST_BYTES = 64 * MIB, 10 * MIB  # a fifth of the sessions' 50 MiB
CONFIG = """
tiers.host.prefault = false
tiers.host.mlock = false
[tiers.disk]
path = "{path}"
size = "{size}"
reserve = "1MiB"
"""


def daemon(disk: Path, more: str = "", host_bytes: int = HOST_BYTES) -> DaemonProcess:
    config = CONFIG.format(path=disk, size=DISK_BYTES)
    return DaemonProcess(str(host_bytes), config + more)


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """The most bytes that the folder's files took on their medium at any time, as a list of one."""
    over, most = threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.02):
            sizes = [os.stat(path).st_blocks * 512 for path in folder.rglob("*") if path.exists()]
            most[0] = max(most[0], sum(sizes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def prompt(session: int) -> list[int]:
    return [1000 * session + n // WIDE.block_size for n in range(SESSION_BLOCKS * WIDE.block_size)]


def read(made: DaemonProcess, sessions: list[int]) -> tuple[int, int]:
    """How many blocks of the sessions are found, and bytes that are not their own."""
    tagged, found, wrong = Tagged(WIDE), 0, 0
    with made.client(call_timeout_seconds=20.0) as client:
        space = client.attach(WIDE)
        for session in sessions:
            with space.lookup(prompt(session)) as match:
                views = [bytes(view) for view in space.restore(match)]
                match.check()
            found += len(views)
            wrong += tagged.wrong(prompt(session), views)
    return found, wrong


def test_each_session_gets_its_own_bytes_back_from_disk(tmp_path: Path) -> None:
    """I11: 200 sessions with room for a fifth of them in memory, four readers: no byte is wrong."""
    order = list(range(SESSIONS))
    random.Random(5).shuffle(order)

    disk = tmp_path / "disk"
    with daemon(disk, 'admission = "all"\n') as made, watched(disk) as most:
        with made.client(call_timeout_seconds=20.0) as client:
            space, tagged = client.attach(WIDE), Tagged(WIDE)
            for session in range(SESSIONS):
                space.put(prompt(session), tagged.blocks(prompt(session)))
                if session % 20 == 19:
                    client.admin.flush()
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(partial(read, made), [order[n::4] for n in range(4)]))
    assert sum(wrong for _, wrong in results) == 0
    assert sum(found for found, _ in results) >= 0.95 * SESSIONS * SESSION_BLOCKS
    assert HOST_BYTES < most[0] <= DISK_BYTES


def test_ten_times_of_what_fits_is_taken_by_default(tmp_path: Path) -> None:
    """I14: defaults take ten times of what both tiers hold, and the disk is never over its size."""
    spec = bench_spec(MIB)
    payload = [bytes([n]) * MIB for n in range(8)]
    host, stored, disk = 4 * HOST_BYTES, 0, tmp_path / "disk"
    total = 10 * (DISK_BYTES + host) // (8 * MIB)
    with (
        daemon(disk, host_bytes=host) as made,
        watched(disk) as most,
        made.client(call_timeout_seconds=20.0) as client,
    ):
        space = client.attach(spec)
        for n in range(total):
            tokens = [n * 100 + i // spec.block_size for i in range(8 * spec.block_size)]
            stored += space.put(tokens, payload).stored
            if n % 10 == 9:
                client.admin.flush()
        with space.lookup([*tokens, 1]) as match:
            views = [bytes(view) for view in space.restore(match)]
            match.check()
        assert made.status().state == "serving"
    assert views == payload
    assert stored >= 0.9 * 8 * total
    assert 0 < most[0] <= DISK_BYTES
