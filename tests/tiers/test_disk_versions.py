"""Formats of other versions: the one before is read, an unknown one is refused and left alone."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_damage import CAPACITY, make_directory, segments
from disk_world import recovered

from kvstore.core.errors import TierError
from kvstore.tiers import epochs
from kvstore.tiers.disk import DiskTier, layout
from kvstore.tiers.disk.fsck import fsck
from kvstore.tiers.disk.io import PAGE
from kvstore.tiers.epochs import EpochsFile, Mark

LATER = layout.VERSION + 1


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    make_directory(folder / "disk")
    yield folder / "disk"
    shutil.rmtree(folder)


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    files = [p for p in path.rglob("*") if p.is_file()]
    return {str(p.relative_to(path)): (p.stat().st_mode, p.read_bytes()) for p in files}


def later_format(path: Path) -> None:
    file = path / "format.json"
    file.write_text(file.read_text().replace('"version": 1', f'"version": {LATER}'))


def later_segment(path: Path) -> None:
    """As a later version writes it: sealed, and in all else what we know."""
    for file in segments(path):
        raw = bytearray(file.read_bytes())
        body = raw[: layout._SUPERBLOCK.size]
        body[8:12] = LATER.to_bytes(4, "little")
        raw[:PAGE] = layout._sealed(bytes(body), PAGE, 0)
        file.write_bytes(raw)


def later_segment_alone(path: Path) -> None:
    later_segment(path)
    (path / "format.json").unlink()


def later_epochs(path: Path) -> None:
    for name in epochs.NAMES:
        raw = b"KVEPOCH\x03" + b"what we cannot know"
        (path / name).write_bytes(raw + epochs.xxhash.xxh3_128_digest(raw))


def opened(path: Path) -> None:
    EpochsFile(path)
    DiskTier(path, CAPACITY).close()


@pytest.mark.parametrize("later", [later_format, later_segment, later_segment_alone, later_epochs])
def test_an_unknown_version_is_refused_and_untouched(path: Path, later) -> None:
    """One sentence says which format it is and which ones are known, whoever opens it; not a byte
    is changed: the version that made it goes on with all of it."""
    later(path)
    before = contents(path)
    for call in (opened, fsck, lambda path: fsck(path, repair=True)):
        with pytest.raises(TierError, match="has format") as caught:
            call(path)
        assert "knows" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert contents(path) == before


def test_a_flipped_version_is_damage(path: Path) -> None:
    """A version that no checksum vouches for is a damaged page, and mended like one."""
    file = segments(path)[0]
    with file.open("r+b") as opened_file:
        opened_file.seek(8)
        opened_file.write(b"\x63")
    tier = DiskTier(path, CAPACITY)
    assert any("superblock" in note for note in tier.notes)
    assert len(recovered(tier)) > 0
    tier.close()


def test_epochs_of_the_version_before_are_read(tmp_path: Path) -> None:
    """I13: what the version before has made void stays void."""
    space = b"s" * 32
    raw = epochs._HEAD_BEFORE.pack(epochs._MAGIC_BEFORE, 7, 0, 1)
    raw += epochs._ENTRY.pack(space, 3, 50)
    for name in epochs.NAMES:
        (tmp_path / name).write_bytes(raw + epochs.xxhash.xxh3_128_digest(raw))
    for _ in range(2):  # read as it was, then as this version has written it
        found = EpochsFile(tmp_path)
        assert found.mark(space) == Mark(3, 50)
        assert not found.all_void
        assert found.notes == []
    assert (tmp_path / epochs.NAMES[0]).read_bytes().startswith(epochs._MAGIC)
