"""docs/architecture.md equals the tree: every file it names is there, layers are as tested."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILE = re.compile(r"(?<![\w./<-])(?:(?:[\w-]+/)*[\w-]+\.py|(?:[\w-]+/)+[\w-]+\.proto)\b")


def found(name: str) -> bool:
    """Whether a file of the package, named from its top or from `kvstore/`, is there."""
    return (ROOT / name).is_file() or (ROOT / "kvstore" / name).is_file()


@pytest.mark.parametrize("name", sorted(set(FILE.findall(TEXT))))
def test_files_exist(name: str) -> None:
    """A drawing or sentence that names a file names one that is there."""
    assert found(name)


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"(?<![\w/<])([a-z]+)/(?![\w<])", TEXT))))
def test_folders_exist(folder: str) -> None:
    """So do folders."""
    assert (ROOT / folder).is_dir() or (ROOT / "kvstore" / folder).is_dir()


def test_every_flow_is_drawn() -> None:
    """Each file of the store has its place in a drawing, so that a new flow gets one, too."""
    shared = {"__init__.py", "assemble.py", "parts.py", "sessions.py", "views.py"}
    helpers = {"operators.py", "pins.py", "find.py"}  # operators' calls, no flow of their own
    for path in (ROOT / "kvstore" / "store").glob("*.py"):
        if path.name not in shared | helpers:
            assert f"store/{path.name}" in TEXT, f"{path.name} is in no drawing"


def tidy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tests" / "test_tidy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layers_are_those_that_are_tested() -> None:
    """The table of layers says what the import test allows."""
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", TEXT, re.MULTILINE)
    assert len(rows) >= 8
    for part, allowed in rows:
        assert set(re.findall(r"\w+", allowed)) == tidy().IMPORT_MAP[part], part
