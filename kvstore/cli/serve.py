"""`kvstore serve`: runs the daemon in the foreground until it is drained or stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import config_option, json_option, load_config, print_json
from kvstore.core.config import read


@click.command()
@config_option
@click.option("--socket", metavar="PATH", help="Overrides server.socket.")
@click.option("--metrics", metavar="HOST:PORT", help="Overrides server.metrics; '' turns it off.")
@click.option("--host-size", metavar="SIZE", help="Overrides tiers.host.size, such as 8GiB.")
@click.option(
    "--journal", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write down in a new FILE what every decision follows from, for `kvstore trace check`.",
)  # fmt: skip
@json_option
def command(
    config_path: Path | None,
    socket: str | None,
    metrics: str | None,
    host_size: str | None,
    journal: Path | None,
    as_json: bool,
) -> None:
    """Run the daemon.

    SIGTERM drains (server.drain_seconds) and stops, a second one stops at once; SIGHUP reads the
    configuration again, applies what needs no restart and names the rest in the log. The host pool
    stays for the next start, unless `kvstore drain --free` removes it; a disk tier always stays.
    """
    # The library writes lines of its own past our logging, with bytes of its peers in them, as many
    # as these like. It reads this when it is imported; who looks for a fault in it may set it.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvstore.core.clock import SystemClock
    from kvstore.daemon import serve
    from kvstore.daemon.reload import ConfigSource
    from kvstore.logs import configure

    sections = _sections(socket, metrics, host_size)
    config = load_config(config_path, **sections)
    configure(SystemClock(), config.logging.format, config.logging.level)
    if as_json:
        print_json({"socket": config.server.socket, "metrics": config.server.metrics})

    source = ConfigSource(
        lambda: load_config(config_path, **sections),
        lambda: read(config_path, os.environ, sections),
    )
    serve(config, source, journal)


def _sections(socket: str | None, metrics: str | None, host_size: str | None) -> dict[str, Any]:
    server = {"socket": socket, "metrics": metrics}
    sections: dict[str, Any] = {"server": {k: v for k, v in server.items() if v is not None}}
    if host_size is not None:
        sections["tiers"] = {"host": {"size": host_size}}
    return sections
