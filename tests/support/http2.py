"""HTTP/2 by hand, for what no client would send."""

from __future__ import annotations

import base64
import contextlib
import socket
import struct
from pathlib import Path

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
QUIET_SECONDS = 0.02


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A frame as RFC 9113, section 4.1, lays it out."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def block(path: bytes, token: bytes) -> bytes:
    """A gRPC call's header block, every field literal: RFC 7541, section 6.2.2."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x",
        b"content-type": b"application/grpc", b"te": b"trailers",
        b"x-kv-session-bin": base64.b64encode(token),
    }  # fmt: skip
    return b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in fields.items()
    )


def headers(path: bytes, token: bytes) -> bytes:
    """A HEADERS frame that begins a call on stream 1."""
    return frame(1, 4, 1, block(path, token))


def send(path: Path, pieces: list[bytes]) -> None:
    """Sends until the daemon hangs up, reads until it is quiet, hangs up."""
    with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
        raw.settimeout(QUIET_SECONDS)
        raw.connect(str(path))
        for piece in pieces:
            raw.sendall(piece)
        while raw.recv(1 << 16):
            pass
