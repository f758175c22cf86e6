"""docs/decisions: one short page a decision, all of the same form, all listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent.parent / "docs" / "decisions"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
HEADINGS = ["Context", "Decision", "Rejected", "Reopen if"]
ROOT = FOLDER.parent.parent


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_page_has_the_form(page: Path) -> None:
    """Number and title, then context, decision, what was rejected, and what would reopen it."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert re.match(rf"# {int(page.name[:4])}\. \S", lines[0])
    assert [line[3:] for line in lines if line.startswith("## ")] == HEADINGS
    assert all(part.strip() for part in re.split(r"^## .*$", text, flags=re.MULTILINE))
    assert len(lines) <= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
def test_files_exist(page: Path) -> None:
    """Files that a page names are there."""
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name


def test_every_page_is_listed() -> None:
    """The list has each page with its title, in order, and numbers have no gaps."""
    listed = re.findall(r"\* \[(.+)\]\((.+)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    titles = [path.read_text(encoding="utf-8").splitlines()[0][2:] for path in PAGES]
    assert listed == [(title, path.name) for title, path in zip(titles, PAGES, strict=True)]
    assert [int(path.name[:4]) for path in PAGES] == list(range(1, len(PAGES) + 1))
