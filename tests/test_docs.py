"""Documentation equals the code: settings, metrics, verbs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import VERBS
from kvstore.core.config import settings
from kvstore.metrics import TABLE

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def table_rows(page: str) -> list[list[str]]:
    """Cells of every table row whose first cell is one code word."""
    rows = []
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def shown(default: Any) -> str:
    """A default as the documentation writes it."""
    return "none" if default is None else f"`{json.dumps(default)}`"


def test_configuration_page_lists_every_setting() -> None:
    """docs/configuration.md has each key once, with its default and a meaning, and no other."""
    rows = table_rows("configuration.md")
    assert [(row[0], row[1]) for row in rows] == [
        (f"`{key}`", shown(default)) for key, default in settings()
    ]
    assert all(len(row) == 3 and row[2].endswith(".") for row in rows)


def test_every_setting_is_used() -> None:
    """No key is accepted and then read by nobody."""
    read = set()
    for folder in ("kvstore", "tiers", "policies"):
        for path in (ROOT / folder).rglob("*.py"):
            if not path.name.startswith("config"):
                read |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    read |= {"host_size"}  # through Config.host_pools
    read |= {"host_cap", "host_floor", "disk_cap", "disk_floor"}  # through TenantSection.quota
    unused = [key for key, _ in settings() if key.rpartition(".")[2] not in read]
    assert unused == []


def test_metrics_page_lists_every_metric() -> None:
    """docs/metrics.md has each metric with its kind, labels and help as scraped."""
    documented = {row[0]: row[1:] for row in table_rows("metrics.md") if "kvstore_" in row[0]}
    expected = {
        f"`{row.name}`": [row.kind, ", ".join(f"`{n}`" for n in row.labels) or "none", row.help]
        for row in TABLE
    }
    assert documented == expected


def test_metrics_page_explains_every_label() -> None:
    """Each label of a metric is explained."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Labels")[2]
    for row in TABLE:
        for label in row.labels:
            assert f"`{label}`" in text, label


def test_metrics_page_asks_only_what_is_there() -> None:
    """Metric names in the example queries exist."""
    names = {row.name for row in TABLE}
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for found in re.findall(r"kvstore_[a-z_]*[a-z]", text):
        assert found.removesuffix("_bucket") in names, found


def test_command_line_page_lists_every_verb() -> None:
    """docs/cli.md has a heading for each verb, and for no other."""
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    headings = re.findall(r"^##+ .*$", text, re.MULTILINE)
    named = {word for line in headings for word in re.findall(r"`kvstore ([a-z]+)", line)}
    assert named == set(VERBS)


def test_command_line_page_is_the_help() -> None:
    """docs/cli.md quotes every verb's help as it is; `make docs` writes it anew."""
    script = [sys.executable, "-P", str(DOCS / "generate_cli.py"), "--check"]
    assert subprocess.run(script, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted(DOCS.rglob("*.md")))
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file of the repository finds it."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
