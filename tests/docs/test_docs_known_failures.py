"""docs/known-failures.md: what is said to be tried has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "known-failures.md"


def functions(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_each_named_test_is_there() -> None:
    """Files and functions that the page names exist, and every row names one or a benchmark."""
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| here |" not in line]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row)
        assert named or "`kvstore bench " in row, row
        for file, function in named:
            assert (TESTS / file).is_file(), file
            assert not function or function in functions(TESTS / file), f"{file}::{function}"
