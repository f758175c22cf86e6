"""`Machine`: how much memory there is, as configuration and `doctor` need to know it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple, Protocol

POOL_GLOB = "pool-*.data"
NO_LIMIT = 1 << 62
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Machine(Protocol):
    """What configuration asks the machine; tests pass a made-up one."""

    def available_bytes(self) -> int:
        """Memory that processes could still take, the cgroup's limit counted."""
        ...

    def total_bytes(self) -> int:
        """Memory there is, used or not, or what the cgroup allows of it."""
        ...

    def file_system_free_bytes(self, directory: str) -> int:
        """Free bytes of the file system that `directory` is on or would be made on."""
        ...

    def file_system_bytes(self, directory: str) -> int:
        """All bytes of that file system, used or free."""
        ...

    def pool_bytes(self, directory: str) -> int:
        """Memory of the pools that an earlier daemon left in `directory`; 0 without any."""
        ...

    def directory_bytes(self, directory: str) -> int:
        """Bytes on the medium of the files below `directory`; 0 if it is not there."""
        ...

    def file_system_kind(self, directory: str) -> str:
        """Type of the file system that `directory` is on or would be made on; empty: unknown."""
        ...

    def uid(self) -> int: ...


class FixedMachine(NamedTuple):
    """A made-up machine, for tests and for sizing another host."""

    memory: int = 64 << 30
    free: int = 32 << 30
    pools: int = 0
    user: int = 0
    on_disk: int = 0
    kind: str = "ext4"
    others: int = 0

    def available_bytes(self) -> int:
        return self.memory

    def total_bytes(self) -> int:
        return self.memory

    def file_system_free_bytes(self, directory: str) -> int:
        return self.free

    def file_system_bytes(self, directory: str) -> int:
        return self.free + self.on_disk + self.others

    def pool_bytes(self, directory: str) -> int:
        return self.pools

    def directory_bytes(self, directory: str) -> int:
        return self.on_disk

    def file_system_kind(self, directory: str) -> str:
        return self.kind

    def uid(self) -> int:
        return self.user


class LocalMachine:
    """This machine, read from /proc, the cgroup files and the file system."""

    def available_bytes(self) -> int:
        return min(meminfo().get("MemAvailable", NO_LIMIT), cgroup_available_bytes())

    def total_bytes(self) -> int:
        return min(meminfo().get("MemTotal", NO_LIMIT), cgroup_limit_bytes())

    def file_system_free_bytes(self, directory: str) -> int:
        status = os.statvfs(existing_parent(directory))
        return status.f_bavail * status.f_frsize

    def file_system_bytes(self, directory: str) -> int:
        status = os.statvfs(existing_parent(directory))
        return status.f_blocks * status.f_frsize

    def pool_bytes(self, directory: str) -> int:
        try:
            return sum(medium_bytes(str(path)) for path in Path(directory).glob(POOL_GLOB))
        except OSError:
            return 0

    def directory_bytes(self, directory: str) -> int:
        return sum(
            medium_bytes(os.path.join(here, name))
            for here, _, names in os.walk(directory)
            for name in names
        )

    def file_system_kind(self, directory: str) -> str:
        return file_system_type(existing_parent(directory))

    def uid(self) -> int:
        return os.getuid()


def medium_bytes(path: str) -> int:
    """What a file takes on its medium; 0 if it is gone meanwhile."""
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0


def file_system_type(path: Path) -> str:
    """Type of the file system that `path` is on, from the mount table; empty if not known."""
    path, best, kind = path.resolve(), "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, mount_point, mount_type, *_ = line.split(" ")
        mount_point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), mount_point)
        if path.is_relative_to(mount_point) and len(mount_point) >= len(best):
            best, kind = mount_point, mount_type
    return kind


def existing_parent(path: str) -> Path:
    """`path` itself if it exists, else its nearest ancestor that does.

    What is in a directory that this user may not enter counts as not there.
    """
    here = Path(path).absolute()
    while not os.path.exists(here):  # Path.exists raises where it may not look
        here = here.parent
    return here


def may_be_there(path: str) -> bool:
    """Whether something is at `path`, or may be: in a directory that this user may not enter."""
    try:
        return Path(path).exists()
    except PermissionError:
        return True


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes (counts without a unit as they are); empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    values = {}
    for line in lines:
        name, _, rest = line.partition(":")
        number, *unit = rest.split()
        values[name] = int(number) * (1024 if unit else 1)
    return values


def cgroup_limit_bytes() -> int:
    """The memory limit of this process's cgroup, v2 or v1; NO_LIMIT without one."""
    return min((limit for limit, _ in _cgroup_readings()), default=NO_LIMIT)


def cgroup_available_bytes() -> int:
    """What the tightest cgroup above this process still allows; NO_LIMIT without a limit."""
    return min((limit - used for limit, used in _cgroup_readings()), default=NO_LIMIT)


def _cgroup_readings() -> list[tuple[int, int]]:
    """(limit, used) of every cgroup above this process that has a limit."""
    readings = []
    for directory, limit_name, usage_name in _cgroup_directories():
        limit = _read_number(directory / limit_name)
        if limit is not None and limit < NO_LIMIT // 2:
            readings.append((limit, _read_number(directory / usage_name) or 0))
    return readings


def _cgroup_directories() -> list[tuple[Path, str, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        here = root / name.lstrip("/")
        for directory in (here, *here.parents):
            if directory == root or root in directory.parents:
                found.append((directory, *files))
    return found


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
