"""The operator's walk: from install to roll back, on wheels of two versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvstore", "tiers", "policies", "kernels", "proto")


def wheel(version: str, work: Path) -> Path:
    """A wheel of this tree that says it is `version`."""
    source, target = work / f"source-{version}", work / f"wheel-{version}"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    project = (ROOT / "pyproject.toml").read_text()
    project = re.sub(r'^version = ".*"', f'version = "{version}"', project, flags=re.MULTILINE)
    (source / "pyproject.toml").write_text(project)
    done = subprocess.run(
        [sys.executable, "-Im", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(target), str(source)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next(target.glob("*.whl"))


@pytest.mark.long
@pytest.mark.timeout(330)
def test_an_operator_gets_through(tmp_path: Path) -> None:
    """Install, serve, first hit, why, policy, drain, upgrade and roll back: all 15 commands work.

    Blocks outlive both changes of version. Commands that should be quick take at most 2 s, of
    processor time where the machine is busy.
    """
    home = tmp_path / "home"
    venv.create(home, with_pip=False)
    site = next((home / "lib").glob("python3*")) / "site-packages"
    (site / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]))
    # The packages that it needs are there; the project's own is not, until it is installed.
    pip = f"{sys.executable} -Im pip --python {home}/bin/python install --quiet --no-deps"
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "walk.py"), "--pip", pip,
         "--wheel", str(wheel("0.1.0", tmp_path)), "--next", str(wheel("0.1.1", tmp_path))],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env={**os.environ, "PATH": f"{home}/bin:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nok") + done.stdout.startswith("ok") == 15
