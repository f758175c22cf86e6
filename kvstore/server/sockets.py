"""Unix sockets of the daemon: private from the first moment, and never taken from a live one."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvstore.core.errors import AlreadyRunning, ConfigError
from kvstore.store.sessions import Identity

SO_PEERGROUPS = 59
GROUPS_MAX = 256  # Python reads no more than 1 KiB of a socket option
_UCRED = struct.Struct("=iII")
_OWNER_ONLY = 0o177


@contextmanager
def private_umask() -> Iterator[None]:
    """Files made meanwhile are the owner's alone; single-threaded start-up only."""
    before = os.umask(_OWNER_ONLY)
    try:
        yield
    finally:
        os.umask(before)


def share_with(path: Path, group: int | None) -> None:
    """Lets `group` connect to the socket at `path`."""
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(0o660)


def bind(path: Path, group: int | None, backlog: int = 128) -> socket.socket:
    """A listening socket at `path`, mode 0600 (0660 for `group`); the caller holds its lock."""
    remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with private_umask():
            listener.bind(str(path))
        share_with(path, group)
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_stale(path: Path) -> None:
    """Deletes the socket that a dead daemon left; raises AlreadyRunning if somebody answers."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} is there and is no socket; move it or server.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise AlreadyRunning(f"another process serves {path}; stop it or move server.socket")


def peer(connection: socket.socket) -> tuple[Identity, tuple[int, ...]]:
    """Who is at the other end, by the kernel's word, and its supplementary groups.

    None of them where they are more than GROUPS_MAX.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * GROUPS_MAX)
    except OSError:
        packed = b""
    groups = struct.unpack(f"={len(packed) // 4}I", packed)
    return Identity(uid=uid, gid=gid, pid=pid), groups
