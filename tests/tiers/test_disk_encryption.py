"""An encrypted disk tier: nothing in clear, nothing forged, keys that come and go."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
from disk_world import SIZE, abandon, drop, header, payload, put, recovered
from sealed_world import COUNT, NEW, OLD, filled, opened, right

from kvstore.core.errors import TierError
from kvstore.core.key_file import DiskKey
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.fsck import inspect
from kvstore.tiers.disk.layout import header_bytes, pack_header, parse_header, parse_sealed
from kvstore.tiers.disk.vault import Vault
from kvstore.tiers.epochs import EpochsFile
from kvstore.tiers.payload import digest
from kvstore.tiers.record import SlotRecord

STORE = bytes(range(16))


def on_medium(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file())


@pytest.mark.parametrize("length", [SIZE, 3 << 20, 4096])
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_come_back(disk_directory, length, direct):
    """I9: what was written encrypted is read, by ones and many, in this life and the next."""
    count = 2 if length > 1 << 20 else COUNT
    tier = DiskTier(disk_directory, 32 << 20, direct=direct, vault=Vault([OLD]))
    places = put(tier, list(range(count)), length)
    assert right(tier, places, length) == list(places)
    tier.check_integrity()
    abandon(tier)
    tier = DiskTier(disk_directory, 32 << 20, direct=direct, vault=Vault([OLD]))
    places = recovered(tier)
    assert sorted(right(tier, places, length)) == list(range(count))
    single = np.empty(length, np.uint8)
    for i, place in places.items():
        tier.read(place, single, length)
        assert np.array_equal(single, payload(i, length))
        assert tier.verify(place, length, digest(payload(i, length)))
        assert tier.header(place) == header(i, length)
    tier.close()


def put_secrets(path: Path, *keys: DiskKey) -> list[tuple[bytes, ...]]:
    """What must not be seen of ten blocks whose every field is made of chance."""
    tier, known, blocks = opened(path, *keys), [], []
    for i, place in enumerate(tier.reserve(SIZE, 64, 10)):
        one, two, symbol = (payload(1000 * n + i).tobytes()[:64] for n in (1, 2, 3))
        shown = BlockHeader(
            one[:32], one[32:], two[:16], two[16:32], 1, 0, 0, SIZE, symbol
        )  # fmt: skip
        blocks.append((place, shown, tier.write(place, payload(i))))
        pieces = [payload(i).tobytes()[at : at + 16] for at in range(0, SIZE - 16, 1000)]
        known.append((*shown[:4], symbol[:16], blocks[-1][2], *pieces))
    tier.commit(blocks)
    tier.close()
    return known


def test_nothing_of_a_block_lies_in_clear(disk_directory):
    """No 16 bytes of payload, symbol, key, space, root or checksum are in any file."""
    known = put_secrets(disk_directory, OLD)
    raw = on_medium(disk_directory)
    assert not [secret for secrets in known for secret in secrets if secret in raw]
    assert OLD.secret not in raw


def test_the_same_blocks_without_a_key_show_it_all(disk_directory):
    """The search above finds what is there to be found: in clear, each of these."""
    known = put_secrets(disk_directory)
    raw = on_medium(disk_directory)
    assert not [secret for secrets in known for secret in secrets if secret not in raw]


def segment_and_base(path: Path) -> tuple[Path, int]:
    """The only segment, and where its first payload lies."""
    tier = opened(path, OLD)
    (segment,) = tier._books.segments.values()
    tier.close()
    return path / "segments" / f"{segment.serial}.seg", segment.geometry.payload_base


def test_every_flipped_bit_of_a_payload_is_a_miss(sealed_original, tmp_path):
    """I11: one bit of the ciphertext, and the block does not open; the others do."""
    random, path = Random(3), tmp_path / "disk"
    shutil.copytree(sealed_original, path)
    file, base = segment_and_base(path)
    spoiled = random.sample(range(COUNT), 10)
    with file.open("r+b") as raw:
        for slot in spoiled:
            at = base + slot * 12288 + random.randrange(SIZE)
            raw.seek(at)
            byte = raw.read(1)[0]
            raw.seek(at)
            raw.write(bytes([byte ^ 1 << random.randrange(8)]))
    tier = opened(path, OLD)
    places = recovered(tier)
    slots = {i: tier._books.locate(place)[1] for i, place in places.items()}
    assert set(right(tier, places)) == {i for i, slot in slots.items() if slot not in spoiled}
    single = np.ones(SIZE, np.uint8)
    bad = next(i for i, slot in slots.items() if slot in spoiled)
    with pytest.raises(TierError, match="not what was encrypted there"):
        tier.read(places[bad], single, SIZE)
    assert not single.any()
    assert not tier.verify(places[bad], SIZE, tier.checksum(places[bad]))
    tier.close()


def test_every_bit_of_seal_and_place_counts():
    """I11: a record opens for its store, segment and slot alone, and with every bit as it was."""
    vault = Vault([OLD])
    stored = payload(5)
    place = b"payload" + STORE + bytes(8)
    sealer = vault.sealer(place)
    out = np.empty(SIZE, np.uint8)
    sealer.update(stored, out)
    seal = sealer.finish()
    for bit in range(0, len(seal) * 8):
        changed = bytearray(seal)
        changed[bit // 8] ^= 1 << bit % 8
        assert not genuine(vault, bytes(changed), place, out)
    for bit in range(0, len(place) * 8):
        changed = bytearray(place)
        changed[bit // 8] ^= 1 << bit % 8
        assert not genuine(vault, seal, bytes(changed), out)
    assert genuine(vault, seal, place, out)
    record = SlotRecord(header(5), digest(stored), 77, seal)
    size = header_bytes(64, True)
    page = pack_header(record, STORE, 3, 9, size, vault)
    assert parse_header(page, STORE, 3, 9, vault) == record
    for wrong in ((STORE, 3, 8), (STORE, 4, 9), (bytes(16), 3, 9)):
        assert parse_header(page, *wrong, vault) is None
    assert parse_header(page, STORE, 3, 9) is None
    assert parse_header(page, STORE, 3, 9, Vault([NEW])) is None
    sealed = parse_sealed(page, STORE, 3, 9).raw
    for bit in range(0, len(sealed) * 8, 7):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        assert vault.open(bytes(changed), b"header" + STORE + b"\3\0\0\0\x09\0\0\0") is None
    assert vault.open(sealed, b"header" + STORE + b"\3\0\0\0\x09\0\0\0") is not None
    assert vault.open(sealed, b"entry" + STORE + b"\3\0\0\0\x09\0\0\0") is None


def genuine(vault: Vault, seal: bytes, place: bytes, stored: np.ndarray) -> bool:
    opener = vault.opener(seal, place)
    if opener is None:
        return False
    opener.update(stored, np.empty(len(stored), np.uint8))
    return opener.is_genuine()


def test_swapped_records_are_misses(sealed_original, tmp_path):
    """I11: two blocks that change places, payloads and headers, are two misses; so is a copy."""
    path = tmp_path / "disk"
    shutil.copytree(sealed_original, path)
    file, base = segment_and_base(path)
    raw = bytearray(file.read_bytes())
    one, two = base + 4 * 12288, base + 9 * 12288
    raw[one : one + 12288], raw[two : two + 12288] = (
        raw[two : two + 12288], raw[one : one + 12288],
    )  # fmt: skip
    head = 3 * 4096
    raw[head + 4 * 4096 : head + 5 * 4096], raw[head + 9 * 4096 : head + 10 * 4096] = (
        raw[head + 9 * 4096 : head + 10 * 4096], raw[head + 4 * 4096 : head + 5 * 4096],
    )  # fmt: skip
    raw[base + 20 * 12288 : base + 21 * 12288] = raw[base + 21 * 12288 : base + 22 * 12288]
    file.write_bytes(raw)
    for lost_index in (False, True):
        if lost_index:
            shutil.rmtree(path / "index")
        tier = opened(path, OLD)
        places = recovered(tier)
        slots = {i: tier._books.locate(place)[1] for i, place in places.items()}
        wrong = {i for i, slot in slots.items() if slot in (4, 9, 20)}
        assert set(right(tier, places)) == set(places) - wrong
        assert len(places) == (COUNT - 2 if lost_index else COUNT)
        tier.close()


def test_an_older_payload_in_its_own_slot_is_a_miss(disk_directory, tmp_path):
    """I11: what once stood in a slot, authentic then, does not pass for what stands there now."""
    filled(disk_directory, OLD)
    file, base = segment_and_base(disk_directory)
    before = file.read_bytes()
    tier = opened(disk_directory, OLD)
    places = recovered(tier)
    drop(tier, list(places.values()))
    tier.commit([])
    put(tier, list(range(100, 100 + COUNT)))
    tier.close()
    after = bytearray(file.read_bytes())
    after[base : base + 5 * 12288] = before[base : base + 5 * 12288]
    file.write_bytes(after)
    tier = opened(disk_directory, OLD)
    places = recovered(tier)
    assert len(places) == COUNT
    assert len(right(tier, places)) == COUNT - 5
    tier.close()


def test_fsck_needs_the_key(sealed_original, tmp_path):
    """With the key every payload is checked; without it, what cannot be is counted, not dropped."""
    path = tmp_path / "disk"
    shutil.copytree(sealed_original, path)
    EpochsFile(path).confirm_void()
    assert inspect(path, vault=Vault([OLD])) == ([], {})
    assert inspect(path) == ([], {f"{OLD.key_id:08x}": COUNT})
    file, base = segment_and_base(path)
    raw = bytearray(file.read_bytes())
    raw[base + 5 * 12288 + 77] ^= 4
    raw[3 * 4096 + 6 * 4096 + 60] ^= 4
    file.write_bytes(raw)
    path.joinpath("segments", "1.seg").chmod(0o644)
    found, unchecked = inspect(path)
    assert [finding.kind for finding in found] == ["mode"]
    assert unchecked == {f"{OLD.key_id:08x}": COUNT}
    with pytest.raises(TierError, match="a repair would drop them"):
        inspect(path, repair=True)
    found, unchecked = inspect(path, repair=True, vault=Vault([OLD]))
    assert [(finding.kind, finding.repaired) for finding in found] == [
        ("mode", True), ("payload", True), ("header", True),
    ]  # fmt: skip
    assert inspect(path, vault=Vault([OLD])) == ([], {})
    tier = opened(path, OLD)
    assert len(right(tier, recovered(tier))) == COUNT - 1
    tier.close()


@pytest.mark.parametrize("many", [False, True])
def test_padding_is_zeroed_on_the_medium(disk_directory, many):
    """I21: behind a payload shorter than its slot there is nothing of an earlier block."""
    filled(disk_directory, OLD, length=12_288)
    tier = opened(disk_directory, OLD)
    places = recovered(tier)
    drop(tier, list(places.values()))
    tier.commit([])
    fresh = tier.reserve(12_288, 64, COUNT)
    if many:
        tier.write_many([(place, payload(7, 5000)) for place in fresh])
    else:
        for place in fresh:
            tier.write(place, payload(7, 5000))
    segment, first = tier._books.locate(fresh[0])
    file = disk_directory / "segments" / f"{segment.serial}.seg"
    tier.close()
    raw = np.fromfile(file, np.uint8, COUNT * 12_288, offset=segment.geometry.payload_at(first))
    raw = raw.reshape(COUNT, 12_288)
    assert raw[:, :5000].any(axis=1).all()
    assert not raw[:, 5000:].any()


@pytest.mark.parametrize("symbol_bytes", [0, 64, 3700, 3800, 3900, 9000])
def test_symbols_of_any_length_fit_their_sealed_header(disk_directory, symbol_bytes):
    """A sealed header takes as many whole pages as its symbol needs."""
    tier = opened(disk_directory, OLD)
    places = put(tier, [1, 2], SIZE, symbol_bytes)
    tier.check_integrity()
    assert right(tier, places) == [1, 2]
    tier.close()
    tier = opened(disk_directory, OLD)
    places = recovered(tier)
    assert tier.header(places[2]) == header(2, SIZE, symbol_bytes)
    tier.close()
