"""`kvstore flush`: has blocks be on disk, where they outlive a reboot."""

from __future__ import annotations

import click

from kvstore.cli import spaces
from kvstore.cli.admin import connected, counted, duration_text, spinner
from kvstore.cli.output import finish, json_option, print_json, socket_option
from kvstore.core.clock import perf_seconds


@click.command()
@click.option(
    "--space", metavar="ID", callback=spaces.check_digits,
    help="Only of one space, by its id or the id's first 8 digits or more.",
)  # fmt: skip
@socket_option
@json_option
def command(space: str | None, socket: str | None, as_json: bool) -> None:
    """Write what the host tier has and the disk tier lacks, and wait until it is durable.

    It counts blocks that are READY when it begins. Exit 1 if some had to be left out, as where the
    disk has no room for them, or there is no disk tier.
    """
    with connected(socket) as client:
        space_id = bytes.fromhex(spaces.find(client, space)["space_id"]) if space else b""
        began = perf_seconds()
        with spinner("writing to disk"):
            result = client.admin.flush(space_id)
        seconds = perf_seconds() - began
    durable, left_out = result.durable_blocks, result.left_out_blocks
    if as_json:
        print_json({"durable_blocks": durable, "left_out_blocks": left_out, "seconds": seconds})
    else:
        rest = f"; {left_out:,} left out, see `kvstore status` for why" if left_out else ""
        click.echo(f"{counted(durable, 'block')} on disk, after {duration_text(seconds)}{rest}")
    finish(not left_out)
