"""Writes the reference part of cli.md from the command's own help; `--check` only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from kvstore.cli.main import group

PAGE = Path(__file__).parent / "cli.md"
MARK = "<!-- Below: `make docs` writes it. -->\n"
WIDTH = 90


def sections(name: str, command: click.Command, parent: click.Context | None) -> Iterator[str]:
    """The help of a verb, then of the verbs inside it."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=WIDTH)
    level = "##" if parent is None or parent.parent is None else "###"
    if parent is not None:
        yield f"{level} `{context.command_path}`\n\n```text\n{context.get_help()}\n```\n"
    if isinstance(command, click.Group):
        for inner_name in command.list_commands(context):
            inner = command.get_command(context, inner_name)
            assert inner is not None
            yield from sections(inner_name, inner, context)


def page() -> str:
    """The whole page as it should be."""
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{PAGE} has lost its mark: {MARK}"
    return head + MARK + "\n" + "\n".join(sections("kvstore", group, None))


def main(arguments: list[str]) -> int:
    """0 when the page is, or now is, what the command says of itself."""
    expected = page()
    if "--check" in arguments:
        return int(PAGE.read_text(encoding="utf-8") != expected)
    PAGE.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
