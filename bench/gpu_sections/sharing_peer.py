"""A process with device memory of its own or another's, for the checks of sharing."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from kvstore.cuda.device import Device, Event, Shared, Stream


class Peer:
    """Carries out what it is told; every method with a public name is a request."""

    def __init__(self) -> None:
        self.device = Device()
        self.stream: Stream = self.device.stream()
        self.arena = self.base = self.length = 0
        self.shared: Shared | None = None
        self.scratch = 0
        self.pending: Event | None = None

    def allocate(self, length: int, offset: int, share: int) -> dict[str, Any]:
        self.arena = self.device.allocate(length)
        return self.share(offset, share)

    def share(self, offset: int, share: int) -> dict[str, Any]:
        self.base, self.length = self.arena + offset, share
        shared = self.device.share(self.base, share)
        return {"handle": shared.handle.hex(), "offset": shared.offset, "length": shared.length}

    def share_torch(self) -> str:
        import torch

        tensor = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")[1 << 20 :]
        torch.cuda.synchronize()
        shared = self.device.share(tensor.data_ptr(), 1 << 20)
        return f"shared at offset {shared.offset}"

    def open(self, shared: dict[str, Any]) -> bool:
        handle = bytes.fromhex(shared["handle"])
        self.shared = Shared(handle, shared["offset"], shared["length"])
        self.base, self.length = self.device.open(self.shared), shared["length"]
        return True

    def close(self) -> bool:
        assert self.shared is not None, "open comes first"
        self.device.close(self.base, self.shared)
        return True

    def free(self) -> bool:
        self.device.free(self.arena)
        return True

    def fill(self, value: int, at: int, length: int) -> bool:
        self.stream.fill(self.base + at, value, length)
        self.stream.synchronize()
        return True

    def read(self, at: int, length: int) -> list[int]:
        """Least and greatest byte of a range."""
        target = np.zeros(length, np.uint8)
        self.stream.copy(target.ctypes.data, self.base + at, length)
        self.stream.synchronize()
        return [int(target.min()), int(target.max())]

    read_again = read

    def wait_then_fill(self, at: int, value: int, fill: int, to: int) -> bool:
        self.stream.wait_value(self.base + at, value)
        self.stream.fill(self.base + to, fill, 4096)
        self.pending = self.stream.record()
        return True

    def signal(self, at: int, value: int) -> bool:
        self.stream.write_value(self.base + at, value)
        self.stream.synchronize()
        return True

    def busy(self) -> bool:
        assert self.pending is not None, "nothing was asked for"
        return not self.pending.done()

    def finish(self, **_: int) -> bool:
        assert self.pending is not None, "nothing was asked for"
        self.pending.synchronize()
        return True

    def copy_on(self, length: int) -> bool:
        """Begins some 0.1 s of copies out of the shared range."""
        self.scratch = self.device.allocate(length)
        for _ in range(max(2, int(0.1 * self.copy_speed(length) / (2 * length)))):
            self.stream.copy(self.scratch, self.base, length)
        self.pending = self.stream.record()
        return True

    def copy_speed(self, length: int) -> float:
        self.scratch = self.device.allocate(length)
        self.stream.copy(self.scratch, self.base, length)
        start = self.stream.record(timing=True)
        for _ in range(10):
            self.stream.copy(self.scratch, self.base, length)
        end = self.stream.record(timing=True)
        end.synchronize()
        return 2 * 10 * length / end.seconds_since(start)

    def own_memory(self) -> bool:
        address = self.device.allocate(1 << 20)
        self.stream.fill(address, 1, 1 << 20)
        self.stream.synchronize()
        return True


def main() -> None:
    peer = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            peer = peer or Peer()
            answer = {"result": getattr(peer, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
