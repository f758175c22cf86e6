"""`kvstore doctor`: looks at this machine for what would stop or slow the daemon."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

from kvstore.cli.output import (
    config_option,
    finish,
    json_option,
    load_config,
    print_json,
    print_table,
)
from kvstore.core.config import Config
from kvstore.core.errors import ConfigError
from kvstore.core.machine import (
    NO_LIMIT,
    LocalMachine,
    cgroup_limit_bytes,
    existing_parent,
    file_system_type,
    meminfo,
)
from kvstore.core.sizes import format_bytes

OK, WARN, FAIL = "ok", "warn", "fail"
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


class Finding(NamedTuple):
    """One look: what was found and, unless ok, what to do."""

    check: str
    status: str
    found: str
    fix: str = ""


@click.command()
@config_option
@click.option(
    "--directory",
    metavar="DIR",
    help="Where to try direct I/O, as a disk tier would need it; else tiers.disk.path, or here.",
)
@json_option
def command(config_path: Path | None, directory: str | None, as_json: bool) -> None:
    """Look at this machine: limits, memory, file systems, versions.

    Every finding is ok, warn or fail and says the fix. Exit 1 if any is fail.
    """
    findings = examine(config_path, directory)
    if as_json:
        counts = {status: sum(f.status == status for f in findings) for status in (OK, WARN, FAIL)}
        print_json({**counts, "findings": [finding._asdict() for finding in findings]})
    else:
        print_table(("status", "check", "found", "fix"), [(f[1], f[0], *f[2:]) for f in findings])
    finish(all(finding.status != FAIL for finding in findings))


def examine(config_path: Path | None, directory: str | None = None) -> list[Finding]:
    config, verdict = _configuration(config_path)
    findings = [verdict]
    if config is not None:
        findings += [_memlock(config), _memory_file_system(config), hugepages(config, meminfo())]
        findings += disk(config)
        directory = directory or config.tiers.disk.path
    checks: tuple[Callable[[], Finding], ...] = (_cgroup, _user, _open_files, _kernel)
    findings += [check() for check in checks]
    return [*findings, direct_io(directory or "."), *_versions()]


def _configuration(path: Path | None) -> tuple[Config | None, Finding]:
    try:
        config = load_config(path)
    except ConfigError as error:
        return None, Finding("configuration", FAIL, str(error), "as the sentence says")
    size = format_bytes(config.tiers.host.size)
    return config, Finding("configuration", OK, f"valid; host tier {size}")


def _memlock(config: Config) -> Finding:
    limit, need = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], config.tiers.host.size
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    enough = limit == resource.RLIM_INFINITY or limit >= need or os.geteuid() == 0
    if enough or not config.tiers.host.mlock:
        return Finding("memlock limit", OK, shown)
    return Finding(
        "memlock limit",
        WARN,
        f"{shown}, below the host tier's {format_bytes(need)}: its pages may be swapped out",
        "raise it (LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited`) or set "
        "tiers.host.mlock = false",
    )


def _memory_file_system(config: Config) -> Finding:
    host = config.tiers.host
    here = existing_parent(host.directory)
    status = os.statvfs(here)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{here}: {format_bytes(total)}, {format_bytes(free)} free"
    if host.pool == "sealed":
        return Finding("memory file system", OK, f"{found}; not used by sealed pools")
    kind = file_system_type(here)
    if kind and kind not in MEMORY_FILE_SYSTEMS:
        return Finding(
            "memory file system", WARN, f"{found}; it is {kind}, so pools are written to a disk",
            "set tiers.host.directory to a folder on a tmpfs such as /dev/shm",
        )  # fmt: skip
    return Finding("memory file system", OK, f"{found}; {kind or 'type unknown'}")


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _cgroup() -> Finding:
    limit, total = cgroup_limit_bytes(), meminfo().get("MemTotal", 0)
    available = format_bytes(LocalMachine().available_bytes())
    if limit >= NO_LIMIT or limit >= total > 0:
        return Finding("cgroup memory", OK, f"no limit below the machine's; {available} available")
    return Finding(
        "cgroup memory", OK,
        f"limit {format_bytes(limit)}, {available} available; pools count toward it",
    )  # fmt: skip


def _user() -> Finding:
    if os.geteuid() == 0:
        return Finding(
            "user", WARN, "root: the daemon needs no such rights",
            "run it as a user of its own",
        )  # fmt: skip
    return Finding("user", OK, f"uid {os.geteuid()}")


def hugepages(config: Config, memory: dict[str, int]) -> Finding:
    """Free huge pages and tmpfs's transparent ones, against what the host tier asks for."""
    lines = _read_lines(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    shmem = lines[0].partition("[")[2].partition("]")[0] if lines else "unknown"
    pages, page_bytes = memory.get("HugePages_Free", 0), memory.get("Hugepagesize", 0)
    found = f"{pages} free of {format_bytes(page_bytes)}; transparent in tmpfs: {shmem}"
    host = config.tiers.host
    if host.hugepages == "hugetlb" and pages * page_bytes < host.size:
        need = -(-host.size // page_bytes) if page_bytes else 0
        return Finding(
            "hugepages", FAIL, f"{found}; tiers.host.hugepages = 'hugetlb' needs {need}",
            f"run `sysctl vm.nr_hugepages={need}` or set tiers.host.hugepages = 'advise'",
        )  # fmt: skip
    if host.hugepages == "advise" and shmem in ("never", "deny"):
        return Finding(
            "hugepages", WARN, f"{found}; 'advise' has no effect",
            "run `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`",
        )  # fmt: skip
    return Finding("hugepages", OK, found)


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 1024:
        return Finding("open files", WARN, str(limit), "raise it to 4096 (`ulimit -n 4096`)")
    return Finding("open files", OK, str(limit))


def _kernel() -> Finding:
    boot = _read_lines(Path("/proc/sys/kernel/random/boot_id"))
    found = f"{platform.system()} {platform.release()}, boot {boot[0] if boot else 'unknown'}"
    if sys.platform != "linux":
        return Finding("kernel", FAIL, found, "run on Linux: sealed memory and SO_PEERCRED need it")
    return Finding("kernel", OK, found)


def disk(config: Config) -> list[Finding]:
    """What a disk tier needs of its directory and file system; nothing where there is none."""
    if not config.tiers.disk.path:
        return []
    path = Path(config.tiers.disk.path)
    return [_disk_directory(path), _disk_file_system(path), _disk_room(config)]


def _disk_directory(path: Path) -> Finding:
    if not path.exists():
        if os.access(path.parent, os.W_OK | os.X_OK):
            return Finding("disk directory", OK, f"{path} is not there yet and can be made")
        return Finding(
            "disk directory", FAIL, f"{path} is not there, and uid {os.geteuid()} cannot make it",
            f"run `install -d -m 700 -o UID {path}` with the daemon's user",
        )  # fmt: skip
    status = path.stat()
    if status.st_uid != os.geteuid():
        return Finding(
            "disk directory", FAIL, f"{path} belongs to uid {status.st_uid}, not {os.geteuid()}",
            "run this, and the daemon, as its owner, or choose another tiers.disk.path",
        )  # fmt: skip
    if status.st_mode & 0o077:
        return Finding(
            "disk directory", FAIL, f"{path} has mode {status.st_mode & 0o777:03o}: others get in",
            f"run `chmod 700 {path}`",
        )  # fmt: skip
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding(
            "disk directory", FAIL, f"{path} cannot be written", f"run `chmod 700 {path}` or "
            "mount its file system writable",
        )  # fmt: skip
    return Finding("disk directory", OK, f"{path}, private and writable")


def _disk_file_system(path: Path) -> Finding:
    kind = file_system_type(existing_parent(str(path)))
    if kind in MEMORY_FILE_SYSTEMS:
        return Finding(
            "disk file system", WARN, f"{path} is on {kind}: memory, gone with a reboot",
            "set tiers.disk.path to a directory on a local disk",
        )  # fmt: skip
    if kind == "overlay":
        return Finding(
            "disk file system", WARN, f"{path} is in a container's own layer, gone with it",
            "mount a volume and set tiers.disk.path to a directory on it",
        )  # fmt: skip
    return Finding("disk file system", OK, f"{path}: {kind or 'type unknown'}")


def _disk_room(config: Config) -> Finding:
    path, reserve = config.tiers.disk.path, int(config.tiers.disk.reserve)
    machine = LocalMachine()
    free, present = machine.file_system_free_bytes(path), machine.directory_bytes(path)
    found = (
        f"{format_bytes(config.disk_bytes)}, {format_bytes(present)} of it taken; "
        f"{format_bytes(free)} free, {format_bytes(reserve)} of that stay free"
    )
    if free < reserve:
        return Finding(
            "disk room", WARN, f"{found}: the tier grows no more",
            "free some space or lower tiers.disk.reserve",
        )  # fmt: skip
    return Finding("disk room", OK, found)


def direct_io(directory: str) -> Finding:
    """Whether a file in `directory` can be written and read past the page cache."""
    here = existing_parent(directory)
    flags = os.O_RDWR | os.O_TMPFILE | os.O_DIRECT
    try:
        descriptor = os.open(here, flags, 0o600)
        try:
            with mmap.mmap(-1, 4096) as page:
                os.pwritev(descriptor, [page], 0)
                os.preadv(descriptor, [page], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Finding(
            "direct I/O", WARN, f"{here}: {error.strerror}",
            "put a disk tier on ext4 or xfs; the host tier does not need it",
        )  # fmt: skip
    return Finding("direct I/O", OK, f"{here}: works")


def _versions() -> Iterator[Finding]:
    version = platform.python_version()
    if not PYTHON_MIN <= sys.version_info[:2] <= PYTHON_MAX:
        yield Finding("python", WARN, version, "use Python 3.11 to 3.13, which are tested")
    else:
        yield Finding("python", OK, version)
    for name in ("grpcio", "protobuf", "numpy"):
        try:
            yield Finding(name, OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, FAIL, "not installed", "run `pip install kvstore-daemon`")
