"""Mutation check: known bugs are put into a copy of the tree, and its tests have to notice each.

    make mutation                      all of them
    make mutation BUG="TTL never"      those whose name has these words

The bugs are in tests/mutation/bugs.toml. Before any of them, the tests they are for run on the
copy as it is, and have to pass. Exit 1: a bug went unnoticed; exit 2: the check itself is broken,
for instance because a change no longer fits its file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent.parent
BUGS = ROOT / "tests" / "mutation" / "bugs.toml"
FOLDERS = ("kvstore", "kernels", "policies", "proto", "tiers", "tests")
LINKED = ("kernels", "policies", "proto", "tiers")  # packages of kvstore, as pyproject.toml has it
LIMIT_SECONDS = 300.0
PASSED, FAILED = 0, 1  # pytest's exit status


class Broken(Exception):
    """The check cannot be made: nothing is known about the tests."""


class Edit(NamedTuple):
    """One replacement of text that stands in a file exactly once."""

    old: str
    new: str


class Change(NamedTuple):
    """A bug as edits of one file, and which tests are for it."""

    bug: str
    what: str
    file: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    keyword: str

    @property
    def selection(self) -> tuple[str, ...]:
        """What pytest is told."""
        return (*self.tests, *(("-k", self.keyword) if self.keyword else ()))


class Result(NamedTuple):
    """What became of a change: `caught_by` is the first test that failed, empty if none did."""

    change: Change
    caught_by: str
    seconds: float


def changes(path: Path = BUGS) -> list[Change]:
    """The known bugs."""
    return [_change(entry) for entry in tomllib.loads(path.read_text())["change"]]


def _change(entry: dict[str, Any]) -> Change:
    edits = [Edit(entry["old"], entry["new"])]
    edits += [Edit(**also) for also in [entry.get("also")] if also]
    return Change(
        entry["bug"], entry["what"], entry["file"], tuple(edits), tuple(entry["tests"]),
        entry.get("keyword", ""),
    )  # fmt: skip


def apply(change: Change, tree: Path) -> str:
    """The text of the file below `tree` with the bug in it; raises Broken where it does not fit."""
    path = tree / change.file
    if not path.is_file():
        raise Broken(f"{change.what!r} is for {change.file}, which is not there; correct it")
    text = path.read_text()
    for old, new in change.edits:
        count = text.count(old)
        if count != 1:
            raise Broken(
                f"{change.what!r} no longer fits {change.file}: its text is there {count} times, "
                "not once; correct tests/mutation/bugs.toml"
            )
        text = text.replace(old, new)
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise Broken(f"{change.what!r} makes {change.file} no Python: {error}") from error
    return text


class Copy:
    """A copy of the tree that is imported in place of the installed one."""

    def __init__(self, directory: Path) -> None:
        self.tree = directory / "tree"
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.tree / name, ignore=ignored)
        for name in LINKED:
            (self.tree / "kvstore" / name).symlink_to(self.tree / name)
        shutil.copy(ROOT / "pyproject.toml", self.tree)
        self._check_imports()

    def run(self, *arguments: str, seconds: float = LIMIT_SECONDS) -> tuple[int, str]:
        """Exit status and output of pytest in the copy; raises Broken when it does not end."""
        return self._python("-m", "pytest", "-q", "-x", "-rfE", "--no-header", "-p",
                            "no:cacheprovider", *arguments, seconds=seconds)  # fmt: skip

    def try_out(self, change: Change) -> Result:
        """Runs the change's tests with the bug in, and takes it out again."""
        path, start = self.tree / change.file, perf_counter()
        right, wrong = path.read_text(), apply(change, self.tree)
        _write(path, wrong)
        try:
            status, output = self.run(*change.selection)
        finally:
            _write(path, right)
        if status not in (PASSED, FAILED):
            raise Broken(f"the tests for {change.what!r} do not run:\n{output[-2000:]}")
        return Result(change, first_failure(output) if status else "", perf_counter() - start)

    def _check_imports(self) -> None:
        code = "import kvstore, kvstore.tiers as t; print(kvstore.__file__, t.__file__)"
        _, output = self._python("-c", code, seconds=60.0)
        if output.count(str(self.tree)) != 2:
            raise Broken(f"the copy is not what Python imports: {output}")

    def _python(self, *arguments: str, seconds: float) -> tuple[int, str]:
        environ = {
            **os.environ,
            "PYTHONPATH": str(self.tree),
        }
        environ.pop("PYTHONSAFEPATH", None)
        try:
            done = subprocess.run(
                [sys.executable, *arguments], cwd=self.tree, env=environ, capture_output=True,
                text=True, timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Broken(f"{' '.join(arguments)} took more than {seconds} s") from error
        return done.returncode, done.stdout + done.stderr


def _write(path: Path, text: str) -> None:
    """Replaces a file by one that is a second younger: compiled code goes by time and size."""
    younger = path.stat().st_mtime + 1
    path.write_text(text)
    os.utime(path, (younger, younger))


def first_failure(output: str) -> str:
    """The first test that pytest's summary says failed."""
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return found[1] if found else "a test"


def check_unchanged(copy: Copy, wanted: list[Change]) -> None:
    """The tests pass, and there are some, without any bug; raises Broken."""
    for selection in dict.fromkeys(change.selection for change in wanted):
        status, output = copy.run(*selection)
        if status != PASSED or not re.search(r"\d+ passed", output):
            raise Broken(f"without any bug, {' '.join(selection)} does not pass:\n{output[-3000:]}")


def table(results: list[Result]) -> str:
    """For people: a line a bug and its changes."""
    lines = []
    for bug in dict.fromkeys(result.change.bug for result in results):
        lines.append(f"{'caught' if is_caught(bug, results) else 'MISSED':<8}{bug}")
        for change, caught_by, seconds in results:
            if change.bug == bug:
                lines.append(f"{'':<10}{change.what}")
                lines.append(f"{'':<12}{caught_by or 'no test failed'} ({seconds:.1f} s)")
    bugs = {result.change.bug for result in results}
    caught = sum(is_caught(bug, results) for bug in bugs)
    return "\n".join([*lines, f"{caught} of {len(bugs)} bugs caught, as {len(results)} changes"])


def is_caught(bug: str, results: list[Result]) -> bool:
    """Whether every change that amounts to `bug` made a test fail."""
    return all(result.caught_by for result in results if result.change.bug == bug)


def document(results: list[Result]) -> dict[str, Any]:
    """For programs: the same as `table`."""
    bugs = list(dict.fromkeys(result.change.bug for result in results))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPUs",
        "bugs": len(bugs),
        "caught": sum(is_caught(bug, results) for bug in bugs),
        "changes": [
            {
                "bug": change.bug, "what": change.what, "file": change.file,
                "tests": list(change.selection), "caught_by": caught_by,
                "seconds": round(seconds, 1),
            }
            for change, caught_by, seconds in results
        ],
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    parser.add_argument("words", nargs="?", default="", help="only bugs whose name has these words")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    options = parser.parse_args(arguments)
    wanted = [change for change in changes() if options.words in change.bug]
    try:
        if not wanted:
            raise Broken(f"no bug's name has {options.words!r}; see tests/mutation/bugs.toml")
        for change in wanted:
            apply(change, ROOT)
        with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
            copy = Copy(Path(directory))
            check_unchanged(copy, wanted)
            results = []
            for change in wanted:
                results.append(copy.try_out(change))
                print(f"{change.bug}: {results[-1].caught_by or 'MISSED'}", file=sys.stderr)
    except Broken as error:
        print(error, file=sys.stderr)
        return 2
    print(table(results))
    if options.json is not None:
        options.json.write_text(json.dumps(document(results), indent=2) + "\n")
    return 0 if all(result.caught_by for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
