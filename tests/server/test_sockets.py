"""Unix sockets: private from the first moment, never taken from a daemon that lives."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from kvstore.core.errors import AlreadyRunning, ConfigError
from kvstore.server import sockets


def test_mode_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """The socket is 0600 from its first moment, and the umask is restored."""
    before = os.umask(0)
    try:
        listener = sockets.bind(tmp_path / "s", None)
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    listener.close()


def test_a_group_may_be_let_in(tmp_path: Path) -> None:
    """With a group the socket is 0660 and belongs to it."""
    listener = sockets.bind(tmp_path / "s", os.getgid())
    status = (tmp_path / "s").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())
    listener.close()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    """What a killed daemon left behind does not keep the next one out."""
    sockets.bind(tmp_path / "s", None).close()
    listener = sockets.bind(tmp_path / "s", None)
    listener.close()


def test_a_live_socket_is_never_taken(tmp_path: Path) -> None:
    """I20: a second daemon on the socket is refused, and the first one keeps it."""
    listener = sockets.bind(tmp_path / "s", None)
    with pytest.raises(AlreadyRunning, match="another process serves"):
        sockets.bind(tmp_path / "s", None)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))
    listener.close()


def test_another_kind_of_file_is_left_alone(tmp_path: Path) -> None:
    """A file that is no socket is somebody's: it is not deleted."""
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="no socket"):
        sockets.bind(tmp_path / "s", None)
    assert (tmp_path / "s").read_text() == "mine"


def test_peer_is_the_kernels_word() -> None:
    """Identity comes from the kernel: user, group, process, supplementary groups."""
    left, right = socket.socketpair()
    identity, groups = sockets.peer(left)
    assert (identity.uid, identity.gid, identity.pid) == (os.getuid(), os.getgid(), os.getpid())
    assert set(groups) == set(os.getgroups())
    left.close()
    right.close()
