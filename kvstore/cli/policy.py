"""`kvstore policy`: which blocks leave when room is needed."""

from __future__ import annotations

import click

from kvstore.cli.admin import connected
from kvstore.cli.output import json_option, print_json, socket_option


@click.group()
def command() -> None:
    """Show or change the eviction policy of a running daemon."""


@command.command("get")
@socket_option
@json_option
def get_command(socket: str | None, as_json: bool) -> None:
    """Print the policy's name."""
    with connected(socket) as client:
        name = client.status().policy
    if as_json:
        print_json({"policy": name})
    else:
        click.echo(name)


@command.command("set")
@click.argument("name")
@socket_option
@json_option
def set_command(name: str, socket: str | None, as_json: bool) -> None:
    """Rank blocks by policy NAME from now on; what is stored stays.

    It holds until the daemon reads its configuration again (restart or SIGHUP), where
    policy.eviction says the same for good. An unknown NAME answers with the list.
    """
    with connected(socket) as client:
        before = client.status().policy
        client.admin.set_policy(name)
    if as_json:
        print_json({"policy": name, "policy_before": before})
    elif name == before:
        click.echo(f"the eviction policy is {name} already")
    else:
        click.echo(f"the eviction policy is {name} now; before it was {before}")
