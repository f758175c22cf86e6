"""A client on another host: mutual TLS, and the bytes in the messages."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from interrupts import Alarm

from kvstore.client import (
    InvalidRequest,
    KVClient,
    KVSpec,
    LeaseLost,
    PutResult,
    StoreUnavailable,
    TLSConfig,
)

SIZE, COUNT = 1_500_000, 5  # more than one message a block
TOKENS = list(range(16 * COUNT))
BLOCKS = [random.Random(i).randbytes(SIZE) for i in range(COUNT)]
SPEC = KVSpec(
    model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
    block_size=16, layout="opaque", block_bytes=SIZE,
)  # fmt: skip


def openssl(folder, *arguments):
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_certificate(folder, name, authority):
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    names = (folder / f"{name}.key", folder / f"{name}.csr")
    subject = ("-subj", f"/CN={name}")
    openssl(folder, "req", *key, "-keyout", names[0], "-out", names[1], *subject)
    (folder / "names.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        folder, "x509", "-req", "-in", names[1], "-CA", f"{authority}.pem", "-CAkey",
        f"{authority}.key", "-CAcreateserial", "-days", "2", "-out", f"{name}.pem", "-extfile",
        "names.ext",
    )  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make certificates with")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ca", "other-ca"):
        openssl(
            folder, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj",
            f"/CN={name}",
        )  # fmt: skip
    make_certificate(folder, "daemon", "ca")
    make_certificate(folder, "engine-1", "ca")
    make_certificate(folder, "forged", "other-ca")
    return folder


@pytest.fixture
def far(make_serve, certificates):
    """A daemon that listens on TCP, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = make_serve(
        f'[server.tcp]\nlisten = "127.0.0.1:{port}"\ncert = "{certificates}/daemon.pem"\n'
        f'key = "{certificates}/daemon.key"\nclient_ca = "{certificates}/ca.pem"\n'
        f'[[access]]\nuid = {os.getuid()}\nrole = "admin"\n'
        '[[access]]\ncertificate = "engine-1"\ntenant = "default"\n'
    )
    return serve, f"localhost:{port}"


def tls(folder, name="engine-1"):
    return TLSConfig(f"{folder}/ca.pem", f"{folder}/{name}.pem", f"{folder}/{name}.key")


def connect(far, certificates, **options):
    return KVClient.connect(
        far[1], tls=tls(certificates), call_timeout_seconds=2.0, **options
    )  # fmt: skip


def test_bytes_cross_the_network_whole(far, certificates):
    """I1: blocks put over TCP come back over TCP and on the daemon's own host, byte for byte."""
    with connect(far, certificates) as client, far[0].connect() as near:
        space = client.attach(SPEC)
        assert space.put(TOKENS, BLOCKS) == PutResult(stored=COUNT)
        assert space.put(TOKENS, BLOCKS) == PutResult(present=COUNT)
        with space.lookup(TOKENS) as match:
            views = space.restore(match)
            assert [bytes(view) for view in views] == BLOCKS
            assert all(view.readonly for view in views)
            match.check()
            out = np.zeros((COUNT, SIZE), np.uint8)
            space.restore_into(match, out)
            assert [row.tobytes() for row in out] == BLOCKS
        with near.attach(SPEC).lookup(TOKENS) as match:
            assert match.matched_tokens == len(TOKENS)
        assert near.admin.clear(all=True).removed_blocks == COUNT
        assert space.lookup(TOKENS).matched_tokens == 0


def test_leases_of_far_clients_are_renewed(far, certificates):
    """A match over TCP lives for as long as it is held, and is over once it is cleared."""
    with connect(far, certificates) as client, far[0].connect() as near:
        space = client.attach(SPEC)
        space.put(TOKENS, BLOCKS)
        match = space.lookup(TOKENS)
        time.sleep(1.5)
        space.restore_into(match, bytearray(SIZE * COUNT))
        near.admin.clear(all=True)
        with pytest.raises(LeaseLost):
            space.restore_into(match, bytearray(SIZE * COUNT))


def test_a_far_daemon_that_dies_comes_back(far, certificates, eventually):
    """Over TCP, too, a killed daemon is unavailable at once and found again by itself."""
    serve, _ = far
    with connect(far, certificates) as client:
        space = client.attach(SPEC)
        space.put(TOKENS, BLOCKS)
        serve.signal(signal.SIGKILL)
        with pytest.raises(StoreUnavailable):
            space.lookup(TOKENS)
        serve.start()

        def is_back():
            try:
                return space.lookup(TOKENS).matched_tokens == len(TOKENS)
            except StoreUnavailable:
                return False

        eventually(is_back)


@pytest.mark.timeout(90)
def test_an_interrupt_over_the_network(far, certificates):
    """I15: after signals in the middle of calls over TCP the client is back long before its session
    would have ended by itself; what is put and found then is right."""
    rng, alarm = random.Random(1), Alarm()
    with connect(far, certificates) as client:
        space = client.attach(SPEC)

        def work():
            space.put(TOKENS, BLOCKS)
            with space.lookup(TOKENS) as match:
                assert [bytes(view) for view in space.restore(match)] == BLOCKS

        try:
            for number in range(12):
                with contextlib.suppress(StoreUnavailable, LeaseLost):
                    alarm.interrupt(work, rng.uniform(0.0005, 0.05), rng.choice([1, 2]), 0.001)
                end = time.monotonic() + 10.0
                while time.monotonic() < end:
                    with contextlib.suppress(StoreUnavailable, LeaseLost):
                        work()
                        break
                    time.sleep(0.02)
                else:
                    raise AssertionError(f"not back after interrupt {number}")
        finally:
            alarm.close()
    assert alarm.raised >= 6


def test_a_frozen_far_daemon_costs_one_time_limit(far, certificates, eventually):
    """Over TCP the first call waits its limit, and the next ones do not wait."""
    serve, _ = far
    with connect(far, certificates) as client:
        space = client.attach(SPEC)
        serve.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="did not answer Lookup"):
            space.lookup(TOKENS)
        start = time.perf_counter()
        with pytest.raises(StoreUnavailable):
            space.lookup(TOKENS)
        assert time.perf_counter() - start < 0.05
        serve.signal(signal.SIGCONT)
        eventually(lambda: client.available)
        space.lookup(TOKENS).release()


def test_a_forged_certificate_gets_nowhere(far, certificates):
    """I18: a client whose certificate another authority signed learns nothing but that."""
    with pytest.raises(StoreUnavailable, match="no daemon answers"):
        KVClient.connect(
            far[1], tls=tls(certificates, "forged"), attach_timeout_seconds=1.0
        )  # fmt: skip


def test_a_missing_certificate_is_named(certificates):
    """A path that is wrong is named before anything is sent."""
    with pytest.raises(InvalidRequest, match=r"tls\.key: .*nobody\.key"):
        KVClient.connect("localhost:1", tls=TLSConfig(
            f"{certificates}/ca.pem", f"{certificates}/engine-1.pem", "/nobody.key"
        ))  # fmt: skip


def test_grpc_is_loaded_for_network_addresses_only():
    """An engine beside the daemon does not pay for importing gRPC."""
    code = "import sys, kvstore.client; print('grpc' in sys.modules, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-Ic", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False False\n"
