"""What operators' verbs share: an admin's connection, and sizes and durations as values."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from kvstore.cli.output import target
from kvstore.core.errors import PermissionDenied
from kvstore.core.sizes import parse_size

if TYPE_CHECKING:
    from kvstore.client import KVClient

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")


@contextmanager
def connected(socket: str | None) -> Iterator[KVClient]:
    """A client of the daemon whose calls may be an operator's; raises if they may not."""
    from kvstore.client import KVClient

    address = target(socket)
    if not address.startswith("unix:"):
        raise click.UsageError(
            f"--socket is {address!r}; pass a socket's path: operators work on the daemon's host",
            click.get_current_context(silent=True),
        )
    with KVClient.connect(address, client_name="kvstore command line", staging_bytes=1) as client:
        if client.role != "admin":
            verb = click.get_current_context().command_path
            raise PermissionDenied(
                f"`{verb}` needs the admin role, and at {socket_path(address)} uid {os.geteuid()} "
                'is an engine; run it as an admin, or add an [[access]] rule with role = "admin"'
            )
        yield client


def socket_path(address: str) -> str:
    """The path in a `unix:` address."""
    return address.removeprefix("unix://").removeprefix("unix:")


def size_value(text: str) -> int:
    """Type of an option: bytes such as `8GiB`, or `none`, which takes a limit away and is 0."""
    if text == "none":
        return 0
    try:
        return int(parse_size(text))
    except ValueError as error:
        raise click.BadParameter(f"{error}, or none") from error


def duration_value(text: str) -> float:
    """Type of an option: seconds such as `90`, `90s`, `15m`, `1h30m` or `2d`."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def parse_duration(text: str) -> float:
    """Seconds of `90`, `1.5h` or `1h30m`; raises ValueError."""
    compact = text.replace(" ", "")
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", compact):
        return float(compact)
    if not re.fullmatch(f"(?:{_PART.pattern})+", compact):
        raise ValueError(f"{text!r} is no duration; write it like 90s, 15m, 1h30m or 2d")
    return sum(float(number) * SECONDS[unit] for number, unit in _PART.findall(compact))


def duration_text(seconds: float) -> str:
    """For people, what `parse_duration` reads: `1h30m`, `90ms`, `12.5s`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g}ms"
    if seconds < 60:
        return f"{seconds:.3g}s"
    parts, left = [], round(seconds)
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(SECONDS[unit]))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts)


def counted(count: int, noun: str) -> str:
    """`1 block`, `1,234 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's standard error that work goes on; what it yields changes the text."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text: progress.update(task, description=text)
