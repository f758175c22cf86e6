"""`JournalFile`: lines in order, whole or not at all, and a daemon that goes on without it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from kvstore.core.errors import ConfigError
from kvstore.daemon import journal as module
from kvstore.daemon.journal import JournalFile


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def test_lines_are_written_in_their_order(tmp_path: Path) -> None:
    """What was taken is in the file once it is closed, each line whole; the file is private."""
    path = tmp_path / "j"
    file = JournalFile(path, 1 << 20)
    for n in range(2000):
        file.journal.note("index", "split", n)
    file.close()
    assert lines_of(path) == [b'["index","split",%d]' % n for n in range(2000)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_refused(tmp_path: Path) -> None:
    """Neither a file nor a link is followed or replaced; the error names the fix."""
    path, link = tmp_path / "j", tmp_path / "l"
    path.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for name in (path, link, tmp_path / "no" / "j"):
        with pytest.raises(ConfigError, match=r"cannot be made .* name a new file"):
            JournalFile(name, 1 << 20)
    assert path.read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


def test_it_ends_at_its_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line that does not fit ends it, and none after it is taken, however short."""
    file = JournalFile(tmp_path / "j", 40)
    for words in (("a", 1), ("b", "x" * 100), ("c", 2)):
        file.journal.note(*words)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            file.check()
    file.close()
    assert lines_of(tmp_path / "j") == [b'["a",1]']
    assert [record.getMessage() for record in caplog.records] == [
        f"the journal {tmp_path / 'j'} ends here: it has limits.journal_bytes, 40 B"
    ]


def test_a_disk_that_fails_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No space left: the log says so, and nobody who notes something is held up or hurt."""
    failed = threading.Event()

    def full(fd: int, data: object) -> int:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    file = JournalFile(tmp_path / "j", 1 << 20)
    monkeypatch.setattr(module.os, "write", full)
    file.journal.note("a", 1)
    assert failed.wait(10)
    file._thread.join(10)
    file.journal.note("b", 2)
    assert file.journal.ended
    with caplog.at_level(logging.WARNING):
        file.close()
    assert "it cannot be written (No space left on device)" in caplog.text


def test_a_disk_that_hangs_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I16: what waits for the disk is bounded; past that only the journal ends."""
    stuck, inside = threading.Event(), threading.Event()
    write = os.write

    def slow(fd: int, data: bytes) -> int:
        inside.set()
        stuck.wait(20)
        return write(fd, data)

    monkeypatch.setattr(module.os, "write", slow)
    monkeypatch.setattr(module, "QUEUE_BYTES", 100)
    file = JournalFile(tmp_path / "j", 1 << 20)
    file.journal.note("first", 1)
    assert inside.wait(10)
    for n in range(50):
        file.journal.note("more", n)
    assert file.journal.ended
    stuck.set()
    with caplog.at_level(logging.WARNING):
        file.close()
    assert "wait for the disk" in caplog.text
    assert 1 < len(lines_of(tmp_path / "j")) < 20


def test_what_cannot_be_said_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A value that has no form in a journal is no reason for a daemon to fail."""
    file = JournalFile(tmp_path / "j", 1 << 20)
    file.journal.note("index", "split", {1, 2})
    with caplog.at_level(logging.WARNING):
        file.close()
    assert "the journal has no form for a set" in caplog.text
