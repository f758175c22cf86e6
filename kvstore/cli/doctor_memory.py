"""What `kvstore doctor` looks at in memory: locked pages, /dev/shm, the cgroup, huge pages."""

from __future__ import annotations

import resource
from pathlib import Path

from kvstore.cli.findings import FAIL, OK, WARN, Finding, read_lines
from kvstore.core.config import MIB, Config
from kvstore.core.config_host import never_fits
from kvstore.core.config_rules import index_block_bytes
from kvstore.core.machine import (
    NO_LIMIT,
    Machine,
    cgroup_available_bytes,
    cgroup_limit_bytes,
    existing_parent,
    file_system_type,
)
from kvstore.core.sizes import format_bytes

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
CAP_IPC_LOCK = 14  # linux/capability.h
# What a daemon takes beside pools, staging and index: the interpreter, and buffers of sessions.
FIXED_BYTES, SESSION_BYTES = 256 * MIB, MIB


def memlock(config: Config) -> Finding:
    """Whether the host tier's pages may be kept from being swapped out."""
    limit, host = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], config.tiers.host
    need = max(host.size, host.size_max or 0)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    if limit == resource.RLIM_INFINITY or limit >= need:
        return Finding("memlock limit", OK, shown)
    if not host.mlock or _may_lock_all():
        why = "CAP_IPC_LOCK overrides it" if host.mlock else "no pages are locked"
        return Finding("memlock limit", OK, f"{shown}; {why}")
    below = f"{shown}, below the host tier's {format_bytes(need)}: its pages may be swapped out"
    if limit >= host.size:
        below = f"{shown}, below tiers.host.size_max, {host.size_max}: it cannot grow that far"
    return Finding(
        "memlock limit",
        WARN,
        below,
        "raise it (LimitMEMLOCK=infinity in the unit, `--ulimit memlock=-1` for a container, "
        "`ulimit -l unlimited` in a shell) or set tiers.host.mlock = false",
    )


def _may_lock_all() -> bool:
    """Whether this process has CAP_IPC_LOCK; root in a container often has not."""
    for line in read_lines(Path("/proc/self/status")):
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def memory_file_system(config: Config, machine: Machine, is_default_size: bool) -> Finding:
    """Whether the host pools' file system is memory, and large enough for them."""
    host = config.tiers.host
    here = existing_parent(host.directory)
    total = machine.file_system_bytes(str(here))
    free = machine.file_system_free_bytes(str(here))
    found = f"{here}: {format_bytes(total)}, {format_bytes(free)} free"
    name = "memory file system"
    too_large, fix = never_fits(config, machine), "lower tiers.host.size_max"
    if host.pool == "sealed" and too_large:
        return Finding(name, WARN, too_large, fix)
    if host.pool == "sealed":
        return Finding(name, OK, f"{found}; not used by sealed pools")
    kind = file_system_type(here)
    if kind and kind not in MEMORY_FILE_SYSTEMS:
        return Finding(
            name, WARN, f"{found}; it is {kind}, so pools are written to a disk",
            "set tiers.host.directory to a folder on a tmpfs such as /dev/shm",
        )  # fmt: skip
    free += machine.pool_bytes(host.directory)
    if host.size > free:
        return Finding(
            name, FAIL, f"{found}; the host tier of {format_bytes(host.size)} does not fit",
            _larger(here, 2 * host.size) + ", or lower tiers.host.size",
        )  # fmt: skip
    if too_large:
        return Finding(name, WARN, f"{found}; {too_large}", fix)
    wanted = machine.available_bytes() // 4
    if is_default_size and wanted > 2 * host.size:
        return Finding(
            name, WARN,
            f"{found}; it holds the default host tier to {format_bytes(host.size)}, where memory "
            f"would allow {format_bytes(wanted)}",
            _larger(here, 2 * wanted) + ", or set tiers.host.size",
        )  # fmt: skip
    return Finding(name, OK, f"{found}; {kind or 'type unknown'}")


def _larger(here: Path, size: int) -> str:
    while not here.is_mount():
        here = here.parent
    size_mib = -(-size // MIB)
    return (
        f"make it larger (`mount -o remount,size={size_mib}m {here}`, `--shm-size={size_mib}m` "
        "for a container, a larger sizeLimit of the pod's memory volume)"
    )


def cgroup(config: Config | None, machine: Machine) -> Finding:
    """Whether pools, staging, index and sessions fit what the cgroup allows."""
    limit, free = cgroup_limit_bytes(), cgroup_available_bytes()
    if limit >= NO_LIMIT:
        return Finding(
            "cgroup memory", OK, f"no limit; {format_bytes(machine.available_bytes())} available"
        )
    found = f"limit {format_bytes(limit)}, {format_bytes(free)} of it free; pools count toward it"
    if config is None:
        return Finding("cgroup memory", OK, found)
    need = daemon_bytes(config)
    if config.tiers.host.pool == "shm":
        need -= machine.pool_bytes(config.tiers.host.directory)
    if need <= free:
        return Finding("cgroup memory", OK, found)
    return Finding(
        "cgroup memory", FAIL if need > limit else WARN,
        f"{found}; the daemon may take {format_bytes(need)} more and would be killed",
        f"raise the limit (MemoryMax= of the unit, `--memory` of a container, "
        f"resources.limits.memory of a pod) by {format_bytes(need - free)} or lower "
        "tiers.host.size",
    )  # fmt: skip


def daemon_bytes(config: Config) -> int:
    """Memory that the daemon takes at most: pools, staging, index, sessions and itself."""
    limits = config.limits
    index = config.index.max_blocks * index_block_bytes(bool(config.tiers.disk.path))
    parts = (config.tiers.host.size, limits.staging_bytes, index, FIXED_BYTES)
    return sum(map(int, parts)) + limits.sessions * SESSION_BYTES


def hugepages(config: Config, memory: dict[str, int]) -> Finding:
    """Free huge pages and tmpfs's transparent ones, against what the host tier asks for."""
    lines = read_lines(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
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
