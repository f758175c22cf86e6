"""`LaneServer`: the local lane. Sessions of this host's clients open, live and die here."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from kvstore.core.errors import LimitReached
from kvstore.core.lane import FrameKind, pack_frame
from kvstore.server import sockets
from kvstore.server.budget import MessageBudget
from kvstore.server.peer import Lane, LanePeer
from kvstore.server.service import Service, error_payload
from kvstore.server.sessions import Sessions

ACCEPTS_A_TURN = 16
TICK_SECONDS = 0.5

_log = logging.getLogger("kvstore.server")


class LaneServer:
    """Listens on a Unix socket of the running loop.

    A connection whose session ended (it was silent for too long) is closed within a tick.
    """

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        path: Path,
        *,
        budget: MessageBudget,
        message_bytes: int,
        connections_max: int,
        group: int | None = None,
    ) -> None:
        self._lane = Lane(service, sessions, budget, message_bytes)
        self._path = path
        self._group = group
        self._connections_max = connections_max
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def connection_count(self) -> int:
        return len(self._lane.peers)

    def start(self) -> None:
        """Binds and listens; raises AlreadyRunning or ConfigError. Needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._listener = sockets.bind(self._path, self._group)
        self._loop.add_reader(self._listener, self._on_connection)
        self._tick()

    def stop_listening(self) -> None:
        """Lets nobody new in; connections go on."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Stops listening and ends every connection with its session."""
        self.stop_listening()
        if self._timer is not None:
            self._timer.cancel()
        for peer in list(self._lane.peers):
            peer.close("the daemon stops")
        # Closing takes a turn of the loop.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def _on_connection(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            assert self._listener is not None
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                return self._pause_accepting(error)
            self._take(connection)

    def _pause_accepting(self, error: OSError) -> None:
        _log.error("no connection can be accepted (%s); raise the open-files limit", error)
        listener = self._listener
        assert listener is not None
        self._loop.remove_reader(listener)
        self._loop.call_later(TICK_SECONDS, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._on_connection)

    def _take(self, connection: socket.socket) -> None:
        if len(self._lane.peers) < self._connections_max:
            LanePeer(self._lane, self._loop, connection)
            return
        refusal = LimitReached("the daemon has no connection left; close one or raise limits")
        payload = error_payload(refusal, "OpenSession")
        with connection:
            connection.setblocking(False)
            try:
                connection.send(pack_frame(FrameKind.ERROR, 0, 0, 0, payload))
            except OSError:
                _log.info("a refused connection did not wait for its answer")

    def _tick(self) -> None:
        for peer in list(self._lane.peers):
            peer.tick()
        self._lane.sessions.prune()
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)
