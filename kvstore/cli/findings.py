"""`Finding`: what one look of `kvstore doctor` found, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"


class Finding(NamedTuple):
    """One look: what was found and, unless ok, what to do."""

    check: str
    status: str
    found: str
    fix: str = ""


def read_lines(path: Path) -> list[str]:
    """Lines of a file of the kernel's; none where it is not there."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
