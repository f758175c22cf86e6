"""`kvstore drain`: the daemon finishes what it has begun and leaves."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.admin import (
    connected,
    counted,
    duration_text,
    duration_value,
    socket_path,
    spinner,
)
from kvstore.cli.output import finish, json_option, print_json, socket_option, target
from kvstore.core.clock import perf_seconds, sleep
from kvstore.core.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client import KVClient

POLL_SECONDS = 0.05
CLOSE_SECONDS = 30.0  # for the copies under way, after the deadline
DEADLINE_SECONDS_MAX = 3600.0
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


@click.command()
@click.option("--free", is_flag=True, help="Give the host pool up instead of keeping it.")
@click.option(
    "--deadline", type=duration_value, metavar="DURATION", default="10s", show_default=True,
    help="How long leases and puts may take to end; 0 is at once, 1h the most.",
)  # fmt: skip
@socket_option
@json_option
def command(free: bool, deadline: float, socket: str | None, as_json: bool) -> None:
    """Let the daemon refuse new work, end what is under way, and leave; wait until it is gone.

    A pool in shared memory stays for the next start unless --free is given. Blocks that would go
    with the pool (--free, or sealed memory) are written to the disk tier first, if there is one,
    as far as the deadline allows. Ctrl-C ends the waiting, not the drain. Exit 1 if the daemon is
    still there well after the deadline.
    """
    if deadline > DEADLINE_SECONDS_MAX:
        raise click.BadParameter("pass 1h at most", param_hint="--deadline")
    began = perf_seconds()
    with connected(socket) as client, _process(socket_path(target(socket))) as process:
        before = client.status()
        client.admin.drain(deadline, free)
        with spinner("draining") as show:
            gone, last = _watch(client, process, before, began + deadline + CLOSE_SECONDS, show)
    seconds = perf_seconds() - began
    late = seconds >= deadline
    result = {
        "pid": before.pid,
        "gone": gone,
        "freed": free and gone,
        "cut_leases": last.lease_count if late else 0,
        "cut_puts": last.reservation_count if late else 0,
        "seconds": seconds,
    }
    if as_json:
        print_json(result)
    else:
        click.echo(_text(result))
    finish(gone)


@contextmanager
def _process(path: str) -> Iterator[select.poll | None]:
    """What becomes readable when the process at the socket has ended.

    None if it is not to be seen from here, as from another container.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"{path}.lane")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid = CREDENTIALS.unpack(raw)[0]
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        yield ended
    finally:
        os.close(descriptor)


def _watch(
    client: KVClient,
    process: select.poll | None,
    before: Any,
    until: float,
    show: Callable[[str], None],
) -> tuple[bool, Any]:
    """Waits for the daemon's end; answers with whether it came, and the last status before it."""
    last, answers = before, True
    while perf_seconds() < until:
        if process is not None and process.poll(POLL_SECONDS * 1000):
            return True, last
        try:
            # Whoever restarts daemons may have done so: that one is another.
            answers = answers and (status := client.status()).pid == before.pid
        except KVStoreError:
            answers = False
        if answers:
            last = status
            leases, puts = status.lease_count, status.reservation_count
            show(f"draining: {counted(leases, 'lease')} and {counted(puts, 'put')} under way")
        elif process is None:
            return True, last
        else:
            show("closing the pool")
        sleep(POLL_SECONDS)
    return False, last


def _text(result: dict[str, Any]) -> str:
    pid, cuts = result["pid"], []
    if not result["gone"]:
        return f"the daemon (pid {pid}) is still there; end it with `kill -9 {pid}`"
    for count, noun in ((result["cut_leases"], "lease"), (result["cut_puts"], "put")):
        cuts += [counted(count, noun)] if count else []
    cut = f"; {' and '.join(cuts)} cut short" if cuts else ""
    pool = "its pool is given up" if result["freed"] else "a shm pool stays for the next start"
    return f"the daemon left after {duration_text(result['seconds'])}{cut}; {pool}"
