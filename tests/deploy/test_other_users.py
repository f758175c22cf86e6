"""Users of the host that may not enter the daemon's directories: told so in a sentence each."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.doctor import examine
from kvstore.cli.main import run
from kvstore.core.config import find_socket

NOBODY = 65534


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A directory as the unit makes for its user, seen by somebody outside of its group."""
    path = tmp_path / "kvstore"
    path.mkdir(mode=0o700 if os.geteuid() == 0 else 0)
    (tmp_path / "kvstore.toml").write_text(
        f'[server]\nsocket = "{path}/kvstore.sock"\n'
        f'[tiers.host]\nsize = "16MiB"\ndirectory = "{path}/pool"\n'
        f'[tiers.disk]\npath = "{path}/disk"\nsize = "256MiB"\n'
    )
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    # Python may be where only root can read it: what is imported late is imported now.
    codecs.lookup("ascii")
    examine(tmp_path / "kvstore.toml")
    run(["status", "--socket", f"{path}/none.sock"])
    user = os.geteuid()
    if user == 0:
        os.setresuid(NOBODY, NOBODY, 0)
    yield path
    os.setresuid(user, user, user)


def test_a_socket_that_may_not_be_seen_is_tried(closed: Path) -> None:
    """Where a client may not look it does not fall back to another place, nor fail in looking."""
    socket = f"{closed}/kvstore.sock"
    assert find_socket({"XDG_RUNTIME_DIR": str(closed.parent)}) == socket
    assert find_socket({"KVSTORE_SOCKET": socket}) == socket


def test_a_command_of_somebody_else_says_what_to_do(
    closed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvstore status` of a user outside of the group is one sentence, and no traceback."""
    monkeypatch.setenv("KVSTORE_SOCKET", f"{closed}/kvstore.sock")
    assert run(["status"]) == 3
    said = capsys.readouterr().err
    assert f"uid {os.geteuid()} may not connect to {closed}/kvstore.sock" in said
    assert "server.socket_group" in said


def test_doctor_of_somebody_else_finds_what_it_may_not_enter(closed: Path) -> None:
    """doctor goes on where it may not look, with a sentence for each."""
    found = {it.check: it for it in examine(closed.parent / "kvstore.toml")}
    assert "may not look" in found["configuration"].found
    assert found["disk directory"].status == "fail"
    assert f"may not enter {closed}" in found["daemon"].found


def test_direct_io_is_not_tried_in_a_place_nobody_named(
    closed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a disk tier, a working directory that takes no file is no reason to warn."""
    monkeypatch.chdir(tmp_path)
    (it,) = [it for it in examine(None) if it.check == "direct I/O"]
    assert (it.status, it.found[:9]) == ("ok", "not tried")
    (it,) = [it for it in examine(None, str(tmp_path)) if it.check == "direct I/O"]
    assert it.status == "warn"
