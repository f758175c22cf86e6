"""`kvstore clear`: drops blocks for good."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli import spaces
from kvstore.cli.admin import connected, counted
from kvstore.cli.output import finish, json_option, print_json, socket_option
from kvstore.core.sizes import format_bytes

if TYPE_CHECKING:
    from kvstore.client import KVClient


@click.command()
@click.option(
    "--space", metavar="ID", callback=spaces.check_digits,
    help="Of one space, by its id or the id's first 8 digits or more.",
)  # fmt: skip
@click.option("--tenant", metavar="NAME", help="Of all spaces of a tenant.")
@click.option("--all", "everything", is_flag=True, help="Of all spaces.")
@click.option("--yes", is_flag=True, help="Do not ask; required where there is no terminal.")
@socket_option
@json_option
def command(
    space: str | None,
    tenant: str | None,
    everything: bool,
    yes: bool,
    socket: str | None,
    as_json: bool,
) -> None:
    """Drop every block of a space, of a tenant, or of all.

    They are gone at once and do not come back with a restart. A lease on one of them is lost: its
    engine recomputes.
    """
    if [space is not None, tenant is not None, everything].count(True) != 1:
        raise click.UsageError("pass exactly one of --space ID, --tenant NAME and --all")
    if tenant == "":
        raise click.UsageError("--tenant is empty; name the tenant, or pass --all for every one")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("clear drops blocks for good; add --yes to say that you mean it")
    with connected(socket) as client:
        chosen = _chosen(client, space, tenant)
        if not yes and not click.confirm(_question(chosen), err=True):
            click.echo("nothing was dropped", err=True)
            finish(False)
        target: dict[str, Any] = {"all": True}
        if space is not None:
            target = {"space_id": bytes.fromhex(chosen[0]["space_id"])}
        elif tenant is not None:
            target = {"tenant": tenant}
        removed = client.admin.clear(**target).removed_blocks
    if as_json:
        print_json({"removed_blocks": removed, "space_count": len(chosen)})
    else:
        click.echo(f"{counted(removed, 'block')} dropped from {counted(len(chosen), 'space')}")


def _chosen(client: KVClient, space: str | None, tenant: str | None) -> list[dict[str, Any]]:
    if space is not None:
        return [spaces.find(client, space)]
    return [found for found in spaces.read(client) if tenant in (None, found["tenant"])]


def _question(chosen: list[dict[str, Any]]) -> str:
    blocks = sum(found["block_count"] for found in chosen)
    size = format_bytes(sum(map(spaces.total_bytes, chosen)))
    models = ", ".join(sorted({found["spec"]["model"] for found in chosen}))
    of = f" ({models})" if models else ""
    return (
        f"Drop {counted(blocks, 'block')}, {size}, of {counted(len(chosen), 'space')}{of} for good?"
    )
