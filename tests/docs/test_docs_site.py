"""The pages for operators: every command in them is run, and the site is built."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("quickstart", "sizing", "tuning", "troubleshooting", "upgrade")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`kvstore (\w+)[^`]*`")
PRELUDE = """
set -eu
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
serving() { for _ in $(seq 300); do kvstore status >/dev/null 2>&1 && return; sleep 0.1; done; }
"""


def fences(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of a page."""
    return FENCE.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))


def script(page: str) -> str:
    """The commands of a page in their order; after a daemon was started they wait for it."""
    lines = []
    for language, text in fences(page):
        if language == "console":
            joined = text.replace("\\\n", " ")
            commands = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
            assert len(commands) == len(joined.splitlines()), f"{page}: a block has other lines"
            lines += [f"{c}\nserving" if c.endswith("&") else c for c in commands]
    return "\n".join(f"echo '$ {line}' >&2\n{line}" for line in "\n".join(lines).splitlines())


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with the files of the pages, and a short path."""
    path = Path(tempfile.mkdtemp(prefix="kvt-docs-", dir="/dev/shm"))
    for page in ("tuning", "quickstart"):
        for language, text in fences(page):
            if language in ("toml", "python"):
                (path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run(page: str, place: Path) -> None:
    """Every command of the page ends with 0, in its order, on a machine without a daemon."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORE_")}
    environ |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(place), "KVSTORE_SERVER__METRICS": "", "COLUMNS": "200",
        "KVSTORE_TIERS__HOST__DIRECTORY": str(place / "pool"), "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", PRELUDE + script(page)], cwd=place, env=environ, capture_output=True,
        text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if page == "quickstart":
        assert "first time: 0 tokens found" in done.stdout
        assert "second time: 64 tokens, [0, 1, 2, 3]" in done.stdout


def test_pages_have_commands() -> None:
    """Each page has some, and the inline ones name verbs that there are."""
    from kvstore.cli.main import VERBS

    for page in PAGES:
        assert script(page), page
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert set(INLINE.findall(text)) <= set(VERBS), page


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (make operate-env)"
)
def test_the_site_builds(tmp_path: Path) -> None:
    """mkdocs builds it without a warning, and nothing in it is loaded from elsewhere."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for page in PAGES:
        html = (tmp_path / f"{page}.html").read_text(encoding="utf-8")
        assert "<h1" in html
        loaded = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(https?:[^"]+)"', html)
        assert not [address for address in loaded if "canonical" not in address], page
