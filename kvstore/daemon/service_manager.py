"""`ServiceManager`: tells systemd how the daemon is, by the protocol of sd_notify(3).

Datagrams of `NAME=value` lines go to the socket in $NOTIFY_SOCKET; without one nothing is told.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

# A watchdog is fed in this part of its time, so that one late beat kills nobody.
BEAT_SHARE = 1 / 3
STATUS_CHARS_MAX = 400


class ServiceManager:
    """The manager that started this process, if one did and wants to be told.

    The variables are taken out of `environ`, so that no child speaks in the daemon's name.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        path = environ.pop("NOTIFY_SOCKET", "")
        microseconds = environ.pop("WATCHDOG_USEC", "")
        watched = environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._socket: socket.socket | None = None
        self._beat_seconds = 0.0
        self._next_beat = 0.0
        self._shown = ""
        if not path:
            return
        # A leading @ stands for the zero byte of an abstract name.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        if microseconds.isdecimal() and watched:
            self._beat_seconds = int(microseconds) / 1e6 * BEAT_SHARE

    def ready(self, status: str) -> None:
        """The doors are open, or a reload is over."""
        self._tell("READY=1", _status(status))

    def reloading(self, now: float) -> None:
        """The configuration is read again; `now` is by the monotonic clock, as systemd's is."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={int(now * 1e6)}")

    def stopping(self, status: str) -> None:
        self._tell("STOPPING=1", _status(status))

    def status(self, text: str) -> None:
        """What `systemctl status` shows; told when it changes."""
        if _status(text) != self._shown:
            self._tell(_status(text))

    def beat(self, now: float) -> None:
        """The owner thread runs; told as often as the watchdog needs it."""
        if self._beat_seconds and now >= self._next_beat:
            self._next_beat = now + self._beat_seconds
            self._tell("WATCHDOG=1")

    def close(self) -> None:
        """Nothing is told any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *lines: str) -> None:
        if self._socket is None:
            return
        self._shown = next((line for line in lines if line.startswith("STATUS=")), self._shown)
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            # A manager that is gone or does not read is no reason to stop serving.
            return


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split())[:STATUS_CHARS_MAX]
