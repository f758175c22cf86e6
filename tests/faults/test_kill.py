"""kill -9 of the real daemon, again and again, under processes that store and check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import writer
from daemons import DaemonProcess, Tagged, eventually
from soaked import leave_report
from writers import running

from kvstore.client import KVClient

LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
limits.lease_ttl_seconds = 1.0
limits.max_lease_ttl_seconds = 1.0
limits.staging_bytes_per_session = "4MiB"
"""


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    made = DaemonProcess("128MiB", LIMITS)
    yield made
    made.close()


def run_kills(daemon: DaemonProcess, kills: int, writer_count: int, seed: int) -> dict[str, int]:
    random, tagged = Random(seed), Tagged(writer.SPEC)
    daemon.start()
    totals = {"kills": 0, "readopted": 0, "checked": 0}
    with running(daemon.address, writer_count) as writers:
        while totals["kills"] < kills:
            time.sleep(random.uniform(0.05, 0.4))
            daemon.kill()
            totals["kills"] += 1
            if random.random() < 0.2:
                # Once more, in the middle of its recovery.
                daemon.launch()
                time.sleep(random.uniform(0.2, 0.6))
                daemon.kill()
                totals["kills"] += 1
            daemon.configure(f"{LIMITS}server.worker_threads = {random.randrange(1, 4)}")
            acked = {family: n for one in writers for family, n in dict(one.acked).items()}
            daemon.start()
            with daemon.client(call_timeout_seconds=10.0) as client:
                totals["readopted"] += client.status().readopted_blocks
                totals["checked"] += check_all(client, tagged, acked)
    assert not [line for one in writers for line in one.complaints]
    totals["hits"] = sum(one.hits for one in writers)
    totals["acked"] = sum(sum(one.acked.values()) for one in writers)
    return totals


def check_all(client: KVClient, tagged: Tagged, acked: dict[int, int]) -> int:
    """Everything that was acknowledged is there, and every byte of it is right."""
    space, checked = client.attach(writer.SPEC), 0
    for family, blocks in acked.items():
        tokens = writer.prompt(family, writer.BLOCKS_MAX)
        with space.lookup(tokens) as match:
            assert match.matched_tokens >= 4 * blocks, f"family {family} lost blocks"
            target = np.empty((match.block_count, writer.SPEC.block_bytes), np.uint8)
            space.restore_into(match, target)
        assert tagged.wrong(tokens, target) == 0, f"family {family} has wrong bytes"
        checked += blocks
    return checked


@pytest.mark.timeout(240)
def test_kill_loses_nothing_and_falsifies_nothing(daemon: DaemonProcess) -> None:
    """I10: over 50 kills under three writers, all that was acknowledged is back, none is wrong."""
    totals = run_kills(daemon, kills=50, writer_count=3, seed=1)
    print(totals)
    assert totals["readopted"] > 10_000
    assert totals["hits"] > 1_000
    assert totals["acked"] > 1_000


@pytest.mark.long
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_many_more_kills(daemon: DaemonProcess) -> None:
    """I10: the same over 200 kills and eight writers."""
    totals = run_kills(daemon, kills=200, writer_count=8, seed=2)
    leave_report("kills-of-host-200", {**totals, "lost_blocks": 0, "wrong_bytes": 0})
    assert totals["readopted"] > 80_000


def test_kill_under_eviction(daemon: DaemonProcess) -> None:
    """I10, I11: with a pool that is too small blocks may be gone after a kill, but never wrong."""
    small = DaemonProcess("4MiB", LIMITS)
    try:
        small.start()
        with running(small.address, 2) as writers:
            for _ in range(6):
                time.sleep(0.5)
                small.kill()
                small.start()
    finally:
        small.close()
    complaints = [line for one in writers for line in one.complaints]
    assert not [line for line in complaints if not line.startswith("LOST")]
    assert sum(one.hits for one in writers)


def test_frozen_writers_never_spoil(daemon: Any) -> None:
    """I5, I10: bytes that are put again under other contents after a kill stay apart by key."""
    daemon.start()
    tagged = Tagged(writer.SPEC)
    tokens, other = writer.prompt(1, 20), writer.prompt(2, 20)
    with daemon.client() as client:
        space = client.attach(writer.SPEC)
        space.put(tokens, tagged.blocks(tokens))
        daemon.kill()
        daemon.start()
        assert eventually(lambda: client.available)
        space.put(other, tagged.blocks(other))
        assert check_all(client, tagged, {1: 20, 2: 20}) == 40
