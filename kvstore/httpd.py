"""The HTTP endpoint for machines that watch: /metrics, /live and /ready, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore.core.errors import ConfigError

CONTENT_TYPE_METRICS = "text/plain; version=0.0.4; charset=utf-8"
REQUESTS_AT_ONCE_MAX = 8
IDLE_SECONDS_MAX = 5.0

# Answers None while all is well, else one sentence with the reason.
Probe = Callable[[], str | None]


def always_well() -> str | None:
    return None


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "kvstore"
    sys_version = ""
    timeout = IDLE_SECONDS_MAX

    def do_GET(self) -> None:
        status, content_type, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: a scrape every few seconds is no news."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(
        self, address: tuple[str, int], render: Callable[[], bytes], live: Probe, ready: Probe
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._render = render
        self._probes = {"/live": live, "/ready": ready}
        self._places = threading.BoundedSemaphore(REQUESTS_AT_ONCE_MAX)
        super().__init__(address, _Handler)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            return 200, CONTENT_TYPE_METRICS, self._render()
        probe = self._probes.get(path)
        if probe is None:
            return 404, "text/plain", b"There is /metrics, /live and /ready.\n"
        reason = probe()
        return 503 if reason else 200, "text/plain", f"{reason or 'ok'}\n".encode()

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
    (starting, draining, degraded). Both are called from this server's threads.
    """

    def __init__(
        self,
        address: tuple[str, int],
        render: Callable[[], bytes],
        live: Probe = always_well,
        ready: Probe = always_well,
    ) -> None:
        try:
            self._server = _Server(address, render, live, ready)
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
