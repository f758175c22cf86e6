"""What the daemon tells the service manager, over a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.daemon.service_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """(NOTIFY_SOCKET, the socket at its other end)."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@kvt-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        end.setblocking(False)
        yield name, end


def told(end: socket.socket) -> list[str]:
    messages = []
    while True:
        try:
            messages.append(end.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_the_life_of_a_daemon_is_told(manager: tuple[str, socket.socket]) -> None:
    """Ready, reloading with the time, and stopping; a status only when it changes, as one line."""
    name, end = manager
    environ = {"NOTIFY_SOCKET": name, "OTHER": "stays"}
    with closing(ServiceManager(environ)) as service:
        assert environ == {"OTHER": "stays"}
        service.ready("serving")
        service.status("serving")
        service.status("degraded: the disk\nis full")
        service.reloading(12.5)
        service.ready("serving")
        service.stopping("draining")
    assert told(end) == [
        "READY=1\nSTATUS=serving",
        "STATUS=degraded: the disk is full",
        "RELOADING=1\nMONOTONIC_USEC=12500000",
        "READY=1\nSTATUS=serving",
        "STOPPING=1\nSTATUS=draining",
    ]


def test_a_watchdog_is_fed_three_times_in_its_time(manager: tuple[str, socket.socket]) -> None:
    """As often as that and no more; not at all where the watchdog is for another process."""
    name, end = manager
    watched = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    with closing(ServiceManager(dict(watched))) as service:
        for tick in range(120):
            service.beat(100.0 + tick * 0.05)
    assert told(end) == ["WATCHDOG=1"] * 6
    with closing(ServiceManager({**watched, "WATCHDOG_PID": "1"})) as service:
        service.beat(100.0)
    assert told(end) == []


def test_a_daemon_without_a_manager_tells_nobody(tmp_path: Path) -> None:
    """Without NOTIFY_SOCKET, with one that is gone and with one that is full, it goes on."""
    ServiceManager({"WATCHDOG_USEC": "1000000"}).beat(1.0)
    with closing(ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")})) as service:
        service.ready("serving")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "full"))
        with closing(ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "full")})) as service:
            for i in range(2000):
                service.status(f"{i}" * 100)
        end.setblocking(False)
        assert 0 < len(told(end)) < 2000
