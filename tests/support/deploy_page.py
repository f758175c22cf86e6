"""The commands of docs/deploy.md, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def console(heading: str) -> list[str]:
    """The lines of the first console block under `heading`, with what is continued joined."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = [part for part in section if part.startswith(f"{heading}\n")]
    block = text.partition("```console\n")[2].partition("```")[0].replace("\\\n", " ")
    return [line[2:] for line in block.splitlines()]


def words(heading: str, start: str) -> list[str]:
    """The words of the one command under `heading` that begins with `start`."""
    (line,) = [line for line in console(heading) if line.startswith(start)]
    return shlex.split(line)
