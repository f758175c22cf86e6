"""`kvstore doctor` on machines that have what it looks for: each condition is made for real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from silent_fuse import SilentFuse

from kvstore.cli.doctor import examine
from kvstore.core.spec import KVSpec
from kvstore.policies.cost import LinkIdentity, RecomputeIdentity
from kvstore.store.costs import CostBook
from kvstore.store.record import KnownSpace, _write_spaces

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup/memory")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, or takes rights away")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in the memory file system."""
    path = Path(tempfile.mkdtemp(prefix="kvt-doctor-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def config(place: Path, host: str = "16MiB", disk: str = "", more: str = "") -> Path:
    """A small configuration in `place`; `disk` is a directory for a disk tier of 64 MiB."""
    text = f'[server]\nsocket = "{place}/run/kv.sock"\nmetrics = ""\n'
    text += f'[tiers.host]\ndirectory = "{place}/pool"\n'
    text += f'size = "{host}"\n' if host else ""
    if disk:
        text += f'[tiers.disk]\npath = "{disk}"\nsize = "64MiB"\nreserve = "1MiB"\n'
    file = place / "kvstore.toml"
    file.write_text(text + more)
    return file


def doctor(file: Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """Findings by check; by the command in a process of its own where it needs a `prefix`."""
    if not prefix:
        return {finding.check: finding._asdict() for finding in examine(file)}
    command = [*prefix, sys.executable, "-Im", "kvstore.cli.main", "doctor", "--json"]
    done = subprocess.run(
        [*command, "--config", str(file)], capture_output=True, text=True, timeout=60, cwd="/"
    )
    document = json.loads(done.stdout)
    assert done.returncode == (1 if document["fail"] else 0), done.stderr
    return {finding["check"]: finding for finding in document["findings"]}


def mounted(kind: str, path: Path, options: str = "") -> Iterator[Path]:
    path.mkdir(mode=0o700)
    more = ["-o", options] if options else []
    subprocess.run(["mount", "-t", kind, *more, "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small_shm(place: Path) -> Iterator[Path]:
    yield from mounted("tmpfs", place / "shm", "size=8m,mode=700")


@pytest.fixture
def no_direct(place: Path) -> Iterator[Path]:
    """A file system that refuses O_DIRECT."""
    yield from mounted("ramfs", place / "ramfs", "mode=700")


@root_only
def test_a_memlock_limit_below_the_host_tier_is_found(place: Path) -> None:
    """A limit of 64 KiB warns with the fix, unless the process may lock what it likes."""
    limited = ["prlimit", "--memlock=65536", "--"]
    bounded = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *limited]
    file = config(place)
    found = doctor(file, bounded)["memlock limit"]
    assert found["status"] == "warn"
    assert found["found"].startswith("64 KiB, below the host tier's 16 MiB")
    assert "LimitMEMLOCK=infinity" in found["fix"]
    assert doctor(file, limited)["memlock limit"]["status"] == "ok"


@root_only
def test_a_memory_file_system_too_small_is_found(place: Path, small_shm: Path) -> None:
    """A host tier of 16 MiB in a tmpfs of 8 fails with the size that would do."""
    file = config(place)
    file.write_text(file.read_text().replace(f"{place}/pool", f"{small_shm}/pool"))
    found = doctor(file)
    assert found["configuration"]["status"] == "fail"
    assert found["memory file system"]["status"] == "fail"
    assert "the host tier of 16 MiB does not fit" in found["memory file system"]["found"]
    (small_shm / "pool").mkdir()  # A directory of the daemon's: what is remounted is above it.
    fix = doctor(file)["memory file system"]["fix"]
    assert f"remount,size=32m {small_shm}`" in fix


@root_only
def test_a_memory_file_system_that_limits_the_default_is_found(
    place: Path, small_shm: Path
) -> None:
    """A default host tier of 4 MiB, for want of room in a tmpfs of 8, is a warning."""
    file = config(place, host="")
    file.write_text(file.read_text().replace(f"{place}/pool", f"{small_shm}/pool"))
    found = doctor(file)
    assert found["configuration"]["status"] == "ok"
    assert found["memory file system"]["status"] == "warn"
    assert "holds the default host tier to" in found["memory file system"]["found"]


@root_only
@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="no memory cgroup can be made here")
def test_a_cgroup_limit_below_the_daemons_need_is_found(place: Path) -> None:
    """In a cgroup of 512 MiB a daemon of that size fails, and one of 16 MiB of pools warns.

    The small one's need is dominated by its limits: 256 sessions of 1 MiB each.
    """
    cgroup = CGROUP / f"kvt-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(700 * MIB))
        script = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
        inside = ["sh", "-c", script, "sh"]
        found = doctor(config(place, "600MiB"), inside)["cgroup memory"]
        assert found["status"] == "fail"
        assert found["found"].startswith("limit 700 MiB")
        assert "MemoryMax=" in found["fix"]
        small = "[limits]\nsessions = 8\nstaging_bytes_per_session = '1MiB'\n"
        small += "staging_bytes = '16MiB'\n"
        assert doctor(config(place, more=small), inside)["cgroup memory"]["status"] == "ok"
    finally:
        _remove(cgroup)


def _remove(cgroup: Path) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            return cgroup.rmdir()
        except OSError:
            assert time.monotonic() < end, f"{cgroup} is in use"
            time.sleep(0.02)


@root_only
def test_a_file_system_without_direct_io_is_found(place: Path, no_direct: Path) -> None:
    """A directory where O_DIRECT is refused is a warning that names file systems which have it."""
    found = doctor(config(place, disk=f"{no_direct}/disk"))["direct I/O"]
    assert found["status"] == "warn"
    assert "Invalid argument" in found["found"]
    assert "ext4 or xfs" in found["fix"]


@root_only
@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="no FUSE here")
def test_a_network_file_system_is_found(place: Path) -> None:
    """A disk tier on FUSE, whose files may live anywhere, fails with where to put it."""
    with SilentFuse(place / "remote") as remote:
        found = doctor(config(place, disk=f"{remote}/disk"))
    assert found["disk file system"]["status"] == "fail"
    assert "is on fuse, which may lose locks" in found["disk file system"]["found"]
    assert found["configuration"]["status"] == "fail"


@root_only
def test_directories_of_another_user_are_found(place: Path) -> None:
    """Pools, socket and disk of uid 65534 fail for a daemon of another uid, with the fix."""
    for name in ("pool", "run", "disk"):
        (place / name).mkdir(mode=0o700)
        os.chown(place / name, 65534, 65534)
    found = doctor(config(place, disk=f"{place}/disk"))
    for check in ("pool directory", "socket directory", "disk directory"):
        assert found[check]["status"] == "fail"
        assert "belongs to uid 65534, not 0" in found[check]["found"]
        assert "as" in found[check]["fix"]


def test_a_clock_that_was_set_back_is_found(place: Path) -> None:
    """What a daemon wrote an hour from now is a warning: the clock has jumped back since."""
    (place / "pool").mkdir(mode=0o700)
    lock = place / "pool" / "LOCK"
    lock.touch()
    os.utime(lock, (time.time() + 3600,) * 2)
    found = doctor(config(place))["clock"]
    assert found["status"] == "warn"
    assert "was written 3" in found["found"]
    assert "the clock was set back" in found["found"]


def test_nobody_with_the_admin_role_is_found(place: Path) -> None:
    """Rules that give nobody the role admin are a warning with the line to add."""
    found = doctor(config(place, more="[[access]]\nuid = 1\n"))["access"]
    assert found["status"] == "warn"
    assert 'role = "admin"' in found["fix"]


def test_a_disk_that_cannot_add_hits_is_found(place: Path) -> None:
    """A disk tier no larger than the host tier is a warning; a larger one is not."""
    found = doctor(config(place, host="64MiB", disk=f"{place}/disk"))["disk adds hits"]
    assert found["status"] == "warn"
    assert "may be in host as well" in found["found"]
    assert doctor(config(place, disk=f"{place}/disk"))["disk adds hits"]["status"] == "ok"


def written_costs(directory: Path, token_seconds: float) -> None:
    """What a daemon has measured of one engine, as it writes it down, and the engine's space."""
    spec = KVSpec(
        model="tiny", revision="r1", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16",
        block_size=16,
    )  # fmt: skip
    directory.mkdir(mode=0o700)
    book = CostBook(str(directory))
    engine = RecomputeIdentity("tiny", "r1", "build", "cpu", 1)
    for new in (64, 256, 1024, 4096) * 8:
        for cached in (0, 512, 4096):
            book.observe_step(engine, 1e-4 + token_seconds * new, [(new, cached)])
    (directory / "costs.json").write_bytes(book.dump())
    _write_spaces(directory / "spaces.json", [KnownSpace(spec, "default")])


@pytest.mark.parametrize(("limit", "status"), [("", "ok"), ('"1MiB"', "warn")])
def test_a_disk_slower_than_recompute_is_found(place: Path, limit: str, status: str) -> None:
    """8,192 tokens that a measured engine computes in 41 ms are 2 MiB: too much for 1 MiB/s."""
    written_costs(place / "disk", 5e-6)
    more = f"bytes_per_second_max = {limit}\n" if limit else ""
    found = doctor(config(place, disk=f"{place}/disk", more=more))["disk against recompute"]
    assert found["status"] == status, found
    assert "8,192 tokens of tiny" in found["found"]
    assert ("of no use" in found["found"]) == (status == "warn")


def test_a_link_that_the_daemon_has_measured_counts(place: Path) -> None:
    """Where the daemon has measured its reads, these count and no file is tried."""
    directory = place / "disk"
    written_costs(directory, 5e-6)
    book = CostBook(str(directory))
    book.load((directory / "costs.json").read_bytes())
    for size in (1, 2, 4, 8, 16, 32) * 8:
        book.observe_transfer(LinkIdentity("disk>host", str(directory)), size * 0.5, size * MIB)
    (directory / "costs.json").write_bytes(book.dump())
    found = doctor(config(place, disk=str(directory)))["disk against recompute"]
    assert found["status"] == "warn", found
    assert "measured by the daemon" in found["found"]


def test_the_page_lists_every_check(place: Path) -> None:
    """docs/doctor.md has each check that doctor makes, in its order, and no other."""
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if "| `" in line]
    more = f'key_file = "{place}/keys"\n[tiers.hbm]\nsize = "1MiB"\n'
    assert [row.split("`")[1] for row in rows] == list(
        doctor(config(place, disk=f"{place}/disk", more=more))
    )
