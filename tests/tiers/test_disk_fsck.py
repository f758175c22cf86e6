"""fsck explains every damage and mends it: what is left is right, and found right again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_world import header, is_right, put, recovered

from kvstore.core.errors import TierError
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.fsck import fsck
from kvstore.tiers.epochs import EpochsFile

CAPACITY = 8 << 20
PAGE = 4096


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with blocks 0 to 59 in it, written in five groups."""
    path = tmp_path_factory.mktemp("original") / "disk"
    path.mkdir(mode=0o700)
    EpochsFile(path)
    tier = DiskTier(path, CAPACITY)
    for first in range(0, 60, 12):
        put(tier, list(range(first, first + 12)))
    tier.close()
    return path


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "disk"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def segment(path: Path) -> Path:
    return sorted((path / "segments").iterdir())[0]


def in_header(path: Path, at: int) -> None:
    """Flips a bit of the header of block 7."""
    for file in (path / "segments").iterdir():
        found = file.read_bytes().find(header(7).key)
        if found >= 0:
            flip(file, found // PAGE * PAGE + at)


def first_payload(path: Path) -> None:
    tier = DiskTier(path, CAPACITY)
    place = recovered(tier)[0]
    found, slot = tier._books.locate(place)
    at, name = found.geometry.payload_at(slot), f"{found.serial}.seg"
    tier.close()
    flip(path / "segments" / name, at + 100)


def index_entry(path: Path) -> None:
    file = path / "index" / "data.mdb"
    file.write_bytes(file.read_bytes().replace(header(7).key, header(8).key))


def stray_segment(path: Path) -> None:
    (path / "segments" / "4000.seg").write_bytes(bytes(100_000))
    (path / "segments" / "4000.seg").chmod(0o600)


def swapped(path: Path) -> None:
    segment(path).rename(path / "segments" / "900.seg")


DAMAGE: dict[str, tuple[str, Callable[[Path], object], int]] = {
    "header": ("header", lambda p: in_header(p, 90), 60),
    "header magic": ("header", lambda p: in_header(p, 0), 60),
    "payload": ("payload", first_payload, 59),
    "superblock": ("superblock", lambda p: flip(segment(p), 40), 60),
    "cell": ("cell", lambda p: [flip(segment(p), PAGE + 50), flip(segment(p), 2 * PAGE + 50)], 60),
    "index entry": ("index", index_entry, 60),
    "index gone": ("index", lambda p: shutil.rmtree(p / "index"), 60),
    "index short": ("index", lambda p: os.truncate(p / "index" / "data.mdb", 9000), 60),
    "format": ("format", lambda p: (p / "format.json").unlink(), 60),
    "epochs copy": ("epochs", lambda p: flip(p / "epochs.copy", 20), 60),
    "epochs gone": ("epochs", lambda p: (p / "epochs").unlink(), 60),
    "orphan": ("orphan", stray_segment, 60),
    "name": ("name", swapped, 60),
    "file gone": ("missing", lambda p: segment(p).unlink(), 0),
    "file short": ("length", lambda p: os.truncate(segment(p), 300_000), 0),
    "file mode": ("mode", lambda p: segment(p).chmod(0o640), 60),
    "folder mode": ("mode", lambda p: (p / "index").chmod(0o755), 60),
    "directory mode": ("mode", lambda p: p.chmod(0o755), 60),
}


def snapshot(path: Path) -> dict:
    return {
        str(p.relative_to(path)): (p.stat().st_mode, p.read_bytes() if p.is_file() else b"")
        for p in [path, *sorted(path.rglob("*"))]
    }


def test_nothing_is_found_where_nothing_is_wrong(path):
    """A sound directory has no finding, and progress reaches its end."""
    seen = []
    before = snapshot(path)
    assert fsck(path, True, lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (60 * 12_000, 60 * 12_000)
    assert snapshot(path) == before


@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_explained_and_mended(path, name):
    """I11, I13: without repair a damage is named and nothing changed; with it, it is gone."""
    kind, spoil, left = DAMAGE[name]
    spoil(path)
    before = snapshot(path)
    found = fsck(path)
    assert kind in {finding.kind for finding in found}
    assert all(finding.what and finding.repair and not finding.repaired for finding in found)
    assert snapshot(path) == before, "a look changed something"
    mended = fsck(path, repair=True)
    assert [f.what for f in mended] == [f.what for f in found]
    assert all(finding.repaired for finding in mended)
    assert fsck(path) == []
    tier = DiskTier(path, CAPACITY)
    kept = recovered(tier)
    assert len(kept) >= left
    assert all(is_right(tier, place, i) for i, place in kept.items())
    tier.check_integrity()
    tier.close()


def test_lost_block_stays_lost(path):
    """A block that fsck dropped does not come back when the index is made anew."""
    first_payload(path)
    assert fsck(path, repair=True)[0].repaired
    shutil.rmtree(path / "index")
    tier = DiskTier(path, CAPACITY)
    assert sorted(recovered(tier)) == list(range(1, 60))
    tier.close()


def test_many_damages_at_once(path):
    """Damages of several kinds are all named, and mended in one go."""
    for name in ("payload", "superblock", "epochs copy", "orphan", "file mode", "index short"):
        DAMAGE[name][1](path)
    found = fsck(path, repair=True)
    assert {"epochs", "orphan", "mode", "index"} <= {finding.kind for finding in found}
    assert all(finding.repaired for finding in found)
    assert fsck(path) == []


def test_what_fsck_may_not_touch_remains(path):
    """A link is not followed and not removed; the damage remains, and is said to."""
    (path / "segments" / "77.seg").symlink_to("/etc/hostname")
    found = fsck(path, repair=True)
    assert next((finding.kind, finding.repaired) for finding in found) == ("stranger", False)
    assert (path / "segments" / "77.seg").is_symlink()


def test_no_directory_is_an_error(tmp_path):
    """What is no directory is refused by name."""
    with pytest.raises(TierError, match="nowhere"):
        fsck(tmp_path / "nowhere")
