"""The client against a real daemon: frozen, killed, restarted, cleared, crowded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvstore.client import KVSpec, LeaseLost, StoreUnavailable

BLOCK_SIZE, BLOCK_BYTES = 16, 64 << 10


def spec(revision="r"):
    return KVSpec(
        model="m", revision=revision, num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
        block_size=BLOCK_SIZE, layout="opaque", block_bytes=BLOCK_BYTES,
    )  # fmt: skip


def tokens(request, block_count):
    return [request * 1000 + i for i in range(block_count * BLOCK_SIZE)]


def payload(request, block):
    """Bytes that tell which block of which request they are: foreign ones show."""
    return random.Random(request * 4096 + block).randbytes(BLOCK_BYTES)


def payloads(request, block_count):
    return [payload(request, block) for block in range(block_count)]


@pytest.fixture
def serve(make_serve):
    return make_serve()


def answers(space, request, block_count):
    try:
        with space.lookup(tokens(request, block_count)):
            return True
    except StoreUnavailable:
        return False


def test_bytes_come_back_and_are_lost_when_cleared(serve):
    """I1, I6: a put comes back exactly; a Clear under a lease is LeaseLost, not other bytes."""
    with serve.connect() as client:
        space = client.attach(spec())
        result = space.put(tokens(1, 40), payloads(1, 40))
        assert (result.stored, result.rejected, result.pending) == (40, 0, 0)
        assert space.put(tokens(1, 40), payloads(1, 40)).present == 40
        with space.lookup(tokens(1, 50)) as match:
            assert match.matched_tokens == 40 * BLOCK_SIZE
            out = np.empty((40, BLOCK_BYTES), np.uint8)
            space.restore_into(match, out)
            assert [row.tobytes() for row in out] == payloads(1, 40)
            assert client.admin.clear(all=True).removed_blocks == 40
            with pytest.raises(LeaseLost):
                space.restore_into(match, out)
        assert space.lookup(tokens(1, 40)).matched_tokens == 0


def test_a_frozen_daemon_costs_one_time_limit(serve, eventually):
    """With SIGSTOP the first lookup waits its limit and later ones not; SIGCONT brings it back."""
    with serve.connect(call_timeout_seconds=0.1) as client:
        space = client.attach(spec())
        space.put(tokens(1, 8), payloads(1, 8))
        serve.signal(signal.SIGSTOP)
        start = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            space.lookup(tokens(1, 8))
        assert time.perf_counter() - start < 0.5
        start = time.perf_counter()
        for _ in range(20):
            with pytest.raises(StoreUnavailable):
                space.lookup(tokens(1, 8))
        assert time.perf_counter() - start < 0.1
        serve.signal(signal.SIGCONT)
        eventually(lambda: answers(space, 1, 8))
        assert space.lookup(tokens(1, 8)).matched_tokens == 8 * BLOCK_SIZE


def test_a_killed_daemon_comes_back_with_its_blocks(serve, eventually):
    """I10: after SIGKILL and a restart the same Space finds what was stored, byte for byte."""
    with serve.connect() as client:
        space = client.attach(spec())
        space.put(tokens(1, 8), payloads(1, 8))
        old = space.lookup(tokens(1, 8))
        serve.signal(signal.SIGKILL)
        start = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            space.lookup(tokens(1, 8))
        assert time.perf_counter() - start < 0.2
        serve.start()
        eventually(lambda: answers(space, 1, 8))
        with pytest.raises((LeaseLost, StoreUnavailable)):
            space.restore_into(old, bytearray(8 * BLOCK_BYTES))
        with space.lookup(tokens(1, 8)) as match:
            assert match.matched_tokens == 8 * BLOCK_SIZE
            assert [bytes(view) for view in space.restore(match)] == payloads(1, 8)


FROZEN_CLIENT = f"""
import sys
from kvstore.client import *
client = KVClient.connect(sys.argv[1])
space = client.attach(KVSpec(model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1,
    dtype="uint8", block_size={BLOCK_SIZE}, layout="opaque", block_bytes={BLOCK_BYTES}))
match = space.lookup([1000 + i for i in range({8 * BLOCK_SIZE})])
print(match.matched_tokens, flush=True)
sys.stdin.readline()
try:
    space.restore_into(match, bytearray({8 * BLOCK_BYTES}))
    print("restored", flush=True)
except LeaseLost as error:
    print("LeaseLost", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other_client(serve):
    """Another process with a live match of request 1."""
    with serve.connect() as client:
        client.attach(spec()).put(tokens(1, 8), payloads(1, 8))
        process = subprocess.Popen(
            [sys.executable, "-c", FROZEN_CLIENT, serve.socket], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        with process:
            assert process.stdout.readline() == f"{8 * BLOCK_SIZE}\n"
            yield process, client
            process.kill()


def test_a_client_frozen_past_its_time_gets_lease_lost(other_client):
    """I6: a client stopped for longer than its lease lives restores nothing afterwards."""
    process, _ = other_client
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.stdin.write("go on\n")
    process.stdin.flush()
    process.send_signal(signal.SIGCONT)
    assert process.stdout.readline() == "LeaseLost\n"


def test_a_live_client_keeps_its_lease_past_its_time(other_client):
    """Leases are renewed in the background for as long as their match is held."""
    process, _ = other_client
    time.sleep(2.5)
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stdout.readline() == "restored\n"


def test_a_dead_clients_lease_is_free_within_a_second(other_client):
    """I15: the end of a client's process ends its leases."""
    process, client = other_client
    assert client.status().lease_count == 1
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(1.0)
    assert client.status().lease_count == 0


def test_a_crowded_pool_never_answers_with_wrong_bytes(serve):
    """I1, I5, I6: with threads putting more than the pool holds, what is restored is right."""
    wrong, restored = [], []
    until = time.perf_counter() + 3.0

    def work(seed):
        chance = random.Random(seed)
        with serve.connect(call_timeout_seconds=5.0) as client:
            space = client.attach(spec())
            while time.perf_counter() < until:
                request, count = chance.randrange(12), chance.randrange(1, 65)
                if chance.random() < 0.5:
                    space.put(tokens(request, count), lambda block, r=request: payload(r, block))
                    continue
                with space.lookup(tokens(request, count)) as match:
                    out = [bytearray(BLOCK_BYTES) for _ in range(match.block_count)]
                    space.restore_into(match, out)
                    restored.append(len(out))
                    wrong.extend(
                        (request, i) for i, got in enumerate(out) if got != payload(request, i)
                    )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert sum(restored) > 0
