"""The report page: complete in itself, readable, and safe whatever a trace is called."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvstore.core.errors import InvalidRequest
from kvstore.replay.formats import BUNDLED
from kvstore.replay.report import page, write_report
from kvstore.replay.report_charts import percent_axis, seconds_axis, sizes_axis, spread
from kvstore.replay.simulate import Bench, Setup
from kvstore.replay.simulate_pool import simulate

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Balance(HTMLParser):
    """Checks that every tag is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    bench = Bench(Setup(BUNDLED, limit=200))
    sizes = [(bench.workload.capacity(f),) for f in (0.02, 0.1)]
    return simulate(bench, ["lru", "gdsf"], sizes)


@pytest.fixture(scope="module")
def disk_document() -> dict[str, Any]:
    bench = Bench(Setup(BUNDLED, limit=100, hints=0.9))
    costs = bench.costs._replace(deadline_seconds=0.1)
    bench = Bench(Setup(BUNDLED, costs, limit=100, hints=0.9, endurance_dwpd=1))
    capacity = bench.workload.capacity
    sizes = [(capacity(h), capacity(d)) for h in (0.02, 0.05) for d in (0.2, 0.5)]
    return simulate(bench, ["lru"], sizes)


def test_page_needs_nothing_else(document: dict[str, Any]) -> None:
    """No script and no address of anything: the page works from a mail attachment."""
    html = page(document)
    assert "<script" not in html
    assert not re.search(r"(src|href|url)\s*[=(]", html)
    assert "http" not in html
    assert "prefers-color-scheme: dark" in html


def test_page_is_well_formed(document: dict[str, Any], disk_document: dict[str, Any]) -> None:
    """Every tag is closed, and every policy and size is there."""
    for one in (document, disk_document):
        balance = Balance()
        html = page(one)
        balance.feed(html)
        assert not balance.open
        assert "nan" not in html
        for result in one["results"]:
            assert f"{result['token_hit_ratio']:.2%}" in html
            assert result["policy"] in html
    assert "1,750" not in page(document)
    assert "host 2%" in page(document)


def test_what_if_is_marked(document: dict[str, Any], disk_document: dict[str, Any]) -> None:
    """A page made with hints from the future says so; deadlines and disk writes show if any are."""
    assert "What if" in page(disk_document)
    assert "right in 90% of cases" in page(disk_document)
    assert "deadlines missed" in page(disk_document)
    assert "of allowed" in page(disk_document)
    assert "What if" not in page(document)
    assert "deadlines missed" not in page(document)


def test_names_are_escaped(document: dict[str, Any]) -> None:
    """A trace's name cannot become markup."""
    html = page({**document, "trace": "<img src=x>.jsonl"})
    assert "<img" not in html
    assert "&lt;img" in html


def test_page_is_written_whole(tmp_path: Path, document: dict[str, Any]) -> None:
    """The file appears complete; where it cannot be written a sentence says so."""
    write_report(tmp_path / "out.html", document)
    assert (tmp_path / "out.html").read_text().endswith("</html>\n")
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(InvalidRequest, match=r"report .* cannot be written"):
        write_report(tmp_path / "none" / "out.html", document)


def test_axes() -> None:
    """Ticks are round and within the axis; a single size still has an axis."""
    assert [text for _, text in percent_axis([0.43]).ticks] == [
        "0%", "10%", "20%", "30%", "40%", "50%",
    ]  # fmt: skip
    assert percent_axis([0.0]).high > 0
    axis = seconds_axis([0.02, 30.0])
    assert [text for _, text in axis.ticks] == ["100 ms", "1 s", "10 s"]
    assert (axis.share(0.02), axis.share(30.0)) == (0, 1)
    single = sizes_axis([(0.05, "5%")])
    assert single.share(0.05) == pytest.approx(0.5)


def test_labels_move_apart() -> None:
    """Names at line ends do not overlap and stay within the chart."""
    placed = spread([10, 10, 11, 200], 14, 0, 205)
    assert all(b - a >= 14 for a, b in pairwise(placed))
    assert spread([100, 100, 100], 14, 0, 100) == [72, 86, 100]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_a_browser_draws_it(tmp_path: Path, document: dict[str, Any]) -> None:
    """A real browser lays the page out: every chart has its lines."""
    write_report(tmp_path / "out.html", document)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    dom = subprocess.run(
        [*command, (tmp_path / "out.html").as_uri()], capture_output=True, text=True, timeout=60
    ).stdout
    assert dom.count("<svg") == 4
    assert dom.count("<polyline") >= 10
