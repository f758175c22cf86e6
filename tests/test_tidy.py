"""Style as a test: the import map, sizes, and what no file may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "kvstore": "kvstore",
    "tiers": "kvstore.tiers",
    "policies": "kvstore.policies",
    "kernels": "kvstore.kernels",
    "proto": "kvstore.proto",
}
GENERATED = ROOT / "proto" / "v1"
FILE_LINES_MAX, FUNCTION_LINES_MAX, COLUMNS_MAX = 400, 70, 100
# A GPU kernel takes a parameter for each stride, and its loop cannot be cut into calls freely.
KERNEL_LINES_MAX = 110

REPLAY = {"core", "client", "policies", "engines", "replay"}
BELOW_STORE = {"core", "tiers", "policies", "mover"}
# part: the parts it may import. The longest name that fits a module is its part.
IMPORT_MAP: dict[str, set[str]] = {
    "core": {"core"},
    "cuda": {"cuda"},
    "tiers": {"core", "cuda", "tiers"},
    "policies": {"core", "policies"},
    "kernels": {"kernels"},
    "proto": {"proto"},
    "mover": {"core", "tiers", "policies", "mover"},
    "store": {*BELOW_STORE, "store"},
    "recovery": {*BELOW_STORE, "store", "recovery"},
    "server": {*BELOW_STORE, "store", "server", "proto"},
    "client": {"core", "cuda", "proto", "client"},
    "metrics": {"core", "metrics"},
    "events": {"core"},
    "event_wire": {"core", "events"},
    "event_publisher": {"core", "events", "event_wire"},
    "explain": {"core"},
    "locks": {"core"},
    "scheduling": {"core"},
    "logs": {"core"},
    "httpd": {"core"},
    "console": {"core", "httpd", "console"},
    "testing": {
        *BELOW_STORE,
        "store",
        "recovery",
        "server",
        "client",
        "proto",
        "events",
        "testing",
    },
    "engines": {"core", "client", "engines", "kernels"},
    "replay": REPLAY,
    "bench": {*REPLAY, "proto", "tiers", "locks", "bench"},
}
FREE_PARTS = ("daemon", "cli")  # they put everything together
LAZY_IMPORTS = ("daemon", "cli", "engines")  # heavy imports may wait there

# Third-party packages of the parts that others' processes import.
THIRD_PARTY = {
    "": set(),
    "core": {"msgspec", "numpy", "xxhash"},
    "cuda": {"numpy"},
    "policies": {"numpy"},
    "store": {"numpy", "msgspec", "xxhash"},
    "mover": {"numpy"},
    "client": {"google", "grpc", "msgspec", "numpy", "xxhash"},
}
PURE = ("policies",)
IMPURE_MODULES = {
    "asyncio", "concurrent", "ctypes", "fcntl", "glob", "io", "logging", "mmap", "multiprocessing",
    "os", "pathlib", "queue", "resource", "shutil", "signal", "socket", "subprocess", "tempfile",
    "threading",
}  # fmt: skip
NO_ASYNCIO = ("core", "store", "mover", "policies", "tiers")

CLOCK, ENTROPY = "kvstore.core.clock", "kvstore.core.entropy"
BANNED_MODULES = {
    "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "cPickle", "jsonpickle",
}  # fmt: skip
BANNED_CALLS = {"eval", "exec", "__import__", "compile"}
BANNED_ATTRIBUTES = {("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load")}
CLOCK_ATTRIBUTES = {
    ("os", "urandom"), ("os", "getrandom"), ("datetime", "now"), ("datetime", "utcnow"),
    ("datetime", "today"), ("date", "today"), ("loop", "time"),
}  # fmt: skip
TOP_FOLDERS = {"tiers", "policies", "kernels", "proto", "tests"}
BARE_MARK = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b(?!\()")


class Source(NamedTuple):
    path: Path
    module: str
    tree: ast.Module
    lines: list[str]

    @property
    def part(self) -> str:
        """`core`, `store`, ...: the first name below kvstore; empty for kvstore itself."""
        return [*self.module.split("."), ""][1]

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


@cache
def sources() -> tuple[Source, ...]:
    """Every hand-written file of the package."""
    found = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if GENERATED in path.parents and path.name != "__init__.py":
                continue
            inside = path.relative_to(ROOT / folder).with_suffix("").parts
            parts = [package, *(inside[:-1] if inside[-1] == "__init__" else inside)]
            found.append(_read(path, ".".join(parts)))
    return tuple(found)


@cache
def suite() -> tuple[Source, ...]:
    folders = ("tests", "bench", "docs", "deploy")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(_read(path, f"tests.{path.stem}") for path in paths)


def _read(path: Path, module: str) -> Source:
    text = path.read_text(encoding="utf-8")
    return Source(path, module, ast.parse(text), text.splitlines())


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, dotted name) of everything imported; `from a import b` counts as a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module or ''}.{alias.name}"


def check(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_imports_point_down() -> None:
    """Parts import only what the import map allows, for type checking too."""
    problems = []
    for source in sources():
        if source.part in FREE_PARTS or source.module == "kvstore":
            continue
        allowed = IMPORT_MAP.get(source.part)
        if allowed is None:
            problems.append(f"{source.path}: {source.part} is not in the import map; add it")
            continue
        for node, name in imports(source):
            words = name.split(".")
            if words[0] != "kvstore":
                continue
            target = words[1] if len(words) > 1 else "__init__"
            if target not in allowed and not target.startswith("__"):
                problems.append(f"{source.at(node)}: {source.part} imports {name}")
    check(problems)


def test_imports_are_absolute() -> None:
    """The folders at the top are imported by their installed names only."""
    problems = []
    for source in (*sources(), *suite()):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                problems.append(f"{source.at(node)}: relative import")
        for node, name in imports(source):
            if name.split(".")[0] in TOP_FOLDERS:
                problems.append(f"{source.at(node)}: import {name} as kvstore.{name}")
    check(problems)


def test_third_party_imports_are_few() -> None:
    """Parts that engines load, or that must be pure, bring no other packages in."""
    problems = []
    for source in sources():
        allowed = THIRD_PARTY.get(source.part)
        if allowed is None:
            continue
        for node, name in imports(source):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names | allowed | {"kvstore"}:
                problems.append(f"{source.at(node)}: {source.part} imports {top}")
    check(problems)


def test_policies_are_pure() -> None:
    """Policies touch no files, threads or processes, so that the simulator runs the same code."""
    problems = []
    for source in sources():
        if source.part not in PURE:
            continue
        for node, name in imports(source):
            if name.split(".")[0] in IMPURE_MODULES:
                problems.append(f"{source.at(node)}: imports {name}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "print"):
                problems.append(f"{source.at(node)}: calls {ast.unparse(node.func)}")
    check(problems)


def test_store_is_free_of_asyncio() -> None:
    """The store runs without an event loop: live, in process and simulated."""
    problems = [
        f"{source.at(node)}: imports asyncio"
        for source in sources()
        if source.part in NO_ASYNCIO
        for node, name in imports(source)
        if name.split(".")[0] == "asyncio"
    ]
    check(problems)


def test_imports_stand_at_the_top() -> None:
    """No function imports, except where heavy packages are loaded lazily on purpose."""
    problems = []
    for source in sources():
        if source.part in LAZY_IMPORTS:
            continue
        for function in _functions(source.tree):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    problems.append(f"{source.at(node)}: import inside {function.name}")
    check(problems)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_files_and_functions_are_short() -> None:
    """Files end within 400 lines, functions within 70 (GPU kernels 110), lines within 100."""
    problems = []
    for source in (*sources(), *suite()):
        if len(source.lines) > FILE_LINES_MAX:
            problems.append(f"{source.path.relative_to(ROOT)}: {len(source.lines)} lines")
        for number, line in enumerate(source.lines, 1):
            if len(line) > COLUMNS_MAX:
                problems.append(f"{source.path.relative_to(ROOT)}:{number}: {len(line)} columns")
        for function in _functions(source.tree):
            length = (function.end_lineno or 0) - function.lineno + 1
            kernel = "triton.jit" in map(ast.unparse, function.decorator_list)
            if length > (KERNEL_LINES_MAX if kernel else FUNCTION_LINES_MAX):
                problems.append(f"{source.at(function)}: {function.name} has {length} lines")
    check(problems)


def test_time_and_chance_come_in_as_parameters() -> None:
    """Only core/clock.py reads a clock, only core/entropy.py asks for random bytes."""
    problems = []
    for source in sources():
        if source.module in (CLOCK, ENTROPY):
            continue
        for node, name in imports(source):
            words = name.split(".")
            if words[0] in ("time", "secrets", "uuid"):
                problems.append(f"{source.at(node)}: imports {name}")
            if words[0] == "random" and words[1:] not in ([], ["Random"]):
                problems.append(f"{source.at(node)}: imports {name}; pass a random.Random in")
        modules = {name for _, name in imports(source)}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and _reads_clock_or_chance(node, modules):
                problems.append(f"{source.at(node)}: {ast.unparse(node)}")
    check(problems)


def _reads_clock_or_chance(node: ast.Attribute, modules: set[str]) -> bool:
    owner = ast.unparse(node.value)
    if owner in ("np.random", "numpy.random"):
        return node.attr != "Generator"
    if owner == "random" and "random" in modules:
        return node.attr != "Random"
    return (owner.rpartition(".")[2], node.attr) in CLOCK_ATTRIBUTES


def test_no_bytes_become_code() -> None:
    """I19: no pickle, marshal, eval, torch.load or the like is anywhere in the package."""
    problems = []
    for source in sources():
        for node, name in imports(source):
            if name.split(".")[0] in BANNED_MODULES:
                problems.append(f"{source.at(node)}: imports {name}")
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and _makes_code(node):
                problems.append(f"{source.at(node)}: {ast.unparse(node.func)}")
    check(problems)


def _makes_code(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id in BANNED_CALLS:
        return True
    if isinstance(call.func, ast.Attribute):
        owner = ast.unparse(call.func.value).rpartition(".")[2]
        if (owner, call.func.attr) in BANNED_ATTRIBUTES:
            return True
    return any(
        keyword.arg == "allow_pickle"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        for keyword in call.keywords
    )


def test_modules_are_imported_by_name_in_one_place() -> None:
    """I19: import by a computed name happens only where the command line finds its verbs."""
    problems = [
        f"{source.at(call)}: {ast.unparse(call)}"
        for source in sources()
        if source.module != "kvstore.cli.main"
        for call in ast.walk(source.tree)
        if isinstance(call, ast.Call)
        and ast.unparse(call.func).rpartition(".")[2] in ("import_module", "exec_module")
        and not (call.args and isinstance(call.args[0], ast.Constant))
    ]
    check(problems)


def test_marks_of_unfinished_work_say_what_they_wait_for() -> None:
    """A mark such as TO-DO stands only with what it waits for in parentheses."""
    problems = [
        f"{source.path.relative_to(ROOT)}:{number}: {line.strip()}"
        for source in (*sources(), *suite())
        for number, line in enumerate(source.lines, 1)
        if BARE_MARK.search(line)
    ]
    check(problems)


def test_every_module_says_what_it_is() -> None:
    """Each file opens with a docstring, and each test's docstring is the promise it holds."""
    problems = []
    for source in (*sources(), *suite()):
        if not ast.get_docstring(source.tree):
            problems.append(f"{source.path.relative_to(ROOT)}: no module docstring")
    for source in suite():
        for function in _functions(source.tree):
            is_test = source.path.name.startswith("test_") and function.name.startswith("test_")
            if is_test and not ast.get_docstring(function):
                problems.append(f"{source.at(function)}: {function.name} has no docstring")
    check(problems)


def _python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_package_imports_nothing() -> None:
    """Importing kvstore alone costs nothing: it brings in no other module."""
    before = "import sys; before = set(sys.modules); import kvstore; "
    assert _python(before + "print(sorted(set(sys.modules) - before))") == "['kvstore']"


def test_client_is_light() -> None:
    """kvstore.client imports in less than 0.5 s of processor time, and without torch."""
    code = (
        "import sys, time; start = time.process_time(); import kvstore.client; "
        "print(time.process_time() - start, 'torch' in sys.modules)"
    )
    seconds, torch = min(_python(code).split() for _ in range(3))
    assert torch == "False"
    assert float(seconds) < 0.5


@pytest.mark.parametrize("name", sorted(TOP_FOLDERS))
def test_folders_shadow_nobody(name: str) -> None:
    """With our tree installed, a bare `import kernels` or `import proto` does not find it."""
    code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)"
    found = _python(code)
    assert found == "None" or not Path(found).is_relative_to(ROOT)
