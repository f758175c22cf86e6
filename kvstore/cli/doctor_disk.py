"""What `kvstore doctor` looks at on disk: whose, what kind, how large, past the cache, how fast."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvstore.cli.doctor_memory import MEMORY_FILE_SYSTEMS
from kvstore.cli.findings import FAIL, OK, WARN, Finding
from kvstore.core.clock import perf_seconds
from kvstore.core.config import MIB, Config
from kvstore.core.config_disk import is_network_file_system
from kvstore.core.machine import LocalMachine, existing_parent, file_system_type
from kvstore.core.sizes import format_bytes
from kvstore.policies.cost import LinkCost, RecomputeIdentity, RecomputePrior
from kvstore.store.costs import CostBook
from kvstore.store.record import COSTS_NAME, SPACES_NAME, read_spaces

PROBE_BYTES, PROBE_READ_BYTES, PROBE_SECONDS = 64 * MIB, 4 * MIB, 0.5
PROMPT_TOKENS = 8192
ASSUMED_TOKEN_BYTES = 128 << 10  # of the model that RecomputePrior's default is of


def disk(config: Config) -> list[Finding]:
    """What a disk tier needs of its directory and file system; nothing where there is none."""
    if not config.tiers.disk.path:
        return []
    path = Path(config.tiers.disk.path)
    return [
        _directory(path), _file_system(path), _room(config), adds_hits(config),
        worth_reading(config),
    ]  # fmt: skip


def _directory(path: Path) -> Finding:
    if not os.path.exists(path):  # Path.exists raises where it may not look
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


def _file_system(path: Path) -> Finding:
    kind = file_system_type(existing_parent(str(path)))
    if is_network_file_system(kind):
        return Finding(
            "disk file system", FAIL,
            f"{path} is on {kind}, which may lose locks and synced writes",
            "set tiers.disk.path to a directory on a local disk (ext4 or xfs)",
        )  # fmt: skip
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


def _room(config: Config) -> Finding:
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


def adds_hits(config: Config) -> Finding:
    """Whether the disk tier can hold what the host tier does not.

    What is in host is written to disk too, so a disk no larger than host may hold copies alone.
    """
    host, size = int(config.tiers.host.size), config.disk_bytes
    found = f"disk {format_bytes(size)}, host {format_bytes(host)}"
    if size <= host:
        return Finding(
            "disk adds hits", WARN, f"{found}: all that fits on disk may be in host as well",
            "raise tiers.disk.size well above tiers.host.size, or remove tiers.disk",
        )  # fmt: skip
    return Finding("disk adds hits", OK, found)


def direct_io(directory: str | None) -> Finding:
    """Whether a file in `directory` can be written and read past the page cache.

    Without one, and without a disk tier that names one, it is tried here if here takes a file.
    """
    here = existing_parent(directory or ".")
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
        if not directory and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return Finding("direct I/O", OK, f"not tried: no disk tier, and no writing to {here}")
        return Finding(
            "direct I/O", WARN, f"{here}: {error.strerror}",
            "put a disk tier on ext4 or xfs; the host tier does not need it",
        )  # fmt: skip
    return Finding("direct I/O", OK, f"{here}: works")


# ---- Disk against recompute ----


def worth_reading(config: Config) -> Finding:
    """Whether reading a prompt from disk is quicker than computing it again.

    By what the daemon has measured and written down, where it has; else the disk is read here and
    compared with an assumed engine, which only informs.
    """
    name = "disk against recompute"
    book, token_bytes = _measured(config)
    link = book.link(book.read_link)
    if link is not None and link.state.name == "fitted":
        cost, how = link.cost(), "measured by the daemon"
    else:
        probed = read_speed(config)
        if probed is None:
            return Finding(name, OK, "not measured: the directory takes no file to try with")
        cost, how = LinkCost.of(0.0, probed), "tried just now"
    worst = max(_against(book, token_bytes, cost), default=None)
    if worst is None:
        assumed = RecomputePrior().cost.seconds(PROMPT_TOKENS, 0)
        restore = cost.seconds(PROMPT_TOKENS * ASSUMED_TOKEN_BYTES)
        return Finding(
            name, OK,
            f"{PROMPT_TOKENS:,} tokens of an 8-billion-parameter model take {restore:.3g} s from "
            f"disk ({how}), {assumed:.3g} s on an H100 as assumed; no engine is measured yet",
        )  # fmt: skip
    ratio, model, restore, recompute = worst
    found = (
        f"{PROMPT_TOKENS:,} tokens of {model} take {restore:.3g} s from disk ({how}), "
        f"{recompute:.3g} s to recompute"
    )
    if ratio < 1:
        return Finding(name, OK, found)
    return Finding(
        name, WARN, f"{found}: the disk tier is of no use to it",
        "use a faster disk, raise tiers.disk.bytes_per_second_max if it is set, or do without "
        "tiers.disk",
    )  # fmt: skip


def _measured(config: Config) -> tuple[CostBook, dict[str, float]]:
    """The costs that a daemon of this configuration wrote down, and bytes a token by model."""
    path = config.tiers.disk.path
    book = CostBook(path)
    try:
        book.load((Path(path) / COSTS_NAME).read_bytes())
    except OSError:
        return book, {}
    token_bytes = {
        known.spec.model: known.spec.block_bytes * known.spec.shard_count / known.spec.block_size
        for known in read_spaces(Path(path) / SPACES_NAME)
    }
    return book, token_bytes


def _against(
    book: CostBook, token_bytes: dict[str, float], disk_cost: LinkCost
) -> Iterator[tuple[float, str, float, float]]:
    """(restore / recompute, model, restore seconds, recompute seconds) of each fitted engine."""
    saved = json.loads(book.dump())["models"]
    for key in [each["identity"] for each in saved]:
        if len(key) != len(RecomputeIdentity._fields):
            continue
        engine = book.engine(RecomputeIdentity(*key))
        model = key[0]
        if engine is None or engine.state.name != "fitted" or model not in token_bytes:
            continue
        recompute = engine.seconds(PROMPT_TOKENS)
        restore = disk_cost.seconds(int(PROMPT_TOKENS * token_bytes[model]))
        yield restore / recompute, model, restore, recompute


def read_speed(config: Config) -> float | None:
    """Bytes a second of reads as the tier makes them; None where no file can be tried with.

    A nameless file of 64 MiB is written and read back, for at most half a second of reads.
    """
    section = config.tiers.disk
    here = existing_parent(section.path)
    if LocalMachine().file_system_free_bytes(str(here)) < int(section.reserve) + PROBE_BYTES:
        return None
    flags = os.O_RDWR | os.O_TMPFILE | (os.O_DIRECT if section.direct else 0)
    try:
        descriptor = os.open(here, flags, 0o600)
        try:
            speed = _time_reads(descriptor, section.read_threads)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return min(speed, float(section.bytes_per_second_max or speed))


def _time_reads(descriptor: int, threads: int) -> float:
    places = range(0, PROBE_BYTES, PROBE_READ_BYTES)
    with mmap.mmap(-1, PROBE_READ_BYTES) as page:
        for place in places:
            os.pwritev(descriptor, [page], place)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, PROBE_BYTES, os.POSIX_FADV_DONTNEED)
    start = perf_seconds()

    def read(place: int) -> int:
        if perf_seconds() - start > PROBE_SECONDS:
            return 0
        with mmap.mmap(-1, PROBE_READ_BYTES) as page:
            return os.preadv(descriptor, [page], place)

    with ThreadPoolExecutor(threads) as pool:
        byte_count = sum(pool.map(read, places))
    return byte_count / max(perf_seconds() - start, 1e-9)
