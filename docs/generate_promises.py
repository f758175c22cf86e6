"""Fills the last column of threat-model.md's promises: the tests whose docstrings name them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "threat-model.md"
TESTS = DOCS.parent / "tests"
NAME = re.compile(r"\bI(\d+)\b")
ROW = re.compile(r"^\| I(\d+) \| (.+?) \| (.*) \|$", re.MULTILINE)


def held() -> dict[int, list[str]]:
    """Test files by the promise that a docstring in them names."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for number in sorted(named(path)):
            found[number].append(path.relative_to(TESTS).with_suffix("").as_posix())
    return found


def named(path: Path) -> set[int]:
    """Promises that the docstrings of a test file name."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return {int(number) for text in texts for number in NAME.findall(text)}


def main() -> None:
    tests = held()

    def row(match: re.Match[str]) -> str:
        number, promise, cell = int(match[1]), match[2], match[3]
        names = ", ".join(f"`{name}`" for name in tests[number])
        return f"| I{number} | {promise} | {names or cell} |"

    PAGE.write_text(ROW.sub(row, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
