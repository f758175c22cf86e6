"""`kvstore fsck`: checks the files of a disk tier that no daemon uses, and mends them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.admin import counted
from kvstore.cli.output import finish, json_option, print_json
from kvstore.core.errors import ConfigError

if TYPE_CHECKING:
    from kvstore.tiers.disk.fsck import Checked, Finding

MARKS = ("format.json", "segments", "index", "epochs", "epochs.copy")


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Mend what is found; what cannot be mended goes.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE",
    help="The keys of an encrypted tier, as tiers.disk.key_file; without them its blocks cannot "
    "be checked.",
)  # fmt: skip
@json_option
def command(directory: Path, repair: bool, key_file: Path | None, as_json: bool) -> None:
    """Check every file of the disk tier in DIR: headers, payloads, index, epochs, modes.

    The daemon must not run. Without --repair nothing is changed; with it, blocks that are damaged
    are dropped, so that what is left is right. Exit 1 if damage remains.
    """
    from kvstore.daemon.tiers import open_vault
    from kvstore.locks import FileLock
    from kvstore.tiers.disk.fsck import inspect

    if not any((directory / mark).exists() for mark in MARKS):
        raise ConfigError(f"{directory} is no disk tier's directory; pass tiers.disk.path")
    vault = open_vault(str(key_file or ""))
    lock = FileLock(directory / "LOCK", f"the disk tier in {directory}")
    try:
        with progress_bar() as progress:
            checked = inspect(directory, repair, progress, vault)
            findings = checked.findings + spaces(directory, repair)
            checked = checked._replace(findings=findings)
    finally:
        lock.release()
    _report(checked, repair, as_json)


def spaces(directory: Path, repair: bool) -> list[Finding]:
    """What is wrong with the files that say which spaces there are."""
    from kvstore.store.record import SPACES_NAME, mend_spaces, read_spaces, spaces_problem
    from kvstore.tiers.disk.fsck import Finding

    what = spaces_problem(directory)
    if not what:
        return []
    lost = not read_spaces(directory / SPACES_NAME)
    done = "every block is dropped at the next start" if lost else "both written anew, with both's"
    if repair:
        mend_spaces(directory)
    repaired = repair and not spaces_problem(directory)
    return [Finding("spaces", SPACES_NAME, what, done, repaired)]


def _report(checked: Checked, repair: bool, as_json: bool) -> None:
    findings: list[dict[str, Any]] = [finding._asdict() for finding in checked.findings]
    left = sum(not finding["repaired"] for finding in findings)
    if as_json:
        answer = {"findings": findings, "damage_remains": left > 0}
        print_json(answer | {"unchecked_blocks": checked.unchecked})
    else:
        for key, count in checked.unchecked.items():
            blocks = counted(count, "encrypted block")
            click.echo(f"{blocks} could not be checked: pass --key-file with key {key}")
        for finding in findings:
            word = "repaired" if finding["repaired"] else "repair"
            click.echo(f"{finding['what']}; {word}: {finding['repair']}")
        fine = "all else is well" if checked.unchecked else "all is well"
        said = counted(len(findings), "finding") if findings else fine
        rest = f", {left:,} not repaired" if repair else "; --repair mends what can be mended"
        click.echo(f"{said}{rest}" if left else said)
    finish(not left)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None]]:
    """Shows on a terminal's standard error how much is done; what it yields takes (done, all)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
