"""An empty unary gRPC call in Python: what a daemon costs that does nothing, the lookup's baseline.

The plainest and fastest set-up: a synchronous server in a process of its own on a Unix socket, no
message classes, no interceptors. `python -m kvstore.bench.empty_rpc SOCKET` is the server.
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import grpc

METHOD, SERVICE = "Nothing", "kvstore.bench.Empty"
READY_SECONDS = 30.0


def serve(socket: str) -> None:
    """Answers until standard input closes."""
    handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
    )
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    sys.stdin.buffer.read()
    server.stop(None)


class EmptyRpc:
    """The server's process and a channel to it; `call` is the empty call."""

    def __init__(self, directory: Path) -> None:
        socket = directory / "empty.sock"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.bench.empty_rpc", str(socket)],
            stdin=subprocess.PIPE,
            cwd="/",
        )
        self._channel = grpc.insecure_channel(f"unix://{socket}")
        self._call = self._channel.unary_unary(f"/{SERVICE}/{METHOD}")

    def __enter__(self) -> EmptyRpc:
        try:
            grpc.channel_ready_future(self._channel).result(READY_SECONDS)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def call(self) -> None:
        self._call(b"")

    def close(self) -> None:
        self._channel.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


if __name__ == "__main__":
    serve(sys.argv[1])
