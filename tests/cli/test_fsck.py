"""`kvstore fsck`: what it says of a directory, and when it fails. What it finds: tests/tiers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemons import SPEC

from kvstore.cli import fsck
from kvstore.cli.main import run
from kvstore.core.keys import block_key
from kvstore.core.space import Space
from kvstore.core.spec import root_digest
from kvstore.store.record import FileRecord, KnownSpace
from kvstore.tiers.base import BlockHeader
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.epochs import EpochsFile

BLOCKS, LENGTH = 4, 16 << 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound directory with four blocks."""
    made = tmp_path / "disk"
    made.mkdir(mode=0o700)
    EpochsFile(made).confirm_void()
    tier = DiskTier(made, 16 << 20)
    space = b"s" * 32
    root = root_digest(space, "", "")
    places, parent, blocks = tier.reserve(LENGTH, 16, BLOCKS), root[:16], []
    for i, place in enumerate(places):
        symbol = bytes([i]) * 16
        key = block_key(parent, symbol)
        checksum = tier.write(place, np.full(LENGTH, 7 + i, np.uint8))
        header = BlockHeader(space, root, key, parent, i, 0, 0, LENGTH, symbol)
        blocks.append((place, header, checksum))
        parent = key
    tier.commit(blocks)
    tier.close()
    return made


def flip(path: Path) -> None:
    """Changes a byte of the second block's payload."""
    (segment,) = (path / "segments").glob("*.seg")
    raw = segment.read_bytes()
    at = raw.index(bytes([8]) * LENGTH)
    with open(segment, "r+b") as file:
        file.seek(at + 100)
        file.write(b"\0")


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capfd.readouterr()
    code = run(["fsck", *arguments])
    out, err = capfd.readouterr()
    return code, out + err


def test_a_sound_directory(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is wrong: one line, exit 0, and an empty list for tools."""
    assert said(capfd, str(path)) == (0, "all is well\n")
    code, out = said(capfd, str(path), "--json")
    sound = {"findings": [], "damage_remains": False, "unchecked_blocks": {}}
    assert (code, json.loads(out)) == (0, sound)


def test_damage_is_named_and_mended(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """I11: without --repair damage is told and left (exit 1), with it it is gone (exit 0)."""
    flip(path)
    for _ in range(2):
        code, text = said(capfd, str(path))
        lines = text.splitlines()
        assert code == 1
        assert len(lines) == 2
        assert "repair: the block is dropped" in lines[0]
        assert lines[1] == "1 finding; --repair mends what can be mended"
    code, out = said(capfd, str(path), "--repair", "--json")
    document = json.loads(out)
    assert (code, document["damage_remains"]) == (0, False)
    (finding,) = document["findings"]
    assert (finding["kind"], finding["repaired"]) == ("payload", True)
    assert said(capfd, str(path)) == (0, "all is well\n")


def test_what_cannot_be_mended_is_exit_1(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A link is not followed and not removed: --repair says so, and fails."""
    (path / "segments" / "other").symlink_to("/etc/passwd")
    code, text = said(capfd, str(path), "--repair")
    assert code == 1
    assert "not repaired" in text
    assert "by hand" in text
    assert Path("/etc/passwd").exists()


def test_spaces_are_written_twice(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """I9, I13: a flipped bit in one of the two files that name the spaces costs no space; fsck says
    so, and writes both anew. With both damaged it says what that costs."""
    record = FileRecord(path, EpochsFile(path), lambda: 1)
    record.remember(Space(1, SPEC, "default", ""))
    assert said(capfd, str(path)) == (0, "all is well\n")
    for name in ("spaces.json", "spaces.copy.json"):
        for spoiled in (b"[{]", (path / name).read_bytes().replace(b'"m"', b'"n"'), None):
            if spoiled is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(spoiled)
            known = FileRecord(path, EpochsFile(path), lambda: 1).known
            assert KnownSpace(SPEC, "default") in known
            code, text = said(capfd, str(path))
            assert (code, "spaces" in text) == (1, True)
            code, text = said(capfd, str(path), "--repair")
            assert (code, "repaired: both written anew" in text) == (0, True)
            assert said(capfd, str(path)) == (0, "all is well\n")
    for name in ("spaces.json", "spaces.copy.json"):
        (path / name).write_bytes(b"{")
    assert "every block is dropped" in said(capfd, str(path))[1]


def test_only_tiers_are_looked_at(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A directory that is none, or not there, is one sentence, and nothing is made in it."""
    for wrong in (tmp_path, tmp_path / "none"):
        code, text = said(capfd, str(wrong))
        assert code == 2
        assert text == (f"kvstore: {wrong} is no disk tier's directory; pass tiers.disk.path\n")
    assert os.listdir(tmp_path) == []


class Terminal:
    """Standard error that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_long_work_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal how much is done is shown, into a pipe nothing."""
    terminal: Any = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with fsck.progress_bar() as progress:
        progress(1, 4)
    assert "checking" in terminal.text
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    terminal.text = ""
    with fsck.progress_bar() as progress:
        progress(1, 4)
    assert terminal.text == ""
