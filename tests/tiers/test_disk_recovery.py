"""What a start makes of a directory: everything that is there, whatever became of the rest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pytest
from disk_world import (
    SIZE,
    BrokenIO,
    abandon,
    directory_bytes,
    drop,
    header,
    is_right,
    number_of,
    payload,
    put,
    recovered,
)

from kvstore.core.errors import TierError
from kvstore.core.generations import Generations
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.index_check import main as check_index

CAPACITY = 16 << 20


def opened(directory: Path, **options) -> DiskTier:
    return DiskTier(directory, CAPACITY, **options)


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "segments").iterdir(), key=lambda path: int(path.name[:-4]))


@pytest.fixture
def filled(disk_directory: Path) -> dict[int, int]:
    """Blocks 0 to 199 in several segments of two classes; 0 to 9 removed for good."""
    tier = opened(disk_directory)
    stored = {}
    for first in range(0, 160, 40):
        stored |= put(tier, list(range(first, first + 40)))
    stored |= put(tier, list(range(160, 200)), 50_000)
    drop(tier, [stored.pop(i) for i in range(10)])
    tier.close()
    return stored


def length_of(i: int) -> int:
    return SIZE if i < 160 else 50_000


def check(tier: DiskTier, wanted: set[int]) -> set[int]:
    """Adopts all, looks at every byte; the numbers found and right."""
    found = recovered(tier)
    right = {i for i, place in found.items() if is_right(tier, place, i, length_of(i))}
    assert wanted <= right, f"lost: {sorted(wanted - right)}"
    tier.check_integrity()
    assert directory_bytes(tier._path) <= CAPACITY
    more = put(tier, [1000, 1001])
    assert all(is_right(tier, place, i) for i, place in more.items())
    tier.close()
    return right


def test_start_from_a_sound_index_writes_nothing(filled, disk_directory):
    """A start without damage reads no header, writes no page and has nothing to tell."""
    io = BrokenIO()
    tier = opened(disk_directory, io=io)
    assert tier.notes == []
    assert tier.torn_header_count == 0
    assert io.calls["pwritev"] == io.calls["commit"] == 0
    assert io.calls["preadv"] == 3 * len(segments(disk_directory))
    assert check(tier, set(filled)) == set(filled)


def test_headers_come_back_whole(filled, disk_directory):
    """Every field of a block is what was committed, by either way of recovery."""
    before = opened(disk_directory)
    by_columns = before.recover_columns()
    for place in by_columns.rows["place"].tolist():
        before.adopt(place)
    before.finish_recovery()
    for row, symbol in zip(by_columns.rows, by_columns.symbols, strict=True):
        found = before.header(int(row["place"]))
        i = number_of(found)
        assert found == header(i, length_of(i))
        assert (symbol, int(row["epoch"]), int(row["position"])) == (
            found.symbol, found.epoch, found.position,
        )  # fmt: skip
    before.close()
    after = opened(disk_directory)
    for block in after.recover():
        i = number_of(block.header)
        assert block.header == header(i, length_of(i))
    after.close()


@pytest.mark.parametrize("with_index", [True, False])
def test_symbols_of_mixed_lengths(disk_directory, with_index):
    """Blocks of one class may have symbols of any length, none at all, and long ones."""
    tier = opened(disk_directory)
    places = tier.reserve(SIZE, 3000, 9)
    blocks = [
        (place, header(i, SIZE, [0, 64, 3000][i % 3]), tier.write(place, payload(i)))
        for i, place in enumerate(places)
    ]
    tier.commit(blocks)
    tier.close()
    if not with_index:
        shutil.rmtree(disk_directory / "index")
    tier = opened(disk_directory)
    found = {number_of(block.header): block.header for block in tier.recover()}
    assert found == {i: header for i, (_, header, _) in enumerate(blocks)}
    tier.close()


@pytest.mark.parametrize("how", ["folder", "file", "empty", "garbage", "other_version"])
def test_lost_index_is_made_anew_from_headers(filled, disk_directory, how):
    """I13: without a usable index every committed block is found by its header."""
    index = disk_directory / "index"
    if how == "folder":
        shutil.rmtree(index)
    elif how == "file":
        (index / "data.mdb").unlink()
    elif how == "empty":
        (index / "data.mdb").write_bytes(b"")
    elif how == "garbage":
        (index / "data.mdb").write_bytes(Random(1).randbytes(100_000))
    else:
        raw = bytearray((index / "data.mdb").read_bytes())
        raw[20] = raw[4096 + 20] = 77
        (index / "data.mdb").write_bytes(raw)
    tier = opened(disk_directory)
    assert tier.notes
    check(tier, set(filled))
    again = opened(disk_directory)
    assert again.notes == []
    check(again, set(filled))


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_in_the_index_cost_no_block(filled, disk_directory, seed):
    """I11, I13: with bits flipped anywhere in the index, nothing durable is lost, nothing wrong."""
    path, random = disk_directory / "index" / "data.mdb", Random(seed)
    raw = bytearray(path.read_bytes())
    for _ in range(random.randrange(1, 6)):
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
    path.write_bytes(raw)
    # As after a start that died of it: the next one looks at the index from another process.
    (disk_directory / "index.loading").touch()
    check(opened(disk_directory), set(filled))
    assert not (disk_directory / "index.loading").exists()


def test_marker_of_a_start_that_died_makes_the_next_one_wary(filled, disk_directory, monkeypatch):
    """I13: an index that kills who reads it is read once more by another process, then replaced."""
    (disk_directory / "index.loading").touch()
    asked = []

    def dies(path, index):
        asked.append(path)
        return False

    monkeypatch.setattr("kvstore.tiers.disk.loading.is_sound", dies)
    tier = opened(disk_directory)
    assert asked == [disk_directory]
    assert "moved" in tier.notes[0]
    assert (disk_directory / "index.damaged" / "data.mdb").exists()
    check(tier, set(filled))


def test_index_checker_tells_sound_from_damaged(filled, disk_directory):
    """The process that looks first says what it found by its exit status."""
    store_id = json.loads((disk_directory / "format.json").read_text())["store_id"]
    command = [str(disk_directory), str(1 << 20), store_id]
    assert check_index(command) == 0
    path = disk_directory / "index" / "data.mdb"
    raw = bytearray(path.read_bytes())
    at = raw.index(payload_digest())
    raw[at] ^= 1
    path.write_bytes(raw)
    assert check_index(command) == 1


def payload_digest() -> bytes:
    return header(50).key


def test_older_copy_of_the_index_is_caught_up(disk_directory):
    """I9, I13: where segments know later groups than the index, their headers fill the gap."""
    tier = opened(disk_directory)
    stored = put(tier, list(range(40)))
    tier.close()
    shutil.copytree(disk_directory / "index", disk_directory.parent / "older")
    tier = opened(disk_directory)
    stored = recovered(tier)
    drop(tier, [stored.pop(i) for i in range(20)])
    tier.commit([])
    reused = put(tier, list(range(100, 115)))
    assert set(reused.values()) <= {*range(100_000)}
    fresh = put(tier, list(range(160, 180)), 50_000)
    stored |= reused | fresh
    tier.close()
    shutil.rmtree(disk_directory / "index")
    shutil.copytree(disk_directory.parent / "older", disk_directory / "index")
    tier = opened(disk_directory)
    assert any("taken up" in note for note in tier.notes)
    right = check(tier, set(stored))
    assert right <= set(stored) | set(range(20))


def test_group_without_its_transaction(disk_directory):
    """A group that died between its headers and its transaction is whole or not there."""
    io = BrokenIO()
    tier = opened(disk_directory, io=io)
    stored = put(tier, list(range(20)))
    drop(tier, [stored.pop(i) for i in range(5)])
    tier.commit([])

    class Died(BaseException):
        pass

    io.fail["commit"] = [Died()]
    with pytest.raises(Died):
        put(tier, [50, 51])
    abandon(tier)
    right = check(opened(disk_directory), set(stored))
    assert right == set(stored) | {50, 51}, "removed blocks came back, or synced ones did not"


def test_missing_segment_is_missed(filled, disk_directory):
    """I11: blocks of a file that is gone are gone, the others are there."""
    segments(disk_directory)[0].unlink()
    tier = opened(disk_directory)
    assert any("no file" in note for note in tier.notes)
    right = check(tier, set())
    assert 0 < len(right) < len(filled)
    again = opened(disk_directory)
    assert again.notes == []
    check(again, right)


def test_renamed_segments_get_their_names_back(filled, disk_directory):
    """Swapped file names confuse nobody: a segment says itself which it is."""
    paths = segments(disk_directory)
    spare = disk_directory / "segments" / "spare"
    paths[0].rename(spare)
    paths[1].rename(paths[0])
    spare.rename(paths[1])
    paths[2].rename(disk_directory / "segments" / "4000000.seg")
    shutil.copy(paths[3], disk_directory / "segments" / "1000000.seg")
    tier = opened(disk_directory)
    assert sum(note.endswith("; renamed") for note in tier.notes) == 3
    assert segments(disk_directory) == paths
    check(tier, set(filled))


def test_segments_of_another_store_are_no_ones(filled, disk_directory, tmp_path):
    """I11: a file from elsewhere is not believed, though its number fits."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    stranger = opened(other)
    put(stranger, list(range(500, 540)))
    stranger.close()
    shutil.copy(segments(other)[0], segments(disk_directory)[0])
    tier = opened(disk_directory)
    found = recovered(tier)
    assert not set(found) & set(range(500, 540))
    tier.close()


@pytest.mark.parametrize("length", [0, 5000, 30_000, 300_000, -4096])
def test_truncated_segment_keeps_what_it_holds(filled, disk_directory, length):
    """I11: blocks behind the end of a shortened file are missed, those before it are not."""
    path = segments(disk_directory)[0]
    size = path.stat().st_size
    os.truncate(path, length if length >= 0 else size + length)
    right = check(opened(disk_directory), set())
    assert set(filled) >= right >= set(range(160, 200))
    if length < 0:
        assert len(right) >= len(filled) - 1


@pytest.mark.parametrize("with_index", [True, False])
def test_damaged_superblock(filled, disk_directory, with_index):
    """A segment that the index knows is mended; without an index it is no segment, and removed."""
    path = segments(disk_directory)[0]
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    if not with_index:
        shutil.rmtree(disk_directory / "index")
    right = check(opened(disk_directory), set())
    assert (right == set(filled)) is with_index
    assert path.exists() is with_index


def test_format_file_is_made_anew(filled, disk_directory):
    """The identity of a store is in each of its segments, too."""
    before = json.loads((disk_directory / "format.json").read_text())
    (disk_directory / "format.json").write_text("{")
    check(opened(disk_directory), set(filled))
    assert json.loads((disk_directory / "format.json").read_text()) == before


def test_unwelcome_directories_are_refused(tmp_path, disk_directory):
    """A directory of others, of a later version, or not private is refused, and says the fix."""
    with pytest.raises(TierError, match="mkdir -m 700"):
        opened(tmp_path / "nowhere")
    disk_directory.chmod(0o755)
    with pytest.raises(TierError, match="chmod 700"):
        opened(disk_directory)
    disk_directory.chmod(0o700)
    (tmp_path / "link").symlink_to(disk_directory)
    with pytest.raises(TierError, match="not a directory itself"):
        opened(tmp_path / "link")
    (disk_directory / "thesis.tex").touch()
    with pytest.raises(TierError, match="thesis"):
        opened(disk_directory)
    (disk_directory / "thesis.tex").unlink()
    with pytest.raises(TierError, match="at least"):
        DiskTier(disk_directory, 1 << 20)
    opened(disk_directory).close()
    known = json.loads((disk_directory / "format.json").read_text())
    (disk_directory / "format.json").write_text(json.dumps(known | {"version": 9}))
    with pytest.raises(TierError, match="format 9"):
        opened(disk_directory)


def test_open_modes_are_closed(filled, disk_directory):
    """A file that others could read is made private, and the start says so."""
    segments(disk_directory)[0].chmod(0o644)
    tier = opened(disk_directory)
    assert "could be read by others" in tier.notes[0]
    assert segments(disk_directory)[0].stat().st_mode & 0o777 == 0o600
    tier.close()
    target = disk_directory.parent / "elsewhere"
    target.touch()
    (disk_directory / "segments" / "77.seg").symlink_to(target)
    with pytest.raises(TierError, match="link"):
        opened(disk_directory)


def test_generations_are_shared_and_go_on(filled, disk_directory):
    """One counter serves all tiers of a store, and never gives a number of before again."""
    shared = Generations(7)
    tier = opened(disk_directory, generations=shared)
    highest = int(tier.recover_columns().rows["generation"].max())
    assert shared.next > highest
    mark = shared.take()
    recovered(tier)
    place = put(tier, [2000])[2000]
    assert tier.generation(place) > mark
    assert tier.next_generation() == shared.next
    tier.close()


def test_larger_directory_is_used_in_larger_parts(disk_directory):
    """A store that was made small and grew does not end in thousands of files."""
    tier = DiskTier(disk_directory, 4 << 20)
    stored = put(tier, list(range(20)))
    tier.close()
    tier = DiskTier(disk_directory, 1 << 30)
    assert recovered(tier).keys() == stored.keys()
    before = len(segments(disk_directory))
    put(tier, list(range(100, 300)))
    assert len(segments(disk_directory)) - before <= 2
    tier.close()


def test_bulk_adoption_is_by_place(filled, disk_directory):
    """Any part of what was found may be adopted, in any order; the rest is removed for good."""
    tier = opened(disk_directory)
    columns = tier.recover_columns()
    places = columns.rows["place"].copy()
    np.random.default_rng(0).shuffle(places)
    tier.adopt_many(places[:70])
    tier.adopt_many(places[70:80])
    tier.finish_recovery()
    assert tier.usage().block_count == 80
    assert (tier.generations(places) > 0).tolist() == [True] * 80 + [False] * (len(places) - 80)
    tier.check_integrity()
    tier.commit([])
    assert tier.usage().resting_bytes == 0
    tier.close()
    again = opened(disk_directory)
    assert len(again.recover_columns().rows) == 80
    again.close()
