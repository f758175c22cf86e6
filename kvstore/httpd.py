"""The HTTP endpoint for machines that watch: /metrics, /live and /ready, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError

CONTENT_TYPE_METRICS = "text/plain; version=0.0.4; charset=utf-8"
REQUESTS_AT_ONCE_MAX = 8
IDLE_SECONDS_MAX = 5.0

# Answers None while all is well, else one sentence with the reason.
Probe = Callable[[], str | None]


class Request(NamedTuple):
    """What is asked, by whom: the path, the Host header, and both ends of the connection."""

    path: str
    host: str
    client: tuple[str, int]
    server: tuple[str, int]


class Answer(NamedTuple):
    """What is answered, with headers beside type and length."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = MappingProxyType({})


# Answers None for a path that is not its own.
Pages = Callable[[Request], Answer | None]


def no_pages(request: Request) -> Answer | None:
    return None


def always_well() -> str | None:
    return None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "kvstore"
    sys_version = ""
    timeout = IDLE_SECONDS_MAX

    def do_GET(self) -> None:
        local = self.connection.getsockname()
        answer = self.server.answer(Request(
            self.path.partition("?")[0], self.headers.get("Host", ""),
            (str(self.client_address[0]), self.client_address[1]), (local[0], local[1]),
        ))  # fmt: skip
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a scrape every few seconds is no news."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(
        self,
        address: tuple[str, int],
        render: Callable[[], bytes],
        live: Probe,
        ready: Probe,
        pages: Pages,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._render, self._pages = render, pages
        self._probes = {"/live": live, "/ready": ready}
        self._places = threading.BoundedSemaphore(REQUESTS_AT_ONCE_MAX)
        super().__init__(address, _Handler)

    def answer(self, request: Request) -> Answer:
        if request.path == "/metrics":
            return Answer(200, CONTENT_TYPE_METRICS, self._render())
        probe = self._probes.get(request.path)
        if probe is None:
            unknown = Answer(404, "text/plain", b"There is /metrics, /live and /ready.\n")
            return self._pages(request) or unknown
        reason = probe()
        return Answer(503 if reason else 200, "text/plain", f"{reason or 'ok'}\n".encode())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hands the connection to a thread, or drops it when all places are taken."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A watcher that hangs up is its own problem."""


class WatchServer:
    """Serves `render()` and the two probes until `stop`; a context manager.

    `live` fails when the daemon should be killed, `ready` while it should get no traffic
    (starting, draining, degraded). `pages` may answer other paths. All are called from this
    server's threads.
    """

    def __init__(
        self,
        address: tuple[str, int],
        render: Callable[[], bytes],
        live: Probe = always_well,
        ready: Probe = always_well,
        pages: Pages = no_pages,
    ) -> None:
        try:
            self._server = _Server(address, render, live, ready, pages)
        except OSError as error:
            raise ConfigError(
                f"server.metrics: {address[0]}:{address[1]} cannot be listened on "
                f"({error.strerror}); pass another address, or '' to do without"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="kvstore-watch",
            daemon=True,
        )
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) listened on; the port is real where 0 was asked for."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(IDLE_SECONDS_MAX)

    def __enter__(self) -> WatchServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
