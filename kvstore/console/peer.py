"""Which user has the other end of a connection within this machine, by the kernel's tables."""

from __future__ import annotations

import socket
from pathlib import Path

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
LOCAL_COLUMN, REMOTE_COLUMN, STATE_COLUMN, UID_COLUMN = 1, 2, 3, 7
ESTABLISHED = "01"


def uid_of_peer(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """The user of the process that connected from `client` to `server`; None if it is not here.

    The tables hold both ends of a connection within the machine, each with the user of its socket;
    of one that comes from elsewhere they hold the server's end alone.
    """
    family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
    wanted = [_entry(family, *client), _entry(family, *server)]
    try:
        lines = TABLES[family].read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    for line in lines:
        columns = line.split()
        if [columns[LOCAL_COLUMN], columns[REMOTE_COLUMN]] == wanted:
            return int(columns[UID_COLUMN]) if columns[STATE_COLUMN] == ESTABLISHED else None
    return None


def _entry(family: socket.AddressFamily, host: str, port: int) -> str:
    """An address as the tables have it: words of 32 bits in the machine's order, then the port."""
    raw = socket.inet_pton(family, host.partition("%")[0])
    words = [raw[i : i + 4][::-1].hex().upper() for i in range(0, len(raw), 4)]
    return f"{''.join(words)}:{port:04X}"
