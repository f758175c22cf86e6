"""The endpoint for watchers: /metrics, /live, /ready."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.core.errors import ConfigError
from kvstore.httpd import REQUESTS_AT_ONCE_MAX, WatchServer
from kvstore.metrics import Metrics


class Daemon:
    """A daemon's two answers, to be changed by a test."""

    stuck: str | None = None
    unready: str | None = None

    def live(self) -> str | None:
        return self.stuck

    def ready(self) -> str | None:
        return self.unready


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def server(daemon: Daemon) -> Iterator[WatchServer]:
    with WatchServer(("127.0.0.1", 0), Metrics().render, daemon.live, daemon.ready) as server:
        yield server


def get(server: WatchServer, path: str, method: str = "GET") -> tuple[int, str]:
    host, port = server.address
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_scraped(server: WatchServer) -> None:
    """GET /metrics answers with every metric in Prometheus text."""
    status, text = get(server, "/metrics")
    assert status == 200
    assert 'kvstore_tier_capacity_bytes{tier="host"} 0.0' in text
    assert get(server, "/metrics", "HEAD") == (200, "")


def test_probes_say_why_not(server: WatchServer, daemon: Daemon) -> None:
    """/ready and /live answer 503 with one sentence while the daemon says what is wrong."""
    assert get(server, "/ready") == (200, "ok\n")
    daemon.unready = "draining: 3 leases are held"
    assert get(server, "/ready") == (503, "draining: 3 leases are held\n")
    assert get(server, "/live") == (200, "ok\n")
    daemon.stuck = "the owner thread has not answered for 30 s"
    assert get(server, "/live")[0] == 503


@pytest.mark.parametrize("path", ["/", "/metrics/", "/../etc/passwd", "/status"])
def test_other_paths_are_not_found(server: WatchServer, path: str) -> None:
    """Nothing but the three paths is served."""
    assert get(server, path)[0] == 404


def test_other_methods_are_refused(server: WatchServer) -> None:
    """Only GET and HEAD are answered."""
    assert get(server, "/metrics", "POST")[0] == 501


def test_idle_connections_are_bounded(server: WatchServer) -> None:
    """Peers that connect and say nothing take at most the places there are, and only they wait."""
    with ExitStack() as stack:
        for _ in range(REQUESTS_AT_ONCE_MAX):
            stack.enter_context(socket.create_connection(server.address))
        extra = stack.enter_context(socket.create_connection(server.address))
        extra.settimeout(5)
        assert extra.recv(1) == b""


def test_taken_address_is_one_sentence(server: WatchServer) -> None:
    """A second endpoint on one address is a configuration error naming the key."""
    with pytest.raises(ConfigError, match=r"server\.metrics"):
        WatchServer(server.address, Metrics().render)
