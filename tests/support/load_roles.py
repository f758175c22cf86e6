"""What a client process under load does: one function a role, forked from one warm process.

    load_roles.py ADDRESS BOARD        reads `ROLE NUMBER` lines, forks, says `{"pid": ..}` of each

`BOARD` is a few numbers in a file that all map: what is to be done now. Clients say on the common
standard output, in one line of JSON each time, what they have seen.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import http2
from daemons import SPEC, Tagged

from kvstore.client import KVClient, KVStoreError, LeaseLost, StoreUnavailable
from kvstore.client.wire import fill_prompt
from kvstore.core.lane import (
    ADMIN_METHODS,
    HEADER,
    LANE_SUFFIX,
    METHOD_NUMBERS,
    METHODS,
    FrameKind,
    pack_frame,
)
from kvstore.proto.v1 import kvstore_pb2 as pb

BOARD = struct.Struct("<qqd")  # phase, how many of the polite work, seconds between their lookups
ABUSE, OVER = 4, 9  # phases
CHATS, CHAT_BLOCKS, GOLD_CHATS = 160, 16, 32
STAGING_BYTES, CALL_SECONDS = 256 << 10, 10.0
SAMPLES_A_LINE = 100
HELD_LEASES, HELD_RESERVATIONS, RESERVED_BLOCKS = 96, 24, 4
PR_SET_PDEATHSIG = 1


class Board:
    """What the test wants to be done, as long as it wants it."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), BOARD.size)

    def read(self) -> tuple[int, int, float]:
        phase, polite, pause = BOARD.unpack(self._map)
        if phase == OVER:
            os._exit(0)
        return phase, polite, pause

    def write(self, phase: int, polite: int = 0, pause: float = 0.0) -> None:
        self._map[:] = BOARD.pack(phase, polite, pause)

    def wait_for_abuse(self) -> None:
        while self.read()[0] != ABUSE:
            time.sleep(0.05)


def say(**what: Any) -> None:
    # Whole lines, also from many processes at once, of which some are killed: one write each.
    line = json.dumps({"pid": os.getpid(), **what}).encode() + b"\n"
    assert len(line) <= 4096, "longer than a pipe takes in one piece"
    os.write(1, line)


def chat_tokens(chat: int, blocks: int = CHAT_BLOCKS) -> list[int]:
    return [1000 * chat + n for n in range(4 * blocks)]


def connected(address: str, tenant: str, staging_bytes: int = STAGING_BYTES) -> tuple[Any, Any]:
    """A client and its space, as soon as there is a place for one more session."""
    while True:
        try:
            client = KVClient.connect(
                address, call_timeout_seconds=CALL_SECONDS, staging_bytes=staging_bytes
            )
            return client, client.attach(SPEC, tenant=tenant)
        except KVStoreError:
            time.sleep(0.1)


# ---- Who behaves ----


class Polite:
    """Looks chats up, restores and checks some, stores what is missing; says how long lookups took.

    The tenant `gold` stores its chats once, and keeps to them.
    """

    def __init__(self, address: str, board: Board, number: int) -> None:
        self.board, self.number = board, number
        self.tenant = "gold" if number % 4 == 0 else "default"
        self.random = random.Random(number)
        self.tagged = Tagged(SPEC, self.tenant)
        self.client, self.space = connected(address, self.tenant)
        self.phase, self.took = 0, []
        self.looked_up = self.checked = self.wrong = self.failed = self.lost = 0

    def run(self) -> None:
        say(ready=self.number)
        due = time.monotonic()
        while True:
            phase, working, pause = self.board.read()
            if phase != self.phase or len(self.took) >= SAMPLES_A_LINE:
                self.tell()
                self.phase, due = phase, time.monotonic() + pause * self.random.random()
            if self.number >= working:
                time.sleep(0.05)
                continue
            if (wait := due - time.monotonic()) > 0:
                time.sleep(min(wait, 0.1))
                if wait > 0.1:
                    continue
            due = max(due + pause, time.monotonic() - pause)
            try:
                self.request()
            except LeaseLost:
                self.lost += 1
            except StoreUnavailable:
                self.failed += 1
                time.sleep(0.05)
            except KVStoreError:
                self.failed += 1

    def request(self) -> None:
        chats = GOLD_CHATS if self.tenant == "gold" else CHATS
        chat = self.random.randrange(chats)
        tokens = chat_tokens(chat)
        began = time.perf_counter()
        match = self.space.lookup(tokens)
        self.took.append(time.perf_counter() - began)
        self.looked_up += 1
        with match:
            if match.block_count and self.random.random() < 0.2:
                self.check(match, tokens)
            missing = match.matched_tokens < len(tokens)
        if missing and (self.phase <= 1 or self.random.random() < 0.3):
            self.space.put(tokens, self.tagged.blocks(tokens))

    def check(self, match: Any, tokens: list[int]) -> None:
        views = self.space.restore(match)
        wrong = self.tagged.wrong(tokens, views)
        match.check()
        self.checked += len(views)
        self.wrong += wrong

    def tell(self) -> None:
        say(
            polite=self.number, phase=self.phase, lookups=self.looked_up, checked=self.checked,
            wrong=self.wrong, failed=self.failed, lost=self.lost,
            took=[round(seconds * 1e6) for seconds in self.took],
        )  # fmt: skip
        self.took = []
        self.looked_up = self.checked = self.wrong = self.failed = self.lost = 0


def polite(address: str, board: Board, number: int) -> None:
    Polite(address, board, number).run()


# ---- Who takes all it can get ----


def leases(address: str, board: Board, number: int) -> None:
    """Looks up and never releases; asks for more than a session may hold."""
    _, space = connected(address, "default")
    tokens, kept = chat_tokens(5000 + number, 1), list[Any]()
    board.wait_for_abuse()
    while board.read()[0] == ABUSE:
        with suppress(KVStoreError):
            match = space.lookup(tokens)
            if match.block_count:
                kept.append(match)
            else:
                space.put(tokens, Tagged(SPEC).blocks(tokens))
        if len(kept) == HELD_LEASES:
            say(holds=number)
        time.sleep(0.05 if len(kept) >= HELD_LEASES else 0.002)


def reservations(address: str, board: Board, number: int) -> None:
    """Reserves and never commits; asks for more than a session may reserve, again as it ends."""
    _, space = connected(address, "default")
    board.wait_for_abuse()
    asked = 0
    while board.read()[0] == ABUSE:
        tokens = chat_tokens(10_000 + number * 10_000 + asked, RESERVED_BLOCKS)
        request = pb.ReserveRequest()
        fill_prompt(request.prompt, SPEC, tokens, None, "", "", None)
        with suppress(KVStoreError):
            attachment = space._link.attachment(space)
            request.attachment = attachment.number
            answer = attachment.session.call("Reserve", request, CALL_SECONDS)
            if answer.reservation_id:
                say(reserved=tokens[0])
        asked += 1
        time.sleep(0.05 if asked >= HELD_RESERVATIONS else 0.005)


def sessions(address: str, board: Board, number: int) -> None:
    """Opens sessions until the daemon has no place left, keeps them for a while, lets them go."""
    board.wait_for_abuse()
    while board.read()[0] == ABUSE:
        held, refused = [], 0
        while refused < 3 and board.read()[0] == ABUSE:
            try:
                held.append(Raw(address, opened=True))
            except (OSError, EOFError):
                refused += 1
        if refused:
            say(refused="sessions", held=len(held))
        time.sleep(0.5)
        for one in held:
            one.close()
        time.sleep(1.0)


def subscribers(address: str, board: Board, number: int) -> None:
    """Subscribes a thousand times over and reads nothing."""
    board.wait_for_abuse()
    payload = pb.SubscribeRequest(from_sequence=1).SerializeToString()
    while board.read()[0] == ABUSE:
        with suppress(OSError, EOFError):
            one = Raw(address, opened=True)
            for call in range(2000):
                one.send(METHOD_NUMBERS["Subscribe"], payload, call + 1)
            until = time.monotonic() + 4.0
            while board.read()[0] == ABUSE and time.monotonic() < until:
                one.send(METHOD_NUMBERS["Session"], b"", 5000)
                time.sleep(0.2)
            one.close()
        time.sleep(0.1)


# ---- Who sends what no client would ----


class Counted:
    """Says how many of something were sent, twice a second."""

    def __init__(self, what: str) -> None:
        self.what, self.count, self.told = what, 0, time.monotonic()

    def add(self) -> None:
        self.count += 1
        if time.monotonic() - self.told > 0.5:
            say(sent=self.what, count=self.count)
            self.count, self.told = 0, time.monotonic()


class Raw:
    """A connection of the lane without a client."""

    def __init__(self, address: str, opened: bool = False) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(2.0)
        try:
            self.socket.connect(address.removeprefix("unix://") + LANE_SUFFIX)
            if opened:
                self.open()
        except BaseException:
            self.close()
            raise

    def open(self) -> None:
        # The smallest segment: staging is for those who put.
        request = pb.OpenSessionRequest(client_name="raw", staging_bytes=4096)
        self.send(METHOD_NUMBERS["OpenSession"], request.SerializeToString(), 1)
        header, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(16))
        for _, _, data in ancillary:
            os.close(int.from_bytes(data[:4], "little"))
        if len(header) < HEADER.size or HEADER.unpack_from(header)[1] != FrameKind.RESPONSE:
            raise EOFError

    def send(self, method: int, payload: bytes, call: int) -> None:
        self.socket.sendall(pack_frame(FrameKind.REQUEST, method, 0, call, payload))

    def read_away(self) -> None:
        """Takes what is there, without waiting."""
        with suppress(BlockingIOError):
            while self.socket.recv(1 << 16, socket.MSG_DONTWAIT):
                pass

    def close(self) -> None:
        self.socket.close()


def oversized(address: str, board: Board, number: int) -> None:
    """Frames above the limit, some that say 4 GiB; and prompts of the largest size there is."""
    board.wait_for_abuse()
    junk, sent = bytes(1 << 20), Counted("oversized")
    while board.read()[0] == ABUSE:
        with suppress(OSError, EOFError):
            one = Raw(address, opened=True)
            for length in ((4 << 20) - 64, 5 << 20, (1 << 32) - 1):
                header = HEADER.pack(length, FrameKind.REQUEST, METHOD_NUMBERS["Lookup"], 0, 7)
                one.socket.sendall(header)
                for _ in range(-(-min(length, 5 << 20) // len(junk))):
                    one.socket.sendall(junk[: min(length, len(junk))])
                sent.add()
            one.close()
        time.sleep(0.01)


def malformed(address: str, board: Board, number: int) -> None:
    """Requests of every method that are no messages, methods of none, bytes that are no frames."""
    draw, sent = random.Random(number), Counted("malformed")
    # What an operator may do would be done, should the bytes happen to be a request.
    numbers = [n for name, n in METHOD_NUMBERS.items() if name not in ADMIN_METHODS]
    numbers += [METHOD_NUMBERS["Status"], METHOD_NUMBERS["Explain"], len(METHODS), 255]
    board.wait_for_abuse()
    while board.read()[0] == ABUSE:
        with suppress(OSError, EOFError):
            one = Raw(address, opened=draw.random() < 0.9)
            for call in range(50):
                one.send(draw.choice(numbers), draw.randbytes(draw.randrange(1, 80)), call + 2)
                sent.add()
                one.read_away()
            one.socket.sendall(draw.randbytes(64))
            one.close()
        time.sleep(0.002)


def garbage(address: str, board: Board, number: int) -> None:
    """HTTP/2 that is none, on the socket of gRPC."""
    draw, path = random.Random(number), address.removeprefix("unix://")
    sent = Counted("garbage")
    board.wait_for_abuse()
    while board.read()[0] == ABUSE:
        frames = [http2.frame(draw.randrange(12), draw.randrange(256), draw.randrange(9),
                              draw.randbytes(draw.randrange(64))) for _ in range(8)]  # fmt: skip
        began = time.monotonic()
        http2.send(path, [http2.PREFACE, http2.frame(4, 0, 0, b""), *frames])
        if time.monotonic() - began < http2.QUIET_SECONDS / 2:
            time.sleep(http2.QUIET_SECONDS)  # nobody listened, or hung up at once
        else:
            sent.add()


ROLES: dict[str, Callable[[str, Board, int], None]] = {
    role.__name__: role
    for role in (polite, leases, reservations, sessions, subscribers, oversized, malformed, garbage)
}


def lines() -> Iterator[list[str]]:
    for line in sys.stdin:
        yield line.split()


def main() -> None:
    address, board = sys.argv[1], Board(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    for role, number in lines():
        pid = os.fork()
        if pid == 0:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.close(0)
            try:
                ROLES[role](address, board, int(number))
                while True:  # a role that is over keeps its process until all are
                    board.read()
                    time.sleep(0.2)
            except BaseException as error:
                say(died=role, error=repr(error)[:300])
            os._exit(1)
        say(forked=pid, role=role, number=int(number))


if __name__ == "__main__":
    main()
