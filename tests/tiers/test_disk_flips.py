"""Bit flips by the hundred: in each field of a segment's pages, and anywhere in the index."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import read_disk
from disk_damage import ALL, CAPACITY, Flip, any_flip, make_directory, right_blocks
from disk_world import put
from soaked import leave_report

from kvstore.tiers.disk import DiskTier
from kvstore.tiers.disk.fsck import fsck
from kvstore.tiers.epochs import EpochsFile

INDEX_BLOCKS, INDEX_LENGTH = 400, 1000
FLIPS_A_FILE = 3
SOAK = [pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """In memory: nothing here asks a disk to hold anything."""
    made = Path(tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def original(folder: Path) -> Path:
    make_directory(folder / "disk")
    return folder / "disk"


@pytest.fixture
def fresh(original: Path, folder: Path) -> Callable[[], Path]:
    """Makes the directory anew, as it was."""

    def make() -> Path:
        path = folder / "copy"
        shutil.rmtree(path, ignore_errors=True)
        return Path(shutil.copytree(original, path))

    return make


def served(path: Path) -> set[int]:
    """What a start finds and reads."""
    tier = DiskTier(path, CAPACITY)
    _, right = right_blocks(tier)
    tier.close()
    return right


def check_flip(make: Callable[[], Path], number: int, with_fsck: bool) -> Flip:
    """One bit flipped in a directory: what a start and fsck make of it."""
    flipped = any_flip(make(), number, Random(number))
    path = flipped.file.parent.parent
    flipped.apply()
    if with_fsck:
        found = fsck(path, repair=True)
        assert bool(found) is not flipped.is_harmless, f"{flipped}: {found}"
        assert all(finding.repaired for finding in found), f"{flipped}: {found}"
        assert served(path) >= ALL - flipped.lost, flipped
        return flipped
    if number % 5 == 1:
        shutil.rmtree(path / "index")
        assert served(path) >= ALL - flipped.lost_without_index, flipped
    else:
        assert served(path) == ALL - flipped.lost, flipped
    return flipped


@pytest.mark.parametrize("flips", [24, pytest.param(1000, marks=SOAK)])
def test_a_bit_in_any_field_of_a_segment(fresh: Callable[[], Path], flips: int) -> None:
    """I9, I11: whichever bit of a segment's pages flips, a start and `fsck --repair` lose the
    block whose payload it is in, and no other; no byte of what is served is wrong."""
    hit = Counter(check_flip(fresh, n, with_fsck=n % 11 == 0).field for n in range(flips))
    leave_report(
        f"segment-flips-{flips}",
        {"flips": flips, "by_field": dict(sorted(hit.items())), "wrong_bytes": 0,
         "of_them_mended_by_fsck": -(-flips // 11),
         "lost_beyond_the_flipped_payload": 0},
    )  # fmt: skip
    assert {field.split()[0] for field in hit} == {
        "superblock", "cell", "header", "payload", "unused",
    }  # fmt: skip


# ---- The index ----


@pytest.fixture(scope="module")
def indexed(folder: Path) -> Path:
    """A directory whose index has pages of every kind."""
    path = folder / "indexed"
    path.mkdir(mode=0o700)
    EpochsFile(path).confirm_void()
    tier = DiskTier(path, CAPACITY)
    for first in range(0, INDEX_BLOCKS, 50):
        put(tier, list(range(first, first + 50)), INDEX_LENGTH)
    tier.close()
    return path


def in_a_process(path: Path) -> tuple[int, dict]:
    """(exit status, report) of a process that opens the directory and reads all of it."""
    script = Path(read_disk.__file__)
    command = [sys.executable, str(script), str(path), str(CAPACITY), str(INDEX_LENGTH)]
    environ = {**os.environ, "PYTHONPATH": str(script.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=120, check=False
    )
    assert done.returncode <= 0, f"{path}: {done.stderr}"
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


def mended_in_a_process(path: Path) -> int:
    """Exit status of `kvstore fsck --repair`."""
    command = [sys.executable, "-m", "kvstore.cli.main", "fsck", str(path), "--repair"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", timeout=120, check=False
    )
    assert done.returncode in (0, 1) or done.returncode < 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.parametrize("files", [2, pytest.param(200, marks=SOAK)])
def test_bits_anywhere_in_the_index(indexed: Path, folder: Path, files: int) -> None:
    """I9, I11, I13: with bits flipped anywhere in the index no block is lost and none is wrong,
    by a start or after `fsck --repair`. A start may die of it once, never twice; fsck does not."""
    died, noted = 0, 0
    for number in range(files):
        path = Path(shutil.copytree(indexed, folder / "other"))
        raw, random = bytearray((path / "index" / "data.mdb").read_bytes()), Random(number)
        for _ in range(FLIPS_A_FILE):
            raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
        (path / "index" / "data.mdb").write_bytes(raw)
        if number % 3 == 2:
            assert mended_in_a_process(path) == 0, number
        code, report = in_a_process(path)
        if code:
            assert number % 3 != 2, f"{number}: what fsck has mended ends a start: {code}"
            died += 1
            code, report = in_a_process(path)
        assert code == 0, f"{number}: a second start ended by signal {-code}"
        assert report["right"] == list(range(INDEX_BLOCKS)), number
        assert not report["bad"]
        noted += bool(report["notes"])
        shutil.rmtree(path)
    leave_report(
        f"index-flips-{files}",
        {"files": files, "flips_a_file": FLIPS_A_FILE, "starts_ended_by_a_signal": died,
         "index_made_anew": noted, "wrong_bytes": 0, "lost_blocks": 0},
    )  # fmt: skip
