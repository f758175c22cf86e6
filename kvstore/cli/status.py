"""`kvstore status`: the daemon's state, its tiers, and what is open at this moment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from kvstore.cli import shadows
from kvstore.cli.admin import connected, socket_path
from kvstore.cli.output import (
    by_speed,
    json_option,
    print_json,
    print_table,
    socket_option,
    target,
)
from kvstore.core.sizes import format_bytes

COST_COLUMNS = ("measured costs", "predicted", "99 % below", "state")
TIER_COLUMNS = ("tier", "used", "resting", "free", "of", "blocks", "state")


@click.command()
@socket_option
@json_option
def command(socket: str | None, as_json: bool) -> None:
    """Show the daemon's state, tiers, sessions, leases and policy.

    Exit 0 whatever the state is, 3 if no daemon answers.
    """
    status = read(socket)
    if as_json:
        print_json(status)
    else:
        _show(status, socket_path(target(socket)))


def read(socket: str | None) -> dict[str, Any]:
    """Everything the daemon tells of itself, but for its spaces, which have a verb of their own."""
    from kvstore.replay.status import plain

    with connected(socket) as client:
        status = plain(client.status(with_tenants=True))
    del status["spaces"]
    return status


def _show(status: dict[str, Any], path: str) -> None:
    from kvstore.cli.top import duration

    click.echo(
        f"kvstore {status['version']} is {status['state']} at {path} "
        f"(pid {status['pid']}, up {duration(status['uptime_seconds'])})"
    )
    if status["reason"]:
        click.echo(status["reason"])
    click.echo()
    print_table(TIER_COLUMNS, list(_tier_rows(status["tiers"])), right=TIER_COLUMNS[1:-1])
    click.echo()
    print_table(("", ""), _rows(status), header=False)
    if status["costs"]:
        click.echo()
        rows = [cost_row(cost) for cost in status["costs"]]
        print_table(COST_COLUMNS, rows, right=COST_COLUMNS[1:-1])
    if status["shadow_request_count"]:
        click.echo()
        columns = shadows.columns(status)
        print_table(columns, shadows.rows(status), right=columns[1:])
        click.echo(shadows.summary(status))


def cost_row(cost: dict[str, Any]) -> list[str]:
    """A cost model: what it predicts for a GiB or 8k tokens, and how far off it was."""
    what = "1 GiB" if cost["unit"] == "bytes" else "8k tokens"
    seconds = cost["predicted_seconds"]
    shown = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    name = f"{cost['subject']} {cost['device']}".strip()
    state = cost["state"] if cost["state"] == "fitted" else f"{cost['state']}, {cost['reason']}"
    return [name, f"{shown} for {what}", f"{cost['ratio_p99']:.2f} x", state]


def _tier_rows(tiers: dict[str, Any]) -> Iterator[list[Any]]:
    """A row a tier, and one for each of several GPUs that it is in."""
    for name in by_speed(tiers):
        yield _tier_row(name, tiers[name])
        devices = tiers[name].get("devices", {})
        if len(devices) > 1:
            yield from (_tier_row(f"  {uuid}", devices[uuid]) for uuid in sorted(devices))


def _tier_row(name: str, tier: dict[str, Any]) -> list[Any]:
    sizes = [
        format_bytes(tier[f"{kind}_bytes"]) for kind in ("used", "resting", "free", "capacity")
    ]
    return [name, *sizes, tier["block_count"], _tier_state(name, tier)]


def _tier_state(name: str, tier: dict[str, Any]) -> str:
    if name != "host":  # only memory is made present first
        return str(tier["state"])
    present = tier["prefaulted_bytes"] / max(tier["capacity_bytes"], 1)
    state = str(tier["state"])
    return state if present >= 1 else f"{state}, {present:.0%} prefaulted"


def _rows(status: dict[str, Any]) -> list[tuple[str, str]]:
    held = format_bytes(status["leased_bytes"])
    adopted = status["readopted_blocks"]
    return [
        ("policy", shadows.policy_line(status)),
        ("sessions", f"{status['session_count']:,}, this command's included"),
        ("leases", f"{status['lease_count']:,} on {held}"),
        ("puts under way", f"{status['reservation_count']:,}"),
        ("pins", f"{status['pin_count']:,}"),
        ("spaces", f"{status['space_count']:,}"),
        ("blocks", f"{status['block_count']:,}, {adopted:,} taken over at the start"),
    ]
