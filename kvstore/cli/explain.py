"""`kvstore explain`: why a request was served as it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.admin import connected
from kvstore.cli.output import json_option, print_json, socket_option
from kvstore.core.errors import NotFound
from kvstore.core.keys import BLOCK_KEY_BYTES

if TYPE_CHECKING:
    from kvstore.client import KVClient


@click.command()
@click.argument("target", metavar="REQUEST_ID|KEY")
@socket_option
@json_option
def command(target: str, socket: str | None, as_json: bool) -> None:
    """Show the plan of a request, the numbers it was chosen by, and what came of it.

    REQUEST_ID is the one that the engine gave; a printed block KEY stands for the last request
    that matched the block and was planned by measured costs. The daemon remembers
    limits.decisions_kept lookups.
    """
    with connected(socket) as client:
        answer = _ask(client, target)
    if as_json:
        print_json(json.loads(answer.document))
    else:
        click.echo(answer.text)


def _ask(client: KVClient, target: str) -> Any:
    key = key_of(target)
    if not key:
        return client.admin.explain(request_id=target)
    try:
        return client.admin.explain(block_key=key)
    except NotFound:
        try:
            return client.admin.explain(request_id=target)  # some engines' ids look like keys
        except NotFound:
            pass
        raise


def key_of(target: str) -> bytes:
    """The block key that these digits are; empty if they are none."""
    try:
        key = bytes.fromhex(target)
    except ValueError:
        return b""
    return key if len(key) == BLOCK_KEY_BYTES and len(target) == 2 * BLOCK_KEY_BYTES else b""
