"""Host pools after kill -9 and damage: what was acknowledged is there, nothing is ever wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from random import Random

import numpy as np
import pytest
import xxhash

from kvstore.core.clock import perf_seconds
from kvstore.tiers import record
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.host import HostTier, PoolConfig, files

POOL = [PoolConfig("", 4 << 20)]
LENGTH = 20_000

WRITER = """
import os, sys
from random import Random
import numpy as np
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.host import HostTier, PoolConfig

directory, first, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random = Random(seed)
tier = HostTier([PoolConfig("", 4 << 20)], directory=directory)
live = [(b.place, int.from_bytes(b.header.key, "little")) for b in tier.recover()]
for place, _ in live:
    tier.adopt(place)
tier.free(tier.finish_recovery())
number = first
print("ready", flush=True)
while True:
    length = random.choice([3000, 20_000, 300_000])
    places = tier.reserve(length, 64, random.randrange(1, 5))
    if not places or random.random() < 0.2:
        for _ in range(min(len(live), 6)):
            place, key = live.pop(random.randrange(len(live)))
            os.write(1, b"-%d\\n" % key)
            tier.discard([place])
            tier.free([place])
    blocks = []
    for place in places:
        number += 1
        payload = np.full(length, number % 251, np.uint8)
        header = BlockHeader(b"s" * 32, b"r" * 32, number.to_bytes(16, "little"), b"p" * 16,
                             number, 0, 0, length, number.to_bytes(4, "little") * 16)
        blocks.append((place, header, tier.write(place, payload)))
    tier.commit(blocks)
    for place, header, _ in blocks:
        key = int.from_bytes(header.key, "little")
        os.write(1, b"+%d\\n" % key)
        live.append((place, key))
"""


def killed_writer(directory, first, seed):
    """Log lines of a writer that was killed at a moment that the seed picks."""
    command = [sys.executable, "-c", WRITER, str(directory), str(first), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        lines = [process.stdout.readline() for _ in range(Random(seed).randrange(1, 1500))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    return [line for line in lines if line.endswith(b"\n")]


def test_kill_loses_and_falsifies_nothing(shm_directory):
    """I10, I11: over many kills, each acknowledged block is back, each block back is right."""
    present, unsure, highest = set(), set(), 0
    first = 0
    for seed in range(10):
        for line in killed_writer(shm_directory, first, seed):
            key = int(line[1:])
            if line.startswith(b"+"):
                present.add(key)
            else:
                present.discard(key)
                unsure = {key}
        first += 1_000_000
        tier = HostTier(POOL, directory=shm_directory)
        found = list(tier.recover())
        keys = {int.from_bytes(block.header.key, "little") for block in found}
        assert present - unsure <= keys
        assert len(keys) == len(found)
        for block in found:
            number = int.from_bytes(block.header.key, "little")
            assert block.header.symbol == number.to_bytes(4, "little") * 16
            assert tier.verify(block.place, block.header.length, block.checksum)
            stored = np.frombuffer(tier.view(block.place, block.header.length), np.uint8)
            assert (stored == number % 251).all()
            tier.adopt(block.place)
        tier.finish_recovery()
        tier.check_integrity()
        assert tier.dropped_chunk_count == 0
        assert not tier.notes
        newest = max(tier.generation(block.place) for block in found)
        assert newest > highest
        highest = newest
        present = keys
        tier.close()


@pytest.fixture
def stored(shm_directory, make_header):
    """A closed pool with 8 committed blocks; their places by key."""
    tier = HostTier(POOL, directory=shm_directory)
    places = tier.reserve(LENGTH, 16, 8)
    for i, place in enumerate(places):
        checksum = tier.write(place, np.full(LENGTH, i, np.uint8))
        tier.commit([(place, make_header(i, LENGTH), checksum)])
    tier.close()
    return places


def flip(directory, kind, at, bit=1):
    with open(directory / f"pool-0.{kind}", "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def recovered(directory):
    tier = HostTier(POOL, directory=directory)
    found = list(tier.recover())
    counts = tier.torn_header_count, tier.dropped_chunk_count
    for block in found:
        tier.adopt(block.place)
    tier.finish_recovery()
    tier.check_integrity()
    tier.close()
    return found, counts


def headers_at(directory, key):
    raw = (directory / "pool-0.headers").read_bytes()
    return raw.index(key) - 64


def test_any_flipped_header_bit_drops_that_block_only(shm_directory, stored, make_header):
    """I11: a header damaged anywhere is dropped and counted, and its neighbours stay."""
    at = headers_at(shm_directory, make_header(3, LENGTH).key)
    for byte in range(0, 176 + 16, 3):
        flip(shm_directory, "headers", at + byte)
        tier = HostTier(POOL, directory=shm_directory)
        found = list(tier.recover())
        assert tier.torn_header_count == 1, byte
        tier.close()
        assert {block.place for block in found} == set(stored) - {stored[3]}
        flip(shm_directory, "headers", at + byte)
    assert len(recovered(shm_directory)[0]) == 8


@pytest.mark.parametrize("length", [0, 1, 8, 16, 100, 188])
def test_torn_header_is_no_block(shm_directory, stored, make_header, length):
    """I11: a header of which only the first bytes were written is no block."""
    at = headers_at(shm_directory, make_header(3, LENGTH).key)
    with open(shm_directory / "pool-0.headers", "r+b") as file:
        file.seek(at + length)
        file.write(bytes(192 - length))
    found, (torn, _) = recovered(shm_directory)
    assert {block.place for block in found} == set(stored) - {stored[3]}
    assert torn == (length > 0)
    assert recovered(shm_directory)[1] == (0, 0), "a torn header is gone after one recovery"


def test_header_in_another_slot_is_no_block(shm_directory, stored, make_header):
    """I11: a misdirected header, sound as it is, does not speak for the slot it is in."""
    at = headers_at(shm_directory, make_header(3, LENGTH).key)
    with open(shm_directory / "pool-0.headers", "r+b") as file:
        file.seek(at)
        raw = file.read(192)
        file.seek(at + record.header_bytes(16))
        file.write(raw)
    found, (torn, _) = recovered(shm_directory)
    assert {block.place for block in found} == set(stored) - {stored[4]}
    assert torn == 1


def test_damaged_payload_fails_verification(shm_directory, stored):
    """I11: a flipped payload bit shows against the checksum in the header."""
    flip(shm_directory, "data", (stored[2] << 12) + LENGTH - 1, bit=128)
    tier = HostTier(POOL, directory=shm_directory)
    sound = {b.place: tier.verify(b.place, LENGTH, b.checksum) for b in tier.recover()}
    assert [place for place, ok in sound.items() if not ok] == [stored[2]]
    tier.close()


def test_damaged_chunk_entry_drops_its_blocks(shm_directory, stored):
    """I11: blocks of a chunk whose map entry is damaged are dropped, and the memory is reused."""
    flip(shm_directory, "headers", 4096 + 8)
    found, (_, dropped) = recovered(shm_directory)
    assert len(found) < 8
    assert dropped == 1
    tier = HostTier(POOL, directory=shm_directory)
    tier.free(tier.finish_recovery())
    tier.check_integrity()
    assert tier.usage().free_bytes == tier.usage().capacity_bytes
    tier.close()


@pytest.mark.parametrize("at", [0, 9, 20, 40, 90, 110])
def test_damaged_superblocks_start_empty(shm_directory, stored, at):
    """I13: one of its two may be damaged, and is mended. Without a sound one the pool starts empty,
    zeroed, and says so."""
    for copy in (0, 1024):
        flip(shm_directory, "headers", copy + at)
        tier = HostTier(POOL, directory=shm_directory)
        assert len(list(tier.recover())) == 8
        tier.close()
    for copy in (0, 1024):
        flip(shm_directory, "headers", copy + at)
    tier = HostTier(POOL, directory=shm_directory)
    assert list(tier.recover()) == []
    assert "dropped" in tier.notes[0]
    assert not np.any(np.frombuffer(tier.view(0, 4 << 20), np.uint8))
    tier.close()


def test_generation_counter_survives_a_torn_cell(shm_directory, stored, make_header):
    """I5: with one of its two cells torn the counter goes on; with both the pool starts empty."""
    flip(shm_directory, "headers", 2048)
    tier = HostTier(POOL, directory=shm_directory)
    found = list(tier.recover())
    assert len(found) == 8
    tier.finish_recovery()
    place = tier.reserve(LENGTH, 16, 1)[0]
    generation = tier.commit([(place, make_header(9, LENGTH), bytes(16))])[0]
    assert generation > max(block.generation for block in found)
    tier.close()
    flip(shm_directory, "headers", 2048)
    flip(shm_directory, "headers", 2048 + 64)
    tier = HostTier(POOL, directory=shm_directory)
    assert list(tier.recover()) == []
    assert "generation counter" in tier.notes[0]
    tier.close()


def test_another_boot_starts_empty(shm_directory, stored, monkeypatch):
    """I10: memory of another boot of the machine is not taken back."""
    monkeypatch.setattr(files, "boot_id", lambda: "0" * 36)
    tier = HostTier(POOL, directory=shm_directory)
    assert list(tier.recover()) == []
    assert "boot id changed" in tier.notes[0]
    tier.close()


def test_crash_between_release_and_reuse_brings_no_old_block_back(shm_directory, make_header):
    """I11: headers of a chunk that was given up are not believed by a chunk made there later."""
    tier = HostTier(POOL, directory=shm_directory)
    places = tier.reserve(LENGTH, 16, 8)
    tier.commit([(p, make_header(i, LENGTH), bytes(16)) for i, p in enumerate(places)])
    tier.close()
    with open(shm_directory / "pool-0.headers", "r+b") as file:
        file.seek(4096)
        file.write(bytes(64 * 32))
    tier = HostTier(POOL, directory=shm_directory)
    assert list(tier.recover()) == []
    tier.finish_recovery()
    assert set(tier.reserve(LENGTH, 16, 8)) == set(places)
    tier.close()
    tier = HostTier(POOL, directory=shm_directory)
    assert list(tier.recover()) == []
    tier.close()


def test_recovery_of_many_slots_is_quick(shm_directory):
    """A hundred thousand blocks are found, adopted and settled within seconds."""
    count = 100_000
    config = [PoolConfig("", 512 << 20)]
    tier = HostTier(config, directory=shm_directory)
    header = BlockHeader(b"s" * 32, b"r" * 32, b"k" * 16, b"p" * 16, 0, 0, 0, 4096, b"x" * 64)
    places = tier.reserve(4096, 64, count)
    tier.commit([(place, header, bytes(16)) for place in places])
    tier.close()
    start = perf_seconds()
    tier = HostTier(config, directory=shm_directory)
    for i, block in enumerate(tier.recover()):
        if i % 2:
            tier.adopt(block.place)
    resting = tier.finish_recovery()
    assert perf_seconds() - start < 8
    assert tier.usage().block_count == count // 2
    assert len(resting) >= count // 2
    tier.check_integrity()
    tier.close(keep=False)


def test_checksums_are_xxh3_128(shm_directory, stored):
    """The checksum beside a payload is its xxh3_128, so that others can check it."""
    tier = HostTier(POOL, directory=shm_directory)
    for block in tier.recover():
        payload = bytes(tier.view(block.place, LENGTH))
        assert block.checksum == xxhash.xxh3_128_digest(payload)
    tier.close()
    assert os.stat(shm_directory / "pool-0.data").st_size == 4 << 20
