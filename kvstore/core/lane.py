"""The local lane's envelope: the protobuf messages of kvstore.v1, framed for a Unix socket.

A frame is a 16-byte header and a payload. Header, little-endian: payload bytes (uint32), kind
(uint8), method (uint8, index in METHODS), flags (uint16), call id (uint64, the caller's choice; 0
in notices). Descriptors ride along with the first byte of a frame whose FDS flag is set.
"""

from __future__ import annotations

import struct
from enum import IntEnum

METHODS = (
    "OpenSession", "Attach", "Lookup", "Restore", "CancelRestore", "Release", "Renew",
    "FinishRequest", "Reserve", "Commit", "Abort", "ReportStep", "ReportTransfer", "Session",
    "PutInline", "FetchInline", "Subscribe",
    "Status", "SetPolicy", "SetQuota", "Pin", "Unpin", "Clear", "BumpEpoch", "Explain", "Flush",
    "Drain", "Verify", "TraceStart", "TraceStop",
    "AttachDevice", "LoadDevice",
)  # fmt: skip
METHOD_NUMBERS = {name: number for number, name in enumerate(METHODS)}
ADMIN_METHODS = frozenset(METHODS[METHODS.index("Status") : METHODS.index("AttachDevice")])

HEADER = struct.Struct("<IBBHQ")
HEADER_BYTES = HEADER.size

FLAG_NO_REPLY = 1
FLAG_FDS = 2

LANE_SUFFIX = ".lane"
PROTOCOL_MINOR = 1


class FrameKind(IntEnum):
    """What a frame is; STREAM items of a call are followed by its RESPONSE or ERROR."""

    REQUEST = 0
    RESPONSE = 1
    ERROR = 2
    NOTICE = 3
    STREAM = 4


def pack_frame(kind: int, method: int, flags: int, call_id: int, payload: bytes) -> bytes:
    """Header and payload, ready to send."""
    return HEADER.pack(len(payload), kind, method, flags, call_id) + payload
