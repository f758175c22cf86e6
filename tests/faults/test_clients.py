"""Clients that die or freeze, and daemons that die or freeze under them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from daemons import SPEC, DaemonProcess, Tagged, eventually

from kvstore.client import KVClient, LeaseLost, StoreUnavailable

TOKENS = list(range(256))  # 64 blocks of 16 KiB
LIMITS = """
tiers.host.prefault = false
tiers.host.mlock = false
limits.lease_ttl_seconds = 2.0
limits.max_lease_ttl_seconds = 2.0
"""


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess("64MiB", LIMITS) as made:
        yield made


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with daemon.client() as made:
        yield made


CHILD = """
import os, sys, time
import numpy as np
from daemons import SPEC, Tagged
from kvstore.client import KVClient

client = KVClient.connect(sys.argv[1])
space, tagged, tokens = client.attach(SPEC), Tagged(), list(range(256))
def block(position):
    if position == 40:
        print("putting", flush=True)
        time.sleep(60)
    return tagged.maker.make(tagged.keys(tokens)[position])
if sys.argv[2] == "put":
    space.put(tokens, block)
match = space.lookup(tokens[:64])
views = space.restore(match)
print("leased", match.matched_tokens, flush=True)
for line in sys.stdin:
    try:
        print(tagged.wrong(tokens, views), flush=True)
        match.check()
        print("right", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


class Child:
    """A client in a process of its own."""

    def __init__(self, daemon: DaemonProcess, what: str) -> None:
        path = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, daemon.address, what],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("check\n")

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def children(daemon: DaemonProcess) -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.end()


def test_a_client_killed_while_it_puts(
    daemon: DaemonProcess, client: KVClient, children: list[Child]
) -> None:
    """I4, I15: a client that is killed in the middle of a put leaves nothing pending, reserved,
    leased or staged 1 s later, and the next writer may write the same blocks."""
    child = Child(daemon, "put")
    children.append(child)
    assert child.line() == "putting"
    space, tagged = client.attach(SPEC), Tagged()
    with space.lookup(TOKENS) as match:
        before = match.matched_tokens
        assert match.pending_tokens == 256 - before
        assert tagged.wrong(TOKENS, space.restore(match)) == 0
    child.process.kill()
    assert eventually(lambda: client.status().session_count == 1, 1.0)
    status = client.status()
    assert (status.reservation_count, status.lease_count) == (0, 0)
    tier = status.tiers["host"]
    assert tier.used_bytes == tier.block_count * SPEC.block_bytes
    with space.lookup(TOKENS) as match:
        assert match.pending_tokens == 0
        assert match.matched_tokens >= before
        assert tagged.wrong(TOKENS, space.restore(match)) == 0
    result = space.put(TOKENS, tagged.blocks(TOKENS))
    assert result.stored + result.present == 64


def test_a_killed_client_s_leases_end(
    daemon: DaemonProcess, client: KVClient, children: list[Child]
) -> None:
    """I15: leases of a client that is killed are over within 1 s."""
    client.attach(SPEC).put(TOKENS, Tagged().blocks(TOKENS))
    child = Child(daemon, "lease")
    children.append(child)
    assert child.line() == "leased 64"
    assert client.status().lease_count == 1
    child.process.kill()
    assert eventually(lambda: client.status().lease_count == 0, 1.0)


def test_a_frozen_client_gets_lease_lost(
    daemon: DaemonProcess, client: KVClient, children: list[Child]
) -> None:
    """I6: a client frozen past its lease's time hears LeaseLost when it thaws, whatever its views
    show by then; until its time is over nobody touches what it reads."""
    space, tagged = client.attach(SPEC), Tagged()
    space.put(TOKENS[:64], tagged.blocks(TOKENS[:64]))
    child = Child(daemon, "lease")
    children.append(child)
    assert child.line() == "leased 64"
    child.ask()
    assert [child.line(), child.line()] == ["0", "right"]
    child.process.send_signal(signal.SIGSTOP)
    client.admin.clear(all=True)
    assert client.status().tiers["host"].resting_bytes > 0
    started = time.monotonic()
    assert eventually(lambda: client.status().tiers["host"].resting_bytes == 0, 5.0)
    assert time.monotonic() - started <= 4.0
    for n in range(4):
        other = [1000 * n + i for i in range(2000)]
        space.put(other, Tagged().blocks(other))
    child.process.send_signal(signal.SIGCONT)
    child.ask()
    assert int(child.line()) >= 0
    assert child.line() == "LeaseLost"


@pytest.mark.long
def test_a_frozen_writer_is_let_go(
    daemon: DaemonProcess, client: KVClient, children: list[Child]
) -> None:
    """I15: what a client that freezes in the middle of a put holds is free again within the time
    that a session may be silent, and 1 s; what it puts when it thaws is its own loss."""
    child = Child(daemon, "put")
    children.append(child)
    assert child.line() == "putting"
    child.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert client.status().reservation_count == 1
    space, tagged = client.attach(SPEC), Tagged()
    assert eventually(lambda: client.status().session_count == 1, 12.0)
    assert time.monotonic() - began <= 11.5
    status = client.status()
    assert (status.reservation_count, status.lease_count) == (0, 0)
    assert space.put(TOKENS, tagged.blocks(TOKENS)).rejected == 0
    child.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    with space.lookup(TOKENS) as match:
        assert match.matched_tokens == 256
        assert tagged.wrong(TOKENS, space.restore(match)) == 0


def test_a_frozen_daemon(daemon: DaemonProcess) -> None:
    """With the daemon frozen a call ends within its limit and later ones at once; when it thaws
    the client goes on by itself, with its leases if they live."""
    tagged = Tagged()
    with daemon.client(call_timeout_seconds=0.2) as client:
        space = client.attach(SPEC)
        space.put(TOKENS, tagged.blocks(TOKENS))
        daemon.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            space.lookup(TOKENS)
        assert time.monotonic() - began < 2.0
        began = time.monotonic()
        for _ in range(100):
            with pytest.raises(StoreUnavailable):
                space.lookup(TOKENS)
        assert time.monotonic() - began < 1.0
        daemon.signal(signal.SIGCONT)
        assert eventually(lambda: client.available, 5.0)
        with space.lookup(TOKENS) as match:
            assert tagged.wrong(TOKENS, space.restore(match)) == 0
        assert client.status().lease_count == 0


def test_a_daemon_that_thaws_copies_no_other_bytes(daemon: DaemonProcess) -> None:
    """I5: a put that got no answer never lets its staging be reused: what a thawed daemon stores
    under the old keys are the old bytes."""
    tagged = Tagged()
    with daemon.client(call_timeout_seconds=0.2, put_timeout_seconds=0.3) as client:
        space = client.attach(SPEC)
        space.put(TOKENS[:4], tagged.blocks(TOKENS[:4]))
        for n in range(1, 4):
            tokens = [1000 * n + i for i in range(64)]
            daemon.signal(signal.SIGSTOP)
            with pytest.raises(StoreUnavailable):
                space.put(tokens, tagged.blocks(tokens))
            daemon.signal(signal.SIGCONT)
            assert eventually(lambda: client.available, 5.0)
            other = [5000 * n + i for i in range(64)]
            space.put(other, tagged.blocks(other))
            for prompt in (tokens, other):
                with space.lookup(prompt) as match:
                    assert tagged.wrong(prompt, space.restore(match)) == 0


def test_a_killed_daemon(daemon: DaemonProcess, client: KVClient) -> None:
    """I6, I10: with the daemon killed calls raise StoreUnavailable at once, leases are lost, and
    after its restart the same client finds its blocks again."""
    space, tagged = client.attach(SPEC), Tagged()
    space.put(TOKENS, tagged.blocks(TOKENS))
    match = space.lookup(TOKENS)
    views = space.restore(match)
    daemon.kill()
    assert eventually(lambda: not client.available, 1.0)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        space.lookup(TOKENS)
    assert time.monotonic() - began < 0.5
    with pytest.raises(LeaseLost):
        match.check()
    assert tagged.wrong(TOKENS, views) == 0
    daemon.start()
    assert eventually(lambda: client.available, 10.0)
    with space.lookup(TOKENS) as again:
        target = np.empty((again.block_count, SPEC.block_bytes), np.uint8)
        space.restore_into(again, target)
    assert len(target) == 64
    assert tagged.wrong(TOKENS, target) == 0
