"""What `kvstore doctor` looks at where the disk tier has keys: their file, its place, the means."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from kvstore.cli.findings import FAIL, OK, WARN, Finding, read_lines
from kvstore.core.config import Config
from kvstore.core.errors import ConfigError
from kvstore.core.key_file import read_key_file
from kvstore.core.machine import existing_parent

CPUINFO = Path("/proc/cpuinfo")
BLOCK_DEVICES = Path("/sys/dev/block")
PACKAGE = "cryptography"


def keys(config: Config) -> list[Finding]:
    """What encryption needs; nothing where the disk tier has no file of keys."""
    disk = config.tiers.disk
    if not disk.path or not disk.key_file:
        return []
    path = Path(disk.key_file)
    return [_key_file(path), key_place(path, Path(disk.path)), _package(), aes(CPUINFO)]


def _key_file(path: Path) -> Finding:
    """Whether the daemon would take it; as the user that runs this."""
    try:
        found = read_key_file(path)
    except ConfigError as error:
        what, _, fix = str(error).rpartition("; ")
        return Finding("key file", FAIL, what, fix)
    return Finding("key file", OK, f"{path}: {len(found)} keys, {found[0].name} writes")


def key_place(path: Path, directory: Path) -> Finding:
    """Whether whoever takes the disk with the blocks takes the keys with it."""
    name, fix = "key place", "keep the file on another medium, and set tiers.disk.key_file to it"
    here, there = (existing_parent(str(it)).stat().st_dev for it in (path, directory))
    if here == there:
        return Finding(
            name, WARN, f"{path} is on the file system of {directory}: whoever takes the disk has "
            "the keys", fix,
        )  # fmt: skip
    shared = disks(here) & disks(there)
    if shared:
        return Finding(
            name, WARN, f"{path} is on another file system than {directory}, but on the same disk "
            f"({', '.join(sorted(shared))}): whoever takes it has the keys", fix,
        )  # fmt: skip
    return Finding(name, OK, f"{path} is not on the file system of {directory}")


def disks(device: int, devices: Path = BLOCK_DEVICES) -> frozenset[str]:
    """Names of the disks below a file system's device; none where the kernel does not say."""
    return _below((devices / f"{os.major(device)}:{os.minor(device)}").resolve())


def _below(block: Path) -> frozenset[str]:
    if not block.is_dir():
        return frozenset()
    parts = list((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if parts:
        return frozenset().union(*(_below(part.resolve()) for part in parts))
    return frozenset([block.parent.name if (block / "partition").exists() else block.name])


def _package() -> Finding:
    try:
        return Finding(PACKAGE, OK, importlib.metadata.version(PACKAGE))
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            PACKAGE, FAIL, "not installed, and tiers.disk.key_file is set",
            "run `pip install 'kvstore-daemon[encryption]'`",
        )  # fmt: skip


def aes(cpuinfo: Path) -> Finding:
    """Whether the processor has instructions for AES and for GCM's product."""
    flags = [
        set(line.partition(":")[2].split())
        for line in read_lines(cpuinfo)
        if line.partition(":")[0].strip() in ("flags", "Features")
    ]
    if not flags:
        return Finding("AES instructions", OK, f"{cpuinfo} does not say whether there are any")
    has = {flag for flag in flags[0] if all(flag in each for each in flags)}
    lacking = {flag for each in flags for flag in each} - has
    if "aes" not in has or not has & {"pclmulqdq", "pmull"}:
        some = "not every processor has" if "aes" in lacking else "the processor has not"
        return Finding(
            "AES instructions", WARN, f"{some} got them: encryption takes it many times as long",
            "use another machine, show the processor's own features to this virtual machine, or "
            "measure it (`kvstore bench encryption`)",
        )  # fmt: skip
    return Finding("AES instructions", OK, "the processor has them")
