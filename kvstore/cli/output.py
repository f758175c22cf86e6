"""What all verbs share: options, printing as table or JSON, and errors as exit codes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from kvstore.core.config import Config, find_socket, load
from kvstore.core.errors import AlreadyRunning, ConfigError, KVStoreError, StoreUnavailable

TIERS = ("hbm", "host", "disk")
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE = 0, 1, 2, 3
F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)
config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML configuration; every key has a default.",
)
_socket = click.option(
    "--socket",
    metavar="PATH",
    help="The daemon's socket; else $KVSTORE_SOCKET, $XDG_RUNTIME_DIR/kvstore/kvstore.sock, "
    "/run/kvstore/kvstore.sock.",
)


def socket_option(function: F) -> F:
    """Adds --socket; the verb finds the daemon with `target(socket)`."""
    return _socket(function)


def target(socket: str | None) -> str:
    """Address for `KVClient.connect`: a path becomes unix:///path, host:port stays."""
    if socket and (socket.startswith("unix:") or ("/" not in socket and ":" in socket)):
        return socket
    return f"unix://{Path(find_socket(os.environ, socket)).absolute()}"


def load_config(path: Path | None, **sections: Any) -> Config:
    """The configuration as the daemon would see it; `sections` are laid over it."""
    from kvstore.policies import residency  # noqa: F401  (registers the policies)
    from kvstore.policies.base import policy_names

    config = load(path, os.environ, overrides=sections)
    known = policy_names()
    policy, fix = config.policy, f"pass one of {', '.join(known)}"
    if policy.eviction not in known:
        raise ConfigError(f"policy.eviction is {policy.eviction!r}; {fix}")
    for name in policy.shadows:
        if name not in known:
            raise ConfigError(f"policy.shadows has {name!r}; {fix}")
    return config


def by_speed(tiers: Iterable[str]) -> list[str]:
    """Names of tiers, the fastest first."""
    order = {name: i for i, name in enumerate(TIERS)}
    return sorted(tiers, key=lambda name: (order.get(name, len(order)), name))


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    title: str = "",
    right: Collection[str] = (),
    header: bool = True,
) -> None:
    """A table for people; numbers and the columns in `right` to the right, nothing cut off when
    piped.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, show_header=header
    )
    for i, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[i], int | float) for row in rows)
        justify: Literal["left", "right"] = "right" if numeric or column in right else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(cell_text(cell) for cell in row))
    console.print(table)


def cell_text(value: Any) -> str:
    """Plain text of a cell; brackets are no markup."""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text.replace("[", r"\[")


def finish(ok: bool) -> None:
    """Ends a verb whose output is printed: exit 0, or 1 if what it did failed."""
    if not ok:
        raise click.exceptions.Exit(EXIT_FAILED)


def exit_code(error: BaseException) -> int:
    if isinstance(error, ConfigError | AlreadyRunning | click.UsageError):
        return EXIT_USAGE
    if isinstance(error, StoreUnavailable):
        return EXIT_UNREACHABLE
    return EXIT_FAILED


def sentence(error: BaseException) -> str:
    """The one sentence that a person gets to read of `error`."""
    if isinstance(error, click.UsageError):
        where = error.ctx.command_path if error.ctx else "kvstore"
        return f"{error.format_message().rstrip('.')}; see `{where} --help`"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and not isinstance(error, KVStoreError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
