"""`SilentFuse`: a file system of type fuse with one empty directory, served from this process.

It is what a network file system looks like to the mount table. Needs root and /dev/fuse. The
protocol's structures are those of linux/fuse.h.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import subprocess
import threading
from pathlib import Path

HEADER_IN, HEADER_OUT = struct.Struct("<IIQQIIII"), struct.Struct("<IiQ")
LOOKUP, GETATTR, STATFS, INIT, ACCESS, OPENDIR = 1, 3, 17, 26, 34, 27
ENOENT, ENOSYS = 2, 38
BLOCKS, BLOCK_BYTES = 1 << 20, 4096


class SilentFuse:
    """Mounted while it is a context."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Path:
        self.path.mkdir()
        self._fd = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._fd},rootmode=40700,user_id=0,group_id=0,allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"silent", bytes(self.path), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount of a fuse file system")
        threading.Thread(target=self._serve, daemon=True).start()
        return self.path

    def __exit__(self, *exc_info: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def _serve(self) -> None:
        try:
            while True:
                request = os.read(self._fd, 1 << 20)
                _, opcode, unique, node, *_ = HEADER_IN.unpack_from(request)
                error, body = self._answer(opcode, node)
                if body is not None:
                    head = HEADER_OUT.pack(HEADER_OUT.size + len(body), error, unique)
                    os.write(self._fd, head + body)
        except OSError:
            os.close(self._fd)  # unmounted

    def _answer(self, opcode: int, node: int) -> tuple[int, bytes | None]:
        if opcode == INIT:
            return 0, struct.pack("<IIIIHHII", 7, 31, 0, 0, 1, 1, 4096, 1) + bytes(32)
        if opcode == GETATTR:
            attributes = struct.pack(
                "<QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, stat.S_IFDIR | 0o700, 2, 0, 0,
                0, BLOCK_BYTES, 0,
            )  # fmt: skip
            return 0, struct.pack("<QII", 1, 0, 0) + attributes
        if opcode == STATFS:
            sizes = (BLOCKS, BLOCKS, BLOCKS, 0, 0)
            return 0, struct.pack("<QQQQQIIII", *sizes, BLOCK_BYTES, 255, BLOCK_BYTES, 0) + bytes(
                24
            )
        if opcode == LOOKUP:
            return -ENOENT, b""
        return (0, None) if opcode in (2, 36, 42) else (-ENOSYS, b"")
