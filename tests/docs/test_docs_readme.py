"""README.md: its snippet runs as printed, and its commands and keys are there."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.main import VERBS
from kvstore.replay.own_daemon import OwnDaemon

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def daemon() -> Iterator[OwnDaemon]:
    with OwnDaemon(64 << 20) as running:
        yield running


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_snippet_prints_what_it_says(daemon: OwnDaemon) -> None:
    """The client snippet, run as it stands, prints the output that follows it."""
    (snippet,) = blocks("python")
    expected = blocks("text")[0]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [sys.executable, "-Ic", snippet], capture_output=True, text=True, timeout=60,
            cwd=directory, env={"KVSTORE_SOCKET": daemon.socket},
        )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == expected


def test_commands_exist() -> None:
    """Every `kvstore ...` and `make ...` that is shown is there."""
    shown = re.findall(r"(?:^\$ |`)kvstore ([a-z]+)", TEXT, re.MULTILINE)
    assert shown
    assert set(shown) <= set(VERBS)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for goal in re.findall(r"(?:^\$ |`)make ([a-z-]+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{goal}:", makefile, re.MULTILINE), goal


def test_first_are_the_two_commands() -> None:
    """What a newcomer sees first runs without reading on."""
    first = blocks("console")[0].splitlines()
    assert [line.split("#")[0].strip() for line in first] == ["$ make demo", "$ make test"]
