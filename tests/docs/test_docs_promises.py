"""docs/threat-model.md and the suite speak of the same promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"
NAME = re.compile(r"\bI(\d+)\b")
ROWS = {
    int(number): (promise, cell)
    for number, promise, cell in re.findall(
        r"^\| I(\d+) \| (.+?) \| (.*) \|$",
        (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}


def named(path: Path) -> set[int]:
    """Promises that the docstrings of a test file name."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return {int(number) for text in texts for number in NAME.findall(text)}


def test_promises_are_numbered_through() -> None:
    """Each promise has its number once, from 1 on."""
    assert list(ROWS) == list(range(1, len(ROWS) + 1))


@pytest.mark.parametrize("number", ROWS)
def test_promise_is_held(number: int) -> None:
    """Every test file that the page names for a promise says that it holds it."""
    files = re.findall(r"`([^`]+)`", ROWS[number][1])
    assert files or "planned" in ROWS[number][1]
    for file in files:
        path = TESTS / f"{file}.py"
        assert path.is_file(), f"{file} is gone; run `make docs`"
        assert number in named(path), f"{file} does not name I{number}; run `make docs`"


def test_tests_name_no_other_promise() -> None:
    """A number in a docstring means something."""
    for path in sorted(TESTS.rglob("test_*.py")):
        unknown = named(path) - set(ROWS)
        assert not unknown, f"{path.name} names I{min(unknown, default=0)}, which is no promise"
