"""A daemon's life: one at a time, starts that fail in one sentence, drains, reloads, memory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import http2
import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually

from kvstore.client import KVClient, KVSpec, StoreUnavailable

TOKENS = list(range(256))
QUICK = "tiers.host.prefault = false\ntiers.host.mlock = false\n"


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("64MiB", QUICK) as made:
        yield made


def serve(*options: str, **environ: str) -> tuple[int, str]:
    """(exit status, standard error) of a daemon that is not expected to stay."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "serve", *options],
        capture_output=True, text=True, timeout=60, cwd="/", env={**clean, **environ},
        check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


def assert_one_sentence(error: str, *words: str) -> None:
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("kvstore: ")
    for word in words:
        assert word in lines[0]


# ---- What peers may write into its log ----


def test_garbage_does_not_reach_the_log() -> None:
    """I19: no bytes that a peer sends as HTTP/2 come into the daemon's log, and there is nothing in
    it but lines of its own, however many such peers there are."""
    draw, mark = random.Random(1), b"bytes-of-a-peer"
    with DaemonProcess("16MiB", f'{QUICK}logging.format = "json"\n') as made:
        for _ in range(60):
            kinds = draw.sample(range(12), 8)
            frames = [http2.frame(kind, 0, 0, draw.randbytes(8) + mark) for kind in kinds]
            goaway = http2.frame(7, 0, 0, bytes(8) + mark + b"\n2026-11-30 ERROR all is lost")
            http2.send(made.socket, [http2.PREFACE, http2.frame(4, 0, 0, b""), goaway, *frames])
        made.status()
        lines = made.log.splitlines()
    assert all(json.loads(line)["part"].startswith("kvstore.") for line in lines), lines
    assert mark.decode() not in "".join(lines)


# ---- One at a time ----


def test_two_daemons_on_one_socket(daemon: DaemonProcess) -> None:
    """I20: a second daemon on the same socket exits 2 and names the holder; the first serves on."""
    other = daemon.directory / "other"
    code, error = serve(
        "--socket", str(daemon.socket), "--metrics", "", "--host-size", "16MiB",
        KVSTORE_TIERS__HOST__DIRECTORY=str(other),
    )  # fmt: skip
    assert code == 2
    assert_one_sentence(error, str(daemon.socket), str(daemon.pid))
    assert daemon.status().state == "serving"


def test_two_daemons_on_one_pool(daemon: DaemonProcess) -> None:
    """I20: a second daemon on the same directory exits 2, names the holder, and spoils nothing."""
    tagged = Tagged()
    with daemon.client() as client:
        space = client.attach(SPEC)
        space.put(TOKENS, tagged.blocks(TOKENS))
        code, error = serve(
            "--socket", str(daemon.directory / "other.sock"), "--metrics", "",
            "--host-size", "16MiB", KVSTORE_TIERS__HOST__DIRECTORY=str(daemon.pool),
        )  # fmt: skip
        assert code == 2
        assert_one_sentence(error, str(daemon.pool), str(daemon.pid))
        with space.lookup(TOKENS) as match:
            assert match.matched_tokens == 256
            assert tagged.wrong(TOKENS, space.restore(match)) == 0


def test_a_killed_daemon_holds_no_lock(daemon: DaemonProcess) -> None:
    """I20: stale sockets and lock files of a killed daemon are in nobody's way."""
    daemon.kill()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.status().state == "serving"


# ---- Starts that fail ----


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("KVSTORE_TIERS__HOST__SIZE", "100TiB", ["tiers.host.size", "100TiB"]),
        ("KVSTORE_TIERS__HOST__SIZE", "0", ["KVSTORE_TIERS__HOST__SIZE"]),
        ("KVSTORE_TIERS__HOST__SIZE", "-5GiB", ["KVSTORE_TIERS__HOST__SIZE"]),
        ("KVSTORE_TIERS__HOST__DIRECTORY", "/dev/shm/not/there", ["tiers.host.directory"]),
        ("KVSTORE_TIERS__HOST__DIRECTORY", "/proc/kvstore", ["/proc/kvstore"]),
        ("KVSTORE_POLICY__EVICTION", "nonsense", ["nonsense", "lru"]),
        ("KVSTORE_SERVER__METRICS", "nonsense", ["server.metrics"]),
        ("KVSTORE_NO__SUCH", "1", ["no"]),
        ("KVSTORE_SERVER__SOCKET_GROUP", "no-such-group", ["no-such-group"]),
    ],
)
def test_wrong_configurations(key: str, value: str, words: list[str], tmp_path: Path) -> None:
    """A setting that cannot be is one sentence naming key and fix, exit 2, and nothing is left."""
    environ = {"KVSTORE_TIERS__HOST__DIRECTORY": f"/dev/shm/kvstore-test-{os.getpid()}-wrong"}
    environ = {"KVSTORE_SERVER__METRICS": "", **environ, key: value}
    code, error = serve("--socket", str(tmp_path / "kv.sock"), **environ)
    assert code == 2, error
    assert_one_sentence(error, *words)
    left = Path(f"/dev/shm/kvstore-test-{os.getpid()}-wrong")
    assert not list(left.glob("pool-*"))
    if left.exists():
        for path in left.iterdir():
            path.unlink()
        left.rmdir()


def test_a_port_in_use(daemon: DaemonProcess, tmp_path: Path) -> None:
    """A metrics port that somebody else has is one sentence, and exit 1 or 2."""
    with DaemonProcess("16MiB", QUICK, metrics="127.0.0.1:0") as other:
        ports = re.findall(r"127\.0\.0\.1:(\d+)", " ".join(_listening(other.pid)))
        assert ports
        code, error = serve(
            "--socket", str(tmp_path / "kv.sock"), "--metrics", f"127.0.0.1:{ports[0]}",
            "--host-size", "16MiB", KVSTORE_TIERS__HOST__DIRECTORY=str(daemon.directory / "p"),
        )  # fmt: skip
    assert code in (1, 2)
    assert_one_sentence(error, ports[0])


def _listening(pid: int) -> list[str]:
    """Addresses that a process listens at, by its sockets' inodes."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            parts = [str(int(address[i : i + 2], 16)) for i in (6, 4, 2, 0)]
            found.append(f"{'.'.join(parts)}:{int(port, 16)}")
    return found


def test_a_damaged_pool_starts_empty(daemon: DaemonProcess) -> None:
    """I11, I13: a pool whose files were damaged while nobody served starts empty, and serves."""
    tagged = Tagged()
    with daemon.client() as client:
        client.attach(SPEC).put(TOKENS, tagged.blocks(TOKENS))
    daemon.kill()
    (headers,) = daemon.pool.glob("pool-*.headers")
    with open(headers, "r+b") as file:
        file.write(b"\xff" * 64)
    for name in ("epochs", "epochs.copy", "spaces.json"):
        (daemon.pool / name).write_bytes(b"damaged")
    daemon.start()
    with daemon.client() as client:
        space = client.attach(SPEC)
        assert space.lookup(TOKENS).matched_tokens == 0
        assert space.put(TOKENS, tagged.blocks(TOKENS)).stored == 64


# ---- Leaving ----


def test_sigterm_drains(daemon: DaemonProcess) -> None:
    """SIGTERM: nothing new is granted, a running lease may finish, then it exits 0; blocks stay."""
    tagged = Tagged()
    with daemon.client() as client:
        space = client.attach(SPEC)
        space.put(TOKENS, tagged.blocks(TOKENS))
        match = space.lookup(TOKENS)
        daemon.signal(signal.SIGTERM)
        assert eventually(lambda: not client.available, 2.0)
        with pytest.raises(StoreUnavailable, match="drain"):
            space.lookup(TOKENS)
        time.sleep(0.2)
        assert daemon.process is not None
        assert daemon.process.poll() is None
        match.check()
        assert tagged.wrong(TOKENS, space.restore(match)) == 0
        match.release()
        assert daemon.wait(5.0) == 0
    assert not daemon.socket.exists()
    daemon.start()
    assert daemon.status().readopted_blocks == 64


def test_a_second_sigterm_leaves_at_once(daemon: DaemonProcess) -> None:
    """A second SIGTERM does not wait for leases any more."""
    with daemon.client() as client:
        space = client.attach(SPEC)
        space.put(TOKENS, Tagged().blocks(TOKENS))
        match = space.lookup(TOKENS)
        daemon.signal(signal.SIGTERM)
        assert eventually(lambda: not client.available, 2.0)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(5.0) == 0
        assert match is not None


def test_drain_under_load_ends_at_its_deadline(daemon: DaemonProcess) -> None:
    """A drain ends at its deadline though a client holds on, and what was stored is whole."""
    tagged = Tagged()
    with daemon.client() as client, daemon.client() as other:
        space = client.attach(SPEC)
        space.put(TOKENS, tagged.blocks(TOKENS))
        match = space.lookup(TOKENS)
        handles = [
            space.put_async([n] * 256, Tagged().blocks([n] * 256)) for n in range(1000, 1020)
        ]
        began = time.monotonic()
        other.admin.drain(1.0)
        assert daemon.wait(10.0) == 0
        assert 0.5 < time.monotonic() - began < 5.0
        for handle in handles:
            try:
                handle.result(10.0)
            except StoreUnavailable:
                continue
        assert match is not None
    daemon.start()
    with daemon.client(call_timeout_seconds=5.0) as client:
        space = client.attach(SPEC)
        for n in range(1000, 1020):
            with space.lookup([n] * 256) as found:
                assert tagged.wrong([n] * 256, space.restore(found)) == 0


def test_drain_free_unlinks_the_pool(daemon: DaemonProcess) -> None:
    """`drain --free` leaves no pool behind; the next start is empty."""
    with daemon.client() as client:
        client.attach(SPEC).put(TOKENS, Tagged().blocks(TOKENS))
        client.admin.drain(1.0, free=True)
    assert daemon.wait(10.0) == 0
    assert not list(daemon.pool.glob("pool-*"))
    daemon.start()
    assert daemon.status().readopted_blocks == 0


# ---- Reload ----


def test_sighup_reloads_quotas(daemon: DaemonProcess) -> None:
    """I17: SIGHUP takes quotas from the file anew; a broken file or policy changes nothing."""
    with daemon.client() as client:
        space, tagged = client.attach(SPEC), Tagged()
        cap = 16 * SPEC.block_bytes
        space.put(TOKENS, tagged.blocks(TOKENS))
        daemon.configure(f'{QUICK}[[tenants]]\nname = "default"\nhost_cap = {cap}\n')
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: _cap(client) == cap, 5.0)
        assert eventually(lambda: client.status().tiers["host"].used_bytes <= cap, 5.0)
        space.put(TOKENS, tagged.blocks(TOKENS))
        assert client.status().tiers["host"].used_bytes <= cap
        for broken in ("nonsense = [", 'policy.eviction = "nonsense"', "tiers.host.sizes = 1"):
            daemon.configure(f"{QUICK}{broken}\n")
            lines = len(daemon.log.splitlines())
            daemon.signal(signal.SIGHUP)
            assert eventually(lambda seen=lines: len(daemon.log.splitlines()) > seen, 5.0)
            assert client.status().state == "serving"
            assert _cap(client) == cap
        assert "Traceback" not in daemon.log
        daemon.configure(QUICK)
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: _cap(client) == 0, 5.0)


def _cap(client: KVClient) -> int:
    (tenant,) = [t for t in client.status(with_tenants=True).tenants if t.tenant == "default"]
    return int(tenant.cap_bytes.get("host", 0))


# ---- Memory ----


def test_memory_is_bounded(daemon: DaemonProcess) -> None:
    """I16: an index of 40,000 blocks costs at most 512 bytes and its symbols a block, and a
    client that sends nonsense costs nothing that stays."""
    spec = KVSpec(
        model="tiny", revision="r", num_layers=1, num_kv_heads=1, head_dim=8, dtype="float16",
        block_size=16,
    )  # fmt: skip
    with DaemonProcess("192MiB", QUICK) as large, large.client() as client:
        space = client.attach(spec)
        data = bytes(spec.block_bytes)
        space.put([1] * 64, lambda _: data)
        before = _anonymous_bytes(large.pid)
        for n in range(20):
            prompt = [n << 16 | i for i in range(16 * 2000)]
            assert space.put(prompt, lambda _: data).stored == 2000
        grown = _anonymous_bytes(large.pid) - before
        assert client.status().block_count == 40_004
        print(f"{grown / 40_000:.0f} bytes a block")
        assert grown <= 40_000 * (512 + 64) + (16 << 20)
        settled = _anonymous_bytes(large.pid)
        for n in range(300):
            space.lookup([n] * 4000)
        assert _anonymous_bytes(large.pid) - settled <= 16 << 20


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10
