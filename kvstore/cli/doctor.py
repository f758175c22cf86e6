"""`kvstore doctor`: looks at this machine for what would stop or slow the daemon."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kvstore.cli.doctor_disk import direct_io, disk
from kvstore.cli.doctor_gpu import gpu
from kvstore.cli.doctor_keys import keys
from kvstore.cli.doctor_memory import cgroup, hugepages, memlock, memory_file_system
from kvstore.cli.findings import FAIL, OK, WARN, Finding, read_lines
from kvstore.cli.output import (
    config_option,
    finish,
    json_option,
    load_config,
    print_json,
    print_table,
)
from kvstore.core.clock import SystemClock
from kvstore.core.config import Config, fill_in, read
from kvstore.core.errors import ConfigError, KVStoreError, StoreUnavailable
from kvstore.core.machine import LocalMachine, meminfo
from kvstore.core.sizes import format_bytes

PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
# A file this much newer than the clock says was written before the clock was set back.
FUTURE_SECONDS = 2.0
TIME_ERROR = 5  # what adjtimex answers while nothing keeps the clock right; linux/timex.h
TIMEX_BYTES = 512  # more than struct timex has anywhere


@click.command()
@config_option
@click.option(
    "--directory",
    metavar="DIR",
    help="Where to try direct I/O, as a disk tier would need it; else tiers.disk.path, or here.",
)
@json_option
def command(config_path: Path | None, directory: str | None, as_json: bool) -> None:
    """Look at this machine: limits, memory, file systems, clock, disk, versions.

    Every finding is ok, warn or fail and says the fix. Exit 1 if any is fail. A disk tier is
    tried with a nameless file of 64 MiB.
    """
    findings = examine(config_path, directory)
    if as_json:
        counts = {status: sum(f.status == status for f in findings) for status in (OK, WARN, FAIL)}
        print_json({**counts, "findings": [finding._asdict() for finding in findings]})
    else:
        print_table(("status", "check", "found", "fix"), [(f[1], f[0], *f[2:]) for f in findings])
    finish(all(finding.status != FAIL for finding in findings))


def examine(config_path: Path | None, directory: str | None = None) -> list[Finding]:
    """Every look at this machine, in the order they are printed."""
    machine = LocalMachine()
    verdict = _configuration(config_path)
    asked, config = _as_asked(config_path, machine)
    findings = [verdict]
    if config is not None and asked is not None:
        default_size = not asked.tiers.host.size
        findings += [memlock(config), memory_file_system(config, machine, default_size)]
        findings += [hugepages(config, meminfo()), *directories(config), *disk(config)]
        findings += [*keys(config), *gpu(config), clock(config), access(config), daemon(config)]
        directory = directory or config.tiers.disk.path
    findings += [cgroup(config, machine), _user(), _open_files(), _kernel()]
    return [*findings, direct_io(directory), *_versions()]


def _configuration(path: Path | None) -> Finding:
    try:
        config = load_config(path)
    except ConfigError as error:
        return Finding("configuration", FAIL, str(error), "as the sentence says")
    size = format_bytes(config.tiers.host.size)
    return Finding("configuration", OK, f"valid; host tier {size}")


def _as_asked(
    path: Path | None, machine: LocalMachine
) -> tuple[Config, Config] | tuple[None, None]:
    """The configuration as written and with its defaults, even one that does not fit here.

    The daemon refuses it at its first fault; all of them are to be found.
    """
    try:
        asked = read(path, os.environ)
        return asked, fill_in(asked, os.environ, machine)
    except ConfigError:
        return None, None


def directories(config: Config) -> list[Finding]:
    """Whether the directories of the socket and of the host pools are this user's."""
    places = {"server.socket": Path(config.server.socket).parent}
    if config.tiers.host.pool == "shm":
        places["tiers.host.directory"] = Path(config.tiers.host.directory)
    findings = []
    for key, path in places.items():
        name = "socket directory" if key == "server.socket" else "pool directory"
        if not os.path.exists(path):  # Path.exists raises where it may not look
            findings.append(Finding(name, OK, f"{path} is not there yet"))
        elif path.stat().st_uid != os.geteuid():
            owner = path.stat().st_uid
            findings.append(Finding(
                name, FAIL, f"{path} belongs to uid {owner}, not {os.geteuid()}",
                f"run this, and the daemon, as uid {owner}, or set {key} to another place",
            ))  # fmt: skip
        else:
            findings.append(Finding(name, OK, f"{path} belongs to uid {os.geteuid()}"))
    return findings


def access(config: Config) -> Finding:
    """Whether anybody may use the daemon, and anybody run it."""
    roles = {rule.role for rule in config.access}
    found = f"{len(config.access)} rules"
    if "admin" not in roles:
        return Finding(
            "access", WARN, f"{found}, none with the role admin: status, policy and drain are "
            "refused to everybody", 'add an [[access]] rule with role = "admin"',
        )  # fmt: skip
    return Finding("access", OK, f"{found}, roles {', '.join(sorted(roles))}")


def daemon(config: Config) -> Finding:
    """How the daemon of this configuration is, where one runs: its state, and clock jumps."""
    place = Path(config.server.socket).parent
    if os.path.isdir(place) and not os.access(place, os.X_OK):
        return Finding(
            "daemon", WARN, f"uid {os.geteuid()} may not enter {place}",
            "run this as the daemon's user, or as one of the group server.socket_group",
        )  # fmt: skip
    if not os.path.exists(config.server.socket):
        return Finding("daemon", OK, f"none at {config.server.socket}")
    from kvstore.client import KVClient

    try:
        with KVClient.connect(f"unix://{config.server.socket}", staging_bytes=1) as client:
            status = client.status()
    except StoreUnavailable:
        return Finding("daemon", OK, f"none answers at {config.server.socket}")
    except KVStoreError as error:
        return Finding("daemon", WARN, str(error), "run this as an admin, or look into its log")
    found = f"{status.state}, for {status.uptime_seconds:.0f} s"
    if status.state == "degraded":
        return Finding(
            "daemon", FAIL, f"{found}: {status.reason}", "see the log, then `kvstore verify`"
        )
    jumps = int(status.counters["kvstore_clock_jumps_total"])
    if jumps:
        return Finding(
            "daemon", WARN, f"{found}; the clock jumped {jumps} times since its start",
            "run chrony or systemd-timesyncd; in a virtual machine, on its host",
        )  # fmt: skip
    return Finding("daemon", OK, found)


def clock(config: Config) -> Finding:
    """Whether the clock was set back since the daemon last wrote, and whether anything keeps it.

    Numbers of leases begin at the wall clock of a daemon's start. One that starts before its
    predecessor did could give a number twice.
    """
    now = SystemClock().wall()
    newest, path = max(_written(config), default=(0.0, Path()))
    if newest > now + FUTURE_SECONDS:
        return Finding(
            "clock", WARN, f"{path} was written {newest - now:.0f} s from now: the clock was set "
            "back since", "set the clock right (chrony or systemd-timesyncd) before the daemon "
            "starts",
        )  # fmt: skip
    if _is_unkept():
        return Finding(
            "clock", WARN, "nothing keeps the clock right, so it may jump",
            "run chrony or systemd-timesyncd; in a virtual machine, on its host",
        )  # fmt: skip
    return Finding("clock", OK, "not behind what was written before")


def _written(config: Config) -> Iterator[tuple[float, Path]]:
    """When the daemon's files were last written; of the large ones only the names count."""
    for directory in filter(None, (config.tiers.disk.path, config.tiers.host.directory)):
        try:
            for entry in os.scandir(directory):
                yield entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)
        except OSError:
            continue


def _is_unkept() -> bool:
    """Whether the kernel says that its clock is not synchronised; False where it does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex"):
        return False
    return bool(libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES)) == TIME_ERROR)


def _user() -> Finding:
    if os.geteuid() == 0:
        return Finding(
            "user", WARN, "root: the daemon needs no such rights",
            "run it as a user of its own",
        )  # fmt: skip
    return Finding("user", OK, f"uid {os.geteuid()}")


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 1024:
        return Finding("open files", WARN, str(limit), "raise it to 4096 (`ulimit -n 4096`)")
    return Finding("open files", OK, str(limit))


def _kernel() -> Finding:
    boot = read_lines(Path("/proc/sys/kernel/random/boot_id"))
    found = f"{platform.system()} {platform.release()}, boot {boot[0] if boot else 'unknown'}"
    if sys.platform != "linux":
        return Finding("kernel", FAIL, found, "run on Linux: sealed memory and SO_PEERCRED need it")
    return Finding("kernel", OK, found)


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
