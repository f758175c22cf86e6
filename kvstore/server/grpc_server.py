"""`GrpcServer`: the public interface, on a Unix socket and, if configured, on TCP with mTLS."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from kvstore.core.errors import AlreadyRunning, ConfigError
from kvstore.server import sockets
from kvstore.server.budget import MessageBudget
from kvstore.server.grpc_calls import SERVICE_NAMES, Gate
from kvstore.server.service import Service
from kvstore.server.sessions import Sessions

METADATA_BYTES = 8 << 10
STREAMS_A_CONNECTION = 64
CALLS_MAX = 512
KEEPALIVE_MILLISECONDS = 5000
REOPEN_SECONDS = 0.05
REOPEN_SECONDS_MAX = 2.0

_log = logging.getLogger("kvstore.server")


class TcpSettings(Protocol):
    """Where to listen and what to prove and ask: PEM files, all required."""

    @property
    def listen(self) -> str: ...
    @property
    def cert(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def client_ca(self) -> str: ...


class GrpcServer:
    """Two grpc.aio servers at most: their rules of who may call what differ.

    A grpc.aio server ends altogether at a request whose path is no UTF-8, before anything of ours
    is asked: it is opened anew then, which sessions of the lane do not notice. Health answers
    NOT_SERVING until `set_serving(True)`.
    """

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        path: Path,
        *,
        budget: MessageBudget,
        message_bytes: int,
        group: int | None = None,
        tcp: TcpSettings | None = None,
    ) -> None:
        self._service = service
        self._sessions = sessions
        self._path = path
        self._budget = budget
        self._message_bytes = message_bytes
        self._group = group
        self._tcp = tcp
        self._health = HealthServicer()
        self._servers: dict[bool, grpc.aio.Server] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._bound = False
        self.tcp_port = 0

    async def start(self) -> None:
        """Binds and serves; raises AlreadyRunning or ConfigError. The caller holds the lock."""
        await self.set_serving(False)
        self._listen_unix()
        if self._tcp is not None:
            self._listen_tcp(self._tcp)
        for with_certificates, server in self._servers.items():
            await server.start()
            watch = asyncio.create_task(self._keep_open(with_certificates))
            self._watches.append(watch)

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer from now on."""
        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls at once and ends the others after `grace_seconds`."""
        await self._health.enter_graceful_shutdown()
        for watch in self._watches:
            watch.cancel()
        servers, self._servers = self._servers, {}
        await asyncio.gather(*(server.stop(grace_seconds) for server in servers.values()))
        if self._bound:
            self._path.unlink(missing_ok=True)

    def _server(self, with_certificates: bool) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._options(), maximum_concurrent_rpcs=CALLS_MAX)
        gate = Gate(self._service, self._sessions, self._budget, with_certificates)
        # The generated function for health would register it where the gate is not asked.
        server.add_generic_rpc_handlers((gate, _health_handler(self._health)))
        self._servers[with_certificates] = server
        return server

    async def _keep_open(self, with_certificates: bool) -> None:
        """Opens a server anew whenever it has ended by itself, after a growing pause."""
        seconds = REOPEN_SECONDS
        while True:
            await _ended(self._servers[with_certificates])
            _log.error("the gRPC server ended, at a malformed request; it is opened anew")
            is_open = False
            while not is_open:
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, REOPEN_SECONDS_MAX)
                is_open = await self._reopen(with_certificates)

    async def _reopen(self, with_certificates: bool) -> bool:
        try:
            if with_certificates:
                assert self._tcp is not None, "there was a server for it"
                self._listen_tcp(self._tcp)
            else:
                self._listen_unix()
            await self._servers[with_certificates].start()
        except (AlreadyRunning, ConfigError, OSError, RuntimeError) as error:
            _log.error("the gRPC server cannot be opened yet: %s", error)
            return False
        return True

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._message_bytes),
            ("grpc.max_send_message_length", self._message_bytes),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES),
            ("grpc.max_concurrent_streams", STREAMS_A_CONNECTION),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", KEEPALIVE_MILLISECONDS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_MILLISECONDS),
            # Without this one a hung peer is noticed after 60 s, whatever keepalive says.
            ("grpc.http2.ping_timeout_ms", KEEPALIVE_MILLISECONDS),
        ]

    def _listen_unix(self) -> None:
        sockets.remove_stale(self._path)
        server = self._server(with_certificates=False)
        with sockets.private_umask():
            server.add_insecure_port(f"unix:{self._path}")
        self._bound = True
        sockets.share_with(self._path, self._group)

    def _listen_tcp(self, tcp: TcpSettings) -> None:
        server = self._server(with_certificates=True)
        credentials = grpc.ssl_server_credentials(
            [(_read("key", tcp.key), _read("cert", tcp.cert))],
            root_certificates=_read("client_ca", tcp.client_ca),
            require_client_auth=True,
        )
        listen = tcp.listen
        if self.tcp_port:  # opened anew: at the port that it had
            listen = f"{listen.rpartition(':')[0]}:{self.tcp_port}"
        try:
            port = server.add_secure_port(listen, credentials)
        except RuntimeError:
            port = 0
        self.tcp_port = port or self.tcp_port
        if not port:
            raise AlreadyRunning(
                f"server.tcp.listen: {tcp.listen} cannot be bound; free it or choose another"
            )


async def _ended(server: grpc.aio.Server) -> None:
    """Waits for a server to end, which only an error of its own makes it."""
    try:
        # Its future is the server's own: cancelling it would keep the server from stopping.
        await asyncio.shield(server.wait_for_termination())
    except Exception as error:
        _log.debug("a gRPC server ended with %r", error)


def _health_handler(health: HealthServicer) -> grpc.GenericRpcHandler:
    types = {
        "request_deserializer": health_pb2.HealthCheckRequest.FromString,
        "response_serializer": health_pb2.HealthCheckResponse.SerializeToString,
    }
    return grpc.method_handlers_generic_handler(
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        {
            "Check": grpc.unary_unary_rpc_method_handler(health.Check, **types),
            "Watch": grpc.unary_stream_rpc_method_handler(health.Watch, **types),
        },
    )


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"server.tcp.{key}: {path} cannot be read ({error.strerror}); correct the path"
        ) from error
