"""Every field of every page, flipped: a miss, never other bytes, and the rest untouched."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from random import Random

import pytest
from disk_world import (
    SIZE,
    BrokenIO,
    directory_bytes,
    header,
    is_right,
    number_of,
    payload,
    put,
    recovered,
)

from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.index import pack_key, pack_value, parse_value
from kvstore.tiers.disk.layout import (
    Geometry,
    Superblock,
    header_bytes,
    pack_cell,
    pack_header,
    pack_superblock,
    parse_cell,
    parse_header,
    parse_superblock,
)
from kvstore.tiers.payload import digest
from kvstore.tiers.record import SlotRecord

CAPACITY = 8 << 20
STORE = bytes(range(16))
RECORD = SlotRecord(header(5), digest(payload(5)), 77)
GEOMETRY = Geometry(12288, 4096, 62, 1 << 20)


def flips(raw: bytes, random: Random, count: int):
    """Copies of `raw` with one bit flipped, at the start of it and anywhere."""
    places = [*range(0, 300), *(random.randrange(len(raw)) for _ in range(count))]
    for at in places:
        spoiled = bytearray(raw)
        spoiled[at] ^= 1 << random.randrange(8)
        yield bytes(spoiled)


def test_pages_come_back_as_packed():
    """What a page says is read back, for itself alone."""
    page = pack_header(RECORD, STORE, 3, 9, 4096)
    assert parse_header(page, STORE, 3, 9) == RECORD
    assert parse_header(page, STORE, 3, 8) is None
    assert parse_header(page, STORE, 4, 9) is None
    assert parse_header(page, bytes(16), 3, 9) is None
    block = Superblock(STORE, 3, 65536, GEOMETRY)
    assert parse_superblock(pack_superblock(block)) == block
    cell = pack_cell(STORE, 3, 12)
    assert parse_cell(cell, STORE, 3) == 12
    assert parse_cell(cell, STORE, 4) == parse_cell(cell, bytes(16), 3) == 0
    key = pack_key(3, 9)
    assert parse_value(key, pack_value(key, RECORD)) == RECORD
    assert parse_value(pack_key(3, 8), pack_value(key, RECORD)) is None


@pytest.mark.parametrize("symbol_bytes", [0, 64, 3800, 3900, 9000])
def test_symbols_of_any_length_fit_their_header(symbol_bytes):
    """A header takes as many whole pages as its symbol needs."""
    record = SlotRecord(header(5, SIZE, symbol_bytes), RECORD.checksum, 77)
    size = header_bytes(symbol_bytes)
    assert size % 4096 == 0
    assert parse_header(pack_header(record, STORE, 3, 9, size), STORE, 3, 9) == record


def test_one_flipped_bit_spoils_a_page():
    """I11: no bit of a header, superblock, cell or entry of the index can flip unseen."""
    random = Random(0)
    for spoiled in flips(pack_header(RECORD, STORE, 3, 9, 4096), random, 500):
        assert parse_header(spoiled, STORE, 3, 9) is None
    for spoiled in flips(pack_superblock(Superblock(STORE, 3, 65536, GEOMETRY)), random, 500):
        assert parse_superblock(spoiled) is None
    for spoiled in flips(pack_cell(STORE, 3, 12), random, 500):
        assert parse_cell(spoiled, STORE, 3) == 0
    key = pack_key(3, 9)
    value = pack_value(key, RECORD)
    for at in range(len(value)):
        spoiled = bytearray(value)
        spoiled[at] ^= 1 << random.randrange(8)
        assert parse_value(key, bytes(spoiled)) is None
    for length in range(len(value)):
        assert parse_value(key, value[:length]) is None


def test_geometry_that_cannot_be_is_refused():
    """A superblock of sound bytes and senseless numbers is no segment of ours."""
    assert GEOMETRY.is_sound(16)
    for wrong in (
        GEOMETRY._replace(payload_bytes=12_000),
        GEOMETRY._replace(payload_bytes=0),
        GEOMETRY._replace(header_bytes=0),
        GEOMETRY._replace(header_bytes=100),
        GEOMETRY._replace(slot_count=63),
        GEOMETRY._replace(chunk_bytes=3 << 16),
        GEOMETRY._replace(chunk_bytes=0),
        GEOMETRY._replace(chunk_bytes=70_000),
    ):
        assert not wrong.is_sound(16)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with blocks 0 to 59 in it."""
    path = tmp_path_factory.mktemp("original") / "disk"
    path.mkdir(mode=0o700)
    tier = DiskTier(path, CAPACITY)
    for first in range(0, 60, 12):
        put(tier, list(range(first, first + 12)))
    tier.close()
    return path


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_flipped_bits_in_segments_are_misses(original, tmp_path, seed, with_index):
    """I11: bits flipped anywhere in segment files cost the blocks they hit, and no other."""
    random, path = Random(seed), tmp_path / "disk"
    shutil.copytree(original, path)
    if not with_index:
        shutil.rmtree(path / "index")
    hit = 12
    for _ in range(hit):
        segment = random.choice(sorted((path / "segments").iterdir()))
        with segment.open("r+b") as file:
            # Not the superblock: without an index that costs a whole segment.
            file.seek(random.randrange(4096, segment.stat().st_size))
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))
    tier = DiskTier(path, CAPACITY)
    found = recovered(tier)
    right = [i for i, place in found.items() if is_right(tier, place, i)]
    assert len(right) >= 60 - hit
    bad = [place for i, place in found.items() if i not in right]
    for place in bad:
        tier.report_bad(place)
    tier.discard(bad)
    tier.free(bad)
    tier.commit([])
    put(tier, list(range(100, 200)))
    tier.close()
    assert directory_bytes(path) <= CAPACITY


def test_torn_headers_are_counted(original, tmp_path):
    """A start says how many headers it could not believe."""
    path = tmp_path / "disk"
    shutil.copytree(original, path)
    shutil.rmtree(path / "index")
    segment = sorted((path / "segments").iterdir())[0]
    with segment.open("r+b") as file:
        file.seek(3 * 4096 + 2000)
        file.write(b"\x01")
    tier = DiskTier(path, CAPACITY)
    assert tier.torn_header_count == 1
    assert any("torn" in note for note in tier.notes)
    assert len(recovered(tier)) == 59
    tier.close()


def test_misdirected_payload_is_a_miss(original, tmp_path):
    """I11: a payload that was written to its neighbour's slot is found out in both."""
    path = tmp_path / "disk"
    shutil.copytree(original, path)
    tier = DiskTier(path, CAPACITY)
    found = recovered(tier)
    segment, slot = tier._books.locate(found[3])
    with (path / "segments" / f"{segment.serial}.seg").open("r+b") as file:
        file.seek(segment.geometry.payload_at(slot))
        file.write(payload(4).tobytes())
    assert not is_right(tier, found[3], 3)
    assert is_right(tier, found[4], 4)
    tier.close()


def test_headers_that_cannot_be_read_cost_no_block(disk_directory):
    """I9: a medium that fails while headers are compared is no reason to drop what is indexed."""
    tier = DiskTier(disk_directory, CAPACITY)
    stored = put(tier, list(range(60)))
    tier.close()
    older = disk_directory / "older"
    shutil.copytree(disk_directory / "index", older)
    tier = DiskTier(disk_directory, CAPACITY)
    recovered(tier)
    put(tier, list(range(60, 64)))
    tier.close()
    shutil.rmtree(disk_directory / "index")
    older.rename(disk_directory / "index")

    class Failing(BrokenIO):
        def preadv(self, fd, buffers, offset):
            if offset >= 3 * 4096 and len(buffers[0]) % SIZE:
                raise OSError(errno.EIO, "injected")
            return super().preadv(fd, buffers, offset)

    tier = DiskTier(disk_directory, CAPACITY, io=Failing())
    assert {number_of(block.header) for block in tier.recover()} >= set(stored)
    tier.finish_recovery()
    tier.close()
