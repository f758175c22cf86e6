"""`kvstore check`: validates a configuration and prints all of it, defaults filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvstore.cli.output import config_option, json_option, load_config, print_json
from kvstore.core.config import effective


@click.command()
@config_option
@json_option
def command(config_path: Path | None, as_json: bool) -> None:
    """Validate the configuration (file, then environment) and print the effective one.

    Exit 2 with one sentence naming the key if the daemon would refuse it on this machine.
    """
    tables = effective(load_config(config_path))
    if as_json:
        print_json(tables)
    else:
        click.echo(to_toml(tables), nl=False)


def to_toml(tables: dict[str, Any]) -> str:
    """TOML text of nested tables and lists of tables; reading it back gives an equal value."""
    lines: list[str] = []
    _write_table(tables, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(table: dict[str, Any], name: str, lines: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not _holds_tables(v)}
    if name and plain:
        lines += ["", f"[{name}]"]
    lines += [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            _write_table(value, path, lines)
        elif _holds_tables(value):
            for item in value:
                lines += ["", f"[[{path}]]"]
                lines += [f"{k} = {_value(v)}" for k, v in item.items()]


def _holds_tables(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(item, dict) for item in value)
    )


def _value(value: Any) -> str:
    # JSON's strings, numbers, booleans and lists of these are TOML's too.
    return json.dumps(value, ensure_ascii=False)
