"""Workers and the owner at once: two writers, a reader, and books that stay right throughout."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from disk_world import SIZE, BrokenIO, drop, header, is_right, payload, put, recovered

from kvstore.tiers.disk import DiskTier

CAPACITY = 8 << 20


def store(tier: DiskTier, numbers: list[int], places: list[int]) -> list[int]:
    """What a worker does with a group."""
    pairs = list(zip(numbers, places, strict=True))
    checksums = tier.write_many([(place, payload(i)) for i, place in pairs])
    return tier.commit(
        [(place, header(i), c) for (i, place), c in zip(pairs, checksums, strict=True)]
    )


def test_writers_and_owner_share_the_books(disk_directory: Path) -> None:
    """I22: groups of two workers, reads, evictions and reuse at once: no slot is used twice."""
    random, tier = Random(4), DiskTier(disk_directory, CAPACITY)
    stored: dict[int, int] = {}
    running: list[tuple] = []
    number, seen = 0, []
    with ThreadPoolExecutor(3) as workers:
        for _ in range(150):
            numbers = list(range(number, number + random.randrange(1, 16)))
            places = tier.reserve(SIZE, 64, len(numbers))
            numbers = numbers[: len(places)]
            number += len(numbers)
            running.append((numbers, places, workers.submit(store, tier, numbers, places)))
            while len(running) > 3 or (running and running[0][2].done()):
                numbers, places, outcome = running.pop(0)
                seen += outcome.result()
                stored |= dict(zip(numbers, places, strict=True))
            sample = random.sample(sorted(stored), min(3, len(stored)))
            reads = [workers.submit(is_right, tier, stored[i], i) for i in sample]
            assert all(read.result() for read in reads)
            if len(stored) > 200 or not places:
                drop(tier, [stored.pop(i) for i in random.sample(sorted(stored), 100)])
                workers.submit(tier.commit, [])
            if random.random() < 0.1:
                workers.submit(tier.probe)
            usage = tier.usage()
            total = usage.used_bytes + usage.free_bytes + usage.resting_bytes
            assert total == usage.capacity_bytes
        for numbers, places, outcome in running:
            seen += outcome.result()
            stored |= dict(zip(numbers, places, strict=True))
    assert len(set(seen)) == len(seen)
    assert len(set(stored.values())) == len(stored)
    assert all(is_right(tier, place, i) for i, place in stored.items())
    tier.check_integrity()
    tier.close()
    again = DiskTier(disk_directory, CAPACITY)
    assert recovered(again).keys() == stored.keys()
    again.close()


def test_owner_never_waits_for_the_medium(disk_directory: Path) -> None:
    """While a disk hangs in a sync, the owner's calls answer at once."""
    io, release, hangs = BrokenIO(), threading.Event(), threading.Event()
    tier = DiskTier(disk_directory, CAPACITY, io=io)
    stored = put(tier, list(range(20)))

    def hang(call: str) -> None:
        if call == "fdatasync":
            hangs.set()
            release.wait(30)

    io.before = hang
    worker = threading.Thread(target=put, args=(tier, list(range(100, 110))))
    worker.start()
    try:
        assert hangs.wait(30)
        began = time.monotonic()
        places = tier.reserve(SIZE, 64, 5)
        tier.discard([stored[0], places[0]])
        tier.free([stored[0], places[0]])
        tier.usage()
        assert tier.generation(stored[1])
        assert tier.checksum(stored[1])
        assert time.monotonic() - began < 5
        assert not release.is_set()
        assert is_right(tier, stored[1], 1)
    finally:
        release.set()
        worker.join()
    assert tier.usage().block_count == 29
    tier.commit([])
    tier.check_integrity()
    tier.close()
