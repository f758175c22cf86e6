"""Epochs file: what was voided stays void, whatever happens to the file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from kvstore.core.errors import TierError
from kvstore.tiers.epochs import NAMES, EpochsFile

A, B = b"a" * 32, b"b" * 32


@pytest.fixture
def directory(tmp_path):
    """A directory whose epochs file has A at epoch 2 and B cleared below 100."""
    epochs = EpochsFile(tmp_path)
    assert epochs.created
    epochs.confirm_void()
    epochs.bump(A)
    epochs.bump(A)
    epochs.clear([B], 100)
    return tmp_path


def expect_as_written(epochs):
    assert (epochs.epoch(A), epochs.clear_mark(A)) == (2, 0)
    assert (epochs.epoch(B), epochs.clear_mark(B)) == (0, 100)
    assert not epochs.all_void


def test_a_space_never_heard_of_is_at_epoch_zero(tmp_path):
    """A new space has epoch 0 and no clear mark, and its blocks count."""
    epochs = EpochsFile(tmp_path)
    epochs.confirm_void()
    assert (epochs.epoch(A), epochs.clear_mark(A), epochs.generation_floor) == (0, 0, 0)
    assert not epochs.is_void(A, 0, 1)


def test_marks_survive_reopening(directory):
    """I13: epochs and clear marks are there again in the next life."""
    epochs = EpochsFile(directory)
    assert not epochs.created
    expect_as_written(epochs)
    assert epochs.bump(A) == 3
    assert EpochsFile(directory).epoch(A) == 3


def test_what_is_void(directory):
    """I13: another epoch, older or newer, or a generation below the mark, makes a block void."""
    epochs = EpochsFile(directory)
    assert epochs.is_void(A, 1, 50)
    assert epochs.is_void(A, 3, 50)
    assert not epochs.is_void(A, 2, 1)
    assert epochs.is_void(B, 0, 99)
    assert not epochs.is_void(B, 0, 100)


def test_clear_marks_never_go_back(directory):
    """I13: a later clear with a lower mark does not bring blocks back."""
    epochs = EpochsFile(directory)
    epochs.clear([A, B], 40)
    assert (epochs.clear_mark(A), epochs.clear_mark(B)) == (40, 100)
    assert epochs.generation_floor == 100


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "missing", "foreign"])
def test_either_copy_is_enough(directory, name, damage):
    """I13: whatever happens to one copy, the other one answers, and both are sound again."""
    path = directory / name
    raw = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        flipped = raw[:40] + bytes([raw[40] ^ 4]) + raw[41:]
        broken = {"flip": flipped, "cut": raw[:-5], "empty": b"", "foreign": b"x" * 500}
        path.write_bytes(broken[damage])
    epochs = EpochsFile(directory)
    expect_as_written(epochs)
    assert bool(epochs.notes) == (damage != "missing")
    assert (directory / NAMES[0]).read_bytes() == (directory / NAMES[1]).read_bytes()
    other = NAMES[1 - NAMES.index(name)]
    (directory / other).unlink()
    expect_as_written(EpochsFile(directory))


def test_every_flipped_byte_shows(directory):
    """I11: no damaged byte goes unnoticed."""
    raw = (directory / NAMES[0]).read_bytes()
    (directory / NAMES[1]).unlink()
    saved = directory.parent / "saved"
    for at in range(0, len(raw), 3):
        shutil.rmtree(saved, ignore_errors=True)
        saved.mkdir()
        (saved / NAMES[0]).write_bytes(raw[:at] + bytes([raw[at] ^ 16]) + raw[at + 1 :])
        assert EpochsFile(saved).all_void


def test_the_newer_copy_counts(directory):
    """I13: after a crash between the two copies, the newer one is believed."""
    old = (directory / NAMES[1]).read_bytes()
    EpochsFile(directory).bump(A)
    (directory / NAMES[1]).write_bytes(old)
    assert EpochsFile(directory).epoch(A) == 3


def test_both_damaged_voids_everything_until_confirmed(directory):
    """I13: with no sound copy all blocks are void, crash or not, until confirmed."""
    for name in NAMES:
        (directory / name).write_bytes(b"noise")
    epochs = EpochsFile(directory)
    assert epochs.all_void
    assert not epochs.created
    assert len(epochs.notes) == 2
    assert (directory / "epochs.damaged").read_bytes() == b"noise"
    again = EpochsFile(directory)
    assert again.all_void, "a crash before the blocks were dropped must not bring them back"
    assert again.is_void(A, 0, 1 << 60)
    again.bump(A)
    assert EpochsFile(directory).all_void
    again.confirm_void()
    last = EpochsFile(directory)
    assert not last.all_void
    assert last.epoch(A) == 1


def test_both_gone_voids_what_is_found(directory):
    """I13: blocks found without an epochs file are void, after a crash before that is done too."""
    for name in NAMES:
        (directory / name).unlink()
    assert EpochsFile(directory).created
    again = EpochsFile(directory)
    assert not again.created
    assert again.all_void
    again.confirm_void()
    assert not EpochsFile(directory).all_void


def test_each_change_is_synced_before_it_returns(tmp_path, monkeypatch):
    """I13: both copies and the directory are synced, and only then replaced is believed."""
    epochs, calls = EpochsFile(tmp_path), []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    epochs.bump(A)
    assert calls == ["sync", "replace", "sync"] * 2


def test_failed_sync_is_an_error_and_no_change(directory, monkeypatch):
    """I12: a change whose sync failed did not happen, and the error says what to do."""
    epochs = EpochsFile(directory)

    def fail(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TierError, match="cannot be written"):
        epochs.bump(A)
    assert epochs.epoch(A) == 2


def test_missing_directory_is_an_error(tmp_path):
    """A directory that is not there is one sentence that names the file."""
    with pytest.raises(TierError, match="nowhere/epochs"):
        EpochsFile(tmp_path / "nowhere")


def test_links_are_not_followed(directory):
    """I19: a copy that is a symbolic link is refused, not followed."""
    target = directory / "target"
    (directory / NAMES[0]).rename(target)
    (directory / NAMES[0]).symlink_to(target)
    with pytest.raises(TierError, match="cannot be read"):
        EpochsFile(directory)


def test_kill_never_loses_an_acknowledged_bump(tmp_path):
    """I13: after kill -9, the last acknowledged epoch is there, or the one after it."""
    code = (
        "import sys\n"
        "from kvstore.tiers.epochs import EpochsFile\n"
        "epochs = EpochsFile(sys.argv[1])\n"
        "epochs.confirm_void()\n"
        "while True: print(epochs.bump(b'a' * 32), flush=True)\n"
    )
    last = 0
    for cycle in range(3):
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(5 + 7 * cycle):
                last = int(process.stdout.readline())
            process.kill()
            rest = process.stdout.read().split(b"\n")[:-1]
        last = int(rest[-1]) if rest else last
        epochs = EpochsFile(tmp_path)
        assert epochs.epoch(A) in (last, last + 1)
        assert not epochs.all_void
        last = epochs.epoch(A)
