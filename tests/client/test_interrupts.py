"""Ctrl-C in the middle of a call: the client is there again at once, and nothing is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from daemons import DaemonProcess
from interrupts import Alarm, InterruptAt

from kvstore.client import KVClient, KVSpec, KVStoreError, LeaseLost, StoreUnavailable

# An interrupt within a destructor is only told by Python; the call goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BLOCK_SIZE, BLOCK_BYTES, COUNT = 16, 16 << 10, 12
SPEC = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
    block_size=BLOCK_SIZE, layout="opaque", block_bytes=BLOCK_BYTES,
)  # fmt: skip
BACK_SECONDS = 5.0  # of a session's 30; a lone machine needs a tenth of a second
OPERATIONS = ("lookup", "restore", "restore_into", "put", "status")


def tokens(request: int) -> list[int]:
    return [request * 1000 + i for i in range(COUNT * BLOCK_SIZE)]


def payload(request: int) -> np.ndarray:
    return np.frombuffer(Random(request).randbytes(COUNT * BLOCK_BYTES), np.uint8)


class Calls:
    """An engine's calls, one after the other, each checked."""

    def __init__(self, client: KVClient, seed: int) -> None:
        self.client, self.space = client, client.attach(SPEC)
        self.random, self.put_count = Random(seed), 0
        self.put()

    def put(self) -> None:
        self.put_count += 1
        self.space.put(tokens(self.put_count), payload(self.put_count))

    def lookup(self) -> None:
        self.space.lookup(tokens(self._any())).release()

    def restore(self) -> None:
        request = self._any()
        with self.space.lookup(tokens(request)) as match:
            views = self.space.restore(match)
            self._check(request, b"".join(views))
            if views:
                match.check()

    def restore_into(self) -> None:
        request = self._any()
        with self.space.lookup(tokens(request)) as match:
            target = np.empty(match.block_count * BLOCK_BYTES, np.uint8)
            self.space.restore_into(match, target)
            self._check(request, target.tobytes())

    def status(self) -> None:
        self.client.status()

    def _any(self) -> int:
        return self.random.randrange(max(1, self.put_count - 20), self.put_count + 1)

    def _check(self, request: int, got: bytes) -> None:
        assert got == payload(request).tobytes()[: len(got)], f"wrong bytes of request {request}"


class Beside(threading.Thread):
    """Another thread of the same client, whose calls may fail for a moment and never for long."""

    def __init__(self, client: KVClient) -> None:
        super().__init__(daemon=True)
        self.calls = Calls(client, 99)
        self.over = threading.Event()
        self.problems: list[str] = []
        self.done = 0
        self.longest = 0.0
        self.start()

    def run(self) -> None:
        since = time.monotonic()
        while not self.over.wait(0.001):
            try:
                self.calls.restore()
                self.done += 1
                since = time.monotonic()
            except KVStoreError:
                self.longest = max(self.longest, time.monotonic() - since)
            except BaseException as error:
                self.problems.append(repr(error))
                return

    def stop(self) -> None:
        self.over.set()
        self.join(30)
        assert not self.is_alive(), "a thread of the client hangs"
        assert not self.problems
        assert self.done
        assert self.longest < BACK_SECONDS


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    made = DaemonProcess("32MiB", "tiers.host.prefault = false\nlimits.lease_ttl_seconds = 1.0\n")
    with made:
        yield made


@pytest.fixture
def calls(daemon: DaemonProcess) -> Iterator[Calls]:
    with daemon.client(call_timeout_seconds=2.0) as client:
        yield Calls(client, 1)
        left_behind(client)


def left_behind(client: KVClient) -> None:
    """I15: no session, lease or reservation stays but the live client's own."""
    end = time.monotonic() + BACK_SECONDS
    while True:
        status = client.status()
        counts = (status.session_count, status.lease_count, status.reservation_count)
        if counts == (1, 0, 0):
            break
        assert time.monotonic() < end, f"sessions, leases, reservations are left: {counts}"
        time.sleep(0.02)


def wait_until_back(calls: Calls, what: str) -> None:
    """Until a lookup, a restore and a put all work again."""
    end, said = time.monotonic() + BACK_SECONDS, ""
    while time.monotonic() < end:
        try:
            calls.put()
            calls.restore()
            return
        except (StoreUnavailable, LeaseLost) as error:
            said = str(error)
            time.sleep(0.005)
    raise AssertionError(f"not back after {what}: {said}")


def interrupt_everywhere(calls: Calls, operation: str, step: int, first: int) -> tuple[int, int]:
    """Interrupts a call at every `step`-th point; answers with points and interrupts."""
    number, count = first, 0
    while True:
        at, is_over = InterruptAt(number), False
        with suppress(StoreUnavailable, LeaseLost):  # the one before ends the session only now
            at.run(getattr(calls, operation))
            is_over = not at.point
        if is_over:
            return number, count
        wait_until_back(calls, f"{operation} at point {number}, {at.point}")
        number, count = number + step, count + 1


@pytest.mark.parametrize(
    "step",
    [
        61,
        pytest.param(7, marks=pytest.mark.long),
        pytest.param(1, marks=[pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
@pytest.mark.parametrize("operation", OPERATIONS[:4])
def test_an_interrupt_at_any_point(calls: Calls, operation: str, step: int) -> None:
    """I15: wherever CPython lets a KeyboardInterrupt come within a call, and with another thread
    in the same client: both are served again at once, with right bytes."""
    beside = Beside(calls.client)
    try:
        points, count = interrupt_everywhere(calls, operation, step, 1 + 7 % step)
    finally:
        beside.stop()
    assert count >= min(points, 100) // step
    print(f"{operation}: {count} interrupts up to point {points}, {beside.done} calls beside")


@pytest.mark.parametrize(
    ("tries", "seed"),
    [
        pytest.param(100, 1),
        pytest.param(1000, 2, marks=[pytest.mark.long, pytest.mark.timeout(300)]),
        pytest.param(
            10_000, 3, marks=[pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_signals_at_any_time(calls: Calls, tries: int, seed: int) -> None:
    """I15: signals at random moments of random calls, one or several at once."""
    random, alarm, beside = Random(seed), Alarm(), Beside(calls.client)
    slowest = 0.0
    try:
        for number in range(tries):
            operation = random.choice(OPERATIONS)
            count = random.choice([1, 1, 1, 2, 3])
            again = random.uniform(5e-6, 2e-4) if count > 1 else 0.0
            call, delay = getattr(calls, operation), random.choice([1e-4, 1e-3]) * random.random()
            with suppress(StoreUnavailable, LeaseLost):  # the one before ended the session
                alarm.interrupt(call, 1e-5 + delay, count, again)
            began = time.monotonic()
            wait_until_back(calls, f"{operation}, try {number}")
            slowest = max(slowest, time.monotonic() - began)
    finally:
        alarm.close()
        beside.stop()
    print(f"{alarm.raised} interrupts in {tries} tries, slowest return {slowest:.3f} s")
    assert alarm.raised > tries // 4
