"""Matches that nobody releases, and loads that are cancelled: no lease is left of any of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually

from kvstore.client import KVClient, LeaseLost, NotFound, StoreUnavailable

TTL_SECONDS = 2.0
CONFIG = """
tiers.host.prefault = false
tiers.host.mlock = false
tiers.disk.path = "{disk}"
tiers.disk.size = "64MiB"
tiers.disk.reserve = "1MiB"
tiers.disk.endurance_dwpd = 0
tiers.disk.admission = "all"
tiers.disk.demote_watermark = 0.25
limits.lease_ttl_seconds = 2.0
limits.max_lease_ttl_seconds = 2.0
limits.leased_bytes_per_session = "1GiB"
limits.leased_bytes_per_tenant = "1GiB"
"""
PROMPTS, BLOCKS = 48, 32  # 24 MiB of 16 KiB blocks, over a host pool of 8 MiB
CANCELS_MIN, CANCEL_SHARE, KEPT_MAX, THREADS = 60, 0.004, 32, 3


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + 4 * BLOCKS))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with DaemonProcess("8MiB", CONFIG.format(disk=disk)) as made:
        with made.client() as client:
            space, tagged = client.attach(SPEC), Tagged()
            for number in range(PROMPTS):
                tokens = prompt(number)
                assert not space.put(tokens, tagged.blocks(tokens)).rejected
                if number % 8 == 7:
                    client.admin.flush()
        yield made


class Careless:
    """One thread of an engine that ends its matches in every way but the right one."""

    def __init__(self, space: Any, seed: int, pool: ThreadPoolExecutor) -> None:
        self.space, self.pool = space, pool
        self.random = Random(seed)
        self.seed, self.count, self.cancelled = seed, 0, 0
        self.kept: list[Any] = []
        self.sources: set[str] = set()

    def run(self, lookups: int) -> None:
        share = max(CANCEL_SHARE, CANCELS_MIN / THREADS / lookups)
        ends = [self.drop, self.drop_in_circle, self.finish, self.release, self.keep]
        while self.count < lookups:
            try:
                if self.random.random() < share:
                    self.cancel()
                else:
                    self.random.choice(ends)(*self.look())
            except StoreUnavailable:  # a busy machine
                continue
        self.kept.clear()

    def look(self) -> tuple[Any, str]:
        self.count += 1
        name = f"{self.seed}-{self.random.randrange(self.count)}" if self.count % 2 else ""
        tokens = prompt(self.random.randrange(PROMPTS + 4))
        match = self.space.lookup(tokens[: self.random.randrange(129)], request_id=name or None)
        return match, name

    def drop(self, match: Any, name: str) -> None:
        """Nothing: the last reference goes."""

    def drop_in_circle(self, match: Any, name: str) -> None:
        """Only the collector finds it."""
        circle = [match]
        circle.append(circle)

    def finish(self, match: Any, name: str) -> None:
        if name:
            self.space.finish_request(name)

    def release(self, match: Any, name: str) -> None:
        match.release()
        match.release()

    def keep(self, match: Any, name: str) -> None:
        self.kept.append(match)
        if len(self.kept) > KEPT_MAX:
            self.random.shuffle(self.kept)
            del self.kept[KEPT_MAX // 2 :]

    def cancel(self) -> None:
        """Ends a match while another thread restores it."""
        self.count += 1
        name = f"load-{self.seed}-{self.count}"
        # Of two prompts one is in host, once it was loaded; of all of them few are.
        among = self.random.choice((2, PROMPTS))
        match = self.space.lookup(prompt(self.random.randrange(among)), request_id=name)
        self.sources |= {step.source for step in match.plan.steps}
        began = threading.Event()
        load = self.pool.submit(self.restore, match, began, self.random.random() < 0.5)
        began.wait(10)
        threading.Event().wait(self.random.random() * 0.004)
        ways: list[Callable[[], None]] = [
            match.release, lambda: self.space.finish_request(name), lambda: None,
        ]  # fmt: skip
        way = self.random.choice(ways)
        del match
        way()
        self.cancelled += 1
        if self.random.random() < 0.5:
            load.result(30)

    def restore(self, match: Any, began: threading.Event, copies: bool) -> None:
        target = np.empty((match.block_count, SPEC.block_bytes), np.uint8)
        began.set()
        try:
            if copies:
                self.space.restore_into(match, target)
            else:
                self.space.restore(match, partial=True)
        except (LeaseLost, NotFound, StoreUnavailable):
            return


def run(client: KVClient, lookups: int) -> None:
    """Every thread's share of the lookups; then nothing may be left."""
    space = client.attach(SPEC)
    with ThreadPoolExecutor(4) as loads:
        careless = [Careless(space, seed, loads) for seed in range(THREADS)]
        threads = [
            threading.Thread(target=each.run, args=(lookups // THREADS,)) for each in careless
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(each.cancelled for each in careless) >= max(lookups * CANCEL_SHARE, CANCELS_MIN) / 3
    assert set().union(*(each.sources for each in careless)) >= {"host", "disk"}


def check_nothing_is_left(daemon: DaemonProcess, client: KVClient) -> None:
    """While the client lives on, with its session."""
    gc.collect()

    def left() -> tuple[int, int]:
        status = daemon.status()
        return status.lease_count, status.leased_bytes

    assert eventually(lambda: left() == (0, 0), TTL_SECONDS + 1, 0.05), left()
    assert client.available
    # Nothing holds a block in place either: what is cleared is free once slots have rested.
    client.admin.clear(client.attach(SPEC).space_id)
    used = lambda: daemon.status().tiers["host"].used_bytes  # noqa: E731
    assert eventually(lambda: used() == 0, 3 * TTL_SECONDS, 0.05), used()


@pytest.mark.parametrize(
    "lookups", [1000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_no_lease_is_left(daemon: DaemonProcess, lookups: int) -> None:
    """I15: of lookups that nobody restores or releases, and of loads from host and disk that are
    cancelled half way, no lease and no leased byte is left 1 s after a lease's time."""
    with daemon.client(call_timeout_seconds=2.0) as client:
        run(client, lookups)
        check_nothing_is_left(daemon, client)
