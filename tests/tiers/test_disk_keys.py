"""Keys of an encrypted disk tier that come, change, leave or do not fit; and no nonce twice."""

from __future__ import annotations

import shutil

import pytest
from disk_world import SIZE, abandon, drop, header, payload, put, recovered
from sealed_world import CAPACITY, COUNT, NEW, OLD, OTHER, filled, opened, right

from kvstore.core.errors import TierError
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.entries import SEAL
from kvstore.tiers.disk.index import Changes, DiskIndex, pack_key, pack_value
from kvstore.tiers.disk.io import FileIO
from kvstore.tiers.disk.layout import pack_header
from kvstore.tiers.disk.vault import Vault
from kvstore.tiers.payload import digest
from kvstore.tiers.record import SlotRecord


def test_rotation_keeps_old_blocks_readable(disk_directory):
    """A new first key writes; the old one is still there to read, until it leaves the file."""
    filled(disk_directory, OLD)
    tier = opened(disk_directory, NEW, OLD)
    places = recovered(tier)
    places |= put(tier, list(range(100, 110)))
    assert sorted(right(tier, places)) == [*range(COUNT), *range(100, 110)]
    assert tier.blocks_by_key() == {"old": COUNT, "new": 10}
    tier.check_integrity()
    tier.close()
    tier = opened(disk_directory, NEW)
    assert tier.locked_block_count == COUNT
    (note,) = [note for note in tier.notes if "need key" in note]
    assert f"{COUNT} blocks need key {OLD.key_id:08x}" in note
    places = recovered(tier)
    assert sorted(right(tier, places)) == list(range(100, 110))
    assert tier.blocks_by_key() == {"new": 10}
    places |= put(tier, list(range(200, 200 + COUNT)))
    assert len(right(tier, places)) == 10 + COUNT
    tier.check_integrity()
    tier.close()
    # Dropped is dropped: the old key does not bring back what its slots no longer hold.
    tier = opened(disk_directory, NEW, OLD)
    assert sorted(recovered(tier)) == [*range(100, 110), *range(200, 200 + COUNT)]
    tier.close()


def test_keys_change_while_the_tier_is_open(disk_directory):
    """A key taken over at run time writes from the next block on; the old one goes on reading."""
    vault = Vault([OLD])
    tier = DiskTier(disk_directory, CAPACITY, vault=vault)
    places = put(tier, [1, 2, 3])
    waiting = tier.reserve(SIZE, 64, 1)
    checksum = tier.write(waiting[0], payload(4))
    assert vault.take([NEW, OLD]) is True
    assert vault.take([NEW]) is False
    tier.commit([(waiting[0], header(4), checksum)])
    places |= {4: waiting[0]} | put(tier, [5, 6])
    assert right(tier, places) == [1, 2, 3, 4, 5, 6]
    assert tier.blocks_by_key() == {"old": 4, "new": 2}
    tier.check_integrity()
    tier.close()
    tier = opened(disk_directory, NEW, OLD)
    assert sorted(right(tier, recovered(tier))) == [1, 2, 3, 4, 5, 6]
    tier.close()
    tier = opened(disk_directory, NEW)
    assert sorted(right(tier, recovered(tier))) == [5, 6]
    tier.close()


@pytest.mark.parametrize("lose_index", [False, True])
@pytest.mark.parametrize("keys", [(), (OTHER,)])
def test_without_any_key_that_fits_nothing_is_opened_or_lost(
    sealed_original, tmp_path, keys, lose_index
):
    """A wrong key file, or none, is refused in one sentence, and the blocks are there after."""
    path = tmp_path / "disk"
    shutil.copytree(sealed_original, path)
    if lose_index:
        shutil.rmtree(path / "index")
    for _ in range(2):
        with pytest.raises(TierError, match=f"{OLD.key_id:08x}.*empty the directory"):
            opened(path, *keys)
    tier = opened(path, OLD)
    assert sorted(right(tier, recovered(tier))) == list(range(COUNT))
    tier.close()


@pytest.mark.parametrize("lose_index", [False, True])
def test_blocks_in_clear_do_not_count_with_keys(disk_directory, lose_index):
    """What was written before there were keys is dropped and told: anybody may have written it."""
    filled(disk_directory, numbers=range(10))
    if lose_index:
        shutil.rmtree(disk_directory / "index")
    tier = opened(disk_directory, OLD)
    assert any(note.startswith("10 blocks are in clear") for note in tier.notes)
    assert recovered(tier) == {}
    places = put(tier, list(range(100, 120)))
    assert right(tier, places) == list(range(100, 120))
    tier.check_integrity()
    tier.close()
    tier = opened(disk_directory, OLD)
    assert sorted(right(tier, recovered(tier))) == list(range(100, 120))
    tier.close()


@pytest.mark.parametrize("lose_index", [False, True])
def test_a_record_in_clear_cannot_be_slipped_in(sealed_original, tmp_path, lose_index):
    """I11: an entry and a header that are sound but for the key are no block, and change none."""
    path = tmp_path / "disk"
    shutil.copytree(sealed_original, path)
    tier = opened(path, OLD)
    places = recovered(tier)
    segment, slot = tier._books.locate(places.pop(7))
    store_id, map_bytes = tier._index.store_id, tier._index.map_bytes
    tier.close()
    forged = SlotRecord(header(500), digest(payload(500)), 10_000)
    with open(path / "segments" / f"{segment.serial}.seg", "r+b") as file:
        file.seek(segment.geometry.header_at(slot))
        file.write(pack_header(forged, store_id, segment.serial, slot, 4096))
        file.seek(segment.geometry.payload_at(slot))
        file.write(payload(500).tobytes())
    index = DiskIndex(path / "index", map_bytes, store_id, FileIO())
    index.open()
    key = pack_key(segment.serial, slot)
    index.commit(Changes(deletes=[key]), None)
    index.commit(Changes(puts=[(key, pack_value(key, forged))]), None)
    index.close()
    if lose_index:
        shutil.rmtree(path / "index")
    tier = opened(path, OLD)
    found = recovered(tier)
    assert sorted(right(tier, found)) == sorted(places)
    assert any(note.startswith("1 blocks are in clear") for note in tier.notes)
    tier.close()


def test_no_nonce_is_used_twice(disk_directory):
    """Salt and counter of all records ever written differ: over restarts, kills and new keys."""
    seen: set[bytes] = set()
    written = 0
    for life in range(4):
        vault = Vault([NEW, OLD] if life > 2 else [OLD], stream_messages_max=7)
        tier = DiskTier(disk_directory, CAPACITY, vault=vault)
        places = recovered(tier)
        drop(tier, list(places.values()))
        tier.commit([])
        for place in put(tier, list(range(COUNT))).values():
            segment, slot = tier._books.locate(place)
            key, salt, counter, _ = SEAL.unpack(vault.expand(segment.seals[slot]))
            seen.add((key, salt, counter))
            written += 1
        for sealed in tier._index.sealed_blocks()[1]:
            seen.add(sealed[:28])
            written += 1
        abandon(tier)
    assert len(seen) == written


def test_a_directory_put_back_does_not_repeat_nonces(sealed_original, tmp_path):
    """Two lives that begin from the same copy write under different salts."""
    salts = set()
    for n in range(2):
        path = tmp_path / str(n)
        shutil.copytree(sealed_original, path)
        vault = Vault([OLD])
        tier = DiskTier(path, CAPACITY, vault=vault)
        recovered(tier)
        (place,) = put(tier, [500]).values()
        segment, slot = tier._books.locate(place)
        salts.add(SEAL.unpack(vault.expand(segment.seals[slot]))[1])
        tier.close()
    assert len(salts) == 2


def test_a_lost_index_is_made_anew_from_sealed_headers(sealed_original, tmp_path):
    """I13: headers alone bring every block back, under a new first key too."""
    path = tmp_path / "disk"
    shutil.copytree(sealed_original, path)
    shutil.rmtree(path / "index")
    tier = opened(path, NEW, OLD)
    places = recovered(tier)
    assert sorted(right(tier, places)) == list(range(COUNT))
    tier.check_integrity()
    tier.close()
    # The index is sealed with the new key now; the payloads still need the old one.
    with pytest.raises(TierError, match=r"no key of tiers\.disk\.key_file"):
        opened(path, NEW)
