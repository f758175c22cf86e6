"""A daemon small enough to misbehave on request: the lane, one pool, blocks by exact prefix."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import KVClient, KVSpec, Space, StoreUnavailable
from kvstore.client.frames import FrameReader
from kvstore.core.lane import (
    FLAG_FDS,
    LANE_SUFFIX,
    METHOD_NUMBERS,
    METHODS,
    FrameKind,
    pack_frame,
)
from kvstore.core.plan import BlockOutcome
from kvstore.core.slots import encode_slots
from kvstore.proto.v1 import kvstore_pb2 as pb

BLOCK_TOKENS = 4
KVSTORE = str(Path(sys.executable).with_name("kvstore"))
SILENCE = object()  # what a handler answers to leave the caller waiting


class FakeDaemon:
    """Serves the lane from one thread.

    `before(method, request)` may return a response, an exception, or SILENCE, in place of the
    real answer. While `frozen` nothing is read. `calls` holds the names of all calls taken.
    """

    def __init__(self, path: Path, block_bytes: int = 4096, slots: int = 64) -> None:
        self.path = str(path)
        self.block_bytes = block_bytes
        self.slot_bytes = -(-block_bytes // 4096) * 4096
        self.lease_ttl = 10.0
        self.session_ttl = 30.0
        self.reserve_blocks = 8
        self.staging_bytes = 1 << 20
        self.calls: list[str] = []
        self.released: list[int] = []
        self.aborted: list[int] = []
        self.before: Callable[[str, Any], Any] = lambda method, request: None
        self.frozen = threading.Event()
        self.data_fd, self.data = _memory("data", slots * self.slot_bytes)
        self.map_fd, raw = _memory("map", slots * self.slot_bytes // 4096 * 8)
        self.generations = raw.view(np.uint64)
        self.blocks: dict[bytes, int] = {}  # exact prefix -> slot
        self.reservations: dict[int, tuple[bytes, list[int]]] = {}
        self.last_id = 0
        self.opened: list[int] = []
        self.listener: socket.socket | None = None
        self.peers: dict[int, _Peer] = {}
        self.start()

    # ---- Life ----

    def start(self) -> None:
        lane = self.path + LANE_SUFFIX
        Path(lane).unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(lane)
        self.listener.listen()
        self.stopping, self.wakeup = socket.socketpair()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """Closes everything at once, as the kernel does for a killed process."""
        if self.listener is None:
            return
        self.frozen.clear()
        self.wakeup.send(b"x")
        self.thread.join(5)
        for peer in list(self.peers.values()):
            peer.socket.close()
        self.peers.clear()
        self.listener.close()
        self.stopping.close()
        self.wakeup.close()
        self.listener = None
        Path(self.path + LANE_SUFFIX).unlink(missing_ok=True)

    def notice(self, notice: pb.Notice) -> None:
        frame = pack_frame(
            FrameKind.NOTICE, METHOD_NUMBERS["Session"], 0, 0, notice.SerializeToString()
        )
        for peer in self.peers.values():
            peer.socket.send(frame)

    def _serve(self) -> None:
        assert self.listener is not None
        while True:
            watched = [self.stopping]
            if not self.frozen.is_set():
                watched += [self.listener, *(peer.socket for peer in self.peers.values())]
            ready, _, _ = select.select(watched, [], [], 0.01)
            for found in ready:
                if found is self.stopping:
                    return
                if self.frozen.is_set():
                    break
                if found is self.listener:
                    connection, _ = self.listener.accept()
                    self.peers[connection.fileno()] = _Peer(connection)
                else:
                    self._read(self.peers[found.fileno()])

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 20)
            for frame in peer.frames.feed(memoryview(data), []):
                self._answer(peer, frame)
        except OSError:  # the client hung up without reading what it asked for
            data = b""
        if not data:
            del self.peers[peer.socket.fileno()]
            peer.socket.close()

    def _answer(self, peer: _Peer, frame: Any) -> None:
        name = METHODS[frame.method]
        request = (pb.Heartbeat if name == "Session" else getattr(pb, f"{name}Request")).FromString(
            frame.payload
        )
        self.calls.append(name)
        answer = self.before(name, request)
        descriptors: list[int] = []
        if answer is None:
            handler = getattr(self, f"on_{name.lower()}", None)
            assert handler is not None, f"the fake daemon has no {name}"
            answer = handler(peer, request, descriptors)
        if answer is SILENCE or frame.call_id == 0:
            return
        kind = FrameKind.RESPONSE
        if isinstance(answer, Exception):
            kind = FrameKind.ERROR
            answer = pb.LaneError(code=answer.code, message=str(answer))
        flags = FLAG_FDS if descriptors else 0
        raw = pack_frame(kind, frame.method, flags, frame.call_id, answer.SerializeToString())
        if descriptors:
            socket.send_fds(peer.socket, [raw], descriptors)
        else:
            peer.socket.sendall(raw)

    def fresh_id(self) -> int:
        self.last_id += 1
        return self.last_id

    # ---- Calls ----

    def on_opensession(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        descriptor, peer.staging = _memory("staging", self.staging_bytes)
        descriptors.append(descriptor)
        self.opened.append(descriptor)
        return pb.OpenSessionResponse(
            token=b"t" * 32, role="admin", staging_bytes=self.staging_bytes,
            session_ttl_seconds=self.session_ttl,
            limits=pb.Limits(message_bytes=4 << 20, reserve_blocks=self.reserve_blocks),
        )  # fmt: skip

    def on_attach(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        descriptors += [self.data_fd, self.map_fd]
        return pb.AttachResponse(
            attachment=self.fresh_id(), block_bytes=self.block_bytes, slot_bytes=self.slot_bytes,
            pools=[pb.Pool(pool_id=0, data_bytes=self.data.nbytes,
                           generation_bytes=self.generations.nbytes)],
        )  # fmt: skip

    def on_lookup(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        width = 4 * BLOCK_TOKENS
        slots = []
        for stop in range(width, len(request.prompt.tokens) + 1, width):
            slot = self.blocks.get(request.prompt.tokens[:stop])
            if slot is None:
                break
            slots.append(slot)
        local = request.local_tokens // BLOCK_TOKENS
        response = pb.LookupResponse(
            matched_tokens=len(slots) * BLOCK_TOKENS, reason="fake", first_block=local,
            restore_tokens=max(len(slots) - local, 0) * BLOCK_TOKENS,
        )  # fmt: skip
        if slots:
            places = np.array(slots[local:], np.int64) * (self.slot_bytes >> 12)
            packed = encode_slots(places, self.generations[places], self.slot_bytes >> 12)
            response.slots.places, response.slots.generations, response.slots.counts = packed
            response.lease_id, response.lease_ttl_seconds = self.fresh_id(), self.lease_ttl
        return response

    def on_release(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        self.released += request.lease_ids
        return pb.ReleaseResponse()

    def on_renew(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        return pb.RenewResponse(lease_ttl_seconds=self.lease_ttl)

    def on_reserve(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        width, tokens = 4 * BLOCK_TOKENS, request.prompt.tokens
        stop = len(tokens) // width
        outcomes = bytes(
            BlockOutcome.PRESENT
            if tokens[: (i + 1) * width] in self.blocks
            else BlockOutcome.WANTED
            for i in range(request.first_block, stop)
        )
        response = pb.ReserveResponse(first_block=request.first_block, outcomes=outcomes)
        if BlockOutcome.WANTED in outcomes:
            response.reservation_id = self.fresh_id()
            self.reservations[response.reservation_id] = tokens
        return response

    def on_commit(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        tokens, width = self.reservations[request.reservation_id], 4 * BLOCK_TOKENS
        response = pb.CommitResponse()
        for run in request.runs:
            for i in range(run.block_count):
                start = run.staging_offset + i * self.slot_bytes
                slot = len(self.blocks)
                target = self.data[slot * self.slot_bytes :][: self.block_bytes]
                target[:] = peer.staging[start : start + self.block_bytes]
                self.generations[slot * (self.slot_bytes >> 12)] = self.fresh_id()
                self.blocks[tokens[: (run.first_block + i + 1) * width]] = slot
            stored = bytes([BlockOutcome.STORED]) * run.block_count
            response.results.add(first_block=run.first_block, outcomes=stored)
        return response

    def on_abort(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        self.aborted.append(request.reservation_id)
        return pb.AbortResponse()

    def on_finishrequest(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        return pb.FinishRequestResponse()

    def on_reportstep(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        return pb.ReportStepResponse()

    def on_status(self, peer: _Peer, request: Any, descriptors: list[int]) -> Any:
        return pb.StatusResponse(state="serving")


class _Peer:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.frames = FrameReader()
        self.staging = np.empty(0, np.uint8)


def _memory(name: str, size: int) -> tuple[int, np.ndarray]:
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, size)
    return descriptor, np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


class Serve:
    """A `kvstore serve` process on a directory of its own."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.socket = f"{folder}/run/kvstore.sock"
        self.config = folder / "kvstore.toml"
        self.pool = tempfile.mkdtemp(prefix="kvstore-test-", dir="/dev/shm")
        self.config.write_text(
            f'[server]\nsocket = "{self.socket}"\nmetrics = "127.0.0.1:0"\n'
            f'[tiers.host]\nsize = "32MiB"\ndirectory = "{self.pool}/pool"\n'
            "[limits]\nlease_ttl_seconds = 1.0\nmax_lease_ttl_seconds = 2.0\n" + more
        )
        self.log = (folder / "log").open("wb")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [KVSTORE, "serve", "--config", str(self.config)], stdout=self.log, stderr=self.log
        )
        for _ in range(1200):
            assert self.process.poll() is None, Path(self.log.name).read_text()
            with contextlib.suppress(StoreUnavailable), self.connect():
                return
            time.sleep(0.05)
        raise AssertionError(Path(self.log.name).read_text())

    def connect(self, **options: Any) -> KVClient:
        return KVClient.connect(f"unix://{self.socket}", **options)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(10)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self.log.close()
        shutil.rmtree(self.pool)


@pytest.fixture
def make_serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    made: list[Serve] = []

    def make(more: str = "") -> Serve:
        made.append(Serve(tmp_path, more))
        made[-1].start()
        return made[-1]

    yield make
    for serve in made:
        serve.stop()


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., FakeDaemon]]:
    made: list[FakeDaemon] = []

    def make(**options: Any) -> FakeDaemon:
        made.append(FakeDaemon(tmp_path / f"{len(made)}.sock", **options))
        return made[-1]

    yield make
    for daemon in made:
        daemon.kill()
        for descriptor in (daemon.data_fd, daemon.map_fd, *daemon.opened):
            os.close(descriptor)


@pytest.fixture
def daemon(make_daemon: Callable[..., FakeDaemon]) -> FakeDaemon:
    return make_daemon()


@pytest.fixture
def spec() -> KVSpec:
    return make_spec(4096)


def make_spec(block_bytes: int) -> KVSpec:
    return KVSpec(
        model="m", revision="r", num_layers=1, num_kv_heads=1, head_dim=1, dtype="uint8",
        block_size=BLOCK_TOKENS, layout="opaque", block_bytes=block_bytes,
    )  # fmt: skip


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[KVClient]:
    with KVClient.connect(f"unix://{daemon.path}") as connected:
        yield connected


@pytest.fixture
def space(client: KVClient, spec: KVSpec) -> Space:
    return client.attach(spec)


@pytest.fixture
def silence() -> object:
    """What FakeDaemon.before returns to leave the caller without an answer."""
    return SILENCE


@pytest.fixture
def eventually() -> Callable[[Callable[[], object]], None]:
    """Waits until something holds, for at most 5 s."""

    def wait(holds: Callable[[], object]) -> None:
        pause = threading.Event()
        for _ in range(500):
            if holds():
                return
            pause.wait(0.01)
        raise AssertionError("it never came true")

    return wait
