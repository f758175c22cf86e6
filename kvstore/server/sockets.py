"""Unix sockets of the daemon: private from the first moment, and never taken from a live one."""

from __future__ import annotations

import fcntl
import grp
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
GROUPS_MAX = 1024
_UCRED = struct.Struct("=iII")
_OWNER_ONLY = 0o177


def group_id(name: str) -> int | None:
    """Number of the group `name`; None for the empty name."""
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"server.socket_group is {name!r}, which is no group here; correct the name"
        ) from None


def prepare_directory(path: Path, group: int | None) -> None:
    """Makes the socket's directory, private or for `group`; one that exists stays as it is."""
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        mode = path.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"everybody may write to {path}, so anybody could replace the socket in it; "
                "chmod it or move server.socket"
            ) from None
        return
    except OSError as error:
        raise ConfigError(
            f"the directory {path} of server.socket cannot be made ({error.strerror}); "
            "make it or move server.socket"
        ) from error
    if group is not None:
        os.chown(path, -1, group)
        path.chmod(0o750)


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


class SocketLock:
    """Holds `<socket>.lock` for the life of the daemon, so that there is one per socket."""

    def __init__(self, socket_path: Path) -> None:
        self._path = Path(f"{socket_path}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise AlreadyRunning(
                f"a daemon with process id {holder or 'unknown'} serves {socket_path}; "
                "stop it or move server.socket"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets another daemon in. The file stays: unlinking it would race with the next holder."""
        os.close(self._descriptor)


def peer(connection: socket.socket) -> tuple[Identity, tuple[int, ...]]:
    """Who is at the other end, by the kernel's word, and its supplementary groups."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * GROUPS_MAX)
    except OSError:
        packed = b""
    groups = struct.unpack(f"={len(packed) // 4}I", packed)
    return Identity(uid=uid, gid=gid, pid=pid), groups
