"""Every invariant that this version promises has a test that names it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NAMED = re.compile(r"^((?:I\d+)(?:, I\d+)*):")
# I9, I12 and I14 are about the disk tier.
PROMISED = [f"I{n}" for n in (*range(1, 9), 10, 11, *range(15, 23))]


@cache
def named() -> dict[str, list[str]]:
    """Tests by the invariants that their docstrings begin with."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                match = NAMED.match(ast.get_docstring(node) or "")
                for name in match.group(1).split(", ") if match else ():
                    found.setdefault(name, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("invariant", PROMISED)
def test_each_has_its_test(invariant: str) -> None:
    """A docstring that begins with an invariant's number is a test of it: each has at least one."""
    assert named().get(invariant), f"no test's docstring begins with {invariant}"
