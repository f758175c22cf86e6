"""The table of docs/fsck.md: what fsck says of each damage, and what is left when it has mended."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_damage import ALL, CAPACITY, DAMAGES, OLDER, make_directory, right_blocks
from disk_world import is_right, put

from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.fsck import Finding, fsck
from kvstore.tiers.epochs import EpochsFile

PAGE = Path(__file__).parents[2] / "docs" / "fsck.md"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory: nothing here asks a disk to hold anything."""
    made = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    make_directory(made / "disk")
    yield made
    shutil.rmtree(made)


@pytest.fixture
def path(folder: Path) -> Path:
    """The directory, with its older copy beside it."""
    target = folder / "copy"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    shutil.copytree(folder / OLDER, target / OLDER)
    return Path(shutil.copytree(folder / "disk", target / "disk"))


def rows() -> dict[str, list[str]]:
    """The table's rows by damage: what is said, what is done, what is left."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells if len(row) == 4}


def plain(finding: Finding, path: Path) -> str:
    """A finding without what is different in every directory."""
    text = finding.what.replace(f"{path}/", "")
    text = re.sub(r"\b[0-9a-f]{32}\b", "KEY", text)
    text = re.sub(r"\d+\.seg", "N.seg", text)
    return re.sub(r"(?<![\w.])\d+", "N", text)


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_found_mended_and_told(path: Path, name: str) -> None:
    """I9, I11, I13: fsck says of each damage what the documentation says, mends it once, and loses
    no block but those that are damaged; what is there after is right, and takes blocks again."""
    damage, (said, done, _) = DAMAGES[name], rows()[name]
    damage.spoil(path)
    found = fsck(path, repair=True)
    assert {finding.kind for finding in found} == damage.kinds, found
    for finding in found:
        assert plain(finding, path) in said, plain(finding, path)
        assert finding.repair in done
    assert all(finding.repaired for finding in found) is damage.is_mended
    again = fsck(path)
    assert bool(again) is not damage.is_mended
    if not damage.is_mended:
        return
    tier = DiskTier(path, CAPACITY)
    found, right = right_blocks(tier)
    assert right == found, "fsck left blocks that cannot be read"
    assert right - damage.back == ALL - damage.lost
    assert EpochsFile(path).all_void is ("both epochs" in name)
    more = put(tier, [500, 501])
    assert all(is_right(tier, place, i) for i, place in more.items())
    tier.check_integrity()
    tier.close()


def test_the_table_has_every_damage_and_no_other() -> None:
    """What is not tried here is not claimed there."""
    assert set(rows()) - {"damage", "---"} == set(DAMAGES)
