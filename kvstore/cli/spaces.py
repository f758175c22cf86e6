"""`kvstore spaces`: whose KV blocks are kept, of which models, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.admin import connected
from kvstore.cli.output import by_speed, json_option, print_json, print_table, socket_option
from kvstore.core.errors import NotFound
from kvstore.core.sizes import format_bytes

if TYPE_CHECKING:
    from kvstore.client import KVClient

ID_DIGITS = 64
ID_DIGITS_SHOWN = 12
ID_DIGITS_MIN = 8
REVISION_DIGITS_SHOWN = 8
COLUMNS = ("space", "tenant", "epoch", "blocks", "engines", "model", "blocks of")


@click.command()
@socket_option
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """List spaces: model and tenant, epoch, blocks and bytes.

    A space's id may be cut to its first 8 digits or more where a verb asks for one.
    """
    with connected(socket) as client:
        spaces = read(client)
    if as_json:
        print_json({"spaces": spaces})
    elif not spaces:
        click.echo("no spaces: no engine has attached yet, or a restart found none with blocks")
    else:
        tiers = by_speed(spaces[0]["used_bytes"])
        columns = (*COLUMNS[:4], *(f"in {tier}" for tier in tiers), *COLUMNS[4:])
        rows = [_row(space, tiers) for space in spaces]
        print_table(columns, rows, right=columns[4 : 4 + len(tiers)])


def read(client: KVClient) -> list[dict[str, Any]]:
    """Every space, the fullest first."""
    from kvstore.replay.status import plain

    spaces = [plain(space) for space in client.status(with_spaces=True).spaces]
    return sorted(spaces, key=lambda space: (-total_bytes(space), space["space_id"]))


def total_bytes(space: dict[str, Any]) -> int:
    return sum(space["used_bytes"].values())


def _row(space: dict[str, Any], tiers: list[str]) -> list[Any]:
    spec = space["spec"]
    return [
        space["space_id"][:ID_DIGITS_SHOWN],
        space["tenant"],
        space["epoch"],
        space["block_count"],
        *(format_bytes(space["used_bytes"].get(tier, 0)) for tier in tiers),
        space["attachment_count"],
        f"{spec['model']} @ {spec['revision'][:REVISION_DIGITS_SHOWN]}",
        describe(spec),
    ]


def describe(spec: dict[str, Any]) -> str:
    """What of a spec tells its spaces apart: `16 tokens, 32x8x128 bfloat16, 2 MiB`."""
    size = format_bytes(spec["block_bytes"])
    parts = [
        f"{spec['block_size']} tokens",
        f"{spec['num_layers']}x{spec['num_kv_heads']}x{spec['head_dim']} {spec['dtype']}",
        size if spec["shard_count"] == 1 else f"{spec['shard_count']} shards of {size}",
    ]
    if spec["pp_size"] > 1 or spec["layer_first"]:
        parts.append(f"layers from {spec['layer_first']}")
    ordinary = {"layout": "LKNHD", "kv_format": "raw", "group": "", "hash_algorithm": ""}
    parts += [spec[name] for name, usual in ordinary.items() if spec[name] != usual]
    parts += [f"{name}={value}" for name, value in spec["attention"].items()]
    return ", ".join(parts)


def find(client: KVClient, digits: str) -> dict[str, Any]:
    """The one space whose id begins with `digits`; raises NotFound."""
    found = [space for space in read(client) if space["space_id"].startswith(digits.lower())]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} spaces begin" if found else "no space begins"
    raise NotFound(f"{what} with {digits}; `kvstore spaces` lists them")


def check_digits(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Callback of an option that takes a space's id or its first digits."""
    if value is None:
        return None
    hexadecimal = all(digit in "0123456789abcdefABCDEF" for digit in value)
    if not hexadecimal or not ID_DIGITS_MIN <= len(value) <= ID_DIGITS:
        raise click.BadParameter(
            f"{value!r} is no space id; pass {ID_DIGITS_MIN} to {ID_DIGITS} hex digits as "
            "`kvstore spaces` prints them",
            ctx, param,
        )  # fmt: skip
    return value
