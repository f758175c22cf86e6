"""What an installed copy contains, and that it leaves other packages alone."""

from __future__ import annotations

import csv
import hashlib
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

import kvstore

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("kvstore", "tiers", "policies", "kernels", "proto")
NEIGHBOURS = {"proto-plus": "proto", "kernels": "kernels"}
NOT_OURS = ("tiers", "policies", "kernels", "proto", "tests", "bench", "docs")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def package_of(folder: Path) -> str:
    """Import name of a folder of the tree."""
    parts = folder.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "kvstore" else ("kvstore", *parts))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing an earlier build left gets into it."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    run(
        sys.executable, "-Im", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", out, copy,
    )  # fmt: skip
    return next(out.glob("*.whl"))


def test_packages_are_the_folders() -> None:
    """Every folder with Python in it is listed as a package, mapped where it lies elsewhere."""
    setuptools = PROJECT["tool"]["setuptools"]
    folders = {
        path.parent
        for name in FOLDERS
        for path in (ROOT / name).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert sorted(map(package_of, folders)) == sorted(setuptools["packages"])
    for package, folder in setuptools["package-dir"].items():
        assert package_of(ROOT / folder) == package
    for folder in folders:
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"


def test_version_is_one() -> None:
    """The package and its metadata name the same version."""
    assert PROJECT["project"]["version"] == kvstore.__version__


def test_lock_keeps_to_the_ranges() -> None:
    """Each dependency has an exact version in the development lock."""
    locked = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements" / "dev.lock").read_text().splitlines()
        if "==" in line
    }
    for requirement in PROJECT["project"]["dependencies"]:
        name = requirement.partition(">")[0]
        assert name in locked, f"{name} is not in requirements/dev.lock"


def test_extras_are_tested_with_the_versions_that_they_install() -> None:
    """torch, triton, transformers and pyzmq have one version: for users' extras and for tests."""
    constraints = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    locked = (ROOT / "requirements" / "kernels.lock").read_text().splitlines()
    locked += (ROOT / "requirements" / "engines.lock").read_text().splitlines()
    locked += (ROOT / "requirements" / "operate.lock").read_text().splitlines()
    for name in ("torch", "triton", "transformers", "pyzmq"):
        pinned = [line for line in constraints if line.startswith(f"{name}==")]
        assert len(pinned) == 1
        assert pinned[0] in locked


def test_core_dependencies_leave_torch_out() -> None:
    """torch, triton, cupy and cryptography come only with an extra."""
    optional = ("torch", "triton", "cupy", "transformers", "cryptography")
    for requirement in PROJECT["project"]["dependencies"]:
        assert not requirement.startswith(optional), requirement
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {
        "bounds", "encryption", "events", "torch", "triton", "transformers", "gpu",
    }  # fmt: skip


def test_wheel_contains_only_kvstore(wheel: Path) -> None:
    """A wheel brings the package kvstore and its metadata, nothing at the top beside them."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top_level = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["kvstore"]
    tops = {name.partition("/")[0] for name in names}
    assert not tops & set(NOT_OURS)
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvstore"}
    assert "kvstore/py.typed" in names
    assert {f"kvstore/console/{name}" for name in ("index.html", "style.css", "page.js")} <= {
        *names
    }
    assert any(name.startswith("kvstore/tiers/") for name in names)


def test_wheel_has_every_module(wheel: Path) -> None:
    """No module of the tree is missing from the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in FOLDERS:
        for path in (ROOT / name).rglob("*.py"):
            inside = path.relative_to(ROOT)
            expected = inside if name == "kvstore" else Path("kvstore") / inside
            assert str(expected) in names, f"{expected} is not in the wheel"


def damaged(site: Path, distribution: str) -> list[str]:
    """Files of an installed distribution that no longer are as its record says."""
    record = next(site.glob(f"{distribution.replace('-', '_')}-*.dist-info")) / "RECORD"
    bad = []
    with record.open() as file:
        for name, digest, _ in csv.reader(file):
            if not digest or name.startswith(".."):
                continue
            path = site / name
            found = hashlib.sha256(path.read_bytes()).digest() if path.exists() else b""
            if urlsafe_b64encode(found).rstrip(b"=").decode() != digest.partition("=")[2]:
                bad.append(name)
    return bad


@pytest.mark.long
@pytest.mark.timeout(600)
def test_neighbours_stay_whole(wheel: Path, tmp_path: Path) -> None:
    """Installing and uninstalling beside proto-plus and HF kernels changes none of their files."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    site = next(tmp_path.glob("lib/python*/site-packages"))
    pip = (python, "-Im", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "protobuf", *NEIGHBOURS)
    for install in (True, False):
        if install:
            run(*pip, "install", "--no-deps", wheel)
            run(python, "-Ic", "import kvstore.proto, kvstore.tiers")
        else:
            run(*pip, "uninstall", "--yes", "kvstore-daemon")
        for distribution, package in NEIGHBOURS.items():
            assert damaged(site, distribution) == []
            code = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
            assert run(python, "-Ic", code).strip() == str(site / package / "__init__.py")
        run(python, "-Ic", "import proto; proto.Message")
