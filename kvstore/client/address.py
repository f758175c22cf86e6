"""Where a daemon is, and the transport that reaches it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.client.lane import LaneTransport
from kvstore.client.transport import Transport
from kvstore.core.clock import Clock
from kvstore.core.config import find_socket
from kvstore.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TLSConfig:
    """Paths of PEM files for mutual TLS; `server_name` if the certificate names another host."""

    ca: str
    cert: str
    key: str
    server_name: str = ""


def connector(address: str | None, tls: TLSConfig | None, clock: Clock) -> Callable[..., Transport]:
    """What makes connections to `address`, given a time limit in seconds."""
    if address is None or not (host := _host_and_port(address)):
        path = _socket_path(address)
        return lambda timeout: LaneTransport(path, timeout, clock)
    if tls is None:
        raise InvalidRequest(
            f"{address} is on the network; pass tls=TLSConfig(ca=..., cert=..., key=...)"
        )
    # Not imported above: gRPC takes longer to import than everything else together.
    module = importlib.import_module("kvstore.client.grpc_transport")
    return lambda timeout: module.GrpcTransport(host, tls, timeout)


def _socket_path(address: str | None) -> str:
    if address is None:
        return find_socket(os.environ)
    path = address.removeprefix("unix://").removeprefix("unix:")
    if not path:
        raise InvalidRequest(f"the address {address!r} names no socket; pass unix:///path")
    return path


def _host_and_port(address: str) -> str:
    """The `host:port` in `address`, empty for a socket's path."""
    if address.startswith(("unix:", "/", ".")):
        return ""
    host = address.removeprefix("tcp://")
    name, _, port = host.rpartition(":")
    if not name or not port.isdecimal():
        raise InvalidRequest(f"the address is {address!r}; pass unix:///path or host:port")
    return host
