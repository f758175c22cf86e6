"""`kvstore quota`: how much of a tier a tenant may hold (cap) and is sure to keep (floor)."""

from __future__ import annotations

from typing import Any

import click

from kvstore.cli.admin import connected, size_value
from kvstore.cli.output import by_speed, json_option, print_json, print_table, socket_option
from kvstore.core.errors import NotFound
from kvstore.core.sizes import format_bytes

COLUMNS = ("tenant", "pool", "tier", "used", "cap", "floor")


@click.group()
def command() -> None:
    """Show or change the quotas of a running daemon."""


@command.command("get")
@click.argument("tenant", required=False)
@socket_option
@json_option
def get_command(tenant: str | None, socket: str | None, as_json: bool) -> None:
    """Show what TENANT uses, and its cap and floor; every tenant without a name."""
    with connected(socket) as client:
        status = client.status(with_tenants=True)
    tiers = by_speed(status.tiers)
    tenants = [_plain(found, tiers) for found in status.tenants]
    if tenant is not None:
        tenants = [found for found in tenants if found["tenant"] == tenant]
        if not tenants:
            names = ", ".join(found.tenant for found in status.tenants)
            raise NotFound(f"tenant {tenant!r} is unknown; name one of {names}")
    _print(tenants, as_json)


@command.command("set")
@click.argument("tenant")
@click.option("--tier", default="host", show_default=True, metavar="TIER", help="In host or disk.")
@click.option("--cap", type=size_value, metavar="SIZE", help="The most it may hold; or none.")
@click.option(
    "--floor", type=size_value, metavar="SIZE", help="What is never evicted for others; or none."
)
@socket_option
@json_option
def set_command(
    tenant: str, tier: str, cap: int | None, floor: int | None, socket: str | None, as_json: bool
) -> None:
    """Set TENANT's cap, floor or both; what is not given stays.

    It holds until the daemon reads its configuration again (restart or SIGHUP), where
    tenants[].host_cap, host_floor, disk_cap and disk_floor say the same for good.
    """
    if cap is None and floor is None:
        raise click.UsageError("nothing to set; pass --cap, --floor or both")
    with connected(socket) as client:
        answer = client.admin.set_quota(tenant, tier, cap_bytes=cap, floor_bytes=floor)
        tiers = by_speed(client.status().tiers)
    _print([_plain(answer.tenant, tiers)], as_json)


def _plain(tenant: Any, tiers: list[str]) -> dict[str, Any]:
    return {
        "tenant": tenant.tenant,
        "isolated": tenant.isolated,
        "tiers": {
            tier: {
                "used_bytes": tenant.used_bytes.get(tier, 0),
                "cap_bytes": tenant.cap_bytes.get(tier),
                "floor_bytes": tenant.floor_bytes.get(tier),
            }
            for tier in tiers
        },
    }


def _print(tenants: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"tenants": tenants})
        return
    rows = [
        [
            tenant["tenant"],
            "its own" if tenant["isolated"] else "shared",
            tier,
            format_bytes(quota["used_bytes"]),
            _limit(quota["cap_bytes"]),
            _limit(quota["floor_bytes"]),
        ]
        for tenant in tenants
        for tier, quota in tenant["tiers"].items()
    ]
    print_table(COLUMNS, rows, right=("used", "cap", "floor"))


def _limit(byte_count: int | None) -> str:
    return "none" if byte_count is None else format_bytes(byte_count)
