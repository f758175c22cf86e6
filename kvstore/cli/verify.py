"""`kvstore verify`: hashes every stored block again."""

from __future__ import annotations

import click

from kvstore.cli.admin import connected, counted, duration_text, spinner
from kvstore.cli.output import finish, json_option, print_json, socket_option
from kvstore.core.clock import perf_seconds
from kvstore.core.sizes import format_bytes


@click.command()
@click.option("--tier", default="", metavar="TIER", help="Only this one: host or disk.")
@socket_option
@json_option
def command(tier: str, socket: str | None, as_json: bool) -> None:
    """Check all stored bytes against their checksums, while the daemon serves.

    A block that does not match is dropped, with every block that depends on it, and named. Exit 1
    if there was one.
    """
    with connected(socket) as client:
        count = counted(client.status().block_count, "block")
        began = perf_seconds()
        with spinner(f"checking {count}"):
            result = client.admin.verify(tier)
        seconds = perf_seconds() - began
    if as_json:
        print_json({
            "verified_blocks": result.verified_blocks,
            "verified_bytes": result.verified_bytes,
            "corrupt_blocks": result.corrupt_blocks,
            "findings": list(result.findings),
            "seconds": seconds,
        })  # fmt: skip
    else:
        for finding in result.findings:
            click.echo(finding)
        verdict = f"{result.corrupt_blocks:,} corrupt" if result.corrupt_blocks else "all match"
        click.echo(
            f"{counted(result.verified_blocks, 'block')} ({format_bytes(result.verified_bytes)}) "
            f"checked in {duration_text(seconds)}: {verdict}"
        )
    finish(not result.corrupt_blocks)
