"""`kvstore pin` and `kvstore unpin`: keep a prefix for a time, and let it go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.admin import connected, counted, duration_text, duration_value
from kvstore.cli.output import json_option, print_json, socket_option
from kvstore.core.errors import NotFound
from kvstore.core.keys import BLOCK_KEY_BYTES
from kvstore.core.sizes import format_bytes

if TYPE_CHECKING:
    from kvstore.client import KVClient


@click.command()
@click.argument("name", metavar="KEY_OR_REQUEST_ID")
@click.option(
    "--ttl", type=duration_value, metavar="DURATION", default="1h", show_default=True,
    help="For how long, such as 90s, 30m, 1h30m or 1d.",
)  # fmt: skip
@socket_option
@json_option
def command(name: str, ttl: float, socket: str | None, as_json: bool) -> None:
    """Keep a prefix from being evicted.

    A request id stands for what the request holds a lease on now; a block's printed key (32 hex
    digits, from KV events) for the prefix that ends with it. Pins end with their time, with
    `unpin`, with `clear`, and with the daemon.
    """
    with connected(socket) as client:
        pinned = _pin(client, name, ttl)
    if as_json:
        print_json({
            "pin_id": pinned.pin_id,
            "block_count": pinned.block_count,
            "pinned_bytes": pinned.pinned_bytes,
            "ttl_seconds": ttl,
        })  # fmt: skip
    else:
        click.echo(
            f"{pinned.pin_id} keeps {counted(pinned.block_count, 'block')} "
            f"({format_bytes(pinned.pinned_bytes)}) for {duration_text(ttl)}"
        )


def _pin(client: KVClient, name: str, ttl: float) -> Any:
    key = _block_key(name)
    try:
        return client.admin.pin(request_id=name, ttl_seconds=ttl)
    except NotFound as error:
        # Engines name requests as they like; some names look like keys.
        if key is None:
            raise NotFound(f"{error} (32 hex digits)") from None
    try:
        return client.admin.pin(block_key=key, ttl_seconds=ttl)
    except NotFound:
        raise NotFound(
            f"{name} is neither a stored block's key nor a request that holds a lease; take a key "
            "from the KV events"
        ) from None


def _block_key(name: str) -> bytes | None:
    """The key that `name` prints, None if it prints none."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == BLOCK_KEY_BYTES else None


@click.command()
@click.argument("name", metavar="PIN_KEY_OR_REQUEST_ID")
@socket_option
@json_option
def unpin_command(name: str, socket: str | None, as_json: bool) -> None:
    """End pins: one by its id (pin-1), or all made under a key or request id.

    The blocks stay until their room is needed.
    """
    key = _block_key(name)
    with connected(socket) as client:
        # The daemon keeps a key's pins under its lower-case digits.
        released = client.admin.unpin(pin_id=name if key is None else key.hex()).released_pins
    if as_json:
        print_json({"released_pins": released})
    else:
        click.echo(f"{counted(released, 'pin')} ended")
